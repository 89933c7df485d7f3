"""An engine on a model whose steps take their time, until there is the file that the environment variable GATE names.

So what a test does meanwhile comes while its requests run, however late the test is.
"""

from __future__ import annotations

import os
import sys
import time

from octavo.serve.engine import process

STEP_SECONDS = 0.02


def main(argv: list[str]) -> None:
    """Run the engine process."""

    def build(config, phases):  # type: ignore[no-untyped-def]
        core, info = process.build_core(config, phases)
        step = core.step

        def paced():  # type: ignore[no-untyped-def]
            if not os.path.exists(os.environ["GATE"]):
                time.sleep(STEP_SECONDS)
            return step()

        core.step = paced
        return core, info

    process.main(argv, build)


if __name__ == "__main__":
    main(sys.argv[1:])

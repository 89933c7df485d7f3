"""The mock engine at a pace: the environment variable PACE says how many seconds a step takes.

With GATE, a path, it keeps to that until there is a file, and then runs as fast as it can.
"""

from __future__ import annotations

import os
import sys

from mock_engine import MockWorker, main


def _heed_the_gate(path: str) -> None:
    execute = MockWorker._execute

    def paced(self, plan):  # type: ignore[no-untyped-def]
        if self._step_seconds and os.path.exists(path):
            self._step_seconds = 0.0
        return execute(self, plan)

    MockWorker._execute = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    if "GATE" in os.environ:
        _heed_the_gate(os.environ["GATE"])
    main(["--step-seconds", os.environ["PACE"], *sys.argv[1:]])

"""The mock engine with graphs that its start has left: the variable LATE names a file of their captures.

A line is whether a request was there.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

import mock_engine
from octavo.serve.engine.process import main as run_engine

NUM_LEFT = 5


def main(argv: list[str]) -> None:
    """Run the engine process."""
    left = [NUM_LEFT]

    def build(config, phases):  # type: ignore[no-untyped-def]
        options = mock_engine.argparse.Namespace(step_seconds=0.02, stop_after=0, load_seconds=0.0, faults=False)
        core, info = mock_engine.build_core(config, phases, options)

        def call(name: str, payload: bytes) -> bytes:
            assert name == "capture_next", "that is all that an engine asks by itself"
            if not left[0]:
                return msgspec.msgpack.encode(False)
            left[0] -= 1
            with open(os.environ["LATE"], "a", encoding="ascii") as file:
                file.write(f"{core.has_unfinished}\n")
            time.sleep(0.03)
            return msgspec.msgpack.encode(True)

        core._executor._worker.call, core._has_uncaptured = call, True
        return core, info

    run_engine(argv, build)


if __name__ == "__main__":
    main(sys.argv[1:])

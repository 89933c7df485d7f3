"""An engine in a process of its own: it computes prompts, says where their blocks are, and offers them until it ends.

Input: a line of JSON with the engine's fields, then lines with prompts, and whether their transfers are to end; output:
for each a line with what the answers say.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

PEER = Path(__file__)


class Peer:
    """Such a process, from outside."""

    def __init__(self, fields: dict[str, Any], packages: str, environment: dict[str, str]) -> None:
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), packages)))
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self._say(fields)

    def _say(self, what: Any) -> None:
        file = cast(IO[str], self.process.stdin)
        file.write(json.dumps(what) + "\n")
        file.flush()

    def prefill(self, prompts: list[str], *, settle: bool = False) -> list[dict[str, Any]]:
        self._say((prompts, settle))
        line = cast(IO[str], self.process.stdout).readline()
        return cast(list[dict[str, Any]], json.loads(line))


@contextlib.contextmanager
def peer(fields: dict[str, Any], packages: str = "", **environment: str) -> Iterator[Peer]:
    """packages: a folder of more of them."""
    made = Peer(fields, packages, environment)
    try:
        yield made
        made.process.communicate()
    finally:
        made.process.kill()
        made.process.communicate()


def main() -> None:
    from octavo import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.readline()))
    params = SamplingParams(
        max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
    )
    for line in sys.stdin:
        prompts, settle = json.loads(line)
        outputs = llm.generate(prompts, params)
        while settle and llm.engine.has_unfinished:
            llm.engine.step()
        print(json.dumps([output.kv_transfer_params for output in outputs]), flush=True)
    llm.close()


if __name__ == "__main__":
    main()

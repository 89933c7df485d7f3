"""Make the environments of tests/clients: one virtual environment per client, since their pins clash.

Owns the table of clients and their versions. Re-runnable: an environment whose stamp names the same requirements is
left alone. Octavo itself is never installed in them: they reach it over HTTP, and LMCache is looked for behind Octavo's
own packages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".venv-clients"
_TORCH = "torch==2.13.0"  # installed first: any build of it will do, so the smallest that the index offers is kept
_LMCACHE = """
lmcache==0.5.6 aiofile aiofiles blake3 cachetools caio cffi cryptography llvmlite numba nvtx py-cpuinfo pycparser pyzmq
redis
"""
# Name -> steps of requirements, each one pip call.
CLIENTS: dict[str, list[list[str]]] = {
    "langchain": [["langchain-openai>=1.3,<2"]],
    "litellm": [["litellm>=1.90,<2", "mcp"]],
    "lm-eval": [["lm_eval[api]>=0.4.11,<0.5", "transformers>=4.57"]],
    # a library, not a client: its folder of packages is put behind Octavo's own. All that it needs without a GPU
    "lmcache": [["--no-deps", *_LMCACHE.split()]],
    "guidellm": [[_TORCH], ["guidellm>=0.6,<1", _TORCH]],
}


def make(name: str, pip_flags: list[str]) -> Path:
    """Make or keep the environment of one client; its folder."""
    folder = FOLDER / name
    stamp, wanted = folder / "requirements.txt", "\n".join(" ".join(step) for step in CLIENTS[name])
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    for step in CLIENTS[name]:
        command = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*command, *pip_flags, *step], check=True)
    stamp.write_text(wanted)
    return folder


def main() -> int:
    """Make the named environments, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; default: all")
    names = parser.parse_args().names or list(CLIENTS)
    unknown = set(names) - set(CLIENTS)
    if unknown:
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    for name in names:
        print(f"{name}: {make(name, os.environ.get('PIP_FLAGS', '').split())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

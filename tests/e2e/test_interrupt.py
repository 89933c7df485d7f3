"""Ctrl-C during `octavo generate`, as a terminal sends it: exit code 130, and no process, lock or file is left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from patience import patient

PIPE_BYTES = 4096  # so much is written while nobody reads: less than the answer, however late the interrupt comes


@pytest.fixture
def generating(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`octavo generate` in a process group of its own, whose home and temporary folder are `tmp_path`."""
    source = str(Path(__file__).parents[2] / "src")
    folders = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME"), str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "generate", "--ignore-eos", "--max-tokens", "none", "def f(x):\n"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", ""), "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1", **folders},
        start_new_session=True,
    )
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_ctrl_c_leaves_nothing_behind(generating: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert generating.stdout is not None
    begun = os.read(generating.stdout.fileno(), 1)
    assert begun, generating.communicate()
    family = [psutil.Process(generating.pid), *psutil.Process(generating.pid).children(recursive=True)]
    os.killpg(generating.pid, signal.SIGINT)
    out, err = generating.communicate(timeout=patient(20))
    assert generating.returncode == 130, err
    assert b"Traceback" not in err
    assert out.endswith(b"\n") and len(out) < PIPE_BYTES + 1000, "it stopped in the middle of the answer"
    assert not [process for process in family if process.is_running()]
    with pytest.raises(ProcessLookupError):
        os.killpg(generating.pid, 0)
    assert not list(tmp_path.iterdir())

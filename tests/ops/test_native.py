"""The native loader: lazy, switchable, one thread pool, and an absence that is an object."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from octavo.ops import native
from octavo.ops.gemm import linear, pack_linear
from patience import patient

needs_native = pytest.mark.skipif(not native.available(), reason="no native library is built")


def run_python(code: str, **environment: str) -> str:
    source_root = str(Path(native.__file__).parents[3])
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env={**os.environ, "PYTHONPATH": source_root, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@needs_native
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_import_loads_nothing() -> None:
    code = (
        "import octavo.ops.gemm as m, torch\n"
        "maps = lambda: {l.split()[-1] for l in open('/proc/self/maps')}\n"
        "assert not [f for f in maps() if '_octavo_cpu' in f]\n"
        "m.linear(torch.ones(2, 8), m.pack_linear(torch.ones(4, 8)))\n"
        "print(len([f for f in maps() if '_octavo_cpu' in f]))"
    )
    assert run_python(code) == "1"


def test_environment_turns_the_library_off() -> None:
    code = "from octavo.ops import native; print(native.available(), native.isa(), native.num_threads())"
    assert run_python(code, OCTAVO_NATIVE="0") == "False none 1"


def test_environment_with_an_unknown_library_is_refused() -> None:
    code = (
        "from octavo.ops import native\n"
        "try: native.lib()\n"
        "except ValueError as error: print('x87' in str(error) and 'known are none' in str(error))"
    )
    assert run_python(code, OCTAVO_NATIVE="x87") == "True"


def test_disabled_is_undone_at_the_end() -> None:
    before = native.isa()
    with native.disabled():
        assert not native.available()
        with pytest.raises(AttributeError, match="octavo_linear"):
            native.lib().octavo_linear()
    assert native.isa() == before


def test_thread_count_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        native.set_num_threads(0)


@needs_native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_thread_that_ends_leaves_no_memory_behind() -> None:
    """Whoever asks may step an engine, so that operators meet many threads, each with its own scratch memory."""
    x, weight = torch.ones(64, 16384), pack_linear(torch.ones(32, 16384))

    def resident_bytes(num_threads: int) -> int:
        for _ in range(num_threads):
            thread = threading.Thread(target=linear, args=[x, weight])
            thread.start()
            thread.join()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    grown = [-resident_bytes(4) + resident_bytes(32) for _ in range(3)]  # what is left behind is so each time
    assert min(grown) < 4 * x.nbytes, "one thread's scratch holds the rows"


@needs_native
def test_vector_lanes_fit_the_instruction_set() -> None:
    lanes = {"x86_64_v4_bf16": 16, "x86_64_v4": 16, "x86_64_v3": 8, "base": 4}
    for isa in native.built_isas():
        with native.using(isa):
            assert native.lib().octavo_vector_lanes() == lanes[isa]

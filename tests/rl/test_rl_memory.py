"""RL.W11, RL.S3: updates and sleeps without end take no memory, and change no bit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import psutil
import pytest

from octavo import LLM
from octavo.rl import Sender, WeightSource
from weights_rig import Weights, answers, give, old_weights

GROWTH = 1 << 20  # bytes that may be allocated more in the second half of all
RESIDENT = 32 << 20


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="bfloat16", max_model_len=256, weight_transfer_config={"backend": "gloo"}) as made:
        yield made


@pytest.fixture(scope="module")
def old() -> Weights:
    return old_weights()


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "a", "b", "used", "free", "top")
    ]


def _facts() -> tuple[int, int, int, int]:
    """Bytes that this process has allocated, those that are resident, open files, and what lies in shared memory."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Heap
    heap, process = libc.mallinfo2(), psutil.Process()
    return heap.used + heap.hblkhd, process.memory_info().rss, process.num_fds(), len(os.listdir("/dev/shm"))


def _check_flat(held: list[tuple[int, int, int, int]]) -> None:
    """Of facts behind each turn: the least of the second half is no more than that of the quarter before it.

    A group of gloo allocates 2 MB in its first 220 updates, and no more.
    What is resident may grow by a few of the system's pages of 2 MiB, as buffers come to lie elsewhere.
    """
    half = len(held) // 2
    grown = [min(each[i] for each in held[half:]) - min(each[i] for each in held[half // 2 : half]) for i in range(4)]
    print(f"{len(held)} turns: {grown[0]} bytes allocated, {grown[1]} resident, {grown[2]} and {grown[3]} files more")
    assert grown[0] < GROWTH and grown[1] < RESIDENT and grown[2] <= 0 and grown[3] <= 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "shm", "gloo"])
def test_rl_w11_a_thousand_updates(llm: LLM, old: Weights, backend: str) -> None:
    """Every hundredth one's answers are those of the first."""
    sender, source, before, held = (
        Sender(llm, backend),
        WeightSource(old),
        answers(llm),
        list[tuple[int, int, int, int]](),
    )
    for turn in range(1000):
        sender.send(source, str(turn))
        if turn % 100 == 0:
            assert answers(llm) == before
        held.append(_facts())
    sender.close()
    _check_flat(held)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_rl_s3_a_hundred_sleeps(llm: LLM, old: Weights, level: int) -> None:
    """At level 2 weights are discarded, and sent again."""
    before, held = answers(llm), list[tuple[int, int, int, int]]()
    for turn in range(100):
        llm.sleep(level, mode=("keep", "wait", "abort")[turn % 3])
        assert not llm.wake_up(["weights"])
        if level == 2:
            give(llm, old)
        assert llm.wake_up(["kv_cache"])
        assert answers(llm) == before
        held.append(_facts())
    _check_flat(held)

"""Signals within a step: their handlers run behind it, and end the call that they interrupt alone."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from octavo import LLM, SamplingParams
from octavo.startup import interrupts
from octavo.startup.interrupts import HeldSignals


class _TooLongError(Exception):
    pass


@pytest.fixture
def limited() -> Iterator[list[int]]:
    """A handler of SIGALRM that raises, and what it was told."""
    told: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        told.append(number)
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, handle)
    yield told
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _hold(seconds: float, *numbers: int) -> None:
    with HeldSignals():
        for number in numbers:
            signal.raise_signal(number)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.01)


def test_what_a_handler_raises_waits_and_all_are_handled(limited: list[int]) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _hold(0.05, signal.SIGINT)
    with pytest.raises((KeyboardInterrupt, _TooLongError)):
        _hold(0.05, signal.SIGALRM, signal.SIGINT)
    assert time.monotonic() - began > 0.1 and limited == [signal.SIGALRM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_is_handled_at_once(limited: list[int]) -> None:
    with pytest.raises(_TooLongError):
        _hold(1e9, signal.SIGALRM, signal.SIGALRM)


def test_one_that_has_waited_for_long_is_handled(limited: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)
    with pytest.raises(_TooLongError):
        _hold(1e9, signal.SIGALRM)


def test_no_signal_is_held_in_another_thread(limited: list[int]) -> None:
    held: list[object] = []

    def hold() -> None:
        with HeldSignals():
            held.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert held == [signal.getsignal(signal.SIGALRM)]


def test_a_time_limit_around_generate_ends_that_call_alone(limited: list[int]) -> None:
    params, few = (SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (300, 8))
    with LLM("octavo-tiny", dtype="float32", max_model_len=512, num_gpu_blocks_override=400) as llm:
        expected = llm.generate(["def f("], few)[0].outputs[0].token_ids
        for index in range(12):
            signal.setitimer(signal.ITIMER_REAL, 0.03 + index * 0.004)
            with pytest.raises(_TooLongError):
                while True:
                    llm.generate(["def f("] * 4, params, use_tqdm=False)
        assert llm.generate(["def f("], few)[0].outputs[0].token_ids == expected and len(limited) == 12

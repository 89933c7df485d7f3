"""Signals within a step: their handlers run behind it, and end the call that they interrupt alone."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType

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


class _Action(ctypes.Structure):
    """What the system keeps of a handler: glibc's struct sigaction."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _actions(*numbers: int) -> list[tuple[int, int]]:
    """Address and flags of handlers."""
    action, read = _Action(), list[tuple[int, int]]()
    for number in numbers:
        assert ctypes.PyDLL(None).sigaction(number, None, ctypes.byref(action)) == 0
        read.append((action.handler, action.flags))
    return read


def test_signals_of_an_event_loop_wake_it_and_restart_calls_as_ever() -> None:
    """The wake-up came, but the flags were Python's own from the first step on: C code had calls that broke off."""
    told: list[int] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGALRM):
            loop.add_signal_handler(number, told.append, number)
        actions = _actions(signal.SIGTERM, signal.SIGALRM)
        assert all(flags & 0x10000000 for _, flags in actions), "SA_RESTART"
        _hold(0.05, signal.SIGTERM, signal.SIGALRM)
        assert _actions(signal.SIGTERM, signal.SIGALRM) == actions
        with HeldSignals():
            assert _actions(signal.SIGTERM, signal.SIGALRM) == actions
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert sorted(told) == sorted([signal.SIGTERM, signal.SIGALRM])


@pytest.mark.parametrize("chain", [False, True])
def test_a_handler_in_c_stays_and_dumps_at_once(limited: list[int], tmp_path: Path, chain: bool) -> None:
    """faulthandler's was gone after a step."""
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.register(signal.SIGALRM, file, chain=chain)
        try:
            for number in (1, 2):
                with pytest.raises(_TooLongError) if chain else contextlib.nullcontext(), HeldSignals():
                    signal.raise_signal(signal.SIGALRM)
                    file.seek(0)
                    assert file.read().count("test_a_handler_in_c") == number
                assert len(limited) == number * chain
        finally:
            faulthandler.unregister(signal.SIGALRM)


def test_a_handler_in_c_that_is_set_within_stays(limited: list[int], tmp_path: Path) -> None:
    with (tmp_path / "dump").open("w+") as file:
        with HeldSignals():
            faulthandler.register(signal.SIGALRM, file)
        try:
            signal.raise_signal(signal.SIGALRM)
            file.seek(0)
            assert "test_a_handler_in_c" in file.read() and not limited
        finally:
            faulthandler.unregister(signal.SIGALRM)


def test_a_handler_that_comes_first_and_gives_the_signal_back_has_done_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is to be called once does: the system's part was put back over it, and the next signal was lost."""
    told: list[int] = []

    def once(number: int, frame: FrameType | None) -> None:
        told.append(number)
        signal.signal(number, signal.SIG_DFL)
        raise _TooLongError

    def set_late(number: int, handler: object, real: Callable[[int, object], object] = interrupts._set) -> object:
        if number == signal.SIGALRM and not told:
            signal.raise_signal(number)  # signal.signal, too, has handlers called before it sets one
        return real(number, handler)

    before = signal.signal(signal.SIGALRM, once)
    monkeypatch.setattr(interrupts, "_set", set_late)
    try:
        with pytest.raises(_TooLongError):
            _hold(0.0)
        assert told == [signal.SIGALRM] and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        assert _actions(signal.SIGALRM)[0][0] is None, "SIG_DFL"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "was taken, and stayed so"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_a_handler_raises_waits_and_all_are_handled(limited: list[int]) -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _hold(0.05, signal.SIGINT)
    with pytest.raises((KeyboardInterrupt, _TooLongError)):
        _hold(0.05, signal.SIGALRM, signal.SIGINT)
    assert time.monotonic() - began > 0.1 and limited == [signal.SIGALRM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_at_the_end_leaves_no_other_signal_taken(
    limited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' handlers were put back no more: later ones were called through what had held them, for ever."""

    def set_late(number: int, handler: object, real: Callable[[int, object], object] = interrupts._set) -> object:
        if not limited:
            signal.raise_signal(signal.SIGALRM)
        return real(number, handler)

    handlers = [signal.getsignal(number) for number in interrupts._HELD]
    with pytest.raises(_TooLongError), HeldSignals():
        monkeypatch.setattr(interrupts, "_set", set_late)
    assert [signal.getsignal(number) for number in interrupts._HELD] == handlers and limited == [signal.SIGALRM]


def test_a_second_one_is_handled_at_once(limited: list[int]) -> None:
    with pytest.raises(_TooLongError):
        _hold(1e9, signal.SIGALRM, signal.SIGALRM)


def test_one_that_has_waited_for_long_is_handled(limited: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)
    with pytest.raises(_TooLongError):
        _hold(1e9, signal.SIGALRM)


def test_it_ends_a_wait_for_a_lock_too(limited: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal that ended it went to the thread that lost its patience, which interrupts no call of the main one."""
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)
    waits = threading.Lock()
    waits.acquire()
    with pytest.raises(_TooLongError), HeldSignals():
        signal.raise_signal(signal.SIGALRM)
        assert not waits.acquire(timeout=20), "nobody releases it"
        pytest.fail("the wait went on")


def test_a_handler_that_raises_nothing_is_told_of_an_interrupt_beside_an_error() -> None:
    """It was dropped, as the KeyboardInterrupt that would take an error's place is."""
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    try:
        with pytest.raises(ZeroDivisionError), HeldSignals():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [signal.SIGINT]
    with pytest.raises(ZeroDivisionError), HeldSignals():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_a_handler_that_is_set_within_stays(limited: list[int]) -> None:
    def other(number: int, frame: FrameType | None) -> None:
        limited.append(-number)

    with pytest.raises(_TooLongError), HeldSignals():
        signal.raise_signal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, other)
    assert signal.getsignal(signal.SIGALRM) is other and limited == [signal.SIGALRM]


@pytest.mark.parametrize("at_end", [False, True])
def test_what_a_handler_raises_at_either_end_leaves_no_signal_held(
    limited: list[int], monkeypatch: pytest.MonkeyPatch, at_end: bool
) -> None:
    """One signal was held, or was again itself, and another one's handler raised: the first waited from then on."""
    change, spoilt = interrupts._set, threading.Event()

    def set_and_raise(number: int, handler: object) -> None:
        change(number, handler)
        if number == signal.SIGINT and spoilt.is_set():  # the first of them
            spoilt.clear()
            signal.raise_signal(signal.SIGINT if at_end else signal.SIGALRM)

    monkeypatch.setattr(interrupts, "_set", set_and_raise)
    held = HeldSignals()
    with pytest.raises(KeyboardInterrupt if at_end else _TooLongError):
        if not at_end:
            spoilt.set()
        with held:
            spoilt.set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(_TooLongError):
        signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_signals_within_the_handling_of_one_leave_nobody_who_loses_patience(
    limited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both had one lock, of which one thread was told: the other one raised its signal behind the end."""
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.2)
    allocate, left = _thread.allocate_lock, [signal.SIGALRM]

    def allocate_and_raise() -> object:
        lock = allocate()
        if left:
            signal.raise_signal(left.pop())
        return lock

    monkeypatch.setattr(_thread, "allocate_lock", allocate_and_raise)
    with pytest.raises((KeyboardInterrupt, _TooLongError)), HeldSignals():
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.5)  # in which either would come again
    assert limited == [signal.SIGALRM]


def test_a_signal_waits_where_no_thread_can_begin(limited: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the thread broke the step, and the signal was lost."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    done = []
    with pytest.raises(_TooLongError), HeldSignals():
        signal.raise_signal(signal.SIGALRM)
        done.append(1)
    assert done == [1]


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


def test_who_waits_for_a_held_signal_keeps_nothing_of_what_it_interrupted(
    limited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may end when the interpreter does, and an engine that it freed then would end the process badly."""
    begun: list[object] = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda *args: begun.append(args))
    held = HeldSignals()
    with pytest.raises(_TooLongError), held:
        signal.raise_signal(signal.SIGALRM)
    assert limited == [signal.SIGALRM] and len(begun) == 1
    reached = [begun[0]]
    for each in reached:
        assert each is not held and not isinstance(each, FrameType)
        if not isinstance(each, FunctionType):
            reached += [one for one in gc.get_referents(each) if not isinstance(one, type)]

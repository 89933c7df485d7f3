"""Meetings and receives beside the steps: who generates goes on, every call is answered, and each wait can be ended."""

from __future__ import annotations

import contextlib
import datetime
import gc
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import BroadcastOptions, HashStore, TCPStore  # type: ignore[attr-defined]

from octavo import LLM, SamplingParams
from octavo.config.settings import ConfigError
from octavo.frontend.control import WrongStateError
from octavo.process_groups.works import wait_for
from octavo.rl import Sender, WeightSource
from octavo.rl.moves import Moves
from octavo.rl.plan import Incoming
from octavo.rl.sender import _Beside, told
from octavo.rl.session import State, WeightConflictError, WeightCutError, WeightTransferError, WeightUpdateError
from octavo.rl.transport import group as group_module
from octavo.rl.transport.gloo import GlooTransport, make_gloo
from octavo.rl.transport.group import Group
from patience import patient
from weights_rig import Weights, answers, old_weights, other_weights

FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}
SECONDS = 60.0  # that a meeting or a receive may take: no test waits for them


@pytest.fixture(scope="module")
def new() -> Weights:
    return other_weights(4)


@pytest.fixture(params=["host", "none"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Of values that wait for the whole, and of ones that overwrite the old as they come."""
    config = {"backend": "gloo", "timeout": SECONDS, "staging": request.param}
    with LLM(**FIELDS, weight_transfer_config=config) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def nobody() -> Iterator[dict[str, Any]]:
    """Where a store would be, and nobody answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "world_size": 2}


class Trainer:
    """Rank 0 of a group, in this process; it sends a tensor when it is told."""

    def __init__(self, llm: LLM, pool: ThreadPoolExecutor, weights: Weights) -> None:
        self.llm, self.pool, self.source = llm, pool, WeightSource(weights)
        self.store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        place = ("127.0.0.1", self.store.port)
        info = {"master_address": place[0], "master_port": place[1], "world_size": 2}
        met = pool.submit(llm.init_weight_transfer_engine, {"init_info": info})
        self.group = Group(make_gloo, *place, 0, 2, 30.0, store=self.store)
        met.result(patient(30))

    def begin(self, session: str | None = None) -> Future[dict[str, Any]]:
        """The engine is told of all tensors, and waits for the first one."""
        message = {"update_info": told(self.source.incoming), "session": session}
        answer = self.pool.submit(self.llm.update_weights, message)
        until(lambda: bool(self.llm.weight_state()["waits_for_trainer"]))
        return answer

    def send(self, first: int, last: int | None = None) -> None:
        for each in self.source.incoming[first:last]:
            whole = self.source.gather(each.name).reshape(-1).view(torch.uint8)
            self.group.broadcast(whole, each.name, 30.0)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.group.close()


def until(fact: Callable[[], bool]) -> None:
    """Wait for a fact; a test's own time limit ends it."""
    while not fact():
        threading.Event().wait(0.001)


def test_a_meeting_that_waits_is_in_nobodys_way(llm: LLM, pool: ThreadPoolExecutor, nobody: Mapping[str, Any]) -> None:
    """RL.W8: requests and calls are answered, another address takes its place, and an abort ends it."""
    wanted = answers(llm)
    first = pool.submit(llm.init_weight_transfer_engine, {"init_info": nobody})
    until(lambda: bool(llm.weight_state()["waits_for_trainer"]))
    assert answers(llm) == wanted and not first.done()
    llm.pause_generation("keep")
    llm.resume_generation()
    second = pool.submit(llm.init_weight_transfer_engine, {"init_info": nobody})
    with pytest.raises(WeightCutError, match="cut short: another init_weight_transfer_engine came"):
        first.result(patient(20))
    until(lambda: bool(llm.weight_state()["waits_for_trainer"]))
    llm.abort_weight_update()
    with pytest.raises(WeightCutError, match="cut short: abort_weight_update came"):
        second.result(patient(20))
    third = pool.submit(llm.init_weight_transfer_engine, {"init_info": nobody})
    until(lambda: bool(llm.weight_state()["waits_for_trainer"]))
    llm.shutdown_weight_transfer_engine()
    with pytest.raises(WeightCutError, match="cut short: shutdown_weight_transfer_engine came"):
        third.result(patient(20))
    assert answers(llm) == wanted


def test_a_receive_that_waits_stops_nobody_until_it_overwrites(
    llm: LLM, pool: ThreadPoolExecutor, new: Weights
) -> None:
    """RL.W1, RL.W8: of staged values the old weights serve on; ones in place hold the steps, and no call."""
    before = answers(llm)
    staged = llm.engine.resolved.weight_transfer_config["staging"] == "host"
    with Trainer(llm, pool, new) as trainer:
        session = llm.start_weight_update()
        update = trainer.begin(session)
        trainer.send(0, 10)
        if staged:
            assert answers(llm) == before
        else:
            assert llm.weight_state()["state"] == "held"
            waiting = pool.submit(answers, llm)
        with pytest.raises(WeightConflictError, match="its tensors are on their way now"):
            llm.start_weight_update()
        finish = pool.submit(llm.finish_weight_update, "1", session=session)  # behind what it waits for
        trainer.send(10)
        assert update.result(patient(30))["num_tensors"] == len(new)
        assert finish.result(patient(30))["weight_version"] == "1"
        after = answers(llm) if staged else waiting.result(patient(30))
    assert after == answers(llm) != before


def test_an_abort_cuts_a_receive_short(llm: LLM, pool: ThreadPoolExecutor, new: Weights) -> None:
    """RL.W8: the trainer is silent in the middle; the next whole update serves."""
    before = answers(llm)
    with Trainer(llm, pool, new) as trainer:
        llm.start_weight_update()
        update = trainer.begin()
        trainer.send(0, 10)
        llm.abort_weight_update()
        with pytest.raises(WeightCutError, match="cut short: abort_weight_update came"):
            update.result(patient(20))
        assert llm.weight_state()["state"] == "ready"
    Sender(llm, "local").send(old_weights())
    assert answers(llm) == before


def test_who_waits_hears_of_a_receive_that_nobody_waits_for_any_more(
    pool: ThreadPoolExecutor, new: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RL.W8: it held the steps, its caller was interrupted, and no call comes behind it."""
    config = {"backend": "gloo", "timeout": SECONDS, "staging": "none"}
    with LLM(**FIELDS, weight_transfer_config=config) as llm, Trainer(llm, pool, new) as trainer:
        llm.start_weight_update()
        moves, interrupted = llm.engine.core.weights.moves, threading.Event()

        def waits() -> None:
            interrupted.wait(patient(30))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(moves, "wait", waits)  # of who called; its interrupt comes when others wait
            update = trainer.begin()
            stream = pool.submit(llm.generate, [[5, 6, 7]], use_tqdm=False)
            until(lambda: bool(llm._shared._waiting))
            interrupted.set()
            with pytest.raises(KeyboardInterrupt):
                update.result(patient(20))
            assert stream.result(patient(20))[0].outputs[0].finish_reason == "length", "nothing was overwritten"


def test_what_comes_for_another_session_is_refused(llm: LLM) -> None:
    """RL.W9: a trainer that was given up wakes in the next one's update; its name says so, and how its own ended."""
    first = llm.start_weight_update()
    llm.abort_weight_update(session=first)
    second = llm.start_weight_update()
    for move in (
        lambda: llm.update_weights({"update_info": {"local_key": 0}, "session": first}),
        lambda: llm.finish_weight_update(session=first),
        lambda: llm.abort_weight_update(session=first),
    ):
        with pytest.raises(WeightConflictError, match=f"session '{first}' is not open: the update was aborted"):
            move()
    with pytest.raises(WeightConflictError, match="'x' is not open: it is none of this engine's last ones"):
        llm.abort_weight_update(session="x")
    llm.abort_weight_update(session=second)


def test_a_trainer_that_has_gone_makes_room_at_once(llm: LLM, pool: ThreadPoolExecutor, new: Weights) -> None:
    """RL.W8: its connection is closed, and tensors are missing; one that has sent all may be finished by another."""
    core = llm.engine.core
    with Trainer(llm, pool, new) as trainer:
        llm.start_weight_update()
        with pytest.raises(WeightConflictError, match=r"by itself in \d+\.\d s.* 60 s \(session_timeout of weight_tr"):
            llm.start_weight_update()
    del trainer  # and its store
    until(lambda: any(core.ask_workers("weights_peer_is_gone", bool)))
    session = llm.start_weight_update()
    llm.abort_weight_update(session=session)
    with Trainer(llm, pool, new) as trainer:
        llm.start_weight_update()
        update = trainer.begin()
        trainer.send(0)
        update.result(patient(30))
    del trainer
    assert core.weights.state in (State.OPEN, State.HELD) and llm.finish_weight_update("1")["weight_version"] == "1"


def test_how_long_a_silent_update_stands_is_a_setting() -> None:
    """RL.W8: the refusal names it, and says how long; what is no time is refused at the start."""
    with LLM(**FIELDS, weight_transfer_config={"session_timeout": 0.01}) as llm:
        llm.start_weight_update()
        names: list[str] = []

        def begins() -> bool:
            with contextlib.suppress(WeightConflictError):
                names.append(llm.start_weight_update())
            return bool(names)

        until(begins)
        llm.abort_weight_update(session=names[0])
        with pytest.raises(WeightConflictError, match="the last one is over: the update was aborted"):
            llm.finish_weight_update()
    for wrong in (0, -1, "60", True):
        with pytest.raises(ConfigError, match="session_timeout must be a number of seconds above 0"):
            LLM(**FIELDS, weight_transfer_config={"session_timeout": wrong})


def test_a_meeting_ends_in_its_time_whatever_torchs_client_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """RL.W8: its store asks for the address again and again, beyond the limit that it was given."""
    released = threading.Event()

    def asks_again(*_: Any, **__: Any) -> None:
        released.wait(patient(30))
        raise RuntimeError("the store gave up")

    monkeypatch.setattr(group_module, "TCPStore", asks_again)
    try:
        with pytest.raises(WeightTransferError, match=r"was not met within 0\.1 s: nobody answers there \(Connection"):
            Group(make_gloo, "127.0.0.1", 1, 1, 2, 0.1)
        assert not released.is_set()
    finally:
        released.set()


@pytest.mark.parametrize("left", [0.05, 0.6])
def test_a_process_may_end_while_a_meeting_that_it_has_left_gives_up(left: float) -> None:
    """RL.W8: a library's thread that comes back while Python goes away would end the process by a signal."""
    code = f"""
import time
from torch.distributed import TCPStore
from octavo.rl.transport.gloo import make_gloo
from octavo.rl.transport.group import Group
store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
until = time.monotonic() + 2.0
def refused():
    raise ValueError("the other end has refused")
try:
    Group(make_gloo, "127.0.0.1", store.port, 0, 2, 2.0, store=store, check=refused)
except ValueError:
    time.sleep(max(until - time.monotonic() - {left}, 0.0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=patient(120), check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-1000:]


class Work:
    """A broadcast that ends in the moment in which a wait for a part of the time has given up."""

    def __init__(self) -> None:
        self.num_waits, self.done = 0, False

    def is_completed(self) -> bool:
        return self.done

    def wait(self, limit: datetime.timedelta) -> None:
        self.num_waits += 1
        was_done, self.done = self.done, True
        if not was_done:
            raise RuntimeError("Operation timed out!")


def test_what_ends_between_two_looks_has_not_failed() -> None:
    """RL.W8: a trainer that is slow, and alive."""
    work, looks = Work(), list[int]()
    wait_for(work, time.monotonic() + SECONDS, lambda: looks.append(1), is_cuda=False)
    assert (work.num_waits, len(looks)) == (2, 1)


class Ends:
    """A group of torch's whose broadcasts are over at once: what was begun, and its limit in seconds."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, float]] = []

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work:
        self.begun.append((tensors[0].numel(), options.timeout.total_seconds()))
        tensors[0].zero_()  # all of it comes
        work = Work()
        work.done = True
        return work


@pytest.mark.parametrize(
    ("num_bytes", "ahead"),
    [(1 << 10, [(3, 300.0)] * 3), (5, [(2, 100.0), (3, 100.0), (3, 100.0)]), (3, [(1, 100.0), (2, 100.0), (3, 100.0)])],
)
def test_buffers_are_on_their_way_together_and_each_has_its_time(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, ahead: list[tuple[int, float]]
) -> None:
    """As many as few bytes allow. RL.W8: each may take as long as if it were alone.

    `ahead`: how many had begun when each was taken, and the limit of the last of them.
    """
    monkeypatch.setattr(group_module, "_AHEAD_BYTES", num_bytes)
    ends, taken = Ends(), list[tuple[int, float]]()
    transport = GlooTransport(torch.device("cpu"), {"timeout": 100.0})
    store = HashStore()
    three = 3  # members, of which some forward: they have no room for more than was announced
    transport._group = Group(lambda *_: ends, "127.0.0.1", 1, 0, three, SECONDS, store=store)
    transport._packed, transport._buffer_bytes = False, 0
    names = {"names": ["a", "b", "c"], "dtype_names": ["float32"] * 3, "shapes": [[1]] * 3}

    def read(names: Sequence[str], _: object, shapes: object) -> list[Incoming]:
        return [Incoming(name, torch.float32, (1,)) for name in names]

    transport.receive(names, read, lambda *_: taken.append((len(ends.begun), round(ends.begun[-1][1]))))
    assert taken == ahead and [size for size, _ in ends.begun] == [4, 4, 4]


class Refuses:
    """An engine that answers at once, where a trainer waits for its group."""

    def __init__(self, llm: LLM) -> None:
        self.start_weight_update, self.update_weights = llm.start_weight_update, llm.update_weights
        self.abort_weight_update = llm.abort_weight_update

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise WeightConflictError("an update is open")


def test_a_sender_hears_a_refusal_while_it_waits_for_its_group(
    llm: LLM, pool: ThreadPoolExecutor, new: Weights
) -> None:
    """RL.W8: in its meeting, and in a broadcast of which the engine takes no part."""
    refused = pool.submit(Sender(Refuses(llm), "gloo", timeout=SECONDS).send, WeightSource(new))
    with pytest.raises(WeightConflictError, match="an update is open"):
        refused.result(patient(20))
    sender = Sender(llm, "gloo", timeout=SECONDS)
    wrong = pool.submit(sender.send, WeightSource({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(WeightUpdateError, match=r"model.norm.weight: expected \[256\], found \[3\]"):
        wrong.result(patient(20))
    sender.send(WeightSource(new), "1")
    assert llm.get_weight_version() == "1"
    sender.close()


def test_an_engine_that_has_left_the_group_is_heard_though_it_answers_late() -> None:
    """RL.W8: it says why; that its connection is closed is all that the group knows."""
    may_answer = threading.Event()

    def answers_late() -> None:
        assert may_answer.wait(patient(30))
        raise WeightUpdateError("it holds NaN")

    with pytest.raises(WeightUpdateError, match="it holds NaN"), _Beside(answers_late):
        threading.Timer(1.2, may_answer.set).start()
        raise WeightTransferError("the connection was closed")


def test_the_thread_of_waits_holds_no_engine() -> None:
    """RL.W11: it serves one move after the other, and ends with whom it works for."""
    moves = Moves(lambda move: bytes(move() or 0), lambda number, why: None)

    def waits() -> Iterator[Callable[[int], Any]]:
        yield lambda number: number

    for _ in range(2):
        answer = moves.do(waits)
        moves.wait()
        moves.poll()
        assert answer.result() == b""
    thread, gone = moves._thread, weakref.ref(moves)
    assert thread is not None
    del moves, answer
    gc.collect()
    assert gone() is None
    thread.join(patient(10))
    assert not thread.is_alive()


def test_a_pause_that_waits_stands_while_an_update_holds_the_steps(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns when the requests have ended, or says that it was undone; meanwhile it asks nothing over and over."""
    weights = list(old_weights().items())
    for part, held in (("a", weights[:1]), ("b", weights[1:])):
        (tmp_path / part).mkdir()
        save_file(dict(held), tmp_path / part / "model.safetensors")
    config = {"backend": "disk", "staging": "none"}
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    with LLM(**FIELDS, weight_transfer_config=config) as llm:
        gate, times, num_looks = llm.engine.core.gate, llm.engine.times, list[None]()
        step, held = llm.engine.step, threading.Event()
        monkeypatch.setattr(llm.engine, "step", lambda: (num_looks.append(None), held.wait(0.02), step())[2])
        for undone in (False, True):
            held.clear()  # until the steps are held each takes its time, so that they are while it runs
            before = times.num_steps
            ran = pool.submit(llm.generate, [[5, 6, 7]], long, use_tqdm=False)
            until(lambda before=before: times.num_steps > before + 2)  # type: ignore[misc]
            pausing = pool.submit(llm.pause_generation, "wait")
            until(lambda: gate.draining)
            llm.start_weight_update()
            llm.update_weights({"update_info": {"path": str(tmp_path / "a")}})  # holds the steps from now on
            held.set()
            num_looks.clear()
            for _ in range(100):
                llm.weight_state()
            assert len(num_looks) <= 1000, "it waits by looking again"
            assert not pausing.done() and not ran.done()
            llm.update_weights({"update_info": {"path": str(tmp_path / "b")}})
            if undone:
                llm.resume_generation()
            llm.finish_weight_update()
            assert ran.result(patient(30))[0].outputs[0].finish_reason == "length"
            if undone:
                with pytest.raises(WrongStateError, match="resumed before the requests had ended"):
                    pausing.result(patient(30))
            else:
                pausing.result(patient(30))
            assert llm.is_paused() is not undone
            llm.resume_generation()

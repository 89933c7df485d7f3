"""Two trainers of one engine: what one of them is refused, takes back or leaves touches nothing of the other's."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import save_file

from octavo import LLM
from octavo.rl import Sender, WeightSource, session
from octavo.rl.messages import Prepared, Received, Way
from octavo.rl.sender import told
from octavo.rl.session import State, WeightConflictError, WeightTransferError, WeightUpdateError, WeightUpdates
from octavo.rl.transport.server_calls import ServerCalls
from octavo.sched.pause import Gate
from patience import patient
from weights_rig import Weights, answers, other_weights

FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}
SECONDS = 60.0  # that a meeting or a receive may take: no test waits for them


class Local(ServerCalls):
    """The calls that a server would get, made to an engine of this process."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self.llm.init_weight_transfer_engine(request)

    def begin_update(self, request: Mapping[str, Any], num_bytes: int = 0) -> Callable[[], object]:
        return functools.partial(self.llm.update_weights, request)

    def finish_weight_update(self, weight_version: str | None, *, session: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version, session=session)

    def abort_weight_update(self, *, session: str | None = None) -> None:
        self.llm.abort_weight_update(session=session)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**FIELDS, weight_transfer_config={"backend": "gloo", "timeout": SECONDS}) as made:
        yield made


@pytest.fixture
def trainer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    """It has met the engine, which looks at whether it is there whenever it is asked something."""
    monkeypatch.setattr(session, "_LOOK_SECONDS", 0.0)
    made = Sender(llm, "gloo", timeout=SECONDS)
    made._engine = Local(llm)
    made.send(WeightSource(other_weights(2)), "1")
    with contextlib.closing(made):
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    path, weights = tmp_path_factory.mktemp("weights"), other_weights(3)
    save_file(weights, path / "model.safetensors")
    return path, weights


def until(fact: Callable[[], bool]) -> None:
    """Wait for a fact; a test's own time limit ends it."""
    while not fact():
        threading.Event().wait(0.001)


def has_gone(llm: LLM) -> bool:
    """Whether the engine sees that the trainer which was met at the open session's start has gone."""
    return any(llm.engine.core.ask_workers("weights_peer_is_gone", bool))


def goes_on(llm: LLM, begun: str, folder: tuple[Path, Weights], version: str) -> None:
    """An update by files goes on from its start to its end."""
    llm.update_weights({"update_info": {"path": str(folder[0])}, "session": begun})
    assert llm.weight_state()["state"] == "open", "its tensors say by now that it is nobody else's"
    llm.finish_weight_update(version, session=begun)
    found = answers(llm)
    Sender(llm, "local").send(WeightSource(folder[1]), version)
    assert answers(llm) == found


def test_a_refused_trainer_ends_its_own_group_and_not_the_others_update(
    llm: LLM, trainer: Sender, folder: tuple[Path, Weights]
) -> None:
    """RL.W9: one that has begun and not told of its files yet. The refused one tries again, and waits for its end."""
    begun = llm.start_weight_update()
    with pytest.raises(WeightConflictError, match="while an update is open"):
        trainer.send(WeightSource(other_weights(4)), "2")
    until(lambda: has_gone(llm))
    for _ in range(2):
        assert llm.weight_state()["state"] == "open"
        with pytest.raises(WeightConflictError, match="init_weight_transfer_engine is not possible while an update"):
            trainer.send(WeightSource(other_weights(4)), "2")
    goes_on(llm, begun, folder, "3")
    trainer.send(WeightSource(other_weights(4)), "4")
    assert llm.get_weight_version() == "4"


def test_a_trainer_that_leaves_ends_nothing_of_an_update_that_is_not_its_own(
    llm: LLM, trainer: Sender, folder: tuple[Path, Weights]
) -> None:
    """RL.W8: nobody can tell whose it is before its tensors are told of; it has none, so it stands in nobody's way."""
    begun = llm.start_weight_update()
    trainer.close()
    until(lambda: has_gone(llm))
    assert llm.weight_state()["state"] == "open"
    goes_on(llm, begun, folder, "5")


def test_an_update_whose_trainer_left_makes_room_for_a_sleep(llm: LLM, trainer: Sender) -> None:
    """RL.W8, RL.S3: whoever asks for the room of an update that was told of nothing has it."""
    before = answers(llm)
    begun = llm.start_weight_update()
    assert llm.weight_state()["state"] == "open"
    trainer.close()
    until(lambda: has_gone(llm))
    llm.sleep(2)
    with pytest.raises(WeightConflictError, match=f"session '{begun}' is not open: its trainer has gone"):
        llm.finish_weight_update(session=begun)
    assert llm.wake_up(["weights"]) is False
    Sender(llm, "local").send(WeightSource(other_weights(2)))
    assert llm.wake_up() and answers(llm) == before


def test_an_update_whose_trainer_left_makes_room_for_a_label(llm: LLM, trainer: Sender) -> None:
    """RL.W8: one that was told of nothing; the label stands in the way of nobody's tensors."""
    begun = llm.start_weight_update()
    with pytest.raises(WeightConflictError, match="update_weight_version is not possible while an update is open"):
        llm.update_weight_version("another")
    trainer.close()
    until(lambda: has_gone(llm))
    llm.update_weight_version("another")
    assert llm.get_weight_version() == "another"
    with pytest.raises(WeightConflictError, match=f"session '{begun}' is not open: its trainer has gone"):
        llm.finish_weight_update(session=begun)


def test_an_abort_of_a_session_that_is_not_open_cuts_no_meeting(
    llm: LLM, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RL.W9: of one that never opened, as a refused trainer sends it, and of one that ended; without a name it does."""
    ended = llm.start_weight_update()
    llm.abort_weight_update(session=ended)
    moves, cuts = llm.engine.core.weights.moves, list[str]()
    cut = moves.cut
    monkeypatch.setattr(moves, "cut", lambda why: (cuts.append(why), cut(why)))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "world_size": 2}
        meeting = pool.submit(llm.init_weight_transfer_engine, {"init_info": where})
        until(lambda: bool(llm.weight_state()["waits_for_trainer"]))
        for name in ("never opened", ended):
            with pytest.raises(WeightConflictError, match=f"session '{name}' is not open"):
                llm.abort_weight_update(session=name)
        assert llm.weight_state()["waits_for_trainer"] and not cuts
        llm.abort_weight_update()
        with pytest.raises(WeightTransferError, match="cut short: abort_weight_update came"):
            meeting.result(patient(20))


LONG = "x" * 257


def test_a_label_that_cannot_be_is_refused_before_any_tensor_travels(
    llm: LLM, trainer: Sender, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RL.W4, RL.W8: a call that is a whole update, and whose trainer sends nothing; and each end that is told first."""
    before = llm.get_weight_version()
    whole = {"update_info": told(WeightSource(other_weights(4)).incoming), "start": {}}
    for finish, words in (
        ({"weight_version": LONG}, "weight_version must have 1 to 256 characters, got 257"),
        ({"weight_version": ""}, "weight_version must have 1 to 256 characters, got 0"),
        ({"on_running": "stop"}, "on_running must be one of recompute, keep_kv, abort, got 'stop'"),
    ):
        refused = pool.submit(llm.update_weights, whole | {"finish": finish})
        with pytest.raises(WeightUpdateError, match=f"^{words}$"):
            refused.result(patient(20))
        assert llm.weight_state()["state"] == "ready"
    with pytest.raises(WeightUpdateError, match=r"^session must be text of up to 256 characters, got 'xxxx"):
        llm.update_weights(whole | {"session": LONG})
    trainer.send(WeightSource(other_weights(2)), before)  # its group is as it was: nothing was received
    asked = list[str]()
    monkeypatch.setattr(llm, "start_weight_update", lambda **_: asked.append("start"))
    wrong: list[tuple[Any, str]] = [
        (LONG, "1 to 256 characters, got 257"),
        (5, "weight_version must be text, got int"),
        ("a\nb", r"weight_version must have characters that can be printed, got 'a\\nb'"),
        ("\ud800", r"weight_version must have characters that can be printed, got '\\ud800'"),
    ]
    for label, words in wrong[2:]:
        with pytest.raises(WeightUpdateError, match=words):
            llm.update_weight_version(label)
    for label, words in wrong:
        for send in (Sender(llm, "local").send, Sender("http://127.0.0.1:1").send):
            with pytest.raises(WeightUpdateError, match=words):
                send(WeightSource(other_weights(4)), label)
        with pytest.raises(WeightUpdateError, match=words), llm.weights(label):
            pass
    assert not asked and llm.get_weight_version() == before


class Core:
    """Of an engine whose receive ends when it is told to, whatever cuts it."""

    def __init__(self) -> None:
        self.comes = threading.Event()

    def ask_workers(self, name: str, reply: type[Any], request: Any = None) -> list[Any]:
        told = {"weights_expect": Way(True, False), "weights_prepare": Prepared("a", 1), "weights_abort": True}
        return [told.get(name, False)]

    def ask_beside(self, name: str, reply: type[Any], request: Any = None) -> list[Any]:
        if name != "weights_cut":
            self.comes.wait(patient(30))
        return [{} if name == "weights_init" else Received(1, 8, 0.1, False)]

    def change_weights(self, apply: Callable[[], bool], identity: str, version: str, running: str) -> tuple[int, str]:
        return 0, running

    def release_weights(self) -> None:
        pass

    def standing(self) -> None:
        pass


def text_of(updates: WeightUpdates, answer: Future[bytes]) -> str:
    """What a move that may wait was refused with; empty: it was not."""
    while not answer.done():
        updates.moves.wait()
        updates.moves.poll()
    return str(msgspec.msgpack.decode(answer.result()).get("text", ""))


@pytest.fixture
def updates() -> WeightUpdates:
    return WeightUpdates(Core(), Gate())  # type: ignore[arg-type]


def ask(updates: WeightUpdates, name: str, **told: Any) -> Future[bytes]:
    return updates.calls()[name](msgspec.msgpack.encode(told))


@pytest.mark.parametrize("name", [None, "mine"])
def test_an_abort_that_comes_too_late_says_so(updates: WeightUpdates, name: str | None) -> None:
    """RL.W9: the tensors were there, and the update was finished, before the cut was seen."""
    whole = ask(updates, "update_weights", update_info={}, session="mine", start={}, finish={"weight_version": "1"})
    aborted = ask(updates, "abort_weight_update", session=name)
    updates._core.comes.set()  # type: ignore[attr-defined]
    assert not text_of(updates, whole) and updates.version == "1"
    assert "it was finished, as '1'" in text_of(updates, aborted)
    assert not updates.stats.num_failed_updates


def test_an_abort_of_a_meeting_ends_no_update_that_waited_behind_it(updates: WeightUpdates) -> None:
    """RL.W9: no session was open when it came; without a name it was for the meeting."""
    meeting = ask(updates, "init_weight_transfer_engine")
    begun = ask(updates, "start_weight_update")
    aborted = ask(updates, "abort_weight_update")
    updates._core.comes.set()  # type: ignore[attr-defined]
    assert not text_of(updates, aborted) and not text_of(updates, begun) and meeting.done()
    assert updates.state is State.OPEN and not updates.stats.num_failed_updates


def test_an_abort_whose_asker_left_ends_nobodys_next_update(updates: WeightUpdates) -> None:
    """RL.W9: it waited behind the receive that it had cut, and was not made; later ones are looked at as ever."""
    first = ask(updates, "update_weights", update_info={}, session="first", start={})
    ask(updates, "abort_weight_update", session="first").cancel()
    updates._core.comes.set()  # type: ignore[attr-defined]
    assert not text_of(updates, first)
    assert not text_of(updates, ask(updates, "abort_weight_update", session="first"))
    assert not text_of(updates, ask(updates, "start_weight_update"))
    late = ask(updates, "abort_weight_update", session="first")
    assert "session 'first' is not open: the update was aborted" in text_of(updates, late)
    assert updates.state is State.OPEN


def test_an_update_that_begins_with_its_tensors_is_refused_at_once_whatever_its_start_says(
    updates: WeightUpdates,
) -> None:
    """RL.W9: while another one's tensors are on their way: it does not wait for them to be refused, or to follow."""
    first = ask(updates, "update_weights", update_info={}, session="first", start={})
    for start in ({}, {"partial": True}):
        second = ask(updates, "update_weights", update_info={}, session="second", start=start)
        assert second.done() and "its tensors are on their way now" in text_of(updates, second)
    updates._core.comes.set()  # type: ignore[attr-defined]
    assert not text_of(updates, first)

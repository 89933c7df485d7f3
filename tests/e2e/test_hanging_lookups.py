"""Stores and connectors whose look-up, or whose end, hangs: one request waits a little, and the engine for nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine_checks import GOOD_PROMPT, assert_idle, num_missing_blocks
from octavo import LLM, SamplingParams
from octavo.kv_connector import SilentConnector
from octavo.kv_connector.worker import NO_WORKER_CONNECTOR
from patience import patient
from test_connectors import host, multi, storage
from test_faulty_stores import PARAMS, PROMPT, Kept, answer, settle
from test_vllm_connector import CONFIG, theirs

__all__ = ["theirs"]
Make = Callable[..., LLM]
NEVER = {"kv_lookup_timeout": 3600, "kv_transfer_timeout": 3600}


def short() -> float:
    """Seconds in which, on this machine and now, all ends that does not hang."""
    return round(patient(0.4), 1)


class Gate:
    """What hangs at it goes on when the test ends."""

    def __init__(self) -> None:
        self.open, self.num = threading.Event(), 0
        self.open.set()

    def pass_through(self) -> None:
        self.num += 1
        self.open.wait(600)


GATE = Gate()


@pytest.fixture
def gate(make_llm: Make) -> Iterator[Gate]:  # opened before these are closed
    GATE.num = 0
    HasHangs.kept.clear()
    yield GATE
    GATE.open.set()


class HasHangs(Kept):
    kept: ClassVar[dict[str, bytes]] = {}

    def has(self, key: str) -> bool:
        GATE.pass_through()
        return key in self.kept


class Halves:
    """A connector of somebody's that moves nothing; one method of one of its halves hangs."""

    shares_names, hangs_in = False, "match"

    def __init__(self, transfer: Any) -> None:
        pass

    def secret(self) -> bytes:
        return b""

    def scheduler_half(self, engine: Any) -> Any:
        half: Any = SilentConnector()
        if self.hangs_in == "match":
            half.match = lambda request, num_local: GATE.pass_through() or 0
        elif self.hangs_in == "close":
            half.close = GATE.pass_through
        else:
            half.close = lambda: engine.ask("close")
        return half

    def worker_half(self, cache: Any, identity: str) -> Any:
        half: Any = type("Half", (type(NO_WORKER_CONNECTOR),), {"close": lambda self: GATE.pass_through()})()
        return half if self.hangs_in == "worker's close" else NO_WORKER_CONNECTOR


class StoreWithHalf(Kept):
    kept: ClassVar[dict[str, bytes]] = {}

    def worker_half(self, cache: Any, identity: str) -> Any:
        made = super().worker_half(cache, identity)
        made.close = GATE.pass_through  # type: ignore[method-assign]
        return made


@pytest.fixture(scope="module")
def expected() -> Any:
    with LLM(dtype="float32", max_model_len=512) as llm:
        return answer(llm)


def own(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": __name__, "kv_role": "kv_both"}


def within(work: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What it gives, if that comes in time."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(patient(seconds))
    assert found, "it hangs"
    return found[0]


def hang_in_stat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is elsewhere, and whoever looks into it without being asked to move a block hangs."""
    stat = os.stat

    def hangs(path: Any, *args: Any, **named: Any) -> Any:
        is_mover = threading.current_thread().name.startswith(("octavo-kv-load", "octavo-kv-save"))
        if isinstance(path, str) and path.startswith(f"{folder}/") and not is_mover:
            GATE.pass_through()
        return stat(path, *args, **named)

    monkeypatch.setattr(os, "stat", hangs)


STORES = ("has", "shared_storage", "files behind host memory", "child of multi", "match", "vLLM's")


def hanging(name: str, folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """The configuration of a store whose look-up hangs when the gate is closed; how it is told."""
    if name == "vLLM's":
        match = theirs.MemoryConnector.get_num_new_matched_tokens

        def hangs(self: Any, request: Any, num_computed: int) -> Any:
            GATE.pass_through()
            return match(self, request, num_computed)

        monkeypatch.setattr(theirs.MemoryConnector, "get_num_new_matched_tokens", hangs)
        return CONFIG, "MemoryConnector"
    if name in ("has", "child of multi"):
        return own("HasHangs") if name == "has" else multi(own("HasHangs"), host()), "HasHangs"
    if name == "match":
        return own("Halves"), "Halves"
    hang_in_stat(folder, monkeypatch)
    if name == "shared_storage":
        return storage(folder), name
    extra = {"num_cpu_blocks": 2, "storage_path": str(folder)}
    return {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": extra}, "host"


@pytest.mark.parametrize("name", STORES)
def test_a_look_up_that_hangs_costs_its_request_the_limit_and_nobody_else_anything(
    name: str, gate: Gate, expected: Any, make_llm: Make, theirs, tmp_path, monkeypatch, caplog
) -> None:
    config, told = hanging(name, tmp_path, theirs, monkeypatch)
    is_late = True
    while is_late:  # of a machine that stood still meanwhile: once more
        caplog.clear()
        seconds, gate.num = short(), 0
        llm = make_llm(max_model_len=512, kv_transfer_config={**config, "kv_lookup_timeout": seconds})
        for _ in range(2):
            assert llm.reset_prefix_cache() and answer(llm) == expected
        is_late = settle(llm).num_late_lookups > 0
    assert gate.num
    gate.open.clear()
    gate.num = 0
    for _ in range(3):
        assert llm.reset_prefix_cache() and within(lambda: answer(llm)) == expected
    assert within(lambda: settle(llm)).num_late_lookups == 1 and gate.num == 1, "who is silent is left alone"
    lines = [record.message for record in caplog.records if f"{seconds:g} s (kv_lookup_timeout)" in record.message]
    assert len(lines) == 1 and told in lines[0]
    gate.open.set()
    stats = llm.engine.scheduler.loads.connector.stats()
    assert stats.num_errors >= 1
    while name != "match" and not llm.engine.scheduler.stats().num_loaded_tokens:  # it has come back, some time
        assert llm.reset_prefix_cache() and answer(llm) == expected
        settle(llm)


@pytest.mark.parametrize("name", STORES)
def test_steps_of_others_go_on_while_a_request_waits_for_a_look_up(
    name: str, gate: Gate, make_llm: Make, theirs, tmp_path, monkeypatch
) -> None:
    config, _ = hanging(name, tmp_path, theirs, monkeypatch)
    llm = make_llm(max_model_len=512, kv_transfer_config={**config, **NEVER})
    engine, ended = llm.engine, list[str]()
    tokens = engine.tokenizer.encode(PROMPT)

    def step(until: Callable[[], bool]) -> bool:
        while not until():
            ended.extend(output.request_id for output in engine.step() if output.finished)
        return True

    engine.add("runs", tokens, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    step(lambda: bool(engine.scheduler.running))
    gate.open.clear()
    gate.num = 0
    engine.add("waits", [*tokens[40:], *tokens], PARAMS)
    assert within(lambda: step(lambda: "runs" in ended))
    assert gate.num == 1 and ended == ["runs"] and len(engine.scheduler.waiting) == 1
    engine.abort(["waits"])
    gate.open.set()
    within(lambda: settle(llm))
    assert_idle(llm)


ENDS = ("close", "worker's close", "a store's worker's close", "shutdown beside the scheduler", "shutdown")


@pytest.mark.parametrize("place", ENDS)
def test_an_end_that_hangs_is_told_by_name_and_not_waited_for(
    place: str, gate: Gate, make_llm: Make, theirs, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(Halves, "hangs_in", place)
    if place.startswith("shutdown"):
        roles = [theirs.KVConnectorRole.SCHEDULER] if "scheduler" in place else [theirs.KVConnectorRole.WORKER]

        def hangs(self: Any) -> None:
            if self.role in roles:
                GATE.pass_through()

        monkeypatch.setattr(theirs.MemoryConnector, "shutdown", hangs, raising=False)
        config, name = CONFIG, "MemoryConnector"
    else:
        name = "StoreWithHalf" if "store" in place else "Halves"
        config = own(name)
    what = {ENDS[3]: "its end beside the scheduler", ENDS[4]: "its end beside the cache"}.get(place, "close")
    for _ in range(3):  # of a machine that stood still more may be told, or something else: once more
        caplog.clear()
        gate.open.set()
        llm = make_llm(max_model_len=512, kv_transfer_config={**config, "kv_transfer_timeout": short()})
        assert llm.generate(GOOD_PROMPT, PARAMS)
        settle(llm)
        gate.open.clear()
        within(lambda: llm.close() or True)  # noqa: B023 - it is called at once
        told = [record.message for record in caplog.records if "did not end within" in record.message]
        if len(told) == 1 and f": {what} did not" in told[0]:
            break
    assert len(told) == 1 and f"kv_connector {name}:" in told[0] and "kv_transfer_timeout" in told[0]
    assert f": {what} did not" in told[0]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_hangs_and_cannot_be_stopped_costs_its_request_the_time_and_keeps_its_blocks(
    policy: str, gate: Gate, expected: Any, make_llm: Make, theirs, monkeypatch, caplog
) -> None:
    """D.8: it may write into them whenever it goes on, so nobody gets them; its request needs others."""
    config = {**CONFIG, "kv_load_failure_policy": policy, "kv_transfer_timeout": short()}
    llm = make_llm(max_model_len=512, kv_transfer_config=config)
    while not llm.engine.scheduler.stats().num_loaded_tokens:  # a save, a look-up or a load may be late by itself
        assert llm.reset_prefix_cache() and answer(llm)
        settle(llm)
    num_failed = llm.engine.scheduler.stats().num_load_failures
    start_load = theirs.MemoryConnector.start_load_kv

    def hangs(self: Any, *args: Any, **named: Any) -> None:
        GATE.pass_through()
        start_load(self, *args, **named)

    monkeypatch.setattr(theirs.MemoryConnector, "start_load_kv", hangs)
    gate.open.clear()
    while not gate.num:
        assert llm.reset_prefix_cache()
        found = within(lambda: answer(llm))
    assert found == expected if policy == "recompute" else found[2] == "error"
    assert llm.engine.scheduler.stats().num_load_failures == num_failed + 1 and num_missing_blocks(llm) > 0
    assert any("blocks stay taken" in record.message for record in caplog.records)
    gate.open.set()
    settle(llm)


def test_a_save_that_hangs_and_cannot_be_stopped_keeps_its_blocks_and_no_answer(
    gate: Gate, expected: Any, make_llm: Make, theirs, monkeypatch
) -> None:
    monkeypatch.setattr(theirs.MemoryConnector, "wait_for_save", lambda self: GATE.pass_through())
    llm = make_llm(max_model_len=512, kv_transfer_config={**CONFIG, "kv_transfer_timeout": short()})
    connector = llm.engine.scheduler.loads.connector
    monkeypatch.setattr(connector, "_lookup", 3600.0)  # behind one that is late nothing is saved
    gate.open.clear()
    for _ in range(2):
        assert within(lambda: answer(llm)) == expected
        assert num_missing_blocks(llm) > 0
    gate.open.set()
    settle(llm)


class GetHangs(Kept):
    kept: ClassVar[dict[str, bytes]] = {}

    def get(self, key: str) -> bytes | None:
        GATE.pass_through()
        return self.kept.get(key)


def test_a_store_whose_get_hangs_is_left_alone_for_as_long_as_one_request_has_waited(
    gate: Gate, expected: Any, make_llm: Make, caplog
) -> None:
    seconds, now = short(), 0.0
    config = {**own("GetHangs"), "kv_load_failure_policy": "recompute", "kv_transfer_timeout": seconds}
    llm = make_llm(max_model_len=512, kv_transfer_config=config)
    connector = llm.engine.scheduler.loads.connector._inner
    connector._clock = lambda: now
    while not GetHangs.kept:
        assert llm.reset_prefix_cache() and answer(llm) == expected
        settle(llm)
    gate.open.clear()
    for _ in range(4):
        assert llm.reset_prefix_cache() and within(lambda: answer(llm)) == expected
    assert llm.engine.scheduler.stats().num_load_failures == 1
    lines = [
        record.message
        for record in caplog.records
        if f"GetHangs: a load did not end within {seconds:g} s" in record.message
    ]
    assert len(lines) == 1 and "kv_transfer_timeout" in lines[0]
    gate.open.set()
    while not llm.engine.scheduler.stats().num_loaded_tokens:
        assert llm.reset_prefix_cache() and answer(llm) == expected
        settle(llm)
        now += seconds

"""Stores that raise, hang or lie: what that costs is computed, the engine lives, and it ends in time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine_checks import GOOD_PROMPT, assert_idle, good_tokens
from octavo import LLM, SamplingParams
from octavo.config.settings import ConfigError
from octavo.kv_connector import SilentConnector
from octavo.kv_connector.store import StoreKind
from octavo.kv_connector.worker import NO_WORKER_CONNECTOR
from patience import patient
from test_connectors import storage

PROMPT = GOOD_PROMPT * 9
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
Make = Callable[..., LLM]


class Kept(StoreKind):
    kept: ClassVar[dict[str, bytes]] = {}

    def has(self, key: str) -> bool:
        return key in self.kept

    def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.kept[key] = data


class HasRaises(Kept):
    kept: ClassVar[dict[str, bytes]] = {}

    def has(self, key: str) -> bool:
        raise ConnectionError("the store went away")


class HasExits(HasRaises):
    def has(self, key: str) -> bool:
        raise SystemExit(3)


class GetExits(Kept):
    kept: ClassVar[dict[str, bytes]] = {}

    def get(self, key: str) -> bytes | None:
        raise SystemExit(3)


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class GetNoText(Kept):
    kept: ClassVar[dict[str, bytes]] = {}

    def get(self, key: str) -> bytes | None:
        raise NoText


class PutNoText(Kept):
    kept: ClassVar[dict[str, bytes]] = {}

    def put(self, key: str, data: bytes) -> None:
        raise NoText


class Hung(Kept):
    kept: ClassVar[dict[str, bytes]] = {}
    gate = threading.Event()
    entered = threading.Event()

    def has(self, key: str) -> bool:
        return True

    def get(self, key: str) -> bytes | None:
        self.entered.set()
        self.gate.wait(120)
        return None


class CannotBeMade(Kept):
    def __init__(self, transfer: Any) -> None:
        raise RuntimeError("no such server")


class NoSecret(Kept):
    def secret(self) -> bytes:
        raise RuntimeError("no key")


class Unfinished(StoreKind):
    def has(self, key: str) -> bool:
        return False


class Raising(SilentConnector):
    """A scheduler's half of somebody's, which raises in one method."""

    saves_running, save_unit = True, 16

    def __init__(self, name: str) -> None:
        def fails(*_: object, **__: object) -> Any:
            raise KeyError(f"in {name}")

        self.match = lambda request, num_local: 16 * (request.num_tokens // 16) - num_local  # type: ignore[method-assign]
        self.computed = self.finished = lambda save: False  # type: ignore[method-assign]
        setattr(self, name, fails)


class Halves:
    """A connector that moves bytes in a way of its own."""

    shares_names = False
    raises_in: ClassVar[str] = ""

    def __init__(self, transfer: Any) -> None:
        pass

    def secret(self) -> bytes:
        return b""

    def scheduler_half(self, engine: Any) -> Any:
        if self.raises_in == "scheduler_half":
            raise ValueError("no half")
        return Raising(self.raises_in)

    def worker_half(self, cache: Any, identity: str) -> Any:
        if self.raises_in == "worker_half":
            raise ValueError("no half")
        return NO_WORKER_CONNECTOR


def own(name: str, **changes: object) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": __name__, "kv_role": "kv_both", **changes}


def answer(llm: LLM) -> Any:
    output = llm.generate(PROMPT, PARAMS)[0].outputs[0]
    return output.token_ids, output.logprobs, output.finish_reason


def settle(llm: LLM) -> Any:
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_idle(llm)
    return llm.engine.scheduler.loads.connector.stats()


@pytest.fixture(scope="module")
def expected() -> Any:
    with LLM(dtype="float32", max_model_len=512) as llm:
        return answer(llm)


@pytest.mark.parametrize("name", ["HasRaises", "HasExits"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_store_whose_has_raises_is_a_miss_that_is_counted_and_told_once(
    name: str, policy: str, expected: Any, make_llm: Make, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(max_model_len=512, kv_transfer_config=own(name, kv_load_failure_policy=policy))
    for _ in range(3):
        assert answer(llm) == expected
        moved = settle(llm)
        assert llm.reset_prefix_cache()
    assert moved.num_errors == 3 and HasRaises.kept  # a request asks once, and no further behind what is not there
    told = [record.message for record in caplog.records if f"{name}.has" in record.message]
    assert len(told) == 1 and "taken for a miss" in told[0]
    llm.close()
    told = [record.message for record in caplog.records if f"{name}.has" in record.message]
    assert len(told) == 2 and f"{moved.num_errors - 1} more" in told[1]


@pytest.mark.parametrize("name", ["GetExits", "GetNoText"])
def test_a_thread_that_a_store_ends_fails_its_load_by_the_policy_and_works_on(
    name: str, expected: Any, make_llm: Make
) -> None:
    """An error whose text cannot be had ended the thread for good, and blocks never came back."""
    llm = make_llm(max_model_len=512, kv_transfer_config=own(name, kv_load_failure_policy="recompute"))
    for _ in range(3):
        assert answer(llm) == expected
        settle(llm)
        assert llm.reset_prefix_cache()
    assert llm.engine.scheduler.stats().num_load_failures == 2


def test_a_save_that_fails_without_a_text_is_told_and_the_next_one_is_made(
    expected: Any, make_llm: Make, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(max_model_len=512, kv_transfer_config=own("PutNoText", kv_transfer_timeout=2))
    assert answer(llm) == expected
    assert settle(llm).num_errors == 1 and "blocks failed: NoText: (its text cannot be had" in caplog.text
    monkeypatch.setattr(PutNoText, "put", Kept.put)
    assert llm.reset_prefix_cache() and answer(llm) == expected
    settle(llm)
    assert PutNoText.kept


def test_a_store_that_hangs_holds_no_close_up(expected: Any, make_llm: Make, caplog: pytest.LogCaptureFixture) -> None:
    config = own("Hung", kv_load_failure_policy="recompute", kv_transfer_timeout=0.5)
    llm = make_llm(max_model_len=512, kv_transfer_config=config)
    try:
        for _ in range(50):  # a load that no thread has begun in time is given up
            assert answer(llm) == expected
            settle(llm)
            assert llm.reset_prefix_cache()
            if Hung.entered.is_set():
                break
        closing = threading.Thread(target=llm.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "close waits for a thread that hangs"
        assert any("Hung" in record.message and "0.5 s" in record.message for record in caplog.records)
    finally:
        Hung.gate.set()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CannotBeMade", r"CannotBeMade'.*: cannot be made: RuntimeError: no such server at test_faulty_stores.py:\d+"),
        ("NoSecret", r"NoSecret'.*: cannot be made: RuntimeError: no key"),
        ("Unfinished", r"Unfinished'.*: lacks get, put"),
    ],
)
def test_a_connector_of_ones_own_that_cannot_be_made_is_refused_by_name(name: str, said: str, make_llm: Make) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_llm(kv_transfer_config=own(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["scheduler_half", "worker_half"])
def test_a_half_that_cannot_be_made_is_refused_by_name(place: str, make_llm: Make, monkeypatch) -> None:
    monkeypatch.setattr(Halves, "raises_in", place)
    with pytest.raises(ConfigError, match=r"Halves'.*cannot be made: ValueError: no half at"):
        make_llm(kv_transfer_config=own("Halves"))


METHODS = ("match", "shorter", "allocated", "loads_no_more", "computed", "finished", "ending")
ASKED = {"shorter": (None, 0, 16), "wait": (0.01,), "cancel": (7,), "release": (["x"],)}


@pytest.mark.parametrize("place", [*METHODS, "cancel", "take_results", "wait", "stats", "release", "reset", "close"])
def test_whatever_a_half_of_ones_own_raises_the_engine_answers_as_ever(
    place: str, expected: Any, make_llm: Make, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Halves, "raises_in", place)
    config = own("Halves", kv_load_failure_policy="recompute", kv_transfer_timeout=0.2)
    llm = make_llm(max_model_len=512, kv_transfer_config=config)
    if place in METHODS and place not in ASKED:  # without a load that nobody ends
        rounds = 0
        while rounds < 2 or f"Halves.{place}" not in caplog.text:  # a look-up may be late by itself
            assert answer(llm) == expected
            rounds += 1
        settle(llm)
    else:
        named = {"force": True} if place == "cancel" else {}
        getattr(llm.engine.scheduler.loads.connector, place)(*ASKED.get(place, ()), **named)
    llm.close()
    until = time.monotonic() + patient(30)
    while f"Halves.{place}" not in caplog.text and time.monotonic() < until:  # an end's thread may be late by itself
        time.sleep(0.01)
    assert f"Halves.{place}" in caplog.text and "KeyError" in caplog.text


def test_a_name_that_is_taken_by_no_file_is_a_miss_and_what_can_be_removed_is(
    expected: Any, make_llm: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_llm(max_model_len=512, kv_transfer_config=storage(tmp_path))
    answer(first)
    settle(first)
    paths = sorted(tmp_path.rglob("*.safetensors"))
    for number, path in enumerate(paths):
        path.unlink()
        if number % 3 == 0:
            path.mkdir()
            (path / "something").touch()
        elif number % 3 == 1:
            os.mkfifo(path)
        else:
            path.mkdir()
    second = make_llm(max_model_len=512, kv_transfer_config=storage(tmp_path))
    caplog.clear()
    for _ in range(3):
        assert answer(second) == expected
        settle(second)
        assert second.reset_prefix_cache()
    stats = second.engine.scheduler.stats()
    assert not stats.num_load_failures
    assert [path for path in paths if path.is_file()] == [path for n, path in enumerate(paths) if n % 3]
    assert sum("cannot be removed" in record.message for record in caplog.records) == 1
    assert len(caplog.records) <= 4


def test_no_file_behind_host_memory_is_a_miss_too(expected: Any, make_llm: Make, tmp_path: Path) -> None:
    extra = {"num_cpu_blocks": 2, "storage_path": str(tmp_path)}
    config = {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    first = make_llm(max_model_len=512, kv_transfer_config=config)
    for _ in range(2):
        answer(first)
        settle(first)
        assert first.reset_prefix_cache()
    paths = list(tmp_path.rglob("*.safetensors"))
    for path in paths:
        path.unlink()
        path.mkdir()
        (path / "something").touch()
    second = make_llm(max_model_len=512, kv_transfer_config=config)
    assert paths and answer(second) == expected
    settle(second)
    assert not second.engine.scheduler.stats().num_load_failures


def test_a_folder_that_vanishes_is_made_again_with_its_key(expected: Any, make_llm: Make, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    llm = make_llm(max_model_len=512, kv_transfer_config=storage(folder))
    answer(llm)
    settle(llm)
    folder.rename(tmp_path / "elsewhere")
    assert llm.reset_prefix_cache() and answer(llm) == expected
    settle(llm)
    assert list(folder.rglob("*.safetensors"))
    assert (folder / "octavo.key").read_bytes() == (tmp_path / "elsewhere" / "octavo.key").read_bytes()
    assert llm.reset_prefix_cache() and answer(llm) == expected
    settle(llm)
    assert llm.engine.scheduler.stats().num_loaded_tokens


def test_a_damaged_folder_is_told_in_a_line_with_a_count(
    expected: Any, make_llm: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(max_model_len=512, kv_transfer_config=storage(tmp_path))
    answer(llm)
    settle(llm)
    paths = sorted(tmp_path.rglob("*.safetensors"))
    for path in paths:
        path.write_bytes(b"x" * 5000)
    caplog.set_level(logging.WARNING)
    assert llm.reset_prefix_cache() and answer(llm) == expected
    settle(llm)
    llm.close()
    told = [record.message for record in caplog.records if "block_files" in record.name or "guard" in record.name]
    assert len(told) == 2 and f"{len(paths) - 1} more" in told[1], told


def test_the_engine_of_a_faulty_store_still_answers(make_llm: Make) -> None:
    assert good_tokens(make_llm(kv_transfer_config=own("HasRaises"))) == good_tokens(make_llm())

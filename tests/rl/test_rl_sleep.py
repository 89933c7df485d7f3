"""Sleep of an engine whose memory moves as a GPU's does, over a double of the driver.

Weights lie as they were loaded, as on a GPU, and in the double's memory, as the cache does: who touches what has none
ends by a signal.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.settings import ConfigError
from octavo.device import sleep
from octavo.frontend.control import WrongStateError
from octavo.kv_connector.mooncake import Mooncake
from octavo.kv_connector.p2p import Nixl
from octavo.request.sampling_params import ParameterError
from octavo.rl import Sender, WeightSource
from octavo.rl.session import WeightConflictError
from patience import patient
from sleep_rig import move_memory
from weights_rig import answers, give, old_weights, other_weights, prompts

from model_rig import make_reference  # isort: skip, its folder is known through rl_rig
from pages_double import PAGE, PagesDouble  # isort: skip, its folder is known through sleep_rig

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "native": "off",
    "max_model_len": 256,
    "num_gpu_blocks_override": 200,
    "enable_sleep_mode": True,
    "weight_transfer_config": {"backend": "disk"},
}


class Engine:
    """One whose memory is a double's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pages = PagesDouble()
        move_memory(patch, self.pages)
        self.llm = LLM(**CONFIG)
        self.whole = self.pages.used
        worker_ = self.llm.engine.core._executor._worker  # type: ignore[attr-defined]
        self.memory = worker_._memory
        self.weights, self.cache = (self.memory._parts[tag, False].num_bytes for tag in ("weights", "kv_cache"))
        self.tensors = [worker_._runner.cache, *_tensors(worker_._model)]
        self.places = [each.data_ptr() for each in self.tensors]

    def check(self, used: int) -> None:
        self.pages.check()
        assert self.pages.used == used
        assert [each.data_ptr() for each in self.tensors] == self.places


def _tensors(model: Any) -> list[torch.Tensor]:
    return [each for layer in model.modules() for each in vars(layer).values() if isinstance(each, torch.Tensor)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        made = Engine(patch)
        with made.llm:
            yield made


@pytest.fixture(scope="module")
def said(engine: Engine) -> Any:
    return answers(engine.llm)


@pytest.fixture
def awake(engine: Engine) -> Iterator[Engine]:
    """As it was, in the end."""
    yield engine
    engine.pages.others, engine.pages.fails = 0, {}
    engine.llm.wake_up()
    engine.llm.resume_generation()
    if engine.llm.engine.core.gate.lost:
        give(engine.llm, old_weights())
    engine.check(engine.whole)


def test_rl_s1_all_weights_and_the_cache_lie_where_memory_moves(engine: Engine, said: Any) -> None:
    """What a checkpoint holds, to the last page, and what the cache was given."""
    file = sum(each.nbytes for each in old_weights().values())
    assert 2 * file <= engine.weights <= 2 * file + PAGE  # of bfloat16, in float32
    assert engine.llm.engine.memory.kv_bytes <= engine.cache <= engine.llm.engine.memory.kv_bytes + PAGE
    assert engine.whole == engine.weights + engine.cache


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_rl_s3_sleep_changes_no_bit(awake: Engine, said: Any, mode: str) -> None:
    """RL.S1, RL.S4: weights come from the host before the cache does, by tags; twice asleep is asleep."""
    llm = awake.llm
    for _ in range(2):
        llm.sleep(1, mode)
        llm.sleep(1, mode)
        awake.check(0)
        assert not llm.wake_up(["scheduling"]) and not awake.pages.used
        assert not llm.wake_up(["weights"])
        awake.check(awake.weights)
        with pytest.raises(WrongStateError, match="wake it up first"):
            llm.resume_generation()
        assert llm.wake_up(["kv_cache"]) and llm.wake_up()
        awake.check(awake.whole)
        assert answers(llm) == said


def test_rl_s1_tags_of_a_sleep_name_what_alone_goes(awake: Engine, said: Any) -> None:
    """From Python as over HTTP, with the same checks."""
    llm = awake.llm
    llm.sleep(1, "keep", ["kv_cache"])
    awake.check(awake.weights)
    llm.sleep(1, tags=["weights"])
    awake.check(0)
    assert llm.wake_up(tags=["weights", "kv_cache"]) and answers(llm) == said
    llm.sleep(2, tags=["kv_cache"])
    awake.check(awake.weights)
    assert not llm.engine.core.gate.lost and llm.wake_up() and answers(llm) == said
    for wrong in ("weights", ["gpu"], [3], 3):
        with pytest.raises(ParameterError, match=r"^tags: "):
            llm.sleep(1, tags=wrong)  # type: ignore[arg-type]
    assert not llm.is_sleeping()


def test_rl_s4_a_trainer_has_the_memory_meanwhile(awake: Engine, said: Any) -> None:
    """Waking needs all of a tag's memory, or changes nothing: the error says so, and a second time is enough."""
    llm, pages = awake.llm, awake.pages
    llm.sleep(1)
    pages.others = pages.total_bytes - awake.weights
    with pytest.raises(WrongStateError, match=r"wake_up: .* are needed for weights, kv_cache.*sleeps as it did"):
        llm.wake_up()
    awake.check(0)
    assert not llm.wake_up(["weights"])
    with pytest.raises(WrongStateError, match="are needed for kv_cache"):
        llm.wake_up()
    awake.check(awake.weights)
    pages.others = 0
    assert llm.wake_up() and answers(llm) == said


def test_no_room_on_the_host_is_no_sleep(awake: Engine, said: Any) -> None:
    awake.pages.fails = {"host": 1}
    with pytest.raises(WrongStateError, match=r"host's memory does not hold .* sleep at level 2"):
        awake.llm.sleep(1, "keep")
    awake.check(awake.whole)
    assert not awake.llm.is_paused() and answers(awake.llm) == said


def test_a_driver_that_fails_leaves_an_engine_that_looks_at_nothing(awake: Engine, said: Any) -> None:
    """And that can be woken."""
    awake.pages.fails = {"unmap": 2}
    with pytest.raises(RuntimeError, match="unmap failed"):
        awake.llm.sleep(1)
    assert awake.llm.is_sleeping()
    with pytest.raises(WrongStateError):
        awake.llm.generate([[1]])
    awake.pages.fails = {}
    assert awake.llm.wake_up() and answers(awake.llm) == said


def test_rl_s2_level_2_and_a_session(awake: Engine, said: Any) -> None:
    """Values are gone; a whole set of weights comes to the same addresses, before the cache has its memory."""
    llm, pages = awake.llm, awake.pages
    on_host = pages.calls["host"]
    for _ in range(2):
        llm.sleep(2)
        awake.check(0)
        with pytest.raises(WeightConflictError, match="sleeps"):
            give(llm, old_weights())
        assert not llm.wake_up(["weights"])
        awake.check(awake.weights)
        part = awake.memory._parts["weights", False]
        part._values(0, part._end).fill_(255)  # whatever was there: NaN
        with pytest.raises(WrongStateError, match="discarded"):
            llm.generate([[1]])
        give(llm, old_weights())
        assert llm.wake_up(["kv_cache"])
        assert answers(llm) == said
    assert pages.calls["host"] == on_host


def test_deeper_sleep_lets_the_hosts_copy_go(awake: Engine, said: Any) -> None:
    llm = awake.llm
    llm.sleep(1)
    llm.sleep(2)
    with pytest.raises(WrongStateError, match="at level 2 already"):
        llm.sleep(1)
    assert not any(part.is_saved for part in awake.memory._parts.values())
    assert llm.wake_up()
    with pytest.raises(WrongStateError, match="discarded"):
        llm.generate([[1]])


def test_rl_s3_a_session_is_not_slept_on(awake: Engine, said: Any) -> None:
    llm = awake.llm
    llm.start_weight_update()
    for level in (1, 2):
        with pytest.raises(WrongStateError, match="update of the weights is open"):
            llm.sleep(level)
    awake.check(awake.whole)
    llm.sleep(0)
    llm.abort_weight_update()
    assert llm.wake_up() and answers(llm) == said


def test_new_weights_come_between_two_sleeps(awake: Engine, said: Any) -> None:
    """Those that were brought are those that come back."""
    llm = awake.llm
    Sender(llm, "local").send(WeightSource(other_weights(1)), "new")
    new = answers(llm)
    llm.sleep(1)
    llm.wake_up()
    assert answers(llm) == new != said
    give(llm, old_weights())
    assert answers(llm) == said


def test_requests_that_run_are_kept(awake: Engine) -> None:
    """While every byte of the engine is away, and no graph is captured meanwhile."""
    llm, drawn = awake.llm, SamplingParams(max_tokens=150, seed=3, ignore_eos=True, detokenize=False)
    whole = llm.generate([[5, 6, 7]], drawn, use_tqdm=False)[0].outputs[0].token_ids
    core, asked = llm.engine.core, threading.Event()
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        before = llm.engine.times.num_steps
        running = pool.submit(llm.generate, [[5, 6, 7]], drawn, use_tqdm=False)
        while llm.engine.times.num_steps < before + 3:
            pass
        llm.sleep(1, "keep")
        awake.check(0)
        core._has_uncaptured = True
        patch.setattr(core._executor._worker._runner, "capture_next", lambda: asked.set() or True)  # type: ignore[attr-defined]
        assert not core.capture_next() and not asked.is_set()
        llm.wake_up()
        assert core.capture_next() and asked.is_set()
        core._has_uncaptured = False
        assert running.result(patient(60))[0].outputs[0].token_ids == whole


def test_rl_s3_a_hundred_sleeps_take_nothing(awake: Engine, said: Any) -> None:
    held = []
    for turn in range(100):
        awake.llm.sleep(1, ("keep", "wait", "abort")[turn % 3])
        held.append(awake.pages.used)
        awake.llm.wake_up()
        held.append(awake.pages.used)
    assert set(held[::2]) == {0} and set(held[1::2]) == {awake.whole}
    assert answers(awake.llm) == said


def test_an_engine_that_ends_gives_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep or not."""
    for level in (None, 2):
        made = Engine(monkeypatch)
        if level:
            made.llm.sleep(level)
        pages = made.pages
        made.llm.close()
        del made
        gc.collect()
        assert not pages.used and not pages.ranges, level


def test_what_nobody_sends_comes_back_from_any_sleep() -> None:
    """A drafter's weights, of the weights' tag."""
    pages = PagesDouble()
    memory = sleep.MovingMemory(pages, pages.give_spare)
    sent, own = (memory.allocator("weights", always_kept=kept) for kept in (False, True))
    assert sent is not None and own is not None
    first, second = sent((4,), torch.float32).fill_(1), own((4,), torch.float32).fill_(2)
    assert memory.sleep({"kv_cache": False, "weights": False}) == "" and not pages.used
    assert memory.wake(["kv_cache", "weights"]) == "" and pages.calls["spare"] == 1
    assert second.tolist() == [2] * 4 and first.tolist() == [0] * 4


def test_a_gpus_engine_says_how_it_may_sleep() -> None:
    with pytest.raises(ValueError, match="--enable-sleep-mode"):
        sleep.LastingMemory().going({"kv_cache": False})
    assert sleep.LastingMemory().sleep({}) == ""


@pytest.mark.parametrize("library", [Nixl, Mooncake])
def test_a_library_that_registers_memory_is_refused(library: Any) -> None:
    kind = library.__new__(library)
    kind._transfer = type("T", (), {"kv_connector": "nixl"})()
    cache = type("C", (), {"moves": True})()
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        kind.worker_half(cache, "")


@pytest.mark.parametrize("family", ["deepseek3", "qwen3-moe", "qwen3-next", "gemma3-32"])
def test_families_sleep_at_both_levels(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Experts, latent states, recurrent ones, norms with an offset: what layers make of weights is filled too."""
    model = make_reference(family)
    model.save_pretrained(tmp_path)
    pages, asked = PagesDouble(), prompts(5, 40)
    move_memory(monkeypatch, pages)
    fields = CONFIG | {"num_gpu_blocks_override": 400, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), **fields) as llm:
        said, whole = answers(llm, asked), pages.used
        assert whole > sum(each.nbytes for each in model.parameters()) / 2
        llm.sleep(1)
        assert pages.used == 0 and llm.wake_up()
        assert answers(llm, asked) == said
        llm.sleep(2)
        assert pages.used == 0 and not llm.wake_up(["weights"])
        Sender(llm, "local").send(WeightSource(model))
        assert llm.wake_up() and pages.used == whole
        assert answers(llm, asked) == said

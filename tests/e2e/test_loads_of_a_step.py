"""Loads that a step waits for layer by layer (O.2, C.6, C.13): of a request alone, from host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_checks import GOOD_PROMPT, assert_idle
from octavo import LLM, SamplingParams
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Mover
from octavo.ops.arrivals import NO_ARRIVALS, Arrivals
from test_connectors import host, multi, settle, storage

Make = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=2, ignore_eos=True)
PROMPTS = [GOOD_PROMPT * 9, list(range(100, 164))]  # the second one is whole blocks


def bits(llm: LLM, prompt: str | list[int]) -> Any:
    (output,) = llm.generate([prompt], PARAMS)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


class Coming(Arrivals):
    """Pages that are copied when a layer is about to wait for them, and not before."""

    def __init__(self, cache: CacheBytes, blocks: Any, rows: Any) -> None:
        pages = cache._page_of_layer()
        super().__init__(None, (), pages)
        self._cache, self._blocks, self._rows = cache, blocks, rows
        self._missing = set(range(cache.num_pages))
        self.waited: list[int] = []
        cache.data[:, blocks] = 255  # what is read too early is no number

    def __bool__(self) -> bool:
        return True

    def _pass(self, count: int) -> None:
        for page in [page for page in sorted(self._missing) if page < count]:
            self._missing.discard(page)
            self.waited.append(page)
            for block, row in zip(self._blocks, self._rows, strict=True):
                self._cache.data[page, block] = row.view(self._cache.num_pages, -1)[page]

    def before_all(self) -> None:
        self._pass(self._cache.num_pages)

    def have_come(self) -> bool:
        return not self._missing

    def wait(self) -> None:
        self.before_all()


@pytest.fixture
def coming(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Coming]]:
    """What the copies of a load are, one after the other; no load is written as a whole."""
    found: list[Coming] = []

    def bring(cache: CacheBytes, blocks: Any, rows: Any) -> Arrivals:
        found.append(Coming(cache, list(blocks), list(rows)))
        return found[-1]

    def write(*_: Any) -> None:
        raise AssertionError("the load is not the step's")

    monkeypatch.setattr(CacheBytes, "bring", bring)
    monkeypatch.setattr(CacheBytes, "write", write)
    yield found


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
@pytest.mark.parametrize(
    "more", [{}, {"async_scheduling": True}, {"attention_backend": "flex"}, {"draft": True}], ids=str
)
def test_C_13_each_layer_waits_for_its_pages(layout, more, make_llm: Make, coming: list[Coming]) -> None:
    """A step without compiled layers, which run as one call; a prompt of whole blocks, and another one."""
    fields: dict[str, Any] = {"max_model_len": 512, "kv_cache_layout": layout, "attention_backend": "reference"}
    if more.get("draft"):
        drafts = {"method": "eagle3", "model": "octavo-tiny-eagle3", "num_speculative_tokens": 2}
        fields["speculative_config"] = drafts
    else:
        fields |= more
    expected = [bits(make_llm(**fields), prompt) for prompt in PROMPTS]
    llm = make_llm(**fields, kv_transfer_config=host())
    for number, prompt in enumerate(PROMPTS):
        assert bits(llm, prompt) == expected[number]
        settle(llm)
        for _ in range(2):
            assert llm.reset_prefix_cache()
            before, num = llm.engine.scheduler.stats().num_loaded_tokens, len(coming)
            assert bits(llm, prompt) == expected[number]
            assert len(coming) == num + 1
            assert coming[-1].waited == sorted(coming[-1].waited) and coming[-1].have_come()
            stats, moved = settle(llm)
            assert stats.num_loaded_tokens > before and not stats.num_load_failures
            assert moved.num_loaded_blocks == sum(len(each._blocks) for each in coming)
    assert llm.reset_prefix_cache(reset_connector=True)
    assert bits(llm, PROMPTS[0]) == expected[0] and len(coming) == 4


@pytest.mark.parametrize("whole", [True, False], ids=["compiled", "by layer"])
def test_C_13_layers_that_run_as_one_wait_for_all(
    whole: bool, make_llm: Make, coming: list[Coming], monkeypatch
) -> None:
    """And so does a model that runs its layers in a way of its own."""
    from octavo.models.causal_lm import CausalLM

    monkeypatch.setattr(CausalLM, "waits_by_layer", whole)
    fields: dict[str, Any] = {"max_model_len": 512, **({} if whole else {"attention_backend": "reference"})}
    expected = bits(make_llm(**fields), PROMPTS[0])
    llm = make_llm(**fields, kv_transfer_config=multi(host(), {"kv_connector": "host", **host("1M")}))
    for _ in range(2):
        assert bits(llm, PROMPTS[0]) == expected
        settle(llm)
        assert llm.reset_prefix_cache()
    assert len(coming) == 1 and coming[0].have_come()


@pytest.mark.parametrize("why", ["busy", "error"])
def test_C_6_a_load_that_cannot_be_ordered_at_once_goes_beside_the_steps(why, make_llm: Make, monkeypatch) -> None:
    expected = bits(make_llm(max_model_len=512), PROMPTS[0])

    def bring(*_: Any) -> None:
        if why == "error":
            raise RuntimeError("the driver failed")

    monkeypatch.setattr(CacheBytes, "bring", bring)
    llm = make_llm(max_model_len=512, kv_transfer_config=host())
    for turn in range(3):
        assert bits(llm, PROMPTS[0]) == expected
        stats, moved = settle(llm)
        assert llm.reset_prefix_cache()
        assert stats.num_loaded_tokens == turn * (stats.num_matched_tokens // (turn + 1) // 16 * 16)
        assert moved.num_errors == (turn if why == "error" else 0) and not stats.num_load_failures
    assert llm.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_C_6_C_7_a_load_that_fails_both_ways_ends_by_the_policy(policy, make_llm: Make, monkeypatch) -> None:
    expected = bits(make_llm(max_model_len=512), PROMPTS[0])
    llm = make_llm(max_model_len=512, kv_transfer_config={**host(), "kv_load_failure_policy": policy})
    assert bits(llm, PROMPTS[0]) == expected
    settle(llm)

    def fails(*_: Any) -> None:
        raise RuntimeError("the driver failed")

    for name in ("bring", "write"):
        monkeypatch.setattr(CacheBytes, name, fails)
    assert llm.reset_prefix_cache()
    (output,) = llm.generate([PROMPTS[0]], PARAMS)
    stats, _ = settle(llm)
    assert stats.num_load_failures == 1
    if policy == "fail":
        assert output.outputs[0].finish_reason == "error"
    else:
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == expected


def test_only_who_is_alone_is_waited_for(make_llm: Make, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Nobody who runs waits for another one's load, and nobody for files."""
    began: list[bool] = []
    begin_now = Mover.begin_now
    monkeypatch.setattr(Mover, "begin_now", lambda self, order: began.append(begin_now(self, order)) or began[-1])
    llm = make_llm(max_model_len=512, kv_transfer_config=host())
    expected = [bits(llm, prompt) for prompt in PROMPTS]
    settle(llm)
    assert llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs] == expected
    settle(llm)
    assert not began
    assert llm.reset_prefix_cache()
    tokens = outputs[0].prompt_token_ids
    llm.engine.add("x", tokens, PARAMS)
    llm.engine.step()
    assert began == [True]
    llm.engine.add("y", PROMPTS[1], PARAMS)
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort(["x"])
    settle(llm)
    assert began == [True]
    assert_idle(llm)
    files = make_llm(max_model_len=512, kv_transfer_config=storage(tmp_path))
    for _ in range(2):
        assert bits(files, PROMPTS[1]) == expected[1]
        settle(files)
        assert files.reset_prefix_cache()
    assert began == [True] and files.engine.scheduler.stats().num_loaded_tokens


def test_C_5_an_abort_while_a_step_waits_gives_all_back(make_llm: Make, coming: list[Coming]) -> None:
    llm = make_llm(max_model_len=512, kv_transfer_config=host(), attention_backend="reference", async_scheduling=True)
    expected = bits(llm, PROMPTS[0])
    settle(llm)
    tokens = llm.generate([PROMPTS[0]], PARAMS)[0].prompt_token_ids
    for num_steps in range(4):
        settle(llm)
        assert llm.reset_prefix_cache()
        llm.engine.add("x", tokens, PARAMS)
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(["x"])
        settle(llm)
    assert llm.reset_prefix_cache() and bits(llm, PROMPTS[0]) == expected
    settle(llm)
    assert llm.reset_prefix_cache(reset_connector=True)


def test_nothing_is_waited_for_where_nothing_comes() -> None:
    assert not NO_ARRIVALS and NO_ARRIVALS.have_come() and NO_ARRIVALS.seconds == 0
    NO_ARRIVALS.before(3)
    NO_ARRIVALS.before_all()
    NO_ARRIVALS.wait()

"""Loads of a request alone from host memory: a step waits for them, a graph some layers at a time (O.2, C.6, C.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from eager_graphs import EagerGraphs
from engine_checks import GOOD_PROMPT, assert_idle
from octavo import LLM, SamplingParams
from octavo.device.graphs import mixed_keys
from octavo.kv_connector.worker import NO_WORKER_CONNECTOR
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Mover
from octavo.kv_connector.worker.several import SeveralWorkers
from octavo.ops.arrivals import NO_ARRIVALS, NO_GATES, Arrivals, Gates
from octavo.worker import worker
from test_connectors import host, multi, settle, storage

Make = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=2, ignore_eos=True)
PROMPTS = [GOOD_PROMPT * 9, list(range(100, 164))]  # the second one is whole blocks


def bits(llm: LLM, prompt: str | list[int]) -> Any:
    (output,) = llm.generate([prompt], PARAMS)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


class Coming(Arrivals):
    """Pages that are copied when a step is about to wait for them, and not before."""

    def __init__(self, cache: CacheBytes, blocks: Any, rows: Any) -> None:
        super().__init__()
        self._cache, self._blocks, self._rows = cache, blocks, rows
        self._missing = list(range(cache.num_pages))
        self.gates = dict[int, int]()  # those of the step's graph -> the pages that were asked for
        self.num_early = 0  # pages that were there when the last gate was passed
        cache.data[:, blocks] = 255  # what is read too early is no number

    def __bool__(self) -> bool:
        return True

    def copy(self, count: int) -> None:
        while self._missing and self._missing[0] < count:
            page = self._missing.pop(0)
            for block, row in zip(self._blocks, self._rows, strict=True):
                self._cache.data[page, block] = row.view(self._cache.num_pages, -1)[page]

    def pass_gate(self, place: int) -> None:
        counts = [count for count, _ in self._cache._gates.in_turn(self._cache._page_of_layer())]
        self.copy(counts[place])
        if place not in self.gates:  # later steps pass it too
            self.gates[place], self.num_early = counts[place], self._cache.num_pages - len(self._missing)

    def before_all(self) -> None:
        self.copy(self._cache.num_pages)

    def have_come(self) -> bool:
        return not self._missing

    def wait(self) -> None:
        self.before_all()


class Passed:
    """An event of a gate: who waits for it waits for what came last."""

    def __init__(self, place: int, found: list[Coming]) -> None:
        self._place, self._found = place, found

    def wait(self) -> None:
        for coming in self._found[-1:]:
            coming.pass_gate(self._place)


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


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch, coming: list[Coming]) -> Iterator[list[EagerGraphs]]:
    """Engines whose steps of few tokens are graphs with gates, as a GPU's are."""
    made: list[EagerGraphs] = []
    make_runner = worker.make_runner

    def make(*args: Any, brings: bool = False) -> Any:
        runner = make_runner(*args)
        num_layers = len(runner.model.layer_specs) if brings else 0
        gates = (
            Gates(num_layers, [Passed(place, coming) for place in range(min(num_layers, 2))]) if brings else NO_GATES
        )
        made.append(EagerGraphs(runner, mixed_keys(16, 64), gates))
        runner._graphs, runner.gates = made[-1], gates
        return runner

    monkeypatch.setattr(worker, "make_runner", make)
    yield made


DRAFTS = {"method": "eagle3", "model": "octavo-tiny-eagle3", "num_speculative_tokens": 2}
WAYS: list[dict[str, Any]] = [
    {"attention_backend": "reference"},
    {"attention_backend": "reference", "async_scheduling": True},
    {"attention_backend": "flex"},
    {"attention_backend": "reference", "speculative_config": DRAFTS},
    {"attention_backend": "reference", "speculative_config": DRAFTS, "async_scheduling": True},
]


def check_loads(make_llm: Make, coming: list[Coming], more: dict[str, Any], config: dict[str, Any]) -> int:
    """Prompts are computed, then loaded twice; how many loads there were, each for a step of its own."""
    fields: dict[str, Any] = {"max_model_len": 512, **more}
    expected = [bits(make_llm(**fields), prompt) for prompt in PROMPTS]
    llm = make_llm(**fields, kv_transfer_config=config)
    for number, prompt in enumerate(PROMPTS):
        assert bits(llm, prompt) == expected[number]
        settle(llm)
        for _ in range(2):
            assert llm.reset_prefix_cache()
            before, num = llm.engine.scheduler.stats().num_loaded_tokens, len(coming)
            assert bits(llm, prompt) == expected[number]
            assert len(coming) == num + 1 and coming[-1].have_come()
            stats, moved = settle(llm)
            assert stats.num_loaded_tokens > before and not stats.num_load_failures
            assert moved.num_loaded_blocks == sum(len(each._blocks) for each in coming)
    count = len(coming)
    assert llm.reset_prefix_cache(reset_connector=True)
    assert bits(llm, PROMPTS[0]) == expected[0] and len(coming) == count
    return count


@pytest.mark.parametrize(
    ("layout", "more"),
    [*(("LBNHC", more) for more in WAYS), *(("BLHNC", more) for more in (WAYS[0], WAYS[-1]))],  # a layout of one gate
    ids=str,
)
def test_C_13_layers_of_a_graph_wait_for_their_pages(
    layout, more, make_llm: Make, coming: list[Coming], gated: list[EagerGraphs]
) -> None:
    """A prompt of whole blocks, and another one; a drafter's layers come behind all gates."""
    assert check_loads(make_llm, coming, {"kv_cache_layout": layout, **more}, host()) == 4
    num_pages = coming[-1]._cache.num_pages
    gates = (
        {0: 1, 1: 1} if layout == "BLHNC" else dict(enumerate(count for count, _ in gated[-1].gates.in_turn(range(9))))
    )
    assert all(each.gates == gates and each.num_early == gates[1] for each in coming)
    assert gates[1] == num_pages or "speculative_config" in more
    assert all(key.num_tokens in (16, 32, 64) for key in gated[-1].replayed)


@pytest.mark.parametrize("how", ["whole", "by layer", "graphs", "own run"])
def test_C_13_other_steps_wait_for_all(how, make_llm: Make, coming: list[Coming], request, monkeypatch) -> None:
    """Layers that run as one, steps without a graph, graphs without gates, and a model with a run of its own."""
    if how == "graphs":
        monkeypatch.setattr("octavo.device.graphs._MOST_GATED", 0)
        request.getfixturevalue("gated")
    more = {"attention_backend": "reference"} if how != "whole" else {}
    config = multi(host(), {"kv_connector": "host", **host("1M")}) if how == "own run" else host()
    assert check_loads(make_llm, coming, more, config) == 4
    assert not any(each.gates for each in coming)


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


def test_of_several_connectors_the_one_that_loads_is_waited_for() -> None:
    class Loading:
        own = Coming.__new__(Coming)

        def arrivals(self, number: int) -> Arrivals:
            return self.own if number == 3 else NO_ARRIVALS

    workers = SeveralWorkers([NO_WORKER_CONNECTOR, cast(Any, Loading())])
    assert workers.arrivals(3) is Loading.own and workers.arrivals(4) is NO_ARRIVALS


def test_nothing_is_waited_for_where_nothing_comes() -> None:
    assert not NO_ARRIVALS and NO_ARRIVALS.have_come() and NO_ARRIVALS.seconds == 0
    NO_ARRIVALS.before_all()
    NO_ARRIVALS.wait()

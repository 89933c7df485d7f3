"""RL.V2: whatever was computed under other weights, no answer differs from a cold engine's, without any reset.

Nor where blocks that have left the cache are kept in host memory, or in files, and come back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from octavo import LLM
from octavo.rl.session import WeightUpdateError
from weights_rig import Weights, answers, give, params, small_weights

FIELDS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "skip_tokenizer_init": True,
    "weight_transfer_config": {"backend": "disk"},
}
BRANCHES = [[(5 * i * i + 3 * branch * (i // 40) + 7) % 190 + 3 for i in range(150)] for branch in range(3)]
Answer = tuple[list[int], list[float]]


class Engines:
    """A warm engine, and one without a cache that is given the same weights before each of its answers."""

    def __init__(self, folder: Path, connector: str) -> None:
        self.weights: list[Weights] = small_weights(folder, 4)
        self.warm = LLM(str(folder), **FIELDS, **_transfer(connector, folder))
        self.cold = LLM(str(folder), **FIELDS, enable_prefix_caching=False)
        self.known: dict[tuple[Any, ...], Answer] = {}
        self.now = (0, 0)  # whose weights the first layer has, and all else

    def set_weights(self, llm: LLM, now: tuple[int, int], **own: Any) -> None:
        """By one update of all, or by a second one of the first layer."""
        give(llm, self.weights[now[1]], **own)
        if now[0] != now[1]:
            first = {name: each for name, each in self.weights[now[0]].items() if ".layers.0." in name}
            give(llm, first, partial=True, **own)

    def expected(self, prompt: list[int], seed: int) -> Answer:
        key = *self.now, tuple(prompt), seed
        if key not in self.known:
            self.set_weights(self.cold, self.now)
            self.known[key] = self.ask(self.cold, prompt, seed)
        return self.known[key]

    def ask(self, llm: LLM, prompt: list[int], seed: int) -> Answer:
        return answers(llm, [{"prompt_token_ids": prompt}], seed=seed, max_tokens=3)[0]


def _transfer(connector: str, folder: Path) -> dict[str, Any]:
    """Of blocks that leave a cache of 24 blocks, and come back; "none": the cache keeps all."""
    extra = {"host": {"cpu_bytes_to_use": "4M"}, "shared_storage": {"shared_storage_path": str(folder / "blocks")}}
    if connector == "none":
        return {}
    own = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra[connector]}
    return {"num_gpu_blocks_override": 24, "kv_transfer_config": own}


@pytest.fixture(scope="module", params=["none", "host", "shared_storage"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("small"), request.param)
    with made.warm, made.cold:
        yield made


SETS = st.integers(0, 3)
MOVES = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 150), st.integers(0, 1)),
    st.tuples(st.just("update"), SETS, SETS, st.sampled_from(["recompute", "keep_kv", "abort"])),
    st.tuples(st.just("running"), st.integers(0, 2), SETS, st.sampled_from(["recompute", "keep_kv", "abort"])),
    st.tuples(st.just("fails"), SETS, st.integers(1, 20), st.booleans()),
    st.tuples(st.just("sleep"), st.sampled_from([0, 1, 2]), SETS, st.none()),
)


def _make(engines: Engines, move: tuple[Any, ...]) -> None:
    kind, first, second, third = move
    warm = engines.warm
    if kind == "ask":
        prompt = BRANCHES[first][:second]
        assert engines.ask(warm, prompt, third) == engines.expected(prompt, third), move
    elif kind == "update":
        engines.now = (first, second)
        engines.set_weights(warm, engines.now, on_running=third, version="one label for all")
    elif kind == "running":  # its blocks are of two sets of weights
        engine = warm.engine
        engine.add("x", BRANCHES[first][:60], params(max_tokens=20))
        for _ in range(4):
            engine.step()
        engines.now = (second, second)
        engines.set_weights(warm, engines.now, on_running=third)
        while engine.has_unfinished:
            engine.step()
    elif kind == "fails":
        some = list(itertools.islice(engines.weights[first].items(), second))
        with pytest.raises(WeightUpdateError if third else RuntimeError), warm.weights() as load:
            for name, tensor in some:
                load(name, tensor)
            load(*(("nothing", some[0][1]) if third else _raise()))
    else:
        warm.sleep(first)
        warm.wake_up()
        if first == 2:
            engines.now = (second, second)
            engines.set_weights(warm, engines.now)


def _raise() -> Any:
    raise RuntimeError("the trainer's own")


def _check(engines: Engines, moves: list[tuple[Any, ...]]) -> None:
    for move in moves:
        _make(engines, move)
    for branch in (0, 1, 2):
        _make(engines, ("ask", branch, 150, 0))


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(st.lists(MOVES, min_size=4, max_size=12))
def test_RL_V2_no_answer_differs_from_a_cold_engines(engines: Engines, moves: list[tuple[Any, ...]]) -> None:
    _check(engines, moves)


@pytest.mark.slow
@hypothesis.settings(max_examples=1000, deadline=None)
@hypothesis.given(st.lists(MOVES, min_size=4, max_size=30))
def test_RL_V2_of_many_lives(engines: Engines, moves: list[tuple[Any, ...]]) -> None:
    _check(engines, moves)

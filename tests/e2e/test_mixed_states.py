"""A model of a window, full attention, and layers of Octavo's own recurrent parts: its bits in every setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recurrent_rig as rig
from eager_graphs import EagerGraphs
from insides import runner_of
from octavo import LLM
from octavo.attention.base import AttentionInputs
from octavo.attention.cpu import CpuBackend
from octavo.device.graphs import decode_keys, mixed_keys
from octavo.ops import native
from octavo.states.base import StateInputs, StateStep
from test_recurrent import LENGTHS, Result, engine_of, generate

FIRST = range(len(LENGTHS))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An engine's settings for the model."""
    with rig.packages():
        yield rig.write_mixed(tmp_path_factory.mktemp("mixed"))


def alone(own: dict[str, Any]) -> Result:
    """What each request says by itself."""
    with LLM(**own, enable_prefix_caching=False) as llm:
        return [one for index in FIRST for one in generate(llm, [index])]


@pytest.mark.parametrize(
    "fields",
    [{}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}, {"state_dtype": "bfloat16", "kv_cache_dtype": "fp8"}],
    ids=lambda fields: " ".join(map(str, fields.values())) or "float32",
)
def test_H_8_H_5_windows_states_and_quantized_caches(mixed: dict[str, Any], fields: dict[str, Any]) -> None:
    """K and V of full attention and of windows in 8 bits, where asked, beside states in a type of their own."""
    own = {**mixed, **fields}
    with LLM(**own) as llm:
        groups, cached = llm.engine.memory.groups, runner_of(llm.engine)._pool.buffer.dtype
        assert {group.kind for group in groups} == {"full", "sliding", "state", "inputs"}
        sums = [each for group in groups if group.kind == "state" for each in group.parts.tensors if each.is_sum]
        assert {each.dtype for each in sums} == {fields.get("state_dtype", "float32")} and len(sums) >= 3
        is_quantized = "kv_cache_dtype" in fields
        assert cached == (torch.float8_e4m3fn if is_quantized else getattr(torch, fields.get("dtype", "float32")))
    expected = alone(own)
    for more in ({"max_num_batched_tokens": 7, "max_num_seqs": 5}, {"max_num_batched_tokens": 100, "block_size": 32}):
        with engine_of(own, **more) as llm:
            for _ in range(2):  # the second time prefixes are found
                assert generate(llm, FIRST) == expected, more
            assert llm.engine.scheduler.kv.stats.hits > 0


def test_operators_without_a_compiler_have_the_same_bits(mixed: dict[str, Any]) -> None:
    """Of layers with states; of attention and products the reference implementations have other bits."""
    own, tokens = {**mixed, "native": "off"}, slice(6)
    with LLM(**own) as llm:
        first = generate(llm, FIRST[tokens])
    with LLM(**own, max_num_batched_tokens=33) as llm:
        assert generate(llm, FIRST[tokens]) == first
    assert native.available()


def test_M5_1_H_1_the_length_of_a_step_of_a_hybrid_is_its_batchs_own(
    mixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with states are told the same bound as attention: the longest row's, where every length is known."""
    with LLM(**mixed, async_scheduling=False) as llm:
        step = runner_of(llm.engine)._model_state._step
        seen, prepare = [], type(step).prepare

        def spy(self: Any, inputs: Any) -> None:
            seen.append((inputs.max_seq_len, int(inputs.seq_lens.max()), inputs.max_query_len))
            prepare(self, inputs)

        monkeypatch.setattr(type(step), "prepare", spy)
        generate(llm, FIRST)
    assert len(seen) > 10 and all(bound == longest for bound, longest, _ in seen)
    assert {query for _, _, query in seen} > {1}


def test_M5_2_H_1_a_capture_tells_states_the_length_that_it_tells_attention(
    mixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest that a graph may serve, of steps that decode and of those with prompts."""
    with LLM(**{**mixed, "max_num_seqs": 5}, max_num_batched_tokens=40, enable_prefix_caching=False) as llm:
        runner = runner_of(llm.engine)
        step, told, prepare, prepare_attention = runner._model_state._step, [], StateStep.prepare, CpuBackend.prepare
        assert isinstance(step, StateStep)

        def spy(self: StateStep, inputs: StateInputs) -> None:
            told.append(("states", inputs.max_seq_len))
            prepare(self, inputs)

        def spy_attention(self: CpuBackend, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
            told.append(("attention, in a capture" if for_capture else "attention", inputs.max_seq_len))
            prepare_attention(self, inputs, for_capture=for_capture)

        monkeypatch.setattr(StateStep, "prepare", spy)
        monkeypatch.setattr(CpuBackend, "prepare", spy_attention)
        runner._graphs = EagerGraphs(runner, [*decode_keys(5), *mixed_keys(5, 40)])
        runner.capture()
        assert {*told} == {("states", 256), ("attention, in a capture", 256)}
        assert [kind for kind, _ in told].count("states") == 2, "one kind of step after the other"


def test_layers_with_states_are_told_where_rows_verify(mixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which every token gives logits, since all rows verify, was taken for one of short prompts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(**mixed, speculative_config=drafts) as llm:
        runner = runner_of(llm.engine)
        step, seen, shapes = runner._model_state._step, [], []
        prepare, view = type(step).prepare, runner._view

        def spy(self: Any, inputs: Any) -> None:
            seen.append(inputs.verifies)
            prepare(self, inputs)

        def spy_view(work: Any, **given: Any) -> Any:
            shapes.append((work.has_drafts, work.verifies))
            return view(work, **given)

        monkeypatch.setattr(type(step), "prepare", spy)
        monkeypatch.setattr(runner, "_view", spy_view)
        generate(llm, FIRST)
    assert seen == [has_drafts for has_drafts, _ in shapes]
    assert {(False, False), (True, True)} <= {*shapes}

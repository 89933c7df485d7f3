"""Attention runs by what was prepared for the pass at hand, and within its bounds: in steps, graphs, drafters' passes.

A kernel trusts the host's numbers of a pass. One that runs by another pass's writes outside its tensors: on a GPU
alone, and only luck shows it. Here every call of a backend is asked what it was prepared with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eager_graphs import EagerGraphs
from insides import runner_of
from octavo.attention.base import (
    NO_TENSORS,
    AttentionInputs,
    LayerTensors,
    TableContext,
    current_context,
    forward_context,
)
from octavo.attention.frame import BackendFrame
from octavo.cache.specs import AttentionSpec
from octavo.config.engine_config import EngineConfig
from octavo.device.graphs import GraphKey, decode_keys, mixed_keys, verify_keys
from octavo.frontend.engine import Engine
from octavo.request.sampling_params import SamplingParams
from octavo.states.base import StateInputs, StateStep
from random_models import COHERE2, DEEPSEEK, GEMMA, GLM4

K, ROWS, TOKENS = 3, 4, 32
UNWRITTEN = 12345.0
HEAD: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
LLAMA: dict[str, Any] = {
    **HEAD,
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
Q3N: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MODULES = {"num_nextn_predict_layers": 1}
EAGLE3 = {**HEAD, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 60}
BLOCKS = {
    **HEAD,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "head_dim": 32,
    "block_size": 1 + K,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}
# target, method, the drafter's config where that is a file of its own
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any] | None]] = {
    "ngram": (GEMMA, "ngram", None),
    "draft_model": (LLAMA, "draft_model", LLAMA),  # the same weights: every draft is right
    "eagle": (LLAMA, "eagle", {**HEAD, "architectures": ["LlamaForCausalLM"]}),
    "eagle3": (LLAMA, "eagle3", EAGLE3),
    "eagle3 of a hybrid": (Q3N, "eagle3", EAGLE3),
    "dflash": (LLAMA, "dflash", BLOCKS),
    "modules of qwen3-next": (Q3N, "mtp", {**Q3N, **MODULES}),
    "two modules of qwen3-next": (Q3N, "mtp", {**Q3N, "num_nextn_predict_layers": 2}),
    "modules of deepseek3": (DEEPSEEK, "mtp", {**DEEPSEEK, **MODULES}),
    "modules of glm4": (GLM4, "mtp", {**GLM4, **MODULES}),
    "modules without lines": (COHERE2, "mtp", {**COHERE2, **MODULES}),
}

ATTEND = ("ngram", "draft_model", "modules without lines")  # in all passes
EAGER = ("draft_model", "dflash", "eagle3 of a hybrid", "two modules of qwen3-next", "modules without lines")


def check_bounds(inputs: AttentionInputs, num_blocks: int) -> None:
    """What the host says of the rows holds on the device: plans are made of it."""
    start, lengths, table = inputs.live
    queries = start.diff()
    assert int(start[0]) == 0 and bool((queries >= 0).all()) and int(start[-1]) <= inputs.num_tokens
    assert inputs.min_query_len <= int(queries.min()) and int(queries.max()) <= inputs.max_query_len
    assert bool((queries <= lengths).all()) and int(lengths.max()) <= inputs.max_seq_len
    if not inputs.is_padded and inputs.num_tokens == inputs.num_rows * inputs.max_query_len:
        assert bool((queries == inputs.max_query_len).all()), "a plan may look for no other rows"
    if inputs.max_long is not None:
        assert int((queries > 1).sum()) <= inputs.max_long
    assert len(inputs.slot_mapping) >= inputs.num_tokens
    for row, length in zip(table, lengths.tolist(), strict=True):
        used = row[: -(-length // inputs.block_size)]
        assert bool(((used >= 0) & (used < num_blocks)).all())


def is_of(inputs: AttentionInputs, pass_inputs: AttentionInputs) -> bool:
    """Whether a backend's inputs are those of the pass, or of its tokens that give logits in a last layer."""
    logits = current_context().logit_tokens
    if inputs is pass_inputs:
        return True
    narrowed = (
        logits is not None
        and inputs.query_start is logits.query_start
        and inputs.max_query_len <= (pass_inputs.max_query_len)
    )
    return narrowed and inputs.seq_lens is pass_inputs.seq_lens and inputs.block_table is pass_inputs.block_table


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call of a backend and every step of layers with states is looked at; one word each."""
    seen: list[str] = []
    run, prepare = BackendFrame.run, StateStep.prepare

    def strict(
        self: BackendFrame,
        q: torch.Tensor,
        kv: torch.Tensor,
        spec: AttentionSpec,
        out: torch.Tensor,
        layer: LayerTensors = NO_TENSORS,
    ) -> None:
        context = current_context()
        (own,) = [each for each in context.layers if each.cache is kv]
        assert own.backend is self and own.spec == spec
        assert own.inputs.num_tokens == len(context.positions), "K and V are stored by the pass's slots"
        assert is_of(self.inputs, own.inputs), "attention runs by what another pass was prepared with"
        assert len(q) == len(out) == self.inputs.num_tokens
        check_bounds(self.inputs, len(kv))
        out.fill_(UNWRITTEN)
        run(self, q, kv, spec, out, layer)
        assert not (out[: int(self.inputs.query_start[self.inputs.num_rows])] == UNWRITTEN).any()
        seen.append("attention")

    def bounded(self: StateStep, inputs: StateInputs) -> None:
        queries = inputs.query_start.diff()
        assert int(queries.max()) <= inputs.max_query_len and int(inputs.seq_lens.max()) <= inputs.max_seq_len
        assert inputs.bounds is not None and int(inputs.query_start[-1]) <= len(inputs.positions)
        assert int((queries == 1).sum()) <= inputs.bounds[0] and int((queries > 1).sum()) <= inputs.bounds[1]
        prepare(self, inputs)
        seen.append("states")

    monkeypatch.setattr(BackendFrame, "run", strict)
    monkeypatch.setattr(StateStep, "prepare", bounded)
    return seen


def hold(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on no pass may write to a block that its row does not hold; how many tokens, by who prepares it."""
    runner, scheduler, written = runner_of(engine), engine.scheduler, Counter[str]()
    tables = runner._model_state._tables

    def check(name: str, table: TableContext, inputs: AttentionInputs) -> None:
        group = runner._tables._sources[tables.index(table)]
        assert inputs.rows is not None
        ends = inputs.query_start.tolist()
        for row, first, end in zip(inputs.rows.tolist(), ends, ends[1:], strict=False):
            slots = inputs.slot_mapping[first:end]
            blocks = set((slots[slots >= 0] // inputs.block_size).tolist())
            owner = scheduler._running.owners.get(row)
            own = [] if owner is None else scheduler.kv._entries[owner.request_id].tables[group]
            assert blocks <= set(own) - {0}, "a pass writes to a block of others"
            written[name] += len(slots)
        assert bool((inputs.slot_mapping[ends[inputs.num_rows] : inputs.num_tokens] < 0).all())

    for name in ("prepare", "prepare_stores"):
        method = getattr(TableContext, name)

        def checked(
            self: TableContext, inputs: AttentionInputs, *, name: str = name, method: Any = method, **rest: Any
        ) -> None:
            check(name, self, inputs)
            method(self, inputs, **rest)

        monkeypatch.setattr(TableContext, name, checked)
    return written


def make(folder: Path, target: dict[str, Any], drafts: dict[str, Any], **fields: Any) -> Engine:
    (folder / "config.json").write_text(json.dumps(target))
    settings: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "reference",
        "max_model_len": 64,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": TOKENS,
        "block_size": 16,
        "kv_cache_memory_bytes": 8 << 20,
        "speculative_config": drafts,
        **fields,
    }
    return Engine(EngineConfig(**settings))


def drafts_of(name: str, folder: Path) -> dict[str, Any]:
    """What an engine's settings say of a case's drafter, whose config is written to a folder in that one."""
    _, method, config = CASES[name]
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": K, "adaptive_depth": False}
    if config is not None:
        (folder / "drafter").mkdir()
        (folder / "drafter" / "config.json").write_text(json.dumps(config))
        drafts["model"] = str(folder / "drafter")
    return drafts


def answers(engine: Engine) -> dict[str, Any]:
    """More requests than rows, of chunked prompts, with all that is asked of logits; then with nothing."""
    prompts = [[(7 * i * i + 3 * i + n) % 290 + 3 for i in range(n)] for n in (50, 3, 33, 18, 9)]
    plain: list[dict[str, Any]] = [{}] * 3
    wanted = [
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.7, "seed": 3},
        {"logprobs": 1, "temperature": 1.0, "seed": 4, "top_k": 40},
        {"max_tokens": 16},
        {"repetition_penalty": 1.2, "max_tokens": 4},
        {"max_tokens": 30, "logprobs": 0},
    ]
    return _told(engine, zip([*prompts, prompts[0]], wanted, strict=True)) | _told(engine, zip(prompts, plain))


def _told(engine: Engine, jobs: Iterable[tuple[list[int], dict[str, Any]]]) -> dict[str, Any]:
    names = []
    for prompt, fields in jobs:
        given = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True, "detokenize": False, **fields}
        names.append(f"{len(prompt)} {fields}")
        engine.add(names[-1], prompt, SamplingParams(**given))
    found = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                one = output.outputs[0]
                told = [{token: each.logprob for token, each in entry.items()} for entry in one.logprobs or ()]
                found[output.request_id] = one.token_ids, told
    assert len(found) == len(names)
    return found


def keys() -> list[GraphKey]:
    return [*decode_keys(ROWS), *mixed_keys(ROWS, TOKENS), *verify_keys(ROWS, TOKENS, lambda rows: K)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Target -> what it answers without drafts and graphs."""
    found: dict[str, Any] = {}
    for target in (GEMMA, LLAMA, Q3N, DEEPSEEK, GLM4, COHERE2):
        engine = make(tmp_path_factory.mktemp("plain"), target, {})
        found[target["architectures"][0]] = answers(engine)
        engine.close()
    yield found


@pytest.mark.parametrize(("name", "graphs"), [*((name, True) for name in CASES), *((name, False) for name in EAGER)])
def test_every_pass_attends_by_what_was_prepared_for_it(
    name: str,
    graphs: bool,
    plain: dict[str, Any],
    looked_at: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With graphs step by step, else with a step in flight."""
    target, drafts = CASES[name][0], drafts_of(name, tmp_path)
    engine, replayed = make(tmp_path, target, drafts, async_scheduling=not graphs), list[GraphKey]()
    written = hold(engine, monkeypatch)
    if graphs:
        runner = runner_of(engine)
        own = runner._graphs = EagerGraphs(runner, keys())
        replayed = own.replayed
    assert answers(engine) == plain[target["architectures"][0]]
    assert engine.stats.num_draft_tokens > 20
    engine.close()
    assert looked_at.count("attention") > 50
    assert ("states" in looked_at) == (target is Q3N)
    assert sum(written.values()) > 300
    assert ("prepare_stores" in written) == (name not in ATTEND), "a pass that only stores is planned for no attention"
    if graphs:
        assert any(key.num_drafts and key.is_decode for key in replayed)
        assert any(key.num_drafts and not key.is_decode for key in replayed)


def test_a_drafters_pass_behind_a_padded_step_says_that_rows_may_have_fewer_tokens(
    looked_at: list[str], tmp_path: Path
) -> None:
    """One row and as many tokens as a graph has may be a row of fewer: none of them is to be left out."""
    engine = make(tmp_path, LLAMA, drafts_of("draft_model", tmp_path), max_num_seqs=1)
    runner = runner_of(engine)
    graphs = runner._graphs = EagerGraphs(runner, [*decode_keys(1), *mixed_keys(1, TOKENS)])
    answers(engine)
    engine.close()
    assert any(key.num_tokens > 1 for key in graphs.replayed) and looked_at


def test_a_pass_that_was_not_prepared_last_is_refused(tmp_path: Path) -> None:
    """A drafter of your own may do so. Attention, or what stores, would else follow another pass's rows."""
    engine = make(tmp_path, LLAMA, {})
    runner = runner_of(engine)
    state, model = runner._model_state, runner.model
    two, one = (runner._buffers.view(rows, rows, 1, 4) for rows in (2, 1))
    before, last = (state.prepare_drafts(batch) for batch in (two, one))
    behind = r"a pass of 2 tokens begins behind the preparation of another one of 1: prepare each pass when"
    with pytest.raises(ValueError, match=behind), forward_context(before):
        pass
    with forward_context(last), torch.inference_mode():
        model.forward(one.input_ids, one.positions)
        with pytest.raises(ValueError, match="2 tokens in a pass that was prepared for 1"):
            model.forward(two.input_ids, two.positions)
    stores = state.prepare_drafts(one, attends=False)
    with pytest.raises(AssertionError, match="a pass that only stores"), forward_context(stores):
        model.forward(one.input_ids, one.positions)
    engine.close()

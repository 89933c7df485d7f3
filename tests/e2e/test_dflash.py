"""Drafts of a block at once: those of transformers' module, whatever the circumstances, and the bits of no drafts.

The drafter has random weights, so hardly a draft is accepted: what it drafts is compared instead, which follows from
all that its layers keep of a row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from drafter_rig import K, make, random_block_drafter
from octavo.device.batch import Batch
from octavo.frontend.engine import Engine
from octavo.model_state.default import DefaultModelState
from octavo.plan import NewRow
from octavo.speculate.step import DraftStep
from test_drafters import JOBS, long_jobs
from test_drafts import LONG, Counts, facts, params, run, said_without


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_block_drafter(tmp_path_factory.mktemp("assistant"))


def given(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"method": "dflash", "model": str(folder), "draft_sample_method": "greedy", **fields}


class Proposed:
    """What was drafted, by row and by how many tokens the row had: only whole blocks of rows that sampled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: dict[tuple[str, int], list[int]] = {}
        self._names: dict[int, str] = {}
        write, add = DraftStep.write_all, DefaultModelState.add

        def named(state: DefaultModelState, new: NewRow) -> None:
            self._names[new.row] = new.request_id
            add(state, new)

        def seen(step: DraftStep, drafts: torch.Tensor, first: int = 0) -> None:
            totals, rows = step.totals().tolist(), step.batch.rows.tolist()
            for place in step.live.nonzero()[:, 0].tolist():
                self.drafts[self._names[rows[place]], totals[place]] = drafts[place].tolist()
            write(step, drafts, first)

        monkeypatch.setattr(DefaultModelState, "add", named)
        monkeypatch.setattr(DraftStep, "write_all", seen)

    def take(self) -> dict[tuple[str, int], list[int]]:
        taken, self.drafts = self.drafts, {}
        return taken


Cold = tuple[dict[str, Any], dict[tuple[str, int], list[int]]]


@pytest.fixture(scope="module")
def cold_runs() -> dict[int, Cold]:
    """By how many requests there are: what each says, and what was drafted for it, from no cache."""
    return {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_S_2_every_feature_gives_the_bits_of_no_drafts(assistant: Path, dtype: str, in_flight: bool) -> None:
    expected = facts(said_without(make, {"dtype": dtype}, JOBS))
    engine = make({"method": "dflash", "model": str(assistant)}, dtype=dtype, async_scheduling=in_flight)
    counts = Counts(engine)
    assert facts(run(engine, JOBS)) == expected
    assert counts.num_drafted > 100
    engine.close()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("chunks", {"max_num_batched_tokens": 21}),
        ("small pool", {"max_model_len": 160, "num_gpu_blocks_override": 105, "block_size": 8}),
        ("rows come and go", {"max_num_seqs": 3, "async_scheduling": True}),
        ("flex", {"attention_backend": "flex", "block_size": 16}),
        ("reference", {"attention_backend": "reference"}),
    ],
)
def test_S_6_S_7_drafts_follow_from_a_rows_tokens_alone(
    assistant: Path, name: str, fields: dict[str, Any], cold_runs: dict[int, Cold], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After chunks, preemption, prefix hits and rejected drafts they are those of a row by itself; a hit is whole."""
    proposed, jobs = Proposed(monkeypatch), long_jobs(3 if name in ("flex", "reference") else 6)
    if len(jobs) not in cold_runs:
        alone = make(given(assistant), enable_prefix_caching=False, async_scheduling=False)
        cold_runs[len(jobs)] = facts(run(alone, jobs)), proposed.take()
        alone.close()
    expected, cold = cold_runs[len(jobs)]
    assert len({tuple(drafts) for drafts in cold.values()}) > len(cold) // 2, "they depend on the text"
    engine = make(given(assistant), **fields)
    for _ in range(2):
        found = facts(run(engine, jobs))
        assert found == expected or name in ("flex", "reference")
        drafts = proposed.take()  # fewer places where a step has room for no more: those are other drafts
        same = [drafts[at] == cold[at] for at in drafts.keys() & cold.keys() if len(drafts[at]) == len(cold[at])]
        assert len(same) > 15 and (all(same) or (name in ("flex", "reference") and sum(same) > 0.9 * len(same)))
    stats = engine.scheduler.kv.stats
    assert name != "small pool" or engine.scheduler.num_preemptions > 0
    engine.close()
    if name in ("chunks", "rows come and go"):  # no backend has a say in what is found
        usual = make(None, **fields)
        for _ in range(2):
            run(usual, jobs)
        assert stats.hits == usual.scheduler.kv.stats.hits > 0
        usual.close()


def test_drafts_are_those_of_transformers_module(assistant: Path, model_folder: Path) -> None:
    """Behind a prompt and behind each further token, of the target's hidden states as transformers computes them."""
    target = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    drafter = MuseGlimmerAssistantModel.from_pretrained(assistant, dtype=torch.float32).eval()
    engine = make(given(assistant), async_scheduling=False)
    prompt = engine.tokenizer.encode(LONG)[:50]
    with pytest.MonkeyPatch.context() as patch:
        proposed = Proposed(patch)
        found = run(engine, [(prompt, params(temperature=0.0, max_tokens=12))])
        drafts = proposed.take()
    engine.close()
    tokens = [*prompt, *found["r0"].outputs[0].token_ids]
    right = 0
    for length in range(len(prompt) + 1, len(tokens)):
        ids = torch.tensor([tokens[:length]])
        with torch.no_grad():
            states = target(ids[:, :-1], output_hidden_states=True).hidden_states
            context = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
            block = torch.cat([ids[:, -1:], torch.full((1, K), 7)], dim=1)
            cache = DFlashCache(config=drafter.config)  # without one its masks are of the block alone
            cache.activate_past_recording()
            cache.set_previous_accepted_tokens(length - 1)
            hidden = drafter(
                noise_embeds=target.get_input_embeddings()(block),
                context_hidden_states=context,
                position_ids=torch.arange(length + K)[None],
                past_key_values=cache,
            ).last_hidden_state
            expected = target.get_output_embeddings()(hidden[:, 1:]).argmax(-1)[0].tolist()
        right += drafts["r0", length] == expected[: len(drafts["r0", length])]
    assert right == len(tokens) - len(prompt) - 1


def test_S_5_M5_4_M5_6_blocks_have_exact_bounds_and_end_at_max_model_len(
    assistant: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request's block the bound counts each of its queries; table entries behind are not read."""
    seen: list[tuple[int, int, int]] = []
    prepare = DefaultModelState.prepare_drafts

    def poisoned(self: DefaultModelState, batch: Batch, **given: bool) -> Any:
        if batch.slot_mapping[0].data_ptr() == blocks.data_ptr():
            seen.append((int(batch.seq_lens.max()), batch.max_seq_len, batch.max_query_len))
        for size, table in zip(self._block_sizes, batch.block_tables, strict=True):
            for row, length in zip(table, batch.seq_lens.tolist(), strict=True):
                row[-(-length // size) :] = 1 << 30
        return prepare(self, batch, **given)

    monkeypatch.setattr(DefaultModelState, "prepare_drafts", poisoned)
    jobs = [(LONG[: 30 + 7 * index], params(max_tokens=None, logprobs=1, seed=index)) for index in range(4)]
    reference = make(None, max_model_len=64)
    expected = facts(run(reference, jobs))
    reference.close()
    engine: Engine = make({"method": "dflash", "model": str(assistant)}, max_model_len=64, async_scheduling=False)
    blocks = _worker(engine)._slots
    assert facts(run(engine, jobs)) == expected
    assert all(longest <= bound <= 64 and queries == 1 + K for longest, bound, queries in seen)
    assert {bound - longest for longest, bound, _ in seen if bound < 64} <= {0, *range(1, 2 + K)}
    assert max(longest for longest, _, _ in seen) == 64
    engine.close()


def _worker(engine: Engine) -> Any:
    from insides import runner_of

    return runner_of(engine)._drafter._speculator._blocks


def rewritten(folder: Path, source: Path, **changes: Any) -> Path:
    """As its authors write it: other names, and what transformers has at the top in an object of its own."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    own = {name: config.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    config |= {"architectures": ["DFlashDraftModel"], "vocab_size": 4096, "is_causal": False}
    config["sliding_window"] += 1  # of the same tokens: transformers counts those on one side of a token
    (folder / "config.json").write_text(json.dumps({**config, "dflash_config": {**own, **changes}}))
    weights = load_file(source / "model.safetensors")
    names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
    for old, new in names.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_both_ways_of_naming_weights_draft_alike(
    assistant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed = Proposed(monkeypatch)
    found = []
    for folder in (assistant, rewritten(tmp_path / "other", assistant)):
        engine = make(given(folder), async_scheduling=False)
        run(engine, long_jobs(2))
        found.append(proposed.take())
        engine.close()
    assert found[0] == found[1] and found[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, r"hidden_size=128 \(the target has 256"),
        ({"target_layer_ids": [1, 99]}, r"target_layer_ids=\[1, 99\] \(the target has layers 0 to"),
        ({"mask_token_id": 5000}, "mask_token_id=5000"),
        ({"block_size": K}, rf"block_size={K} \(it drafts {K - 1} tokens: lower num_speculative_tokens={K} to {K - 1}"),
        ({"output_multiplier": 2.0}, "output_multiplier=2.0"),
        ({"architectures": ["Other"]}, "DFlashDraftModel, MuseGlimmerAssistantModel"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_does_not_suit_is_refused(assistant: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(given(rewritten(tmp_path / "other", assistant, **changes)))

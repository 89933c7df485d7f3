"""Drafters with layers of their own: whatever they draft, outputs have the bits of no drafts, and their caches hold.

A model that drafts for itself drafts what it will say, so any draft that is rejected tells of a wrong entry in the
drafter's cache: after chunks, prefix hits, preemption, rejected drafts of others, and at the last place of a row.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_rig import ITSELF, METHODS, SPEAKERS, K, make, random_head
from octavo import LLM
from octavo.checkpoint.config_reader.drafters import method_of
from octavo.checkpoint.drafters import method_in
from octavo.checkpoint.hub import find_model
from octavo.device.batch import Batch
from octavo.frontend.engine import Engine
from octavo.model_state.default import DefaultModelState
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import SamplingParams
from octavo.speculate.step import DraftBatches, DraftStep
from random_models import DEEPSEEK, GEMMA, settings_of, token_prompts
from test_drafts import EVERYTHING, LONG, PROMPTS, Counts, Job, facts, params, run, said_without


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """A dtype, and what all features give without drafts."""
    engine = make(None, dtype=request.param)
    yield request.param, facts(run(engine, JOBS))
    engine.close()


JOBS: list[Job] = [(PROMPTS[index % len(PROMPTS)], each) for index, each in enumerate(EVERYTHING)]


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
@pytest.mark.parametrize("name", [*SPEAKERS, "eagle"])
def test_S_2_every_feature_gives_the_bits_of_no_drafts(
    plain: tuple[str, dict[str, Any]], name: str, in_flight: bool, tmp_path: Path
) -> None:
    dtype, expected = plain
    given = SPEAKERS[name] if name != "eagle" else {"method": "eagle", "model": str(random_head(tmp_path))}
    engine = make(given, dtype=dtype, async_scheduling=in_flight)
    counts = Counts(engine)
    assert facts(run(engine, JOBS)) == expected
    assert counts.num_drafted > 100
    if name == "draft_model":
        assert counts.num_accepted > 0.5 * counts.num_drafted, "features change what it would draw; no wrong entry does"
    elif name != "eagle":
        assert counts.num_accepted > 0.04 * counts.num_drafted
    engine.close()


def only_rejected_at_ends(counts: Counts) -> None:
    """Of a model that drafts for itself: a draft is rejected only where its request had ended."""
    assert counts.num_drafted > 0
    assert counts.num_accepted == counts.num_drafted


def long_jobs(count: int, **fields: Any) -> list[Job]:
    """Requests whose prompts begin alike, in pairs; each says a multiple of K + 1 tokens and one, behind its first."""
    return [
        (LONG[: 40 + 9 * (index // 2)], params(max_tokens=1 + 5 * (K + 1), seed=index, logprobs=1, **fields))
        for index in range(count)
    ]


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("whole prompts", {}),
        ("chunks", {"max_num_batched_tokens": 21}),
        ("small pool", {"max_model_len": 160, "num_gpu_blocks_override": 30, "block_size": 8}),
        ("rows come and go", {"max_num_seqs": 3}),
    ],
)
def test_S_6_a_model_that_drafts_for_itself_is_never_rejected(
    name: str, fields: dict[str, Any], in_flight: bool
) -> None:
    """So its entries are those of a cold run after chunks, preemption, prefix hits, and in the rows of others."""
    jobs = long_jobs(8)
    expected = facts(said_without(make, fields, jobs))
    engine = make(ITSELF, **fields, async_scheduling=in_flight)
    counts = Counts(engine)
    assert facts(run(engine, jobs)) == expected
    only_rejected_at_ends(counts)
    if name == "small pool":
        assert engine.scheduler.num_preemptions > 0
    assert facts(run(engine, jobs)) == expected, "from the prefix cache"
    assert engine.scheduler.kv.stats.hits > 0
    only_rejected_at_ends(counts)
    engine.close()


def accepted_by_step(engine: Engine, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], RequestOutput]:
    """How many tokens each step behind a prompt gave."""
    scheduler, found = engine.scheduler, list[int]()
    update = scheduler.update

    def seen(plan: Any, result: Any) -> Any:
        found.extend(result.num_sampled.tolist())
        return update(plan, result)

    scheduler.update = seen  # type: ignore[method-assign]
    engine.add("one", prompt, sampling)
    done: list[RequestOutput] = []
    while engine.has_unfinished:
        done += engine.step()
    scheduler.update = update  # type: ignore[method-assign]
    return found, done[-1]


@pytest.mark.parametrize("name", ["eagle3", "mtp", "draft_model"])
def test_S_6_S_7_a_hit_accepts_what_a_cold_run_does(name: str) -> None:
    """Step by step; and no block of a hit is lost, but one where texts part at the border of a block."""
    engine, plain = make(SPEAKERS[name], async_scheduling=False), make(None, async_scheduling=False)
    prompt = engine.tokenizer.encode(LONG)[:70]
    sampling = params(max_tokens=40, temperature=0.0)
    cold, first = accepted_by_step(engine, prompt, sampling)
    warm, second = accepted_by_step(engine, prompt, sampling)
    assert first.num_cached_tokens == 0 and warm == cold
    for _ in range(2):
        _, usual = accepted_by_step(plain, prompt, sampling)
    assert usual.num_cached_tokens == second.num_cached_tokens == 64
    assert second.outputs[0].token_ids == usual.outputs[0].token_ids

    # another text leaves the prompt at the border of a block: its entries are not those of the first
    other = [*prompt[:48], *engine.tokenizer.encode("class Tree:\n    def add(self):\n        return")]
    fresh = make(SPEAKERS[name], async_scheduling=False)
    expected, _ = accepted_by_step(fresh, other, sampling)
    found, parted = accepted_by_step(engine, other, sampling)
    assert found == expected and parted.num_cached_tokens == (48 if name == "draft_model" else 32)
    uncached = make(SPEAKERS[name], async_scheduling=False, enable_prefix_caching=False)
    for text in (prompt, other):  # both are there now, and what was said behind them
        known = [*text, *accepted_by_step(fresh, text, sampling)[1].outputs[0].token_ids]
        found, whole = accepted_by_step(engine, known, sampling)
        assert whole.num_cached_tokens == (len(known) - 1) // 16 * 16
        assert found == accepted_by_step(uncached, known, sampling)[0]
    for each in (engine, plain, fresh, uncached):
        each.close()


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_S_9_a_drafters_entries_go_with_the_blocks(name: str, tmp_path: Path) -> None:
    """What another engine has saved gives the acceptance of a cold run, where texts part at a block's border too."""
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    config = {"shared_storage_path": str(tmp_path / "blocks")}
    transfer: dict[str, Any] = {
        "prefix_cache_secret_file": str(secret),
        "kv_transfer_config": {
            "kv_connector": "shared_storage",
            "kv_role": "kv_both",
            "kv_lookup_timeout": 3600,  # each block is found, however late
            "kv_connector_extra_config": config,
        },
    }
    sampling = params(max_tokens=40, temperature=0.0)
    first = make(SPEAKERS[name], async_scheduling=False, **transfer)
    prompt = first.tokenizer.encode(LONG)[:70]
    other = [*prompt[:48], *first.tokenizer.encode("class Tree:\n    def add(self):\n        return")]
    cold = [accepted_by_step(first, each, sampling)[0] for each in (prompt, other)]
    first.close()
    for each, expected in zip((prompt, other), cold, strict=True):
        second = make(SPEAKERS[name], async_scheduling=False, **transfer)
        found, _ = accepted_by_step(second, each, sampling)
        assert second.scheduler.loads.connector.stats().num_loaded_blocks == len(each) // 16
        assert [count for count in found if count] == [count for count in expected if count]
        second.close()
    stranger = make(SPEAKERS["mtp"], async_scheduling=False, **transfer)
    accepted_by_step(stranger, prompt, sampling)
    assert stranger.scheduler.loads.connector.stats().num_loaded_blocks == 0, "blocks of another drafter"
    stranger.close()


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
@pytest.mark.parametrize("name", ["eagle3", "mtp", "draft_model"])
def test_S_5_drafts_end_at_max_model_len(name: str, in_flight: bool) -> None:
    """Passes at the end of a row write to no slot of another: all rows reach max_model_len, beside each other."""
    jobs = [(LONG[: 30 + 7 * index], params(max_tokens=None, logprobs=1, seed=index)) for index in range(4)]
    fields: dict[str, Any] = {"max_model_len": 64}
    expected = facts(said_without(make, fields, jobs))
    engine = make(SPEAKERS[name], **fields, async_scheduling=in_flight)
    counts = Counts(engine)
    assert facts(run(engine, jobs)) == expected
    if name == "draft_model":
        only_rejected_at_ends(counts)
    engine.close()


@pytest.mark.parametrize("name", ["eagle3", "mtp", "draft_model"])
def test_S_5_M5_5_M5_6_passes_have_exact_bounds_and_read_no_further(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every pass: lengths lie under its bound, that under max_model_len; table entries behind them are not read."""
    bounds: list[tuple[int, int]] = []
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
    prepare, poison = DefaultModelState.prepare_drafts, 1 << 30

    def poisoned(self: DefaultModelState, batch: Batch, **given: bool) -> Any:
        bounds.append((int(batch.seq_lens.max()), batch.max_seq_len))
        while hidden:  # what the pass before must not read a later one may: tables are gathered once a step
            cells, kept = hidden.pop()
            cells.copy_(torch.where(cells == poison, kept, cells))
        for size, table in zip(self._block_sizes, batch.block_tables, strict=True):
            for row, length in zip(table, batch.seq_lens.tolist(), strict=True):
                hidden.append((row[-(-length // size) :], row[-(-length // size) :].clone()))
                row[-(-length // size) :] = poison
        return prepare(self, batch, **given)

    monkeypatch.setattr(DefaultModelState, "prepare_drafts", poisoned)
    jobs = [(LONG[: 30 + 7 * index], params(max_tokens=None, logprobs=1, seed=index)) for index in range(4)]
    engine = make(SPEAKERS[name], max_model_len=64, async_scheduling=False)
    run(engine, jobs)
    assert all(longest <= bound <= 64 for longest, bound in bounds)
    assert min(bound for _, bound in bounds) < 40 and max(bound for _, bound in bounds) == 64
    engine.close()


@pytest.mark.parametrize("name", ["draft_model", "eagle", "eagle3", "mtp", "mtp of two modules"])
def test_S_4_M5_4_M5_8_bounds_are_of_the_drafts_that_a_step_asks_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer in a large batch than the settings say; a pass is as long as its own place, and bounds each row."""
    asked, one = set[int](), DraftBatches._one

    def seen(self: DraftBatches, step: DraftStep, offset: int, tokens: torch.Tensor) -> Any:
        batch, context = one(self, step, offset, tokens)
        number = 1 + offset
        asked.add(step.num_drafts)
        assert number <= step.num_drafts and batch.max_seq_len == min(step.batch.max_seq_len + number, 96)
        bounds = torch.from_numpy(step.bounds(number, 96))
        assert (batch.seq_lens <= bounds).all() and bounds.max() <= batch.max_seq_len
        return batch, context

    monkeypatch.setattr(DraftBatches, "_one", seen)
    engine = make(METHODS[name](tmp_path) | {"adaptive_depth": True}, max_model_len=96, max_num_seqs=20)
    run(engine, [(LONG[: 30 + index], params(max_tokens=10 + index, seed=index)) for index in range(18)])
    engine.close()
    assert min(asked) < K and (max(asked) == K or name == "eagle"), "who knows nothing is soon asked for none"


def noisy_copy(source: Path, folder: Path) -> Path:
    """A model that says something else now and then."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name:
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * 0.35
            weights[name] = (weight + noise).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_draft_model_is_accepted_as_transformers_assistant_is(model_folder: Path, tmp_path: Path) -> None:
    """Step by step, greedily: as many drafts of each step count as in transformers' assisted generation."""
    from transformers import AutoModelForCausalLM

    assistant_folder = noisy_copy(model_folder, tmp_path / "assistant")
    target = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    assistant = AutoModelForCausalLM.from_pretrained(assistant_folder, dtype=torch.float32).eval()
    assistant.generation_config.update(
        num_assistant_tokens=K, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    engine = make({"method": "draft_model", "model": str(assistant_folder)}, async_scheduling=False)
    prompt = engine.tokenizer.encode(PROMPTS[2])
    counts, output = accepted_by_step(engine, prompt, params(temperature=0.0, max_tokens=60))
    engine.close()

    verified: list[int] = []
    forward = target.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        verified.append(named["input_ids"].shape[1])
        return forward(*arguments, **named)

    target.forward = counted
    with torch.no_grad():
        ids = torch.tensor([prompt])
        found = target.generate(ids, assistant_model=assistant, do_sample=False, max_new_tokens=60, eos_token_id=None)
    assert found[0, len(prompt) :].tolist() == output.outputs[0].token_ids
    assert len(counts) < 45, "drafts are accepted now and then"
    # its first step verifies drafts behind the prompt, where ours computes the prompt alone
    assert abs(len(verified) - len([count for count in counts if count])) <= 1


def test_an_abort_between_drafts_leaves_the_others_bits() -> None:
    jobs = long_jobs(4)
    engine = make(SPEAKERS["eagle3"], async_scheduling=True)
    expected = facts(run(engine, jobs))
    found = facts(run(engine, jobs, abort="r1"))
    assert {name: found[name] for name in found if name != "r1"} == {
        name: expected[name] for name in expected if name != "r1"
    }
    engine.close()


def latent_modules(folder: Path, count: int) -> dict[str, Any]:
    """A DeepSeek of random weights, with modules of multi-token prediction behind its layers."""
    return settings_of({**DEEPSEEK, "num_nextn_predict_layers": count}, folder)


@pytest.mark.parametrize("count", [1, 2])
def test_modules_in_the_targets_own_checkpoint(tmp_path: Path, count: int) -> None:
    """Latent attention, experts, and one module or two: the bits of no drafts."""
    fields = latent_modules(tmp_path, count) | {"max_num_batched_tokens": 24, "max_model_len": 160}
    prompts = [each["prompt_token_ids"] for each in token_prompts(9, 30, 70)]
    jobs = [(prompt, params(max_tokens=12, logprobs=1, detokenize=False, seed=len(prompt))) for prompt in prompts]
    reference = make(None, **fields)
    expected = facts(run(reference, jobs))
    reference.close()
    engine = make({"method": "mtp", "num_speculative_tokens": 3}, **fields)
    counts = Counts(engine)
    assert facts(run(engine, jobs)) == expected
    assert counts.num_drafted > 20
    engine.close()


def test_modules_behind_a_plain_targets_layers(tmp_path: Path) -> None:
    """octavo-tiny and its module in one folder: it runs as without it, and drafts as with the module in its own."""
    folders = [find_model(name, None) for name in ("octavo-tiny", "octavo-tiny-mtp")]
    own, drafter = (load_file(folder / "model.safetensors") for folder in folders)
    shutil.copytree(folders[0], tmp_path / "both")
    save_file(own | drafter, tmp_path / "both" / "model.safetensors")
    config = json.loads((folders[0] / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "both" / "config.json").write_text(json.dumps(config))
    jobs, seen = long_jobs(2), []
    for fields, given in (({}, SPEAKERS["mtp"]), ({"model": str(tmp_path / "both")}, {"method": "mtp"})):
        plain, engine = make(None, **fields), make(given, **fields)
        counts = Counts(engine)
        seen.append((facts(run(plain, jobs)), facts(run(engine, jobs)), counts.num_drafted, counts.num_accepted))
        plain.close()
        engine.close()
    assert seen[0] == seen[1] and seen[0][3] > 10


TARGETS: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    "states": lambda _: ({"model": "octavo-tiny-hybrid"}, {**ITSELF, "draft_noise": 0.8}),
    "windows": lambda folder: (
        settings_of(GEMMA, folder / "target"),
        {"method": "eagle", "model": str(random_head(folder / "head", hidden=64, vocab=300))},
    ),
}


@pytest.mark.parametrize("chunk", [17, 512])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_with_states_and_windows(name: str, chunk: int, tmp_path: Path) -> None:
    """What a drafter's layers reserve ahead of a step takes nothing from what the target's layers keep of it."""
    for part in ("target", "head"):
        (tmp_path / part).mkdir()
    fields, given = TARGETS[name](tmp_path)
    fields = fields | {"max_num_batched_tokens": chunk, "max_model_len": 256, "kv_cache_memory_bytes": 32 << 20}
    prompts = [each["prompt_token_ids"] for each in token_prompts(9, 62, 63, 64, 100, 127)]
    jobs = [(prompt, params(max_tokens=30, logprobs=1, detokenize=False, seed=len(prompt))) for prompt in prompts]
    reference = make(None, **fields)
    expected = facts(run(reference, jobs))
    reference.close()
    engine = make(given, **fields)
    counts = Counts(engine)
    for _ in range(2):  # cold, and from the prefix cache
        assert facts(run(engine, jobs)) == expected
    assert counts.num_drafted > 100
    engine.close()


BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "another vocabulary": (
        lambda folder: {"method": "eagle", "model": str(random_head(folder, vocab=4000))},
        r"vocab_size=4000.*the target has 4096",
    ),
    "another size": (
        lambda folder: {"method": "eagle", "model": str(random_head(folder, hidden=128))},
        r"hidden_size=128.*the target has 256",
    ),
    "a head of another method": (
        lambda folder: {"method": "eagle3", "model": str(random_head(folder))},
        r"architectures=.*LlamaForCausalLMEagle3",
    ),
    "no modules": (lambda _: {"method": "mtp"}, r"^speculative_config=.*no modules of multi-token prediction"),
    "no model": (lambda _: {"method": "eagle3"}, r"eagle3.*model"),
    "no drafter of blocks": (lambda _: {"method": "dflash"}, r"dflash.*model"),
    "heads without a cache": (lambda _: {"method": "medusa", "model": "x"}, r"medusa.*EAGLE"),
}


@pytest.mark.parametrize("name", BAD)
def test_S_8_what_does_not_suit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    given, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make(given(tmp_path))


@pytest.mark.parametrize("word", ["fp8", "fp8_e4m3", "fp8_e4m3fn", "int8"])
def test_a_cache_without_scales_for_a_drafter_is_refused_by_the_word_that_was_given(word: str) -> None:
    drafts = {"method": "eagle3", "model": "octavo-tiny-eagle3"}
    with pytest.raises(ValueError, match=r"^kv_cache_dtype=.*no scales") as raised:
        LLM(device="cpu", kv_cache_dtype=word, speculative_config={**drafts, "num_speculative_tokens": K})
    assert re.search(rf"\b{word}\b", str(raised.value)), raised.value


def test_S_1_a_checkpoint_says_its_method_where_nobody_does(tmp_path: Path) -> None:
    for model in ("eagle3", "mtp", "eagle", "draft_model"):
        bundled = {"draft_model": "octavo-tiny", "eagle": str(tmp_path)}.get(model, f"octavo-tiny-{model}")
        if model == "eagle":
            random_head(tmp_path)
        assert method_in(find_model(bundled)) == model
    for name, wanted in (("DFlashDraftModel", "dflash"), ("LlamaForCausalLM", "eagle"), ("x", "draft_model")):
        assert method_of({"architectures": [name]}, ["model.fc.weight"]) == wanted
    whole = ["model.layers.0.mlp.up_proj.weight", "mtp.fc.weight", "model.layers.7.eh_proj.weight"]
    assert method_of({}, whole) == "draft_model" and method_of({}, whole[1:]) == method_of({}, whole[2:]) == "mtp"
    engine = make({"model": "octavo-tiny-eagle3"})
    counts = Counts(engine)
    run(engine, [(PROMPTS[0], params(temperature=0.0, max_tokens=24))])
    assert counts.num_accepted > 8 and engine.resolved.speculative.method == "eagle3"
    engine.close()


def test_a_head_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"a head that drafts: name it in speculative_config"):
        make(None, model="octavo-tiny-eagle3")


def test_a_drafter_of_other_words_is_refused(model_folder: Path) -> None:
    path = model_folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.__getitem__)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"token 300 is .* of the target's"):
        make({"method": "draft_model", "model": str(model_folder)})


@pytest.mark.parametrize(("name", "least"), [("eagle3", 2.4), ("mtp", 2.4)])
def test_acceptance_on_held_out_code(name: str, least: float, held_out_prompts: list[str]) -> None:
    """Tokens a step with 4 drafts, greedily: prompts from files that neither target nor drafter was trained on."""
    jobs: list[Job] = [(prompt, params(temperature=0.0, max_tokens=64)) for prompt in held_out_prompts[:30]]
    engine = make(SPEAKERS[name], dtype="bfloat16", kv_cache_memory_bytes=64 << 20)
    run(engine, jobs)
    stats = engine.scheduler.drafting.stats
    assert 1 + stats.num_accepted_tokens / stats.num_drafts >= least
    engine.close()


@pytest.mark.parametrize("target", ["octavo-tiny", "octavo-tiny-hybrid"])
def test_a_hybrid_is_refused_as_a_draft_model(target: str) -> None:
    """Also for a target of its own family: what would do is said."""
    given = {"method": "draft_model", "model": "octavo-tiny-hybrid", "num_speculative_tokens": 2}
    why = "octavo-tiny-hybrid'}: a drafter has causal attention in all layers; "
    with pytest.raises(ValueError, match=f"{why}take a smaller model with the target's vocabulary that has"):
        LLM(target, speculative_config=given, skip_tokenizer_init=True)

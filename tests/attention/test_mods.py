"""AttentionMods: hints follow from masks, parts compose, fields are checked, nothing is dropped silently."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import octavo.attention as A
from batches import make_history
from contract_rig import CPU, Setting, attend_plainly, make_step
from octavo import LLM
from octavo.attention.base import Setup, alibi_slopes
from octavo.attention.mods import NO_MODS, AttentionMods, bound
from octavo.attention.mods.choice import with_mods
from octavo.attention.mods.loading import load_mods, mods_of_layers
from octavo.attention.reference import ReferenceBackend
from octavo.cache.specs import AttentionSpec
from octavo.config.settings import ConfigError
from octavo.ops import native
from octavo.request.fields import FieldSpec, salt_with_fields
from octavo.request.sampling_params import Limits, SamplingParams, check
from octavo.request.validation import ParameterError

PREFIX = A.request_field("prefix_len")
FIELDS = {"prefix_len": torch.tensor([7, 0, 23]), "document_ids": torch.arange(60).repeat(3, 1) // 9}
PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)


def odd_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx % 2 == 1) | (kv_idx == q_idx)


MODS = {
    "causal": A.causal(),
    "window": A.sliding_window(5),
    "chunked": A.chunked(7),
    "dilated": A.dilated(3),
    "document": A.document(),
    "prefix": A.prefix(PREFIX),
    "prefix_lm": A.prefix_lm(),
    "rswa": A.rswa(4),
    "sinks and window": A.or_(A.sinks(3), A.sliding_window(4)),
    "chunks of documents": A.and_(A.chunked(7), A.document()),
    "free or ahead": A.or_(A.causal(), A.prefix_lm()),
    "user's": AttentionMods(mask_mod=odd_keys),
}


def pairs(mods: AttentionMods, b: int, tokens: int) -> Tensor:
    """The whole mask [queries, keys], evaluated for all pairs at once."""
    at = torch.arange(tokens)
    with bound(FIELDS):
        seen = mods.visible(torch.tensor(b), torch.tensor(0), at[:, None], at[None, :])
    return seen.expand(tokens, tokens)


@pytest.mark.parametrize("name", MODS)
def test_hints_say_what_the_mask_says(name: str) -> None:
    """`some` may be too generous, never too strict; `every` the other way round."""
    mods, tokens, size = MODS[name], 60, 6
    first = torch.arange(0, tokens, size)
    q_first, kv_first = first[:, None], first[None, :]
    for b in range(3):
        blocks = pairs(mods, b, tokens).view(len(first), size, len(first), size)
        with bound(FIELDS):
            at = (torch.tensor(b), q_first, q_first + size - 1, kv_first, kv_first + size - 1)
            some, every = mods.some_visible(*at), mods.all_visible(*at)
        assert not (blocks.any(3).any(1) & ~some).any()
        assert not (every & ~blocks.all(3).all(1)).any()


def test_composition_is_what_it_says() -> None:
    window, start = A.sliding_window(4), A.sinks(3)
    for b in range(2):
        expected = pairs(window, b, 20) | pairs(start, b, 20)
        assert torch.equal(pairs(A.or_(window, start), b, 20), expected)
        assert torch.equal(
            pairs(A.and_(A.or_(window, start), A.chunked(8)), b, 20), expected & pairs(A.chunked(8), b, 20)
        )
    halved = AttentionMods(score_mod=lambda score, b, h, q, kv: score / 2)
    raised = AttentionMods(score_mod=lambda score, b, h, q, kv: score + 1)
    both = A.and_(halved, raised).score_mod
    assert both is not None and both(torch.tensor(6.0), *[torch.tensor(0)] * 4) == 4.0
    with pytest.raises(ValueError, match="or_ joins masks"):
        A.or_(window, halved)


def dense(rows, spec: AttentionSpec, mods: AttentionMods, heads: int) -> Tensor:
    """Attention in float64 over contiguous keys and values under a whole mask and plain score changes."""
    results = []
    for b, (history, seq_len, queries) in enumerate(rows):
        q = history.q[seq_len - queries : seq_len].double()
        key, value = history.kv[:seq_len].double().chunk(2, dim=-1)
        key, value = (x.repeat_interleave(heads // spec.num_kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, key) * spec.scale
        if mods.score_mod is not None:
            at, h = torch.arange(seq_len), torch.arange(heads)[:, None, None]
            with bound(FIELDS):
                scores = mods.score_mod(scores, torch.tensor(b), h, at[seq_len - queries :, None], at[None, :])
        seen = pairs(mods, b, seq_len)[seq_len - queries :]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights.nan_to_num(0), value))
    return torch.cat(results)


@pytest.mark.parametrize("name", [*MODS, "alibi", "alibi and window"])
def test_reference_runs_every_mod(name: str) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    more = {"alibi": A.alibi(4), "alibi and window": A.and_(A.alibi(slopes), A.sliding_window(9), A.soft_cap(3.0))}
    mods = (MODS | more)[name]
    rows = [
        (make_history(seed, n, 4, 2, 16, torch.float32), n, queries)
        for seed, (n, queries) in enumerate([(40, 40), (33, 1), (60, 7)])
    ]
    step = make_step(rows, Setting())
    step.inputs.rows = torch.arange(3)
    spec = dataclasses.replace(PLAIN, mods=mods)
    out = step.run(ReferenceBackend([spec], torch.float32, CPU, Setup(fields=FIELDS)), spec)
    torch.testing.assert_close(out.double(), dense(rows, spec, mods, 4), atol=1e-5, rtol=1e-5)


def test_what_every_backend_knows_becomes_the_variants_own() -> None:
    capped = A.and_(A.causal(), A.sliding_window(64), A.soft_cap(30.0))
    folded = with_mods(dataclasses.replace(PLAIN, window=100), capped)
    assert folded == dataclasses.replace(PLAIN, window=64, soft_cap=30.0)
    falling = with_mods(PLAIN, A.and_(A.soft_cap(9.0), A.chunked(8), A.alibi(4)))
    assert falling == dataclasses.replace(PLAIN, soft_cap=9.0, chunk=8, alibi_slopes=alibi_slopes(4))
    assert with_mods(PLAIN, A.and_(A.alibi(4), A.soft_cap(9.0))).mods is not NO_MODS, "a spec caps before it falls"
    model_caps = dataclasses.replace(PLAIN, soft_cap=50.0)
    assert with_mods(model_caps, capped).mods is capped, "two caps are no cap"
    assert with_mods(PLAIN, A.or_(A.sinks(4), A.sliding_window(8))).mods.name == "(sinks(4) | sliding_window(8))"
    rows = [(make_history(1, 50, 4, 2, 16, torch.float32), 50, 50)]
    torch.testing.assert_close(attend_plainly(rows, folded), dense(rows, PLAIN, capped, 4))


def test_per_layer() -> None:
    per_layer = mods_of_layers(lambda layer: A.chunked(8) if layer % 2 else None, 4)
    assert [mods.name for mods in per_layer] == ["no mods", "chunked(8)", "no mods", "chunked(8)"]
    with pytest.raises(ValueError, match="attention_mods of layer 0 must be AttentionMods or None, got int"):
        mods_of_layers(lambda layer: 3, 1)


def test_names_load_and_wrong_ones_are_refused(tmp_path) -> None:
    (tmp_path / "own.py").write_text("import octavo.attention as A\nmods = A.chunked(16)\nnumber = 3\n")
    loaded = load_mods(f"{tmp_path}/own.py:mods")
    assert isinstance(loaded, AttentionMods) and loaded.name == "chunked(16)"
    for requested, text in (
        (f"{tmp_path}/own.py:missing", "does not load"),
        ("no_such_module:mods", "does not load"),
        (f"{tmp_path}/own.py:number", "must be octavo.AttentionMods"),
        ("nothing", "expected module:name"),
        (3, "must be octavo.AttentionMods"),
    ):
        with pytest.raises(ValueError, match=text):
            load_mods(requested)
    with pytest.raises(ValueError, match="mask_mod must be a function, got int"):
        AttentionMods(mask_mod=3)  # type: ignore[arg-type]


def test_request_fields_are_checked_with_the_request() -> None:
    specs = (FieldSpec("prefix_len"), FieldSpec("heat", "float", 1.0), FieldSpec("ids", per_token=True))
    limits = Limits(vocab_size=10, max_model_len=100, request_fields=specs)
    for extra, text in (
        ({"prefix_len": "x"}, r"extra_args.prefix_len: must be an integer"),
        ({"prefix_len": 2**31}, r"extra_args.prefix_len: must be in"),
        ({"heat": float("nan")}, r"extra_args.heat: must be finite"),
        ({"ids": 4}, r"extra_args.ids: must be a list of numbers"),
        ({"ids": [1, None]}, r"extra_args.ids\[1\]: must be an integer"),
    ):
        with pytest.raises(ParameterError, match=text):
            check(SamplingParams(extra_args=extra), limits, 3)
    check(SamplingParams(extra_args={"prefix_len": 3, "heat": 2, "ids": [0, 0, 1], "else": "kept"}), limits, 3)
    assert specs[1].read(None).expand(1).tolist() == [1.0] and specs[2].read({"ids": []}).expand(1).tolist() == [0]


def test_fields_part_the_prefix_cache() -> None:
    specs = (FieldSpec("prefix_len"), FieldSpec("heat", "float", 1.0))
    assert salt_with_fields("tenant", specs, None) == salt_with_fields("tenant", specs, {"prefix_len": 0}) == "tenant"
    salts = {salt_with_fields("tenant", specs, {"prefix_len": n}) for n in range(4)}
    assert len(salts) == 4
    assert salt_with_fields("tenant", (), {"prefix_len": 3}) == "tenant"


def test_backends_that_cannot_run_a_mod_refuse_it() -> None:
    if native.available():
        with pytest.raises(ConfigError, match="attention backend cpu cannot run it; set attention_backend flex or"):
            LLM(dtype="float32", attention_mods=A.dilated(3), attention_backend="cpu")


def test_a_mask_that_looks_ahead_has_whole_prompts() -> None:
    """In one step each, whatever chunked prefill says; the setting that forbids it is named."""
    with LLM(dtype="float32", attention_mods=A.prefix_lm(), max_model_len=1024) as llm:
        resolved = llm.engine.resolved
        assert resolved.looks_ahead and resolved.enable_chunked_prefill and resolved.enable_prefix_caching
        assert resolved.max_num_batched_tokens == 1024 and "looks ahead" in resolved.why["max_num_batched_tokens"]
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=100.*looks ahead.*max_model_len is 1024"):
        LLM(dtype="float32", attention_mods=A.prefix_lm(), max_model_len=1024, max_num_batched_tokens=100)
    with LLM(dtype="float32", attention_mods=A.prefix_lm(), max_num_batched_tokens=100) as llm:
        assert llm.engine.resolved.max_model_len == 100


def test_the_engines_field_cannot_be_a_users() -> None:
    with pytest.raises(ValueError, match="_prompt_length: the engine has a field of that name"):
        A.request_field("_prompt_length")


def test_public_names_load_when_they_are_asked_for() -> None:
    assert {"AttentionMods", "and_", "draw", "flex_attention", "sliding_window"} <= set(dir(A))
    assert all(callable(getattr(A, name)) and getattr(A, name).__name__ == name for name in dir(A))
    with pytest.raises(AttributeError, match="has no attribute 'windows'"):
        _ = A.windows

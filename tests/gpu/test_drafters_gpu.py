"""Drafters on a GPU: the bits of no drafts in every setting, entries that hold, and never a wait (S.2, S.6, M5.7).

Run as a program it prints a table: tokens a step and tokens a second, with each drafter and without.
"""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from safetensors.torch import save_file

if __name__ != "__main__" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM, SamplingParams
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
K = 4
ITSELF = {"method": "draft_model", "model": "octavo-tiny", "draft_noise": 1}
SPEAKERS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": "octavo-tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "octavo-tiny-mtp"},
    "draft_model": ITSELF,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no graphs": {"enforce_eager": True},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "three rows": {"max_num_seqs": 3},
    "small pool": {"num_gpu_blocks_override": 40, "max_model_len": 512, "max_num_seqs": 24},
}
CACHE = {"kv_cache_memory_bytes": 1 << 28, "max_model_len": 1024}


def block_drafter(folder: Path) -> str:
    """A DFlash drafter of random weights for octavo-tiny."""
    generator = torch.Generator().manual_seed(4)
    shapes = {"fc.weight": (256, 512), "hidden_norm.weight": (256,), "norm.weight": (256,)}
    for layer in range(2):
        own = {
            "input_layernorm": (256,),
            "post_attention_layernorm": (256,),
            "self_attn.q_norm": (64,),
            "self_attn.k_norm": (64,),
            "self_attn.q_proj": (256, 256),
            "self_attn.k_proj": (128, 256),
            "self_attn.v_proj": (128, 256),
            "self_attn.o_proj": (256, 256),
            "mlp.gate_proj": (128, 256),
            "mlp.up_proj": (128, 256),
            "mlp.down_proj": (256, 128),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    weights = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 4]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def prompts(count: int) -> list[str]:
    text = resources.files("octavo").joinpath("assets/octavo-tiny/held_out_prompts.json").read_text()
    found: list[str] = json.loads(text)[:count]
    return found


def params(count: int, max_tokens: int = 41, **fields: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.9 * (index % 2), seed=index, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **fields
        )
        for index in range(count)
    ]


def make(given: dict[str, Any] | None, **fields: Any) -> LLM:
    settings = fields if "num_gpu_blocks_override" in fields else CACHE | fields
    speculative = {} if given is None else {"num_speculative_tokens": K, "adaptive_depth": False, **given}
    return LLM(device="cuda", speculative_config=speculative, **settings)


def answers(llm: LLM, count: int, **fields: Any) -> list[Any]:
    found = llm.generate(prompts(count), params(count, **fields), use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in found]


@pytest.mark.parametrize("name", SPEAKERS)
def test_rows_that_become_few_accept_what_graphs_have_stored_for_them(name: str) -> None:
    """Beside many rows nobody has drafts, and graphs of these steps hold what the drafter stores (S.6)."""
    rates = {}
    for eager in (False, True):
        given = {"adaptive_depth": True, **SPEAKERS[name]}
        with make(given, enforce_eager=eager, max_num_seqs=160, enable_prefix_caching=False) as llm:
            wanted = [
                SamplingParams(temperature=0, max_tokens=24 + 64 * (place < 8), ignore_eos=True) for place in range(160)
            ]
            llm.generate((prompts(60) * 3)[:160], wanted, use_tqdm=False)
            stats = llm.engine.scheduler.stats()
            rates[eager] = stats.num_accepted_tokens / stats.num_draft_tokens
    assert rates[False] > 0.3, "a drafter that is trained, or the model itself"
    assert abs(rates[False] - rates[True]) < 0.03, rates


@pytest.mark.parametrize("name", ["ngram", *SPEAKERS])
def test_the_first_requests_compile_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a start that has compiled ahead: prompts, steps that verify, chunks beside them, any number of drafts.

    What is found on disk is not compiled: this test comes first, and says most where nothing is there yet.
    """
    compiled: list[str] = []

    def told(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(getattr(src, "name", "?"))

    given = {"adaptive_depth": True, **SPEAKERS.get(name, {"method": "ngram"})}
    with make(given, dtype="bfloat16", max_num_batched_tokens=256) as llm:
        monkeypatch.setattr(triton.knobs.compilation, "listener", told)
        for count in (1, 3, 24):
            answers(llm, count)
        monkeypatch.undo()
    print(f"{name}: {len(compiled)} kernels compiled behind the start {compiled[:4]}")
    assert not compiled


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    with make(None, dtype=request.param) as llm:
        return request.param, answers(llm, 24)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", SPEAKERS)
def test_S_2_the_bits_of_no_drafts(plain: tuple[str, list[Any]], name: str, setting: str) -> None:
    """The second run is served from the prefix cache."""
    with make(SPEAKERS[name], dtype=plain[0], **SETTINGS[setting]) as llm:
        answers(llm, 2)  # compiles, which waits
        with no_waits():
            assert answers(llm, 24) == plain[1]
            assert answers(llm, 24) == plain[1]
        stats = llm.engine.scheduler.drafting.stats
        assert stats.num_draft_tokens > 100
        if name == "draft_model":
            assert stats.num_accepted_tokens == stats.num_draft_tokens, "it drafts what it says, from sound entries"


BLOCKS: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "flex": {"attention_backend": "flex"},
    "flex without graphs": {"attention_backend": "flex", "enforce_eager": True},
}


@pytest.mark.parametrize("setting", BLOCKS)
def test_S_2_blocks_leave_the_bits_of_no_drafts(plain: tuple[str, list[Any]], setting: str, tmp_path: Path) -> None:
    """DFlash, whose queries see each other, on the paged backend and on flex."""
    own = BLOCKS[setting]
    given = {"method": "dflash", "model": block_drafter(tmp_path)}
    expected = plain[1]
    if "attention_backend" in own:
        with make(None, dtype=plain[0], **own) as llm:
            expected = answers(llm, 24)
    with make(given, dtype=plain[0], **own) as llm:
        answers(llm, 2)
        with no_waits():
            assert answers(llm, 24) == expected
            assert answers(llm, 24) == expected
        assert llm.engine.scheduler.drafting.stats.num_draft_tokens > 100


def test_S_11_blocks_on_flex_in_a_pool_beyond_32_bit_offsets(tmp_path: Path) -> None:
    """More than 2**31 / (2 H D) tokens, of which the last blocks are handed out first."""
    given, found = {"method": "dflash", "model": block_drafter(tmp_path)}, []
    for size in (1 << 28, 64 << 30):
        fields = {"dtype": "bfloat16", "attention_backend": "flex", "kv_cache_memory_bytes": size}
        with LLM(
            device="cuda", max_model_len=1024, speculative_config={"num_speculative_tokens": K, **given}, **fields
        ) as llm:
            pool = llm.engine.scheduler.kv._pool
            assert size == 1 << 28 or pool.num_blocks * llm.engine.scheduler.kv.block_size > 2**31 // (2 * 2 * 64)
            pool._free_uncached.reverse()
            found.append(answers(llm, 8))
    assert found[0] == found[1]


def show(name: str, given: dict[str, Any] | None, count: int) -> None:
    with make(given, dtype="bfloat16", enable_prefix_caching=False) as llm:
        answers(llm, count, max_tokens=128)
        began = time.perf_counter()
        found = answers(llm, count, max_tokens=128)
        seconds = time.perf_counter() - began
        stats = llm.engine.scheduler.drafting.stats
        per_step = 1 + stats.num_accepted_tokens / max(stats.num_drafts, 1)
        speed = sum(len(one[0]) for one in found) / seconds
        print(f"{name:<14}{count:>4} rows {speed:>9.0f} tokens/s {per_step:>6.2f} tokens a step", flush=True)


if __name__ == "__main__":
    for rows in (1, 16):
        for title, own in {"no drafts": None, **SPEAKERS}.items():
            show(title, own, rows)

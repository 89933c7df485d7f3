"""What a drafter's passes launch on a GPU: the bits of the operators one by one, and how many kernels a step is."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))

import draft_rig
import inputs_rig
import matmul_rig
from octavo import SamplingParams
from octavo.bench.engine import dummy_model
from octavo.ops import norm
from octavo.ops.gemm import pack_linear
from octavo.ops.gemm.fused import linear_of_few, normed_logits
from octavo.ops.gemm.gpu import linear

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("size", [256, 1024, 4096, 2880])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_entries_and_kept_sums(size: int, dtype: torch.dtype) -> None:
    draft_rig.check_beside("cuda", dtype, size)
    draft_rig.check_kept_sum("cuda", dtype, size)


@pytest.mark.parametrize("num_places", [7, 4096, 32000])
def test_drafts_equal_the_cpus(num_places: int) -> None:
    draft_rig.check_drafts("cuda", num_places)


@pytest.mark.parametrize(("size", "places"), [(1024, 32000), (2048, 16448)])
def test_both_ends_of_a_pass(size: int, places: int) -> None:
    draft_rig.check_ends("cuda", size, places)


def test_passes_and_the_oracle() -> None:
    inputs_rig.check_lay_out_passes("cuda")
    draft_rig.check_oracle("cuda")


@pytest.mark.parametrize(("n", "k"), [(6144, 8192), (4096, 2048), (6144, 4096), (1024, 2048)])
def test_products_of_few_rows(n: int, k: int) -> None:
    weight = matmul_rig.heavy_tailed(n, k, dtype=BF16, seed=7, device="cuda") / 256
    packed = pack_linear(weight)
    for rows in (1, 2, 4, 5):
        x = matmul_rig.heavy_tailed(rows, k, dtype=BF16, seed=8, device="cuda")
        expected = linear(x, weight, None, x.new_empty(rows, n))
        assert torch.equal(linear_of_few(x, packed), expected), rows


@pytest.mark.parametrize("k", [1024, 2048, 4096])
def test_logits_of_normed_rows(k: int) -> None:
    weight = matmul_rig.heavy_tailed(32000, k, dtype=BF16, seed=7, device="cuda") / 256
    packed, scale = pack_linear(weight), torch.rand(k, device="cuda") + 0.5
    for rows in (1, 3, 5):
        x = matmul_rig.heavy_tailed(rows, k, dtype=BF16, seed=8, device="cuda")
        expected = linear(norm.rms_norm(x, scale, 1e-6), weight, None, x.new_empty(rows, 32000, dtype=F32))
        assert torch.equal(normed_logits(x, scale, 1e-6, packed), expected), rows


def head(folder: Path, shape: str) -> dict[str, Any]:
    """A drafter of EAGLE-3's shape for a benchmark's model, of random weights."""
    hidden, heads, inner = {"0.6b": (1024, 16, 3072), "8b": (4096, 32, 12288)}[shape]
    facts = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
        "target_hidden_size": hidden,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 4, "adaptive_depth": False}


def launched(shape: str, *, drafts: bool) -> tuple[Counter[str], float]:
    """Kernels of a step of one row, and its microseconds from end to end."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"speculative_config": head(Path(folder), shape)} if drafts else {}
        limits = {"max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 30}
        with dummy_model(shape, device="cuda", dtype="bfloat16", enable_prefix_caching=False, **limits, **given) as llm:
            params = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False, temperature=0.0)
            llm.engine.capture_rest()
            llm.generate([[1, 2, 3] * 40], params, use_tqdm=False)
            before = llm.engine.times.num_steps
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                llm.generate([[1, 2, 3] * 40], params, use_tqdm=False)
                torch.cuda.synchronize()
            steps = llm.engine.times.num_steps - before
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    names = Counter(event.name for event in events)
    return Counter({name: round(count / steps) for name, count in names.items()}), span / steps


def test_a_draft_is_six_kernels() -> None:
    """Entry and product, attention, output and sum, gates and ups, down and sum, head and draw: none of torch's own.

    Entries that are stored alone are apart.
    """
    found, _ = launched("0.6b", drafts=True)
    print(found)
    assert found["_product_and_draw"] == 4 and found["_entry_product"] == 4
    assert found["_beside"] == 1 and found["_lay_out"] == 1 and found["_draw_drafts"] == 0
    assert found["_keep"] == 3
    small = sum(count for name, count in found.items() if "at::native" in name)
    assert small <= 4, {name: count for name, count in found.items() if "at::native" in name}


if __name__ == "__main__":
    for model in sys.argv[1:] or ("0.6b", "8b"):
        kernels, micros = launched(model, drafts=True)
        print(f"{model}: {sum(kernels.values())} kernels, {micros:.0f} us a step")
        for kernel, number in kernels.most_common(30):
            print(f"{number:6} {kernel[:90]}")

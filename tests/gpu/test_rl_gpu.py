"""A trainer's forward on a CUDA device has the sampler's bits there; its gradients are near the CPU's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM, rl
from rl_rig import DTYPES, TINY, flip_lowest_bit, num_differing, random_ids, sampled, tiny

from model_rig import make_reference  # isort: skip, its folder is known through rl_rig

pytestmark = pytest.mark.gpu
FAMILIES = ["qwen3", "llama3-rope", "mistral-window", "gemma3-32", "olmo3", "glm4", "qwen3-moe"]
LENGTHS = (1, 31, 32, 255, 256, 257, 600)
CACHE: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 28}  # other engines' tests run beside these


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N1_octavo_tiny_and_its_control(dtype: torch.dtype) -> None:
    with LLM(TINY, dtype=str(dtype)[6:], **CACHE) as llm:
        sequences, theirs = sampled(llm, random_ids(*LENGTHS, vocab_size=4096))
    model = rl.convert(tiny(dtype).cuda())
    pack = rl.Pack.of(sequences, device="cuda")
    with torch.no_grad():
        assert num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) == 0
        alone = [rl.logprobs(model, rl.Pack.of([each], device="cuda")).logprobs for each in sequences]
        assert num_differing(alone, theirs) == 0
        weight = model.model.layers[3].mlp.down_proj.weight
        flip_lowest_bit(weight, int(weight.abs().argmax()))
        assert num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) > 0


@pytest.mark.parametrize(
    "family", ["qwen3", "llama3-rope", "mistral-window", "gemma3-32", "olmo3", "glm4", "qwen3-moe"]
)
def test_RL_N1_families(family: str, tmp_path: Path) -> None:
    """Heads of 32 channels and more are the kernels'; bfloat16."""
    model = make_reference(family, head_dim=64, hidden_size=128).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="bfloat16", max_model_len=512, skip_tokenizer_init=True, **CACHE) as llm:
        sequences, theirs = sampled(llm, random_ids(1, 33, 70, 300))
    rl.convert(model.cuda(), max_model_len=512)
    pack = rl.Pack.of(sequences, device="cuda")
    found = rl.logprobs(model, pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("temperature, draw", [(0.6, {}), (0.7, {"top_k": 20}), (1.3, {"top_p": 0.9, "min_p": 0.01})])
def test_RL_G3_processed_logprobs(temperature: float, draw: dict[str, float]) -> None:
    prompts, model = random_ids(5, 40, vocab_size=4096), rl.convert(tiny().cuda())
    with LLM(TINY, dtype="bfloat16", logprobs_mode="processed_logprobs", **CACHE) as llm:
        sequences, theirs = sampled(llm, prompts, temperature=temperature, **draw)
    pack = rl.Pack.of(sequences, device="cuda")
    support = rl.Truncation(**draw) if draw else None  # type: ignore[arg-type]
    found = pack.split(rl.logprobs(model, pack, None, temperature, support).logprobs)
    for prompt, own, other in zip(prompts, found, theirs, strict=True):
        assert own[len(prompt) - 1 : -1].tolist() == other[len(prompt) - 1 :]


def test_RL_N2_gradients_are_those_of_the_cpu() -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        model = rl.convert(tiny(torch.float32).to(device))
        pack = rl.Pack.of(random_ids(40, 300, 7, vocab_size=4096), device=device)
        rl.logprobs(model, pack).logprobs.sum().backward()
        gradients.append({name: parameter.grad.cpu() for name, parameter in model.named_parameters()})
    for name, mine in gradients[0].items():
        assert float((mine - gradients[1][name]).norm() / mine.norm()) < 1e-4, name

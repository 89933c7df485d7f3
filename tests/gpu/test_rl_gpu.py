"""A trainer's forward on a CUDA device has the sampler's bits there; its gradients are near the CPU's.

Most of its time is the compilation of kernels, so that `-n 8` is many times as fast as one process; each engine takes
little memory, and tests that take long come first.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM, SamplingParams, rl
from octavo.bench.engine import dummy_model
from rl_rig import DTYPES, TINY, flip_lowest_bit, num_differing, random_ids, sampled, tiny

from trainer_model import make_model  # isort: skip
from model_rig import make_reference  # isort: skip, its folder is known through rl_rig

pytestmark = pytest.mark.gpu
HYBRID = str(resources.files("octavo").joinpath("assets/octavo-tiny-hybrid"))
FAMILIES = ["qwen3", "llama3-rope", "mistral-window", "gemma3-32", "olmo3", "glm4", "qwen3-moe"]
LATENT = ["deepseek2-biased", "deepseek2-groups", "deepseek3", "deepseek3-yarn"]
LENGTHS = (1, 31, 32, 255, 256, 257, 600)
# Memory of their own, since others run beside these; few rows and no graphs, so that few kernels are compiled.
SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
}
WHOLE: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 30, "max_model_len": 1024, "skip_tokenizer_init": True}


def drawn_logprobs(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    """(prompts and what was drawn behind them, the log-probabilities of what was drawn)."""
    wanted = SamplingParams(
        max_tokens=num_tokens, seed=3, logprobs=0, ignore_eos=True, detokenize=False, flat_logprobs=True
    )
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], wanted, use_tqdm=False)
    drawn = [output.outputs[0] for output in outputs]
    sequences = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, drawn, strict=True)]
    return sequences, [each.logprobs.logprobs.tolist() for each in drawn]  # type: ignore[union-attr]


def packed_differences(
    model: torch.nn.Module, sequences: list[list[int]], theirs: list[list[float]], pack_tokens: int
) -> tuple[int, int]:
    """(how many of the log-probabilities of drawn tokens differ, of how many), by forwards of packs of so many."""
    differing = compared = begin = 0
    while begin < len(sequences):
        end, total = begin, 0
        while end < len(sequences) and total + len(sequences[end]) <= pack_tokens:
            total, end = total + len(sequences[end]), end + 1
        pack = rl.Pack.of(sequences[begin:end], device="cuda")
        with torch.no_grad():
            ours = pack.split(rl.logprobs(model, pack).logprobs)
        for own, other in zip(ours, theirs[begin:end], strict=True):
            differing += sum(a != b for a, b in zip(own[-1 - len(other) : -1].tolist(), other, strict=True))
            compared += len(other)
        begin = end
    return differing, compared


def test_RL_A7_the_ten_lines_where_the_model_is_on_a_device() -> None:
    """docs/rl.md's loop, with its tensors beside the model; with a cut, by the masks of the draw."""
    model = rl.convert(tiny(torch.bfloat16).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    prompts: Any = [{"prompt_token_ids": each} for each in random_ids(3, 40, 257)]
    cut: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "return_sampling_mask": True}
    with LLM(TINY, dtype="bfloat16", logprobs_mode="processed_logprobs", **SMALL) as llm:
        for step in range(3):
            for own in (dict[str, Any](), cut):
                params = SamplingParams(n=4, max_tokens=24, logprobs=0, seed=step, **own)
                drawn = rl.Drawn.of(llm.generate(prompts, params, use_tqdm=False), device="cuda")
                support = drawn.support if own else None
                new = drawn.logprobs(model, own.get("temperature", 1.0), support)
                assert torch.equal(new, drawn.old) and new.is_cuda
            ratio = (drawn.logprobs(model) - drawn.old).exp()
            loss = -(ratio * drawn.spread(len(set(ids)) / len(ids) for ids in drawn.token_ids)).mean()
            optimizer.step(loss.backward)
            optimizer.zero_grad()
            rl.Sender(llm, "local").send(model, f"step-{step}")


@pytest.mark.parametrize("name", ["8b", "0.6b"])
def test_RL_N1_twenty_thousand_tokens(name: str) -> None:
    """Drawn 256 at a time through graphs, under weights that a session brought; then one bit of one weight flipped."""
    model = make_model(name)
    lengths = [5 + (37 * row) % 400 for row in range(256)]
    with dummy_model(name, weight_transfer_config={"backend": "disk", "staging": "none"}, **WHOLE) as llm:
        rl.Sender(llm, "local").send(rl.WeightSource(model))
        sequences, theirs = drawn_logprobs(llm, random_ids(*lengths, vocab_size=151936), 80)
    rl.convert(model, max_model_len=1024)
    assert packed_differences(model, sequences, theirs, 16384) == (0, 256 * 80)
    assert packed_differences(model, sequences[:24], theirs[:24], 1100) == (0, 24 * 80)
    weight = model.model.layers[3].mlp.down_proj.weight
    flip_lowest_bit(weight, int(weight.abs().argmax()))
    assert packed_differences(model, sequences[:24], theirs[:24], 16384)[0] > 0


def test_RL_N1_twenty_thousand_tokens_of_experts(tmp_path: Path) -> None:
    sizes = {"head_dim": 128, "hidden_size": 512, "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 4096}
    model = make_reference("qwen3-moe", **sizes, moe_intermediate_size=256, num_hidden_layers=4).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    lengths = [5 + (37 * row) % 300 for row in range(256)]
    with LLM(
        str(tmp_path), dtype="bfloat16", **WHOLE | {"kv_cache_memory_bytes": 4 << 30, "max_model_len": 512}
    ) as llm:
        sequences, theirs = drawn_logprobs(llm, random_ids(*lengths, vocab_size=4096), 80)
    rl.convert(model.cuda(), max_model_len=512)
    assert packed_differences(model, sequences, theirs, 16384) == (0, 256 * 80)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N1_octavo_tiny_and_its_control(dtype: torch.dtype) -> None:
    with LLM(TINY, dtype=str(dtype)[6:], **SMALL) as llm:
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


def test_RL_N1_octavo_tiny_hybrid_and_its_gradients() -> None:
    """Gated delta nets: bits, packed and alone; gradients near those of the same model on a CPU."""
    from transformers import AutoModelForCausalLM

    with LLM(HYBRID, dtype="bfloat16", **SMALL) as llm:
        sequences, theirs = sampled(llm, random_ids(*LENGTHS, vocab_size=4096))
    models = [
        rl.convert(AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.bfloat16).to(device))
        for device in ("cuda", "cpu")
    ]
    pack = rl.Pack.of(sequences, device="cuda")
    with torch.no_grad():
        assert num_differing(pack.split(rl.logprobs(models[0], pack).logprobs), theirs) == 0
        alone = [rl.logprobs(models[0], rl.Pack.of([each], device="cuda")).logprobs for each in sequences]
        assert num_differing(alone, theirs) == 0
    for model, device in zip(models, ("cuda", "cpu"), strict=True):
        rl.logprobs(model, rl.Pack.of(sequences[:4], device=device)).logprobs.sum().backward()
    for (name, own), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert own.grad is not None and other.grad is not None, name
        error = (own.grad.double().cpu() - other.grad.double()).norm() / other.grad.double().norm()
        assert float(error) < 0.1, (name, float(error))


@pytest.mark.parametrize("family", FAMILIES)
def test_RL_N1_families(family: str, tmp_path: Path) -> None:
    """Heads of 32 channels and more are the kernels'; bfloat16."""
    model = make_reference(family, head_dim=64, hidden_size=128).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, **SMALL | {"max_model_len": 512}) as llm:
        sequences, theirs = sampled(llm, random_ids(1, 33, 70, 300))
    rl.convert(model.cuda(), max_model_len=512)
    pack = rl.Pack.of(sequences, device="cuda")
    found = rl.logprobs(model, pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", LATENT)
def test_RL_N1_latent_attention(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Drawn with attention over states, with experts that are shared and a choice that is corrected."""
    model = make_reference(family).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of the choice alone: it moves many
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer))[torch.randperm(len(buffer))])
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype=str(dtype)[6:], skip_tokenizer_init=True, **SMALL | {"max_model_len": 256}) as llm:
        sequences, theirs = sampled(llm, random_ids(1, 33, 70, 2, 64, 200))
    rl.convert(model.cuda(), max_model_len=256)
    pack = rl.Pack.of(sequences, device="cuda")
    found = rl.logprobs(model, pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    with torch.no_grad():
        alone = [rl.logprobs(model, rl.Pack.of([each], device="cuda")).logprobs for each in sequences]
    assert num_differing(alone, theirs) == 0
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert all(layer.self_attn.kv_b_proj.weight.grad.abs().sum() > 0 for layer in model.model.layers)


def test_RL_N2_latent_gradients_are_those_of_the_cpu() -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        model = rl.convert(make_reference("deepseek3").to(device), max_model_len=256)
        pack = rl.Pack.of(random_ids(40, 200, 7), device=device)
        rl.logprobs(model, pack).logprobs.sum().backward()
        gradients.append({name: parameter.grad.cpu() for name, parameter in model.named_parameters()})
    for name, mine in gradients[0].items():
        assert float((mine - gradients[1][name]).norm()) <= 1e-4 * float(mine.norm()), name


def test_RL_G3_processed_logprobs() -> None:
    prompts, model = random_ids(5, 40, vocab_size=4096), rl.convert(tiny().cuda())
    draws: list[tuple[float, dict[str, Any]]] = [(0.6, {}), (0.7, {"top_k": 20}), (1.3, {"top_p": 0.9, "min_p": 0.01})]
    with LLM(TINY, dtype="bfloat16", logprobs_mode="processed_logprobs", **SMALL) as llm:
        drawn = [sampled(llm, prompts, temperature=temperature, **draw) for temperature, draw in draws]
    for (temperature, draw), (sequences, theirs) in zip(draws, drawn, strict=True):
        pack = rl.Pack.of(sequences, device="cuda")
        support = rl.Truncation(**draw) if draw else None
        found = pack.split(rl.logprobs(model, pack, None, temperature, support).logprobs)
        for prompt, own, other in zip(prompts, found, theirs, strict=True):
            assert own[len(prompt) - 1 : -1].tolist() == other[len(prompt) - 1 :], (temperature, draw)


def test_RL_N2_gradients_are_those_of_the_cpu() -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        model = rl.convert(tiny(torch.float32).to(device))
        pack = rl.Pack.of(random_ids(40, 300, 7, vocab_size=4096), device=device)
        rl.logprobs(model, pack).logprobs.sum().backward()
        gradients.append({name: parameter.grad.cpu() for name, parameter in model.named_parameters()})
    for name, mine in gradients[0].items():
        assert float((mine - gradients[1][name]).norm() / mine.norm()) < 1e-4, name

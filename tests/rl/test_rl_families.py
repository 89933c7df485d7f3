"""A converted model of every family gives the sampler's log-probabilities, drawn and of prompts: none differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, rl
from rl_rig import DTYPES, TINY, flip_lowest_bit, num_differing, random_ids, sampled, tiny

from model_rig import FAMILIES, make_reference  # isort: skip, its folder is known through rl_rig

PROMPTS = random_ids(1, 33, 70, 2, 64)
OWN_NORM = "ForCausalLM: it has CenteredNorm as norm of its own$"
REFUSED = {name: f"{FAMILIES[name][0]}{OWN_NORM}" for name in ("cohere", "cohere-biased", "cohere2")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_RL_N1_families(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_reference(family).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of the choice alone: it moves many
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer))[torch.randperm(len(buffer))])
    model.save_pretrained(tmp_path)
    settings: dict[str, Any] = {"model": str(tmp_path), "dtype": str(dtype)[6:], "max_model_len": 256}
    with LLM(**settings, skip_tokenizer_init=True) as llm:
        sequences, theirs = sampled(llm, PROMPTS)
    rl.convert(model, max_model_len=256)
    pack = rl.Pack.of(sequences)
    found = rl.logprobs(model, pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek2", "deepseek3", "qwen3-next"])
def test_RL_N6_a_step_with_experts_brings_the_samplers_weights(family: str, tmp_path: Path) -> None:
    """A trainer has all experts of a layer in one tensor, a checkpoint each by itself: a session takes both."""
    model = make_reference(family)
    model.save_pretrained(tmp_path)
    rl.convert(model, max_model_len=256)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    own = {"max_model_len": 256, "weight_transfer_config": {"backend": "disk"}}
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, **own) as llm:
        for turn in range(3):
            sequences, theirs = sampled(llm, PROMPTS)
            pack = rl.Pack.of(sequences)
            found = rl.logprobs(model, pack).logprobs
            assert num_differing(pack.split(found), theirs) == 0, turn
            found.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) > 0
            rl.Sender(llm, "local").send(rl.WeightSource(model))


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, Any]]:
    """octavo-tiny: an engine, and a converted model of the same weights."""
    with LLM(TINY, dtype=str(request.param)[6:]) as llm:
        yield llm, rl.convert(tiny(request.param))


def test_octavo_tiny_across_tiles_and_leaves(case: tuple[LLM, Any]) -> None:
    llm, model = case
    sequences, theirs = sampled(llm, random_ids(1, 31, 32, 505, 3, 600, vocab_size=4096))
    pack = rl.Pack.of(sequences)
    with torch.no_grad():
        assert num_differing(pack.split(rl.logprobs(model, pack).logprobs), theirs) == 0


@pytest.mark.parametrize(
    "draw", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.8, "top_k": 30, "min_p": 0.01}], ids=str
)
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_RL_G3_processed_logprobs_of_a_temperature_and_a_support(temperature: float, draw: dict[str, Any]) -> None:
    """The canonical temperature is `logits / T`, and a support is cut by the sampler's own operator."""
    prompts, model = random_ids(5, 40, vocab_size=4096), rl.convert(tiny(torch.float32))
    with LLM(TINY, dtype="float32", logprobs_mode="processed_logprobs") as llm:
        sequences, theirs = sampled(llm, prompts, temperature=temperature, **draw)
    pack = rl.Pack.of(sequences)
    support = rl.Truncation(**draw) if draw else None
    found = pack.split(rl.logprobs(model, pack, None, temperature, support).logprobs)
    for prompt, own, other in zip(prompts, found, theirs, strict=True):
        assert own[len(prompt) - 1 : -1].tolist() == other[len(prompt) - 1 :]


def test_controls_differ(case: tuple[LLM, Any]) -> None:
    """One weight's lowest bit, and plain torch, are seen; the bit put back, all is the same again."""
    llm, model = case
    sequences, theirs = sampled(llm, random_ids(40, 90, vocab_size=4096))
    pack = rl.Pack.of(sequences)

    def count(other: Any) -> int:
        with torch.no_grad():
            return num_differing(pack.split(rl.logprobs(other, pack).logprobs), theirs)

    layer = model.model.layers[3]
    for weight in (layer.self_attn.q_proj.weight, layer.mlp.down_proj.weight, model.model.norm.weight):
        index = int(weight.detach().abs().argmax())
        flip_lowest_bit(weight, index)
        assert count(model) > 0
        flip_lowest_bit(weight.data, index)  # a version counter does not see this one
        assert count(model) == 0
    plain = tiny(model.dtype)
    with torch.no_grad():
        logits = [plain(torch.tensor([each])).logits[0].float().log_softmax(-1) for each in sequences]
    values = [
        each.gather(1, torch.tensor([*ids[1:], 0])[:, None])[:, 0] for each, ids in zip(logits, sequences, strict=True)
    ]
    assert num_differing(values, theirs) > 0


@pytest.mark.parametrize(("family", "reason"), REFUSED.items())
def test_families_of_layers_that_are_no_chain_are_refused_by_name(family: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^octavo.rl does not run {reason}"):
        rl.convert(make_reference(family))


MAMBA1 = r"JambaForCausalLM yet: its layer 0 keeps a state \(mamba\) of Mamba-1, and"
NOTHING = r"NemotronHForCausalLM yet: its layer 1 keeps nothing of a sequence \(an MLP or experts alone\), and"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("jamba", MAMBA1),
        ("jamba-dense", MAMBA1),
        ("nemotron-h", NOTHING),
        ("nemotron-h-latent", NOTHING),
        ("falcon-h1", r"FalconH1ForCausalLM yet: its layers run in parts, each with a state of its own, and"),
    ],
)
def test_layers_of_other_kinds_are_refused_by_what_is_missing_and_what_is_there(family: str, reason: str) -> None:
    there = "a converted layer has one of attention, gated delta nets, Mamba-2 and short convolutions"
    with pytest.raises(ValueError, match=f"{reason} .*{there}$"):
        rl.convert(make_reference(family))

"""The chain of bfloat16's sums: the same bits on every instruction set, an own numerics id, kept by each engine."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library is built")
CHAINS = ("single", "pairs")


def _engine(**settings: Any) -> LLM:
    return LLM(dtype="bfloat16", max_model_len=256, num_threads=1, **settings)


def _bits(llm: LLM, prompts: list[str]) -> list[Any]:
    """Tokens and log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


@pytest.fixture
def prompts(held_out_prompts: list[str]) -> list[str]:
    return held_out_prompts[:4]


def test_a_chain_has_its_bits_and_its_id_on_every_instruction_set(prompts: list[str]) -> None:
    """By the processor, and by the emulation of what it does."""
    seen, ids = {}, {}
    for chain in CHAINS:
        for isa in native.built_isas():
            with _engine(native=isa, bfloat16_chain=chain) as llm:
                bits, identity = _bits(llm, prompts), llm.numerics_id
                assert seen.setdefault(chain, bits) == bits and ids.setdefault(chain, identity) == identity, isa
    assert seen["pairs"] != seen["single"], "these prompts do not tell the chains apart"
    assert ids["pairs"] != ids["single"]
    with _engine() as llm:
        own = "pairs" if native.MULTIPLIES_PAIRS in native.built_isas() else "single"
        assert _bits(llm, prompts) == seen[own] and llm.numerics_id == ids[own]


@pytest.mark.parametrize("chain", CHAINS)
def test_an_engine_keeps_its_chain_beside_others(chain: str, prompts: list[str]) -> None:
    """One of the other chain, and one that computes in float32, where bfloat16 has none."""
    with _engine(bfloat16_chain=chain) as llm:
        before = _bits(llm, prompts)
        other = next(name for name in CHAINS if name != chain)
        for settings in ({"dtype": "bfloat16", "bfloat16_chain": other}, {"dtype": "float32"}):
            with LLM(max_model_len=256, num_threads=1, **settings) as neighbour:
                _bits(neighbour, prompts[:1])
                assert _bits(llm, prompts) == before


def test_each_request_alone_and_all_together_in_pairs(prompts: list[str]) -> None:
    """On every processor; tests/e2e/test_same_bits.py has what a processor's own chain is."""
    with _engine(bfloat16_chain="pairs", enable_prefix_caching=False, max_num_batched_tokens=48) as llm:
        together = _bits(llm, prompts)
        assert [_bits(llm, [prompt])[0] for prompt in prompts] == together

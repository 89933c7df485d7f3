"""A seeded request gives the same tokens and bit-equal log-probabilities in every setting, in float32 and bfloat16.

Every other request is greedy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.request.seeds import sample_seed
from settings_matrix import SETTINGS, num_rounds

NUM_OUTPUT = 32

Result = list[tuple[list[int], list[float]]]


def _params(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.0 if index % 2 else 0.9,
            top_p=0.95,
            seed=1000 + index,
            max_tokens=NUM_OUTPUT,
            ignore_eos=True,
            logprobs=0,
        )
        for index in range(count)
    ]


def _results(llm: LLM, prompts: list[str]) -> Result:
    results = []
    for output in llm.generate(prompts, _params(len(prompts))):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        logprobs = [
            entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        results.append((list(completion.token_ids), logprobs))
    return results


@pytest.fixture(scope="module")
def alone(held_out_prompts: list[str]) -> dict[str, Result]:
    """Each prompt by itself."""
    results = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(dtype=dtype, enable_prefix_caching=False) as llm:
            params = _params(len(held_out_prompts))
            results[dtype] = [_one(llm, prompt, own) for prompt, own in zip(held_out_prompts, params, strict=True)]
    return results


def _one(llm: LLM, prompt: str, params: SamplingParams) -> tuple[list[int], list[float]]:
    completion = llm.generate(prompt, params)[0].outputs[0]
    assert completion.logprobs is not None
    chosen = zip(completion.logprobs, completion.token_ids, strict=True)
    return list(completion.token_ids), [entry[token].logprob for entry, token in chosen]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(
    make_llm: Any, held_out_prompts: list[str], alone: dict[str, Result], name: str, dtype: str
) -> None:
    llm = make_llm(dtype=dtype, **SETTINGS[name])
    for _ in range(num_rounds(SETTINGS[name])):
        assert _results(llm, held_out_prompts) == alone[dtype]
    if "small pool" in name:
        assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "references", [{"native": "off"}, {"attention_backend": "reference"}], ids=["all", "attention"]
)
def test_reference_implementations(make_llm: Any, held_out_prompts: list[str], references: dict[str, Any]) -> None:
    """What runs where no compiler was, and what runs a user's mods on a CPU."""
    prompts, references = held_out_prompts[:4], {"num_threads": 1, **references}
    llm = make_llm(enable_prefix_caching=False, **references)
    expected = [_one(llm, prompt, own) for prompt, own in zip(prompts, _params(len(prompts)), strict=True)]
    for name in ("chunks of 16", "asynchronous, small pool"):
        llm = make_llm(**references, **SETTINGS[name])
        for _ in range(2):
            assert _results(llm, prompts) == expected, name


def test_siblings_equal_separate_requests(make_llm: Any, held_out_prompts: list[str]) -> None:
    llm = make_llm()
    params = SamplingParams(temperature=1.0, seed=7, n=4, max_tokens=12, ignore_eos=True)
    siblings = [list(c.token_ids) for c in llm.generate(held_out_prompts[0], params)[0].outputs]
    separate = [
        list(
            llm.generate(
                held_out_prompts[0],
                SamplingParams(temperature=1.0, seed=sample_seed(7, index), max_tokens=12, ignore_eos=True),
            )[0]
            .outputs[0]
            .token_ids
        )
        for index in range(4)
    ]
    assert siblings == separate
    assert len({tuple(ids) for ids in siblings}) > 1


def test_control_library_products_depend_on_the_row_count() -> None:
    """What the operators guard against: the library's float32 product gives a row other bits in another batch."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(768, 256, generator=generator)
    x = torch.randn(64, 256, generator=generator) * torch.exp2(torch.randn(64, 256, generator=generator) * 4)
    whole = x @ weight.T
    differs = [count for count in range(1, 64) if not torch.equal((x[:count] @ weight.T), whole[:count])]
    if not differs:
        pytest.skip("this processor's library gives the same bits at every row count")
    assert differs


@pytest.mark.parametrize(
    "settings", [{"native": "off"}, {"attention_backend": "flex"}, {"kv_cache_dtype": "int8"}, {}], ids=str
)
def test_what_a_trainer_has_set_for_torch_changes_nothing(settings: dict[str, Any]) -> None:
    """Under one numerics id torch's products were those of autocast, and its buffers of the default type."""
    before, found = torch.get_default_dtype(), []
    for default, casts in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        torch.set_default_dtype(default)
        try:
            with torch.autocast("cpu", enabled=casts), LLM(dtype="float32", max_model_len=128, **settings) as llm:
                found.append((_results(llm, ["def add(a, b):"]), llm.numerics_id))
                assert torch.is_autocast_enabled("cpu") == casts and torch.get_default_dtype() == default
        finally:
            torch.set_default_dtype(before)
    assert found[1] == found[0] == found[2]

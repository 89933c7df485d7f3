"""Masks that look ahead: what a query saw when it was first computed, it sees whenever it is computed again.

A prompt's queries see the whole prompt and no generated token, though after a preemption both are computed at once; and
what the cache holds of a prompt was computed in sight of all of that prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from engine_checks import assert_idle
from octavo import LLM, AttentionMods, SamplingParams
from octavo.attention import prefix_lm
from octavo.sched import scheduler
from random_models import GEMMA, settings_of

Answer = tuple[list[int], list[float]]

MAX_LEN = 72
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
MASKS = {
    "both ways": AttentionMods(causal=False),
    "a mask": AttentionMods(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 != 1, causal=False),
    "a long prefix": prefix_lm(),  # it ends within some of the prompts and behind the others
    "in windows": AttentionMods(causal=False),  # of a model with two kinds of layers
}
CASES = [("reference", mask) for mask in MASKS] + [("flex", "both ways")]


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    params: SamplingParams


class Case(NamedTuple):
    """Settings, requests of which some begin alike, and the answer of each by itself."""

    fields: dict[str, Any]
    num_blocks: int  # a pool that is too small for all
    asked: list[Asked]
    expected: list[list[Answer]]


def _answers(llm: LLM, asked: list[Asked]) -> list[list[Answer]]:
    outputs = llm.generate([one.prompt for one in asked], [one.params for one in asked], use_tqdm=False)
    return [
        [
            (list(said.token_ids), [next(iter(entry.values())).logprob for entry in said.logprobs or ()])
            for said in output.outputs
        ]
        for output in outputs
    ]


@pytest.fixture(
    scope="module", params=[*CASES, pytest.param(("flex", "a long prefix"), marks=pytest.mark.slow)], ids="-".join
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    backend, mask = request.param
    shape = GEMMA | {"num_hidden_layers": 3} if mask == "in windows" else QWEN
    fields: dict[str, Any] = {
        **settings_of(shape, tmp_path_factory.mktemp("model")),
        "dtype": "float32",
        "block_size": 16,
        "attention_backend": backend,
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": MAX_LEN,
        "max_num_seqs": 8,
        "attention_mods": MASKS[mask],
    }
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (47, 40, 20, 5, 43)]
    prompts += [prompts[0][:33] + prompts[1][:9], prompts[0]]
    asked = [
        Asked(
            prompt,
            SamplingParams(
                temperature=0.8,
                seed=seed,
                n=1 + (seed == 5),
                max_tokens=min(28, MAX_LEN - len(prompt)),
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"prefix_len": 45},
            ),
        )
        for seed, prompt in enumerate(prompts)
    ]
    alone = {**fields, "enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_seqs": 1}
    with LLM(**alone) as llm:
        yield Case(fields, 22 if mask == "in windows" else 9, asked, [_answers(llm, [one])[0] for one in asked])


def _count_pieces(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows that a step begins and does not finish: in their prompts, or behind them."""
    schedule, counts = llm.engine.scheduler.schedule, {"prompts": 0, "others": 0}

    def counted() -> Any:
        plan = schedule()
        for new, count in zip(plan.new_rows, plan.num_tokens[len(plan.num_tokens) - len(plan.new_rows) :], strict=True):
            end = new.num_computed + count
            counts["prompts"] += end < new.num_prompt
            counts["others"] += new.num_prompt <= end < len(new.token_ids)
        return plan

    monkeypatch.setattr(llm.engine.scheduler, "schedule", counted)
    return counts


@pytest.mark.parametrize("caching", [True, False], ids=["hits", "pieces"])
def test_INV_7_preemption_pieces_and_hits_change_nothing(
    case: Case, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caching: bool
) -> None:
    """INV-7: with such masks preempted requests said something else. Without hits, more is replayed."""
    monkeypatch.setattr(scheduler, "HEADROOM_BLOCKS", 0)  # so that more is preempted
    llm = make_llm(**case.fields, num_gpu_blocks_override=case.num_blocks, enable_prefix_caching=caching)
    llm.engine.scheduler._max_num_tokens = 48  # as if neighbours took the rest
    pieces = _count_pieces(llm, monkeypatch)
    order = random.Random(1).sample(range(len(case.asked)), len(case.asked))
    found = dict(zip(order, _answers(llm, [case.asked[index] for index in order]), strict=True))
    assert [index for index, answer in sorted(found.items()) if answer != case.expected[index]] == []
    assert_idle(llm)
    assert llm.engine.scheduler.num_preemptions > 2
    assert bool(llm.engine.scheduler.kv.stats.hits) == caching
    assert pieces["prompts"] == 0
    assert caching or pieces["others"] > 0

"""Seeds: which samples are equal, which are not, and what goes on where it was cut."""

from __future__ import annotations

from octavo import LLM, SamplingParams
from octavo.request.seeds import sample_seed

PROMPT = list(range(40, 60))


def _sampled(llm: LLM, prompt: list[int], num_tokens: int = 12, **fields: int) -> list[list[int]]:
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **fields)
    return [list(completion.token_ids) for completion in llm.generate([prompt], params, use_tqdm=False)[0].outputs]


def test_neighbouring_seeds_have_no_sample_in_common(llm: LLM) -> None:
    """Seed 100 with n=4 and seed 101 with n=4 shared three of four: sample i drew with seed + i."""
    found = [tuple(ids) for seed in range(100, 108) for ids in _sampled(llm, PROMPT, seed=seed, n=4)]
    assert len(set(found)) == len(found) == 32


def test_each_sample_can_be_had_alone(llm: LLM) -> None:
    """Sample 0 by the seed itself, whatever n is; the others by their own seeds."""
    together = _sampled(llm, PROMPT, seed=7, n=4)
    assert together == [_sampled(llm, PROMPT, seed=sample_seed(7, index))[0] for index in range(4)]
    assert together[:2] == _sampled(llm, PROMPT, seed=7, n=2)
    assert together[0] == _sampled(llm, PROMPT, seed=7)[0]


def test_a_cut_answer_goes_on_with_its_seed(llm: LLM) -> None:
    """What was said becomes part of the prompt: noise is keyed by the absolute position and not by the prompt."""
    for index, whole in enumerate(_sampled(llm, PROMPT, seed=3, n=3)):
        for cut in (1, 5):
            rest = _sampled(llm, PROMPT + whole[:cut], 12 - cut, seed=sample_seed(3, index))
            assert rest == [whole[cut:]]


def test_sample_seeds_are_distinct_words_and_never_change() -> None:
    """A change of the recipe changes every sample beyond the first."""
    seeds = [*range(-50, 50), 2**63 - 1, 2**64 - 51, -(2**63)]
    found = {sample_seed(seed, index) for seed in seeds for index in range(64)}
    assert len(found) == len(seeds) * 64 and min(found) >= 0 and max(found) < 2**64
    assert sample_seed(-5, 0) == 2**64 - 5
    assert sample_seed(-5, 3) == sample_seed(2**64 - 5, 3)
    assert [sample_seed(0, 1), sample_seed(1, 1), sample_seed(0, 2)] == PINNED


PINNED = [3454618561189201622, 15553200007877664693, 8887671361884324935]

"""Row-wise sampling kernels: the random stream, and native code against the reference implementations."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import native
from octavo.ops import sampling as sample

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")
SIZES = [1, 7, 33, 500, 4096, 32001]


def make_logits(vocab_size: int, rows: int = 24) -> torch.Tensor:
    """Strided rows; row 4 has many -inf, row 5 only -inf, row 7 many ties."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (3 * torch.randn(rows, vocab_size + 3, generator=generator))[:, :vocab_size]
    logits[4, 1::2] = float("-inf")
    logits[5] = float("-inf")
    logits[7] = torch.randint(0, 3, (vocab_size,), generator=generator).float()
    return logits


def make_numbers(rows: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperatures (some 0), seeds over all 64 bits, positions."""
    generator = torch.Generator().manual_seed(rows)
    temperatures = torch.rand(rows, generator=generator) * 2 + 0.01
    temperatures[::5] = 0
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator) * 2 + 1
    return temperatures, seeds, torch.randint(0, 2**31, (rows,), generator=generator)


def test_the_stream_is_pinned() -> None:
    """The recipe in plain Python integers: a change of the stream changes every seeded sample."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    for seed, position, token_id in [(0, 0, 0), (2**64 - 1, 5, 151935), (1234567890123456789, 2**31, 77)]:
        golden = 0x9E3779B97F4A7C15
        key = mix((mix((seed + golden) % 2**64) + position * golden) % 2**64)
        h = (token_id + key) % 2**32
        h = (h ^ (h >> 16)) * 0x21F0AAAD % 2**32
        h = (h ^ (h >> 15) ^ (key >> 32)) * 0xD35A2D97 % 2**32
        words = torch.tensor([seed if seed < 2**63 else seed - 2**64]), torch.tensor([position])
        assert sample.uniform_bits(*words, torch.tensor([token_id])).item() == h ^ (h >> 15)


def test_noise_is_finite_and_gumbel() -> None:
    seeds = torch.arange(64)[:, None]
    noise = sample.gumbel_noise(seeds, torch.tensor([[3]]), torch.arange(4096)[None])
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)


def test_noise_of_neighbouring_keys_is_unrelated() -> None:
    """Correlation between positions, and between seeds, at every small shift of the token ids."""
    base = sample.uniform_bits(torch.tensor([9]), torch.tensor([100]), torch.arange(20000)).double()
    for seed, position in [(9, 101), (10, 100), (10, 99)]:
        other = sample.uniform_bits(torch.tensor([seed]), torch.tensor([position]), torch.arange(20000)).double()
        for shift in range(4):
            pair = torch.stack([base[shift:], other[: 20000 - shift]])
            assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.04


def test_samples_follow_the_softmax() -> None:
    """Chi-square over 40,000 draws from 12 tokens at temperature 0.7."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1))
    draws = 40_000
    tokens = sample.sample_rows(
        logits.expand(draws, 12), torch.full((draws,), 0.7), torch.full((draws,), 42), torch.arange(draws)
    )
    expected = (logits / 0.7).softmax(0) * draws
    statistic = ((tokens.bincount(minlength=12) - expected) ** 2 / expected).sum().item()
    assert statistic < 31.3  # 11 degrees of freedom: exceeded once in 1,000 keys


@pytest.mark.parametrize("size", SIZES)
@needs_native
def test_sample_rows_equals_the_reference(size: int) -> None:
    logits, numbers = make_logits(size), make_numbers()
    assert torch.equal(sample.sample_rows(logits, *numbers), sample.sample_rows_eager(logits, *numbers))


def test_draws_depend_on_seed_position_and_row_only() -> None:
    logits, (temperatures, seeds, positions) = make_logits(500), make_numbers()
    tokens = sample.sample_rows(logits, temperatures, seeds, positions)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))[:10]
    again = sample.sample_rows(logits[order], temperatures[order], seeds[order], positions[order])
    assert torch.equal(again, tokens[order])
    assert not torch.equal(sample.sample_rows(logits, temperatures, seeds, positions + 1), tokens)
    assert not torch.equal(sample.sample_rows(logits, temperatures, seeds + 1, positions), tokens)


@pytest.mark.parametrize("function", [sample.sample_rows, sample.sample_rows_eager])
def test_ties_go_low_and_nothing_gives_token_0(function) -> None:
    logits = torch.zeros(4, 50)
    logits[0, 30] = logits[0, 40] = 2
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, :] = float("-inf")
    logits[3, 45] = -1e30
    one = torch.ones(4, dtype=torch.int64)
    assert function(logits, torch.zeros(4), one, one).tolist() == [30, 0, 0, 45]
    assert function(logits, torch.ones(4), one, one).tolist()[1:] == [0, 0, 45]


@pytest.mark.parametrize("size", SIZES)
def test_logprobs_equal_float64(size: int) -> None:
    logits = make_logits(size)
    ids = torch.randint(0, size, (24,), generator=torch.Generator().manual_seed(3))
    ids[4], rows = 0, [row for row in range(24) if row != 5]
    exact = logits.double().log_softmax(dim=1)
    largest, log_sum = sample.logprob_stats(logits)
    torch.testing.assert_close(log_sum.double(), logits.double().logsumexp(dim=1), atol=3e-6, rtol=1e-6)
    assert torch.equal(largest, logits.amax(dim=1))
    logprobs, ranks = sample.token_logprobs(logits, ids)
    torch.testing.assert_close(logprobs.double()[rows], exact.gather(1, ids[:, None])[rows, 0], atol=3e-6, rtol=1e-6)
    assert torch.equal(ranks, sample.token_logprobs_eager(logits, ids)[1])
    for k in (1, 5, 20):
        top, top_logprobs = sample.top_logprobs(logits, k)
        assert torch.equal(top, sample.top_logprobs_eager(logits, k)[0])
        torch.testing.assert_close(top_logprobs.double()[rows], exact.gather(1, top)[rows], atol=3e-6, rtol=1e-6)


def test_nan_rows() -> None:
    logits = make_logits(33)
    logits[9, 32] = logits[10, 0] = float("nan")
    assert sample.nan_rows(logits).nonzero().flatten().tolist() == [9, 10]


@needs_native
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stages", ["k", "p", "m", "kpm"])
def test_mask_equals_the_reference(size: int, stages: str) -> None:
    logits, generator = make_logits(size), torch.Generator().manual_seed(size)
    top_k = torch.randint(-1, size + 2, (24,), generator=generator) if "k" in stages else torch.zeros(24).long()
    top_p = torch.rand(24, generator=generator) if "p" in stages else torch.ones(24)
    min_p = torch.rand(24, generator=generator) * 0.3 if "m" in stages else torch.zeros(24)
    ours, expected = logits.clone(), logits.clone()
    sample.top_k_top_p_mask_(ours, top_k, top_p, min_p)
    sample.top_k_top_p_mask_eager_(expected, top_k, top_p, min_p)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("mask", [sample.top_k_top_p_mask_, sample.top_k_top_p_mask_eager_])
def test_mask_by_hand(mask) -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.2, 0.2, 0.05])
    rows = probabilities.log().repeat(5, 1)
    top_k = torch.tensor([2, 0, 0, -1, 0])
    top_p = torch.tensor([1.0, 0.59, 1.0, 1e-6, 0.61])
    mask(rows, top_k, top_p, torch.tensor([0.0, 0.0, 0.4, 0.0, 0.0]))
    kept = [row.isfinite().nonzero().flatten().tolist() for row in rows]
    assert kept == [[1, 3], [1, 3], [1, 3, 4], [1], [1, 3, 4]]


@needs_native
def test_bits_do_not_depend_on_rows_threads_or_instruction_set() -> None:
    logits, before = make_logits(4097), native.num_threads()
    numbers = make_numbers()

    def everything(rows: torch.Tensor) -> list[torch.Tensor]:
        masked = logits[rows]
        sample.top_k_top_p_mask_(
            masked, torch.full((len(rows),), 50), torch.full((len(rows),), 0.8), torch.zeros(len(rows))
        )
        sampled = sample.sample_rows(logits[rows], *(values[rows] for values in numbers))
        return [masked, sampled, *sample.logprob_stats(logits[rows]), *sample.top_logprobs(logits[rows], 7)]

    expected = everything(torch.arange(24))
    try:
        for isa in native.built_isas():
            with native.using(isa):
                for threads in (1, 2):
                    native.set_num_threads(threads)
                    for rows in (torch.arange(24), torch.tensor([17, 3])):
                        for again, all_rows in zip(everything(rows), expected, strict=True):
                            assert torch.equal(again.nan_to_num(9), all_rows[rows].nan_to_num(9))
    finally:
        native.set_num_threads(before)

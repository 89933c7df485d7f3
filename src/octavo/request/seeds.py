"""Seeds of a request's samples.

Owns the way from a request's seed and a sample's number to the seed that the sample draws with. Knows no tensor and no
prompt: two prompts with one seed share their noise, so that an answer that was cut goes on with the same bits when what
it has said becomes part of the prompt. Invariant: sample 0 draws with the request's own seed.
"""

from __future__ import annotations

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SAMPLES = 0xD1B54A32D192ED03  # keeps samples apart from positions, which count in _GOLDEN


def sample_seed(seed: int, index: int) -> int:
    """The seed that sample `index` of a request with `seed` draws with, 0 to 2**64 - 1.

    As SamplingParams.seed it gives that sample alone.
    Sample 0 has the seed itself, as a word of 64 bits, the others mix(mix(seed + G) + index * S), G and S above, mix
    being SplitMix64's finaliser. So neighbouring seeds have no sample in common.
    """
    assert index >= 0, "samples are counted from 0"
    if index == 0:
        return seed & _WORD
    return _mix(_mix(seed + _GOLDEN) + index * _SAMPLES)


def _mix(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31

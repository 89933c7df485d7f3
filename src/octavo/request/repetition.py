"""RepetitionDetectionParams: when a request ends because it repeats itself.

Owns what a user may set, and the pattern's look. `octavo.sched.stops` asks when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from octavo.request.validation import ParameterError, as_int, type_error

MAX_PATTERN = 1024  # tokens


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Stop when the output ends in one pattern of tokens, repeated.

    The pattern is `min_pattern_size` (0 means 1) to `max_pattern_size` tokens long and occurs `min_count`
    times in a row. `max_pattern_size=0` turns the detection off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        """Raises ParameterError."""
        name = "repetition_detection"
        as_int(f"{name}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN)
        as_int(f"{name}.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        as_int(f"{name}.min_count", self.min_count, 2 if self.max_pattern_size else 0, MAX_PATTERN)


def read_repetition_detection(value: object) -> RepetitionDetectionParams:
    """One, or an object of its fields, as JSON gives it. Raises ParameterError."""
    if isinstance(value, RepetitionDetectionParams):
        return value
    if not isinstance(value, Mapping):
        raise type_error("repetition_detection", "a RepetitionDetectionParams or a dict of its fields", value)
    names = RepetitionDetectionParams.__struct_fields__
    if set(value) - set(names):
        raise ParameterError("repetition_detection", f"takes {', '.join(names)}", "unknown_field")
    return RepetitionDetectionParams(**value)


def ends_in_repetition(tokens: Sequence[int], detection: RepetitionDetectionParams) -> bool:
    """Whether `tokens` end in one pattern, repeated as `detection` describes."""
    num, count, last = len(tokens), detection.min_count, tokens[-1] if tokens else -1
    most = min(detection.max_pattern_size, num // count) if count else 0
    for size in range(max(detection.min_pattern_size, 1), most + 1):
        if tokens[-1 - size] != last:
            continue
        # the last `count` patterns are equal if each of their tokens equals the one `size` before
        span = size * (count - 1)
        if tokens[num - span :] == tokens[num - span - size : num - size]:
            return True
    return False

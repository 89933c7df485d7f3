"""RepetitionDetectionParams: when a request ends because it repeats itself.

Owns what a user may set. `octavo.sched.stops` looks for the pattern.
"""

from __future__ import annotations

import msgspec

from octavo.request.validation import as_int

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

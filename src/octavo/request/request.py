"""Request: the host truth of one sequence that is being generated.

Owns the tokens of a request, how far they are computed, and its status. While it runs, what changes in every step
lives in RequestRows, an array per field over all rows, so that a step costs a few array operations and no loop; a
Request reads through to its row. Knows nothing of blocks, device tensors, text or torch. Invariant: `num_computed <=
num_tokens + num_in_flight`; while a step is in flight the lengths are upper bounds of what the device has finished, as
if all of its drafts were accepted;
after `Scheduler.update` they are exact.
"""

from __future__ import annotations

import enum
import itertools
from typing import Any

import numpy as np

from octavo.plan import IntArray
from octavo.request.sampling_params import SamplingParams

_ARRIVALS = itertools.count()


class Status(enum.IntEnum):
    """Where a request stands. Everything from FINISHED on has ended."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waits again; its tokens are kept, its blocks are not
    LOADING = 3  # its blocks are reserved and being filled from elsewhere; nothing of it is scheduled
    FINISHED = 4


class FinishReason(enum.StrEnum):
    """Why a request ended, in the field's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"  # SamplingParams.repetition_detection saw a loop


NUM_RECENT = 512  # tokens that a row keeps at most before its request has to take them
_EARLIER = 256  # by less than this many some rows take them earlier than others: rows that began together, one by one


class RequestRows:
    """What a step reads and changes of the running requests, by row. Rows without a request hold zeros."""

    __slots__ = (
        "_numbers",
        "_runs",
        "cells",
        "check_at",
        "first_place",
        "max_len",
        "max_new",
        "needs_update",
        "num_computed",
        "num_entered",
        "num_known",
        "num_reserved",
        "num_tokens",
    )

    def __init__(self, num_rows: int, max_new: int = 1) -> None:
        """Arrays of [num_rows]. max_new: tokens that a row may be given at once."""
        assert max_new <= NUM_RECENT - _EARLIER, f"a row keeps {NUM_RECENT} tokens: {max_new} at once are too many"
        self._numbers = np.zeros((8, num_rows), np.int64)
        self.num_tokens = self._numbers[0]
        self.num_known = self._numbers[1]  # num_tokens, and those in flight
        self.num_computed = self._numbers[2]
        self.max_len = self._numbers[3]  # num_tokens of a request that reached its max_tokens
        self.check_at = self._numbers[4]  # num_tokens from which a new token needs a look at its request
        self.num_entered = self._numbers[5]  # num_tokens at the row's beginning
        self.num_reserved = self._numbers[6]  # tokens up to which it needs no blocks, or fewer; of drafts alone
        self.first_place = self._numbers[7]  # token p, if it is new, is in cells[first_place + p, row]
        self.needs_update = np.zeros(num_rows, np.bool_)  # every new token needs one
        # Behind a row's tokens is anything. A column for each row, so that what rows have not come to takes no memory.
        self.cells = np.zeros((NUM_RECENT, num_rows), "<i4")
        self.max_new = max_new
        # [place, row]: the row's cells from that place on, as many as a run has; they overlap
        down, across = self.cells.strides
        shape = (NUM_RECENT - max_new + 1, num_rows, max_new)
        self._runs = np.lib.stride_tricks.as_strided(self.cells, shape, (down, across, down))

    def advance(self, counts: IntArray | int) -> None:
        """Count so many tokens of each row, [num_rows], as computed, and as many more as known: those in flight."""
        self._numbers[1:3] += counts

    def append(self, rows: IntArray, tokens: IntArray) -> IntArray:
        """One more token each for `rows`, [S] both. Returns the new `num_tokens` of each."""
        lengths = self.num_tokens[rows]
        self.cells[self.first_place[rows] + lengths, rows] = tokens
        lengths += 1
        self.num_tokens[rows] = lengths
        return lengths

    def append_runs(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """The first counts[i] of tokens[i] ([S, at most max_new]) for rows[i], each once.

        All of tokens[i] is written: what does not count is behind the row's tokens.
        """
        lengths, width = self.num_tokens[rows], tokens.shape[1]
        cells = self._runs if width == self.max_new else self._runs[:, :, :width]
        cells[self.first_place[rows] + lengths, rows] = tokens
        self.num_tokens[rows] = lengths + counts

    def clear(self, row: int) -> None:
        """Hold no request in `row`."""
        self._numbers[:, row] = 0
        self.needs_update[row] = False


_NO_ROWS = RequestRows(0)
_NO_TOKENS = frozenset[int]()  # the one: another empty set would take 216 bytes


class Request:
    """One sequence: its prompt, its output so far, and its progress."""

    __slots__ = (
        "_num_computed",
        "_num_in_flight",
        "_rows",
        "_tokens",
        "arrival",
        "block_hashes",
        "cache_salt",
        "check_from",
        "coalesce_updates",
        "end_token_ids",
        "eos_token_ids",
        "error",
        "finish_reason",
        "kv_transfer_params",
        "max_tokens",
        "model_eos_token_ids",
        "num_cached",
        "num_found",
        "num_loaded",
        "num_preemptions",
        "num_prompt",
        "num_prompt_logprobs",
        "num_reported",
        "params",
        "priority",
        "request_id",
        "row",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "waits_for",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        eos_token_ids: frozenset[int] = _NO_TOKENS,
        priority: int = 0,
        cache_salt: str = "",
        coalesce_updates: bool = False,
        waits_for: str = "",
    ) -> None:
        """`max_tokens` and `seed` are resolved: the room in the context is counted in, the seed is never None.

        coalesce_updates: they are wanted for the first token and at the end, not for each token. waits_for: a request
        of the same prompt; while its blocks are loaded, nobody else is to compute them.
        """
        assert prompt_token_ids, "an empty prompt is refused before a Request is made"
        assert max_tokens >= 1, "a request generates at least one token"
        self.request_id = request_id
        self.params = params
        self.coalesce_updates = coalesce_updates
        self.num_prompt = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.seed = seed
        # a structured output may be followed by EOS alone once it is complete, so there EOS always ends it
        goes_on = params.ignore_eos and params.structured_outputs is None
        self.eos_token_ids = _NO_TOKENS if goes_on else eos_token_ids  # that end it
        self.model_eos_token_ids = eos_token_ids  # min_tokens forbids them whether or not they would end it
        self.stop_token_ids = frozenset(params.stop_token_ids) if params.stop_token_ids else _NO_TOKENS
        # one look-up per token tells whether it may end
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids if self.stop_token_ids else self.eos_token_ids
        self.check_from = 0  # known tokens from which any token may end it; set with `max_tokens` by the scheduler
        self.priority = priority
        self.cache_salt = cache_salt
        self.waits_for = waits_for
        self.arrival = next(_ARRIVALS)
        self.status = Status.WAITING
        self.row = -1  # while it runs: its row, also in RequestRows
        self._rows = _NO_ROWS
        self._tokens = list(prompt_token_ids)  # while it runs: less those that only its row has
        self._num_computed = self._num_in_flight = 0  # while it does not run
        self.num_reported = 0  # output tokens that updates have told
        self.num_cached = 0  # prompt tokens found in the prefix cache at first admission
        self.num_found = 0  # tokens found there at the last admission
        self.num_loaded = 0  # tokens of `num_cached` that a connector brought
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # prompt positions whose log-probabilities were delivered
        self.block_hashes: list[bytes] = []  # of full blocks, extended by the KV manager
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error = ""
        self.kv_transfer_params: dict[str, Any] | None = None  # where the blocks of its answer are to be had

    def enter(self, rows: RequestRows, row: int) -> None:
        """Run in `row`."""
        rows.num_tokens[row] = rows.num_entered[row] = num_tokens = len(self._tokens)
        rows.num_known[row] = num_tokens + self._num_in_flight
        rows.num_computed[row] = self._num_computed
        rows.max_len[row] = self.num_prompt + self.max_tokens
        self._rows, self.row = rows, row
        self._begin_line()

    def leave(self) -> None:
        """Run no longer."""
        rows, row = self._rows, self.row
        self._fetch()
        self._num_computed, self._num_in_flight = self.num_computed, self.num_in_flight
        self._rows, self.row = _NO_ROWS, -1
        rows.clear(row)

    def append(self, token: int) -> None:
        """One more known token, which is not in flight any longer or never was."""
        in_flight = self.num_in_flight
        self.tokens.append(token)
        if self.row >= 0:
            self._rows.num_tokens[self.row] += 1
            self._begin_line()
        self.num_in_flight = in_flight

    @property
    def tokens(self) -> list[int]:
        """The prompt and every known output token. Whoever waits may be given more by changing the list."""
        if self.row >= 0:
            self._fetch()
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self._tokens) if self.row < 0 else self._rows.num_tokens.item(self.row)

    @property
    def num_computed(self) -> int:
        """Tokens that scheduled steps have computed or will have computed."""
        return self._num_computed if self.row < 0 else self._rows.num_computed.item(self.row)

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        if self.row < 0:
            self._num_computed = value
        else:
            self._rows.num_computed[self.row] = value

    @property
    def num_in_flight(self) -> int:
        """Sampled tokens that steps in flight will give, all their drafts accepted."""
        if self.row < 0:
            return self._num_in_flight
        return self._rows.num_known.item(self.row) - self._rows.num_tokens.item(self.row)

    @num_in_flight.setter
    def num_in_flight(self, value: int) -> None:
        if self.row < 0:
            self._num_in_flight = value
        else:
            self._rows.num_known[self.row] = self._rows.num_tokens[self.row] + value

    @property
    def num_output(self) -> int:
        """Known output tokens."""
        return self.num_tokens - self.num_prompt

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt positions wait for their log-probabilities. The first position has none."""
        num_scored = self.num_prompt - (self.params.scored_token_id is None)
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < num_scored

    @property
    def max_hit(self) -> int:
        """Tokens that need not be computed again: all but one, and none whose log-probabilities are still owed."""
        if self.params.skip_reading_prefix_cache or self.params.return_routed_experts:
            return 0
        if self.owes_prompt_logprobs:
            return self.num_prompt_logprobs  # position p is scored when token p - 1 is computed
        return self.num_tokens - 1

    def packed(self, start: int, end: int) -> bytes:
        """Known tokens start .. end - 1 as 32-bit words, little-endian."""
        if self.row >= 0:
            first = self._rows.first_place.item(self.row) + start
            if first >= 0:
                return self._rows.cells[first : first + end - start, self.row].tobytes()
        return np.array(self.tokens[start:end], "<i4").tobytes()

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        """Printable without content."""
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt}, output={self.num_output}, "
            f"computed={self.num_computed}, in_flight={self.num_in_flight})"
        )

    def make_room(self) -> None:
        """Take the tokens that only the row has: it has room for more then."""
        if self.row >= 0:
            self._fetch()
            self._begin_line()

    def _fetch(self) -> None:
        """Take the tokens that only the row has."""
        start, end = len(self._tokens), self._rows.num_tokens.item(self.row)
        if start < end:
            first = self._rows.first_place.item(self.row)
            self._tokens += self._rows.cells[first + start : first + end, self.row].tolist()

    def _begin_line(self) -> None:
        """Let the row's next token be in its first place."""
        rows, row, num_tokens = self._rows, self.row, len(self._tokens)
        rows.first_place[row] = -num_tokens
        rows.check_at[row] = min(self.check_from, num_tokens + NUM_RECENT - rows.max_new - row % _EARLIER)

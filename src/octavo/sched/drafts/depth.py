"""How many drafts a row verifies: by what was accepted of its own, and by how many rows share the step.

Owns the counts of each row and the rule. Knows no draft and no device. Invariant: the rule decides speed alone: drafts
change no bit, whatever their number.
"""

from __future__ import annotations

import numpy as np

from octavo.config.speculative import batch_depth
from octavo.plan import IntArray, StepLimits

# A draft is worth its place if it is accepted as often as that: of one row, and more where tokens cost more.
_LEAST, _LEAST_OF_MANY = 0.06, 0.6
_DECAY, _PRIOR_HITS, _PRIOR_TRIES = 0.92, 0.4, 0.5  # of counts per step; what a new row is credited with
_PROBE, _RAREST = 32, 128  # steps after which a row that has no drafts tries one again, at first and at last


class Depth:
    """The most drafts of each row.

    Rows that have none try one again in the same steps. Between two of these, where nobody has any, the whole batch
    pauses: nothing is proposed, so that steps are plain ones.
    """

    def __init__(self, limits: StepLimits, cheap_tokens: int) -> None:
        """`limits`: the worker's. cheap_tokens: of a step, at little cost; 0: as many drafts as may be in every row."""
        self._most, self._cheap = limits.max_num_drafts, cheap_tokens
        self._hits = np.zeros(limits.max_num_rows)
        self._tries = np.zeros(limits.max_num_rows)
        self._patience = np.zeros(limits.max_num_rows, np.int64)  # steps from one try to the next
        self._is_trying = np.zeros(limits.max_num_rows, np.bool_)  # a row that has no drafts was given one
        self._step, self._resumes = 1, 0  # the step that is planned; until when nobody has drafts
        self.clear(np.arange(limits.max_num_rows))

    def clear(self, rows: IntArray | int) -> None:
        """Others run in `rows` from now on."""
        self._hits[rows], self._tries[rows], self._patience[rows] = _PRIOR_HITS, _PRIOR_TRIES, _PROBE
        self._is_trying[rows] = False
        self._resumes = 0

    def of_batch(self, num_rows: int) -> int:
        """The most drafts of any row in a step of so many rows."""
        return batch_depth(self._most, self._cheap, num_rows)

    def of_next(self, num_rows: int) -> int:
        """`of_batch` of the next step, 0 while it pauses. Once a plan, behind it."""
        self._step += 1
        return 0 if self._step < self._resumes else self.of_batch(num_rows)

    def num_paused(self, num_rows: int) -> int:
        """How many steps behind the one that is planned have no drafts and propose none, if the same rows run."""
        return max(self._resumes - self._step - 2, 0) if self.of_batch(num_rows) else 1 << 30

    def of_rows(self, rows: IntArray, most: int, num_rows: int) -> IntArray:
        """[N] drafts of each of `rows`, at most `most`, in the step that is planned, of `num_rows`."""
        if not self._cheap or not most:
            return np.full(len(rows), most, np.int64)
        rate = np.minimum(self._hits[rows] / self._tries[rows], 0.999)
        least = _LEAST + _LEAST_OF_MANY * min(num_rows / self._cheap, 1.0)
        # the last draft k for which rate ** k is at least that
        found = np.minimum(np.log(least) / np.log(np.maximum(rate, 1e-6)), most).astype(np.int64)
        waits = found == 0
        if waits.any():
            again = waits & (self._step % self._patience[rows] == 0)
            self._is_trying[rows[again]] = True
            found[again] = 1
            if len(rows) == num_rows and not found.any():
                self._resumes = (self._step // _PROBE + 1) * _PROBE
        return found

    def learn(self, rows: IntArray, drafted: IntArray, accepted: IntArray) -> None:
        """Of each of `rows`, once each, so many drafts were verified and accepted. [N] all; drafted at least 1."""
        tried = self._is_trying[rows]
        if tried.any():  # only now: a step's budget, or a mask that is late, may have taken the draft
            wrong = rows[tried & (accepted == 0)]
            self._patience[wrong] = np.minimum(2 * self._patience[wrong], _RAREST)
            self._is_trying[wrong] = False
            right = rows[tried & (accepted > 0)]
            if len(right):
                self.clear(right)  # what it says now is something else
        if accepted.any():
            self._resumes = 0
        self._hits[rows] = self._hits[rows] * _DECAY + accepted
        self._tries[rows] = self._tries[rows] * _DECAY + np.minimum(accepted + 1, drafted)

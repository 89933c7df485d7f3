"""Log-probabilities of sampled tokens and of prompts.

Owns which rows want how many, the groups in which they are computed, and the way from tensors to plan.TokenLogprobs.
Does not choose tokens. Invariant: a row's numbers are a function of its own logits; which rows share a group decides
only how many of the likeliest tokens are computed, and each row is given exactly the number it asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import torch

from octavo.ops.copying import to_device
from octavo.ops.sampling import token_logprobs, top_logprobs
from octavo.plan import NewRow, PromptLogprobs, TokenLogprobs
from octavo.sampling.rows import IntArray, RowSet, SampleBatch

MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
_FEW = 256  # so many of the likeliest come from top_logprobs with the bits of token_logprobs; more are made by hand


class LogprobGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What some logits rows of a batch want together."""

    at_np: IntArray  # [n] int64, their places among the S
    at: torch.Tensor  # [n] int64, the same on the device
    num_top: int  # likeliest tokens to compute: the most that one of them wants
    num_top_np: IntArray  # [n] how many each wants
    num_extra_np: IntArray  # [n] how many tokens each names
    extra_ids: torch.Tensor  # [n, X] int64, padded with 0


class GroupLogprobs(msgspec.Struct, frozen=True):
    """A group's numbers. Columns: the sampled token, the `num_top` likeliest, the named ones."""

    group: LogprobGroup
    ids: torch.Tensor  # [n, 1 + num_top + X] int64
    values: torch.Tensor  # the same shape, float32
    ranks: torch.Tensor  # the same shape, int64; 1 is the likeliest


class LogprobRows:
    """The rows that want log-probabilities."""

    def __init__(self, max_num_rows: int, vocab_size: int, max_logprobs: int, device: torch.device) -> None:
        """`max_logprobs`: the most that a row may ask for, -1: the vocabulary."""
        self._rows = RowSet(max_num_rows, device)
        self._vocab_size = vocab_size
        self._max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self._device = device
        self._num_top = np.zeros(max_num_rows, np.int64)
        self._extra: dict[int, list[int]] = {}
        self._selected: object = None
        self._groups: list[LogprobGroup] = []

    def add(self, new: NewRow) -> bool:
        """Note what a row wants. Returns whether it wants anything."""
        num_top, extra = new.sampling.logprobs, new.sampling.logprob_token_ids
        if num_top is None and extra is None:
            return False
        num_top = self._vocab_size if num_top == -1 else min(num_top or 0, self._vocab_size)
        assert num_top <= self._max_logprobs, f"logprobs {num_top} > max_logprobs {self._max_logprobs} was let through"
        self._num_top[new.row] = num_top
        self._extra[new.row] = list(extra or ())
        self._rows.add(new.row)
        return True

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._rows.discard(row)
        self._extra.pop(row, None)

    def wanted(self, rows_np: IntArray) -> bool:
        """Whether any of these table rows wants something."""
        return self._rows.has_any(rows_np)

    def groups(self, batch: SampleBatch) -> list[LogprobGroup]:
        """The batch's rows that want something, by appetite."""
        selection = self._rows.select(batch.rows_np)
        if selection is not self._selected:
            self._selected = selection
            self._groups = [] if selection is None else self._deal(selection.at_np, batch.rows_np)
        return self._groups

    def _deal(self, at_np: IntArray, rows_np: IntArray) -> list[LogprobGroup]:
        rows = rows_np[at_np]
        wanted = self._num_top[rows]
        names = np.array([bool(self._extra[row]) for row in rows.tolist()])
        # a row's own wishes decide its group: the sampled token, a few of the likeliest, named ones too, many
        appetites = np.where(wanted > _FEW, 3, np.where(names, 2, wanted > 0))
        groups = []
        for appetite in range(4):
            mine = np.flatnonzero(appetites == appetite)
            if not len(mine):
                continue
            extra = [self._extra[row] for row in rows_np[at_np[mine]].tolist()]
            ids = np.zeros((len(mine), max(map(len, extra))), np.int64)
            for line, named in zip(ids, extra, strict=True):
                line[: len(named)] = named
            groups.append(
                LogprobGroup(
                    at_np=at_np[mine],
                    at=to_device(at_np[mine], self._device),
                    num_top=int(wanted[mine].max()),
                    num_top_np=wanted[mine],
                    num_extra_np=np.array([len(named) for named in extra], np.int64),
                    extra_ids=to_device(ids, self._device),
                )
            )
        return groups


def compute(group: LogprobGroup, logits: torch.Tensor, tokens: torch.Tensor, *, as_logits: bool) -> GroupLogprobs:
    """A group's numbers from its logits ([n, V] float32) and sampled tokens ([n] int64).

    Values are log-softmax of the logits, or with `as_logits` the logits. Rank: 1 + how many logits are greater, so
    equal logits share a rank, whether a token was sampled, is among the likeliest or was named.
    """
    value, rank = token_logprobs(logits, tokens)
    ids, values, ranks = [tokens[:, None]], [value[:, None]], [rank[:, None]]
    if group.num_top:
        top_ids, top_values = top_logprobs(logits, group.num_top)
        ids.append(top_ids)
        values.append(top_values)
        ranks.append(_sorted_ranks(logits.gather(1, top_ids)))
    by_hand = group.num_top > _FEW or group.extra_ids.shape[1] > 0
    if group.extra_ids.shape[1]:
        named = logits.gather(1, group.extra_ids)
        ids.append(group.extra_ids)
        ranks += [1 + (logits > named[:, x : x + 1]).sum(1, keepdim=True) for x in range(named.shape[1])]
    all_ids = torch.cat(ids, dim=1)
    if as_logits:
        all_values = logits.gather(1, all_ids)
    elif by_hand:
        # token_logprobs gives (x - largest) - log_sum, so at the largest logit it gives -log_sum, exactly
        largest, where = logits.max(dim=1)
        all_values = (logits.gather(1, all_ids) - largest[:, None]) + token_logprobs(logits, where)[0][:, None]
    else:
        all_values = torch.cat(values, dim=1)
    return GroupLogprobs(group, all_ids, all_values, torch.cat(ranks, dim=1))


def _sorted_ranks(top: torch.Tensor) -> torch.Tensor:
    """Ranks of logits sorted downwards, [n, k]: 1 + the place of the first equal one."""
    place = torch.arange(1, top.shape[1] + 1, device=top.device).expand(top.shape)
    starts = torch.ones_like(top, dtype=torch.bool)
    starts[:, 1:] = top[:, 1:] != top[:, :-1]
    return torch.where(starts, place, 0).cummax(dim=1).values


def to_token_logprobs(groups: Iterable[GroupLogprobs]) -> dict[int, TokenLogprobs]:
    """Host entries by place among the S logits rows. Waits for the device, so copy the tensors to the host before.

    An entry holds the sampled token, then exactly the likeliest tokens that its row asked for, then those it named.
    """
    found = {}
    for numbers in groups:
        group = numbers.group
        lines = zip(
            group.at_np.tolist(),
            group.num_top_np.tolist(),
            group.num_extra_np.tolist(),
            numbers.ids.tolist(),
            numbers.values.tolist(),
            numbers.ranks.tolist(),
            strict=True,
        )
        named = 1 + group.num_top
        for at, num_top, num_extra, ids, values, ranks in lines:
            if len(ids) > 1 + num_top + num_extra:
                ids, values, ranks = (x[: 1 + num_top] + x[named : named + num_extra] for x in (ids, values, ranks))
            found[at] = TokenLogprobs(ids, values, ranks)
    return found


def to_prompt_logprobs(parts: Iterable[GroupLogprobs]) -> PromptLogprobs:
    """What `prompt_logprobs` gave, on the host, in the order of positions."""
    columns = zip(*((part.ids.numpy(), part.values.numpy(), part.ranks.numpy()) for part in parts), strict=True)
    return PromptLogprobs.of_arrays(*map(np.concatenate, columns))


def prompt_logprobs(
    logits: torch.Tensor, target_ids: torch.Tensor, num_top: int, *, as_logits: bool = False
) -> GroupLogprobs:
    """One line per prompt position: logits ([P, V] float32) at it, `target_ids` ([P] int64) the token after it.

    `num_top`: likeliest tokens beside the target, -1: all. The result does not depend on how a prompt is cut in chunks;
    `prompt_chunks` cuts it so that logits stay small.
    """
    num_rows, vocab_size = logits.shape
    num_top = vocab_size if num_top == -1 else min(num_top, vocab_size)
    at = np.arange(num_rows)
    group = LogprobGroup(
        at_np=at,
        at=to_device(at, logits.device),
        num_top=num_top,
        num_top_np=np.full(num_rows, num_top),
        num_extra_np=np.zeros(num_rows, np.int64),
        extra_ids=target_ids.new_zeros((num_rows, 0)),
    )
    return compute(group, logits, target_ids, as_logits=as_logits)


def prompt_chunks(num_rows: int, max_rows: int = 1024) -> Iterator[slice]:
    """Slices of at most `max_rows` that cover `num_rows` in order."""
    for start in range(0, num_rows, max_rows):
        yield slice(start, min(start + max_rows, num_rows))

"""ReferenceStates: the operators of layers with states in plain torch, on any device.

Owns the walk over a step's chunks: which tokens of which rows stand at which places, and what is kept. The formulas are
in `octavo.ops.scan.reference`. It waits for a GPU. Invariant: a row's results depend on its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.scan import (
    ConvOperands,
    DeltaNetOperands,
    DeltaOperands,
    Mamba1Operands,
    Mamba2Operands,
    normalized,
    sigmoid,
    softplus,
)
from octavo.ops.scan import reference as ops
from octavo.states import composed
from octavo.states.base import LayerStates

DELTA_INPUTS = ("key", "value", "update", "decay", "rate")
MAMBA2_INPUTS = ("x", "b", "decay", "dt")
MAMBA1_INPUTS = ("x", "dt", "b")


class _Chunk(NamedTuple):
    """One chunk of each row that a step has tokens of there."""

    rows: Tensor  # [N], of the step
    at: Tensor  # [n], the step's tokens in these chunks
    row: Tensor  # [n], the index of each among `rows`
    place: Tensor  # [n], in its chunk
    is_new: Tensor  # [N, chunk]: whether the place is one of these tokens'
    full: Tensor  # indices of rows whose chunk the step completes
    borders: Tensor  # [N], behind the chunks

    def put(self, chunk: Tensor, values: Tensor) -> Tensor:
        """chunk [N, C, ...] with the tokens' `values` [T, ...] in it."""
        chunk[self.row, self.place] = values[self.at].to(chunk.dtype)
        return chunk


def _chunks(own: LayerStates) -> Iterator[_Chunk]:
    """Of all rows, from the chunk of their first token of the step on."""
    step, size = own.inputs, own.chunk
    entries = torch.arange(len(step.rows), device=step.rows.device).repeat_interleave(step.num_queries)
    end = step.seq_lens.long()
    begin = step.num_computed // size * size
    rows = (step.num_queries > 0).nonzero().flatten()
    while len(rows):
        place = step.positions - begin[entries]
        at = ((place >= 0) & (place < size)).nonzero().flatten()
        index = torch.zeros_like(begin).index_copy(0, rows, torch.arange(len(rows), device=rows.device))
        row, place = index[entries[at]], place[at]
        is_new = torch.zeros(len(rows), size, dtype=torch.bool, device=rows.device)
        is_new[row, place] = True
        begin = begin + size
        full = (begin[rows] <= end[rows]).nonzero().flatten()
        yield _Chunk(rows, at, row, place, is_new, full, begin[rows])
        rows = rows[begin[rows] < end[rows]]


class ReferenceStates:
    """See StateBackend."""

    name = "reference"

    def short_conv(self, own: LayerStates, conv: ConvOperands, x: Tensor) -> Tensor:
        """See StateBackend. The last inputs before a border are the state there."""
        own = own.only(("conv",), ("conv",))
        step, width = own.inputs, len(conv.weight)
        (tail,), (chunk,) = own.gather_states(), own.gather_open_inputs()
        before, computed = torch.cat((tail, chunk), 1), step.num_computed
        begin = computed // own.chunk * own.chunk - (width - 1)
        entries = torch.arange(len(step.rows), device=x.device).repeat_interleave(step.num_queries)

        def brought(entries: Tensor, positions: Tensor) -> Tensor:
            """What tokens at `positions` of the step's rows `entries` brought."""
            own = positions - computed[entries]
            old = before[entries, (positions - begin[entries]).clamp(0, before.shape[1] - 1)]
            new = x[(step.query_start.long()[entries] + own).clamp(0, max(len(x) - 1, 0))]
            return torch.where((own >= 0)[:, None], new, old.to(x.dtype))

        places = [brought(entries, step.positions - width + 1 + j) for j in range(width)]
        result = ops.convolve(conv, torch.stack(places, 1)).to(x.dtype)
        for each in _chunks(own):
            rows, borders = each.rows[each.full], each.borders[each.full]
            last = [brought(rows, borders - width + 1 + j) for j in range(width - 1)]
            own.store_states(rows, borders, [torch.stack(last, 1)])
        own.store_inputs([x])
        return result

    def gated_delta(self, own: LayerStates, rule: DeltaOperands, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See StateBackend."""
        own = own.only(("state",), DELTA_INPUTS)
        keys = rule.num_key_heads * rule.key_size
        q, k, v = qkv.split((keys, keys, rule.num_heads * rule.value_size), 1)
        query = normalized(q.float().unflatten(1, (-1, rule.key_size))) * rule.key_size**-0.5
        key = normalized(k.float().unflatten(1, (-1, rule.key_size))).to(qkv.dtype)
        value, rate = v.unflatten(1, (-1, rule.value_size)), sigmoid(b.float())
        step = rule.decay * softplus(a.float() + rule.dt_bias)
        result, update, total = torch.empty_like(value), torch.empty_like(value), torch.empty_like(rate)
        (states,), kept = own.gather_states(), own.gather_open_inputs()
        for each in _chunks(own):
            keys_, values, updates, totals, rates = (part[each.rows] for part in kept)
            totals = ops.cumulate(each.put(torch.zeros_like(totals), step), totals, each.is_new)
            chunk = each.put(keys_, key), each.put(values, value), updates, totals, each.put(rates, rate)
            queries = each.put(query.new_zeros(*keys_.shape), query)
            state = states[each.rows].float()
            found, updates = ops.delta_chunk(rule, state, queries, *chunk, each.is_new)
            result[each.at] = found[each.row, each.place].to(result.dtype)
            update[each.at], total[each.at] = updates[each.row, each.place], totals[each.row, each.place]
            states[each.rows] = ops.delta_advance(rule, state, keys_, updates, totals).to(states.dtype)
            own.store_states(each.rows[each.full], each.borders[each.full], [states[each.rows[each.full]]])
            kept = tuple(torch.zeros_like(part) for part in kept)
        own.store_inputs((key, value, update, total, rate))
        return result.flatten(1)

    def delta_net(self, own: LayerStates, net: DeltaNetOperands, x: Tensor) -> Tensor:
        """See StateBackend."""
        return composed.delta_net(self, own, net, x)

    def mamba2(self, own: LayerStates, scan: Mamba2Operands, xbc: Tensor, dt: Tensor) -> Tensor:
        """See StateBackend."""
        own = own.only(("state",), MAMBA2_INPUTS)
        groups = scan.num_groups * scan.state_size
        x, b, c = xbc.split((scan.num_heads * scan.head_size, groups, groups), 1)
        x = x.unflatten(1, (-1, scan.head_size))
        b, c = (part.unflatten(1, (-1, scan.state_size)) for part in (b, c))
        dt = softplus(dt.float() + scan.dt_bias).clamp(scan.dt_min, scan.dt_max)
        step, c = dt * scan.decay, c.float()
        result, total = torch.empty_like(x), torch.empty_like(dt)
        (states,), kept = own.gather_states(), own.gather_open_inputs()
        for each in _chunks(own):
            xs, bs, totals, dts = (part[each.rows] for part in kept)
            totals = ops.cumulate(each.put(torch.zeros_like(totals), step), totals, each.is_new)
            xs, bs, dts = each.put(xs, x), each.put(bs, b), each.put(dts, dt)
            state = states[each.rows].float()
            found = ops.mamba2_chunk(scan, state, each.put(c.new_zeros(*bs.shape), c), xs, bs, totals, dts)
            result[each.at] = found[each.row, each.place].to(result.dtype)
            total[each.at] = totals[each.row, each.place]
            states[each.rows] = ops.mamba2_advance(scan, state, xs, bs, totals, dts).to(states.dtype)
            own.store_states(each.rows[each.full], each.borders[each.full], [states[each.rows[each.full]]])
            kept = tuple(torch.zeros_like(part) for part in kept)
        own.store_inputs((x, b, total, dt))
        return result.flatten(1)

    def mamba1(self, own: LayerStates, scan: Mamba1Operands, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """See StateBackend."""
        own = own.only(("state",), MAMBA1_INPUTS)
        dt, c, result = softplus(dt.float() + scan.dt_bias), c.float(), torch.empty_like(x)
        (states,), kept = own.gather_states(), own.gather_open_inputs()
        for each in _chunks(own):
            xs, dts, bs = (part[each.rows] for part in kept)
            cs = each.put(c.new_zeros(len(each.rows), own.chunk, c.shape[1]), c)
            chunk = each.put(xs, x), each.put(dts, dt), each.put(bs, b), cs
            found, state = ops.mamba1_chunk(scan, states[each.rows].float(), *chunk)
            result[each.at] = found[each.row, each.place].to(result.dtype)
            states[each.rows] = state.to(states.dtype)
            own.store_states(each.rows[each.full], each.borders[each.full], [states[each.rows[each.full]]])
            kept = tuple(torch.zeros_like(part) for part in kept)
        own.store_inputs((x, dt, b))
        return result

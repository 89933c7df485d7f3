"""A rig for models of which some layers keep states: one pool, block tables by hand, rows of tokens in, logits out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from octavo.attention.base import BACKENDS, NO_TAPS, AttentionInputs, ForwardContext, TableContext, forward_context
from octavo.cache.groups import make_groups
from octavo.cache.layout import LAYOUTS
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import distinct
from octavo.model_state.default import layer_contexts
from octavo.ops.inputs.tensors import LogitTokens
from octavo.states.base import StateInputs, StateStep, layer_states
from octavo.states.choice import state_backend
from unpromised import spoil

BLOCK_SIZE = 16
MAX_ROWS = 4


class HybridRig:
    """Every border's state is kept, blocks come in a shuffled order, and every unused byte of the cache is NaN."""

    def __init__(self, model: Any, backend: str = "reference", dtype: torch.dtype = torch.float32, length: int = 1280):
        """length: the most tokens of a row."""
        self.model, specs = model, model.layer_specs
        self.groups = make_groups(specs, BLOCK_SIZE, dtype.itemsize)
        needed = [group.num_blocks(length) for group in self.groups]
        count = 1 + MAX_ROWS * sum(needed)
        self.pool = KVCachePool(
            self.groups, num_blocks=count, dtype=dtype, device=torch.device("cpu"), layout=LAYOUTS["BLHNC"]
        )
        self.pool.buffer.fill_(torch.nan)
        free = list(range(1, count))
        random.Random(0).shuffle(free)
        self.block_tables = [
            torch.tensor([[free.pop() for _ in range(columns)] for _ in range(MAX_ROWS)], dtype=torch.int32)
            for columns in needed
        ]
        self.attending = [index for index, group in enumerate(self.groups) if group.is_attention]
        self.tables = [
            TableContext(
                BACKENDS.resolve(backend)(distinct(specs, self.groups[index].layers), dtype, torch.device("cpu"))
            )
            for index in self.attending
        ]
        self.step = StateStep()
        states = layer_states(specs, self.pool, self.block_tables, self.step, state_backend(torch.device("cpu")))
        self.layers = layer_contexts(specs, self.tables, self.pool, states)
        self.taps = NO_TAPS
        self.rows: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def _attention_inputs(self, index: int, rows: torch.Tensor, inputs: StateInputs) -> AttentionInputs:
        size, table = self.groups[index].block_size, self.block_tables[index]
        token_rows, positions = inputs.token_rows, inputs.positions
        slots = table[token_rows, positions // size].long() * size + positions % size
        return AttentionInputs(
            num_rows=len(rows),
            num_tokens=len(positions),
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            block_size=size,
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            block_table=table[rows],
            slot_mapping=slots,
        )

    @torch.inference_mode()
    def compute(self, chunks: Mapping[str, Sequence[int]], *, last: bool = False) -> torch.Tensor:
        """Run the next tokens of each row; logits [tokens, vocab] of all, or of each row's `last`."""
        rows = torch.tensor([self.rows.setdefault(row, len(self.rows)) for row in chunks])
        known = [self.lengths.get(row, 0) for row in chunks]
        counts = [len(tokens) for tokens in chunks.values()]
        lengths = [before + count for before, count in zip(known, counts, strict=True)]
        query_start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        inputs = StateInputs(
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            rows=rows,
            query_start=query_start,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            positions=torch.cat([torch.arange(a, b) for a, b in zip(known, lengths, strict=True)]),
        )
        self.step.prepare(inputs)
        for index, table in zip(self.attending, self.tables, strict=True):
            table.prepare(self._attention_inputs(index, rows, inputs), for_capture=False)
        order = torch.arange(len(rows) + 1, dtype=torch.int32)
        tokens = LogitTokens(query_start[1:].long() - 1, order[:-1].long(), inputs.seq_lens.long(), order)
        context = ForwardContext(
            layers=self.layers,
            tables=self.tables,
            positions=inputs.positions,
            logit_tokens=tokens if last else None,
            taps=self.taps,
        )
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        with forward_context(context):
            hidden = self.model.forward(ids, context.positions)
        self.step.finish()
        spoil(layer.states for layer in self.layers)
        self.lengths.update(zip(chunks, lengths, strict=True))
        logits: torch.Tensor = self.model.logits(hidden)
        return logits

    def step_of(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """As `compute`; [tokens, vocab] logits per row."""
        logits = self.compute(chunks)
        return dict(zip(chunks, logits.split([len(tokens) for tokens in chunks.values()]), strict=True))

    def run(self, tokens: Sequence[int], sizes: Sequence[int], row: str = "row") -> torch.Tensor:
        """All tokens of one row in chunks of the given sizes; the logits of all, [tokens, vocab]."""
        assert sum(sizes) == len(tokens)
        parts, done = [], 0
        for size in sizes:
            parts.append(self.compute({row: tokens[done : done + size]}))
            done += size
        return torch.cat(parts)

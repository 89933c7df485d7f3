"""A runner whose device does nothing: what is left of issuing a step is the host's part.

Owns the parts that stand in for a device's: graphs that replay nothing, writes that reach no tensor, a model and a
sampler without arithmetic. Does not know who plans the steps. Invariant: the host's work is the runner's own, but for
the calls of CUDA and Triton: a graph's launch, the writes' copy and kernel, events, pinned memory for results.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from octavo.cache.groups import CacheGroup
from octavo.device.batch import Batch, InputBuffers
from octavo.device.block_table import BlockTables
from octavo.device.graphs import EAGER, GraphKey, GraphPool, decode_keys, mixed_keys, verify_keys
from octavo.device.request_table import RequestTable
from octavo.device.staging import PinnedRing, WriteQueue
from octavo.ops.inputs.tensors import RowTensors
from octavo.plan import NewRow, StepLimits
from octavo.sampling.sampler import Sampler
from octavo.speculate.drafter import Drafter
from octavo.worker.results import NOTHING_TOLD, Told
from octavo.worker.runner import Runner

CPU = torch.device("cpu")
_VOCAB_SIZE = 8  # of logits that nobody reads


class _Ring(PinnedRing):
    """Memory that is free at once."""

    def __init__(self) -> None:
        self._slots = [torch.empty(0, dtype=torch.int32)]

    def take(self, num_words: int) -> tuple[torch.Tensor, Any]:
        if self._slots[0].numel() < num_words:
            self._slots[0] = torch.empty(2 * num_words, dtype=torch.int32)
        return self._slots[0], self

    def record(self) -> None:
        """The event of a slot."""


class _Graphs(GraphPool):
    """All sizes, of steps that are already done."""

    def __init__(self, max_num_rows: int, max_num_tokens: int, num_drafts: int) -> None:
        keys = [*decode_keys(max_num_rows), *mixed_keys(max_num_rows, max_num_tokens)]
        keys += verify_keys(max_num_rows, max_num_tokens, lambda rows: num_drafts) if num_drafts else []
        super().__init__(keys)
        self._outputs = {key: torch.zeros(key.num_tokens, _VOCAB_SIZE) for key in keys}

    def has(self, key: GraphKey, *_: object) -> bool:
        return key is not EAGER

    def replay(self, key: GraphKey, *_: object) -> torch.Tensor:
        return self._outputs[key]


class _Sampler(Sampler):
    def draw(self, logits: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits, logits


class _Drafter(Drafter):
    """Its drafts are proposed in the graphs that there are, and nowhere else."""

    def __init__(self, table: RowTensors, num_drafts: int) -> None:
        super().__init__(table)
        self._num_drafts = num_drafts

    @property
    def is_on(self) -> bool:
        return self._num_drafts > 0

    @property
    def captures(self) -> bool:
        return True

    def propose(self, *_: Any, **__: Any) -> None:
        """Nothing is written."""


class _Model(torch.nn.Module):
    arch = SimpleNamespace(num_layers=0)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class _State:
    def add(self, new: NewRow) -> None:
        """Nothing is kept."""


class _Pool:
    data = torch.zeros((1, 1, 1), dtype=torch.uint8)


class NullRunner(Runner):
    """Issues steps, and has a token for each row that samples."""

    def __init__(self, groups: Sequence[CacheGroup], limits: StepLimits, tokens: torch.Tensor) -> None:
        """tokens: [max_num_rows] int64, what rows "sample", by their place in the batch."""
        queue = WriteQueue(_Ring())
        queue._write_runs = cast(Any, lambda *_: None)
        requests = RequestTable(limits, device=CPU, queue=queue)
        tables = BlockTables(groups, limits, device=CPU, queue=queue)
        sampler = _Sampler(
            limits,
            vocab_size=_VOCAB_SIZE,
            device=CPU,
            tokens=requests.token_ids.data,
            prompt_lens=requests.prompt_len.data,
            queue=queue,
        )
        model, state, pool = (cast(Any, part()) for part in (_Model, _State, _Pool))
        buffers = InputBuffers(requests, tables, limits, device=CPU, queue=queue)
        graphs = _Graphs(limits.max_num_rows, limits.max_num_tokens, limits.max_num_drafts)
        drafter = _Drafter(requests.tensors, limits.max_num_drafts)
        super().__init__(model, state, pool, requests, tables, buffers, sampler, graphs, writes=queue, drafter=drafter)
        self._hidden = torch.zeros(limits.max_num_tokens, _VOCAB_SIZE)
        buffers.results.copy_(tokens[:, None])
        buffers.counts.fill_(1 + limits.max_num_drafts // 2)

    def _commit(self, *_: Any, **__: Any) -> None:
        """The results are there."""

    def _sample_of(self, *_: Any) -> Any:
        return None

    def _forward(self, batch: Batch, **_: Any) -> torch.Tensor:
        return self._hidden[: batch.total_tokens]

    def _verify(self, *_: Any) -> Told:
        return NOTHING_TOLD

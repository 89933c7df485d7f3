"""FieldTables: what attention mods read of each request, one device table per field.

Owns the tables, by row. Does not know what a mod does with them. Invariant: a row that a request entered holds its
value, for a field per token one for each position the request can reach; addresses do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from octavo.device.staging import Queue, StagedTensor
from octavo.plan import StepLimits
from octavo.request.fields import FieldSpec

_DTYPES = {"int": torch.int32, "float": torch.float32}
NO_TABLES: Mapping[str, torch.Tensor] = {}


class FieldTables:
    """`data[name]` is [max_num_rows + 1], or [max_num_rows + 1, max_model_len] for a field per token."""

    def __init__(
        self,
        specs: Sequence[FieldSpec],
        limits: StepLimits,
        *,
        device: torch.device,
        queue: Queue,
        known: Mapping[str, torch.Tensor] = NO_TABLES,
    ) -> None:
        """Zeros at first; one more row than `max_num_rows`, the null row. `queue`: see StagedTensor.

        known: tables of others' that mods read as well, by name, [max_num_rows + 1] int32.
        """
        self._specs, self._max_model_len = tuple(specs), limits.max_model_len
        num_rows = limits.max_num_rows + 1
        self._tables = {
            spec.name: StagedTensor(
                num_rows, limits.max_model_len if spec.per_token else 0, _DTYPES[spec.kind], device, queue
            )
            for spec in specs
        }
        self.data: Mapping[str, torch.Tensor] = {
            **{name: table.data for name, table in self._tables.items()},
            **known,
        }

    def add(self, row: int, extra_args: Mapping[str, Any] | None) -> None:
        """Stage the values of a request that entered `row`. They were checked before."""
        for spec in self._specs:
            values = spec.read(extra_args).expand(self._max_model_len if spec.per_token else 1)
            self._tables[spec.name].stage(row, 0, values)

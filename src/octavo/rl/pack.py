"""Pack: sequences of any lengths, one behind the other, as the rows of a paged cache that lives for one layer's pass.

Owns where each sequence's tokens and slots lie, and the attention backends that were prepared for them. Does not know
models. Invariant: a sequence is computed whole, from position 0, and a backend's bits depend on a sequence alone; so
how sequences are packed changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.attention.base import BACKENDS, NO_TENSORS, AttentionBackend, AttentionInputs, LayerTensors, Setup
from octavo.attention.mods import NO_MODS, PROMPT_LENGTH
from octavo.cache.specs import AttentionSpec
from octavo.ops import native
from octavo.ops.backward.rows import Rows

BLOCK_SIZE = 16  # tokens; backends of a GPU take its multiples, and any size gives the same bits
NO_TOKEN = -1  # a target that nobody asks for


class Place(NamedTuple):
    """Where one sequence lies."""

    token: int  # its first, among the pack's
    slot: int  # of its first token; the others follow
    length: int


class Pack:
    """Sequences one behind the other: [tokens] of all of them is the first axis of every tensor of a forward."""

    def __init__(
        self,
        lengths: Sequence[int],
        ids: Tensor | None = None,
        *,
        device: torch.device | str = "cpu",
        fields: Mapping[str, Tensor] | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> None:
        """`lengths`: tokens of each sequence. ids: [tokens] int64, if they are known. Raises ValueError for bad ones.

        fields: [sequences] or [sequences, tokens], what the attention mods read of each sequence, by the field's name.
        prompt_lengths: tokens of each sequence that were given and not drawn, which mods that look ahead need.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths must be one number of tokens or more, each at least 1, got {list(lengths)}")
        self.lengths, self.device = tuple(int(length) for length in lengths), torch.device(device)
        self.num_tokens, self.longest = sum(self.lengths), max(self.lengths)
        if ids is not None and ids.shape != (self.num_tokens,):
            raise ValueError(f"ids must be [{self.num_tokens}], the sum of lengths, got {list(ids.shape)}")
        if ids is not None and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise ValueError(f"ids must be whole numbers, got {ids.dtype}")
        self.ids = None if ids is None else ids.to(self.device, torch.int64)
        self._ids_below = 0  # all ids are known to be
        self.tables = {name: table.to(self.device) for name, table in (fields or {}).items()}  # as mods read them
        if prompt_lengths is not None:
            known = torch.tensor(list(prompt_lengths), dtype=torch.int32, device=self.device)
            if known.shape != (len(self.lengths),):
                raise ValueError(f"prompt_lengths must be {len(self.lengths)} numbers, got {len(known)}")
            self.tables[PROMPT_LENGTH.spec.name] = known
        blocks = [-(-length // BLOCK_SIZE) for length in self.lengths]
        starts = list(itertools.accumulate(self.lengths, initial=0))
        first = list(itertools.accumulate(blocks, initial=1))  # block 0 is the null block
        self.num_slots = first[-1] * BLOCK_SIZE
        self.places = [
            Place(*facts) for facts in zip(starts, [BLOCK_SIZE * b for b in first], self.lengths, strict=False)
        ]
        counts = torch.tensor(self.lengths)
        positions = torch.cat([torch.arange(length) for length in self.lengths])
        slots = positions + torch.tensor([place.slot for place in self.places]).repeat_interleave(counts)
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, (count, begin) in enumerate(zip(blocks, first, strict=False)):
            table[row, :count] = torch.arange(begin, begin + count)
        self.positions, self.slots = positions.to(self.device), slots.to(self.device)
        self.inputs = AttentionInputs(
            num_rows=len(blocks),
            num_tokens=self.num_tokens,
            max_query_len=self.longest,
            max_seq_len=self.longest,
            min_query_len=min(self.lengths),
            block_size=BLOCK_SIZE,
            query_start=torch.tensor(starts, dtype=torch.int32).to(self.device),
            seq_lens=counts.to(self.device, torch.int32),
            block_table=table.to(self.device),
            slot_mapping=self.slots,
            rows=torch.arange(len(blocks), device=self.device),
        )
        rooms = [BLOCK_SIZE * count for count in blocks]
        self.rows = Rows.of(self.lengths, starts[:-1], [place.slot for place in self.places], rooms, self.device)
        self._backends: dict[tuple[AttentionSpec, torch.dtype, str, bool], AttentionBackend] = {}

    @classmethod
    def of(
        cls,
        sequences: Iterable[Sequence[int]],
        *,
        device: torch.device | str = "cpu",
        fields: Mapping[str, Tensor] | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> Pack:
        """The pack of sequences of token ids, ids included."""
        known = [list(sequence) for sequence in sequences]
        ids = torch.tensor([token for sequence in known for token in sequence])
        return cls(
            [len(sequence) for sequence in known], ids, device=device, fields=fields, prompt_lengths=prompt_lengths
        )

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError unless all ids lie in 0 .. vocab_size - 1. Waits for the device the first time."""
        if self.ids is None or 0 < self._ids_below <= vocab_size:
            return
        least, most = int(self.ids.min()), int(self.ids.max())
        if least < 0 or most >= vocab_size:
            raise ValueError(f"ids of a Pack must lie in 0 .. {vocab_size - 1}, got {least} .. {most}")
        self._ids_below = most + 1

    def next_tokens(self) -> Tensor:
        """[tokens] int64: the token behind each one; NO_TOKEN behind a sequence's last.

        Raises ValueError for a pack without ids.
        """
        if self.ids is None:
            raise ValueError("this Pack has lengths alone: give it ids, or name the targets")
        targets = torch.full_like(self.ids, NO_TOKEN)
        targets[:-1] = self.ids[1:]
        targets[[place.token + place.length - 1 for place in self.places]] = NO_TOKEN
        return targets

    def split(self, values: Tensor) -> list[Tensor]:
        """values [tokens, ...] -> those of each sequence."""
        return list(values.split(self.lengths))

    def new_states(self, num_kv_heads: int, channels: int, dtype: torch.dtype) -> Tensor:
        """A cache of one layer: [slots, kv_heads, channels], zeros."""
        return torch.zeros(self.num_slots, num_kv_heads, channels, dtype=dtype, device=self.device)

    def attend(
        self,
        q: Tensor,
        states: Tensor,
        spec: AttentionSpec,
        backend: str | None = None,
        layer: LayerTensors = NO_TENSORS,
    ) -> Tensor:
        """Attention of q [tokens, heads, head_size] over states [slots, kv_heads, channels] -> [tokens, heads, values].

        `values` is head_size, or the latent spec's value_size. backend: an attention backend's name; None: the one
        that an engine takes by itself. layer: the tensors that the layer brings. Without gradients.
        """
        name = backend or _usual_backend(spec, q.dtype, self.device)
        key = spec, q.dtype, name, native.multiplies_in_pairs()  # a backend keeps the chain that it was made in
        made = self._backends.get(key)
        if made is None:
            made = self._backends[key] = self._prepared(spec, q.dtype, name)
        out = q.new_empty(*q.shape[:2], spec.value_size or spec.head_size)
        made.run(q, cache_view(states), spec, out, layer)
        return out

    def _prepared(self, spec: AttentionSpec, dtype: torch.dtype, name: str) -> AttentionBackend:
        """A backend that has planned for the pack's rows. Raises ValueError for mods that read what there is not."""
        lacking = [field.name for field in spec.mods.specs if field.name not in self.tables]
        if lacking:
            wrong = "prompt_lengths" if lacking == [PROMPT_LENGTH.spec.name] else f"fields {', '.join(lacking)}"
            raise ValueError(f"attention mod {spec.mods.name} reads what the pack was not given: make it with {wrong}")
        setup = Setup(
            max_num_rows=len(self.lengths),
            max_num_tokens=self.num_tokens,
            max_model_len=self.longest,
            num_blocks=self.num_slots // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            fields=self.tables,
        )
        made = BACKENDS.resolve(name)([spec], dtype, self.device, setup)
        made.prepare(self.inputs)
        return made


def cache_view(states: Tensor) -> Tensor:
    """states [slots, kv_heads, channels] as backends take a cache: [blocks, kv_heads, BLOCK_SIZE, channels]."""
    return states.view(-1, BLOCK_SIZE, *states.shape[1:]).transpose(1, 2)


def _usual_backend(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
    """The attention backend that an engine takes where its settings name none."""
    if device.type == "cuda":
        return "flex" if spec.mods is not NO_MODS else "mla" if spec.value_size else "paged"
    return "cpu" if native.available() and spec.mods is NO_MODS and dtype in native.DTYPE_CODES else "reference"

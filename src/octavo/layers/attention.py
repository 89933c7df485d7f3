"""Attention: the weights around one layer's attention, and the rotary tables that layers share.

Owns one layer's place in the model (its number, its spec) and its projections and norms. Operators turn channel i of
a head's first half with channel i of its second: where a checkpoint's channels 2i and 2i + 1 turn together, the rows
that make q and k are put into that order once, which changes no product of a query and a key. Does not know blocks,
rows, backends or in which order a decoder layer computes. Invariant: a norm's offset is applied once, at `finalize`.
"""

from __future__ import annotations

import dataclasses

import torch

from octavo.attention.base import NO_TENSORS, FusedRopeBackend, current_context
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch, Rope
from octavo.layers.base import Layer
from octavo.layers.chain import line
from octavo.layers.linear import Linear
from octavo.ops.gemm import unpack
from octavo.ops.gemm.fused import linear_of_few
from octavo.ops.rope import Rotation, qk_norm_rope_store, rope_table


class RotaryTable(Layer):
    """Cosines and sines of every position, shared by the layers of one rotary embedding."""

    cos_sin: torch.Tensor  # [max_position, rotary_size] float32

    def __init__(self, rope: Rope, head_size: int, max_position: int) -> None:
        """The table is computed by `finalize`."""
        super().__init__()
        self._rope = rope
        self._shape = (head_size, max_position)

    def finalize(self, quantization: str | None) -> None:
        """Compute the table: it is nobody's weight."""
        facts = dataclasses.asdict(self._rope)
        del facts["interleaved"]  # which channels turn together: not the table's business
        self.cos_sin = rope_table(*self._shape, **facts)


class _PairedLinear(Linear):
    """q, k and v in one product, of a checkpoint whose channels 2i and 2i + 1 of q and of k turn together."""

    def __init__(self, size: int, spec: AttentionSpec, rotary_size: int, dtype: torch.dtype, *, bias: bool) -> None:
        """`rotary_size`: channels of a head that turn."""
        super().__init__(size, _projections(spec), dtype, bias=bias, rest_from="k")
        head = [*range(0, rotary_size, 2), *range(1, rotary_size, 2), *range(rotary_size, spec.head_size)]
        self._num_rotated, self._order = spec.num_heads + spec.num_kv_heads, head

    def finalize(self, quantization: str | None) -> None:
        """Put the rows of each head of q and k into the operators' order, then pack."""
        for parameter in self.parameters(recurse=False):
            heads = parameter[: self._num_rotated * len(self._order)].unflatten(0, (-1, len(self._order)))
            heads.copy_(heads[:, self._order])
        super().finalize(quantization)

    def declared(self, name: str) -> torch.Tensor | None:
        """With the rows of each head where the checkpoint has them."""
        kept = unpack(self.packed) if name == "weight" else self.bias
        if kept is None:
            return None
        theirs = torch.tensor(self._order).argsort()
        heads = kept[: self._num_rotated * len(self._order)].unflatten(0, (-1, len(self._order)))[:, theirs]
        return torch.cat([heads.flatten(0, 1), kept[self._num_rotated * len(self._order) :]])


def _projections(spec: AttentionSpec) -> dict[str, int]:
    q_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    return {"q": q_size, "k": kv_size, "v": kv_size}


class Attention(Layer):
    """Attention of layer number `index`. `norm_offset`: as RMSNorm's, for q and k norms."""

    rotary: RotaryTable
    q_norm: torch.Tensor | None  # [head_size] float32
    k_norm: torch.Tensor | None

    def __init__(
        self,
        index: int,
        spec: AttentionSpec,
        rotary: RotaryTable,
        arch: Arch,
        dtype: torch.dtype,
        *,
        qk_norm: bool = False,
        norm_offset: float = 0.0,
        in_size: int = 0,
    ) -> None:
        """`qk_norm`: an RMS norm on each head of q and k. in_size: of what `qkv` takes; 0: arch.hidden_size."""
        super().__init__()
        self.index = index
        self.spec = spec
        self.tensors = NO_TENSORS  # what it brings to each call of a backend
        self.stored_scales: tuple[torch.Tensor, torch.Tensor] | None = None  # of a float8 cache, from the checkpoint
        self.__dict__["rotary"] = rotary  # a reference, not a child: the model owns it
        self.norm_eps = arch.norm_eps
        self._norm_offset = norm_offset
        projections, bias, rope = _projections(spec), arch.attention_bias, arch.layers[index].rope
        if rope.interleaved:
            assert not qk_norm, "norms of single channels would have to change places too"
            rotary_size = rope.rotary_size or spec.head_size
            self.qkv: Linear = _PairedLinear(in_size or arch.hidden_size, spec, rotary_size, dtype, bias=bias)
        else:
            self.qkv = Linear(in_size or arch.hidden_size, projections, dtype, bias=bias, rest_from="k")
        self.output = Linear(projections["q"], arch.hidden_size, dtype, bias=arch.output_bias)
        for name in ("q_norm", "k_norm"):
            if qk_norm:
                self.declare(name, (spec.head_size,), torch.float32, dummy=1.0 - norm_offset)
            else:
                setattr(self, name, None)

    def declared(self, name: str) -> torch.Tensor | None:
        """The norms, unless an offset is in them."""
        value = self.__dict__.get(name)
        return value if isinstance(value, torch.Tensor) and not self._norm_offset else None

    def finalize(self, quantization: str | None) -> None:
        """Apply the offset to the norms, if there are any."""
        super().finalize(quantization)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and self._norm_offset:
                norm.add_(self._norm_offset)

    @line("rope_store")
    def rope_and_store(self, qkv: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_size] of what `qkv` gave, normed if the layer norms heads, and rotated.

        K is normed and rotated too, and stored with V in the tokens' slots.
        """
        return self._rope_and_store(qkv, self.spec.num_heads)

    def _rope_and_store(self, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """The same of so many heads of q: all, or none."""
        context, spec, tensors = current_context(), self.spec, self.tensors
        own = context.layers[self.index]
        return qk_norm_rope_store(
            qkv,
            context.positions,
            self.rotary.cos_sin,
            self.q_norm if num_heads else None,
            self.k_norm,
            self.norm_eps,
            num_heads,
            spec.num_kv_heads,
            spec.head_size,
            own.cache,
            own.inputs.slot_mapping,
            key_scale=tensors.key_scale,
            value_scale=tensors.value_scale,
        )

    @line("attend")
    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """What each query's head sees of the cache, [tokens, heads * head_size]."""
        own, attended = current_context().layers[self.index], torch.empty_like(q)
        own.backend.run(q, own.cache, self.spec, attended, self.tensors)
        return attended.flatten(1)

    def store(self, x: torch.Tensor) -> None:
        """Store K and V of tokens x [tokens, size], whose q nobody asks for."""
        rest, bias, num_heads = self.qkv.rest, self.qkv.bias, 0
        if rest is None:
            rest, num_heads = self.qkv.packed, self.spec.num_heads
        bias = None if bias is None else bias[-rest.n :]
        self._rope_and_store(linear_of_few(x, rest, bias), num_heads)

    def project_and_attend(self, x: torch.Tensor) -> torch.Tensor:
        """`attend_projection` of what `qkv` gives of x [tokens, size]."""
        return self.attend_projection(linear_of_few(x, self.qkv.packed, self.qkv.bias))

    def attend_projection(self, projected: torch.Tensor) -> torch.Tensor:
        """What `attend` gives of `rope_and_store` of what `qkv` gave [tokens, channels]: in one kernel, if it can.

        As in steps, in a graph of rows none of which reads what another one stores.
        """
        context, spec = current_context(), self.spec
        own = context.layers[self.index]
        backend, is_apart = own.backend, own.inputs.max_query_len == 1 or own.inputs.apart
        if context.for_capture and is_apart and isinstance(backend, FusedRopeBackend):
            rotation = Rotation(
                positions=context.positions,
                cos_sin=self.rotary.cos_sin,
                q_norm=self.q_norm,
                k_norm=self.k_norm,
                eps=self.norm_eps,
                slot_mapping=own.inputs.slot_mapping,
                key_scale=self.tensors.key_scale,
                value_scale=self.tensors.value_scale,
            )
            if backend.rotates(rotation, own.cache, spec):
                attended = projected.new_empty(projected.shape[0], spec.num_heads, spec.head_size)
                backend.run_fused_rope(projected, rotation, own.cache, spec, attended)
                return attended.flatten(1)
        return self.attend(self._rope_and_store(projected, spec.num_heads))


def plain_specs(arch: Arch) -> list[AttentionSpec]:
    """The attention of each layer, where layers differ by their windows at most; of one without, what it would be."""
    specs = {
        kind: AttentionSpec(
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_size=arch.head_size,
            scale=arch.attention_scale,
            window=kind.window,
        )
        for kind in set(arch.layers)
    }
    return [specs[kind] for kind in arch.layers]


def rotary_tables(arch: Arch) -> dict[Rope, RotaryTable]:
    """One table of whole heads for each rotary embedding of the layers that attend."""
    ropes = {kind.rope for kind in arch.layers if kind.mixer == "attention"}
    return {rope: RotaryTable(rope, arch.head_size, arch.max_position) for rope in ropes}

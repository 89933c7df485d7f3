"""The form of a layer that the standard operators of `octavo.ops.decoder` know: most families' own.

Owns what that form is and how a layer's weights become operands. Does not know steps or which operator runs when.
Invariant: what has this form computes what the operators compute, whichever family it is of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.layers.attention import Attention
from octavo.layers.chain import Line
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.ops.decoder import DecoderLayerOperands, DeltaLayerOperands, PostOperands
from octavo.states.base import LayerStates, NativeNets

if TYPE_CHECKING:  # where a model has such layers they are loaded
    from octavo.layers.mixers.delta_net import GatedDeltaNet
    from octavo.layers.mixers.gated_attention import GatedAttention

_BEGINNING = ("norm", "linear", "rope_store", "attend")
_ENDS = (
    ("linear", "add", "norm", "mlp", "add"),
    ("linear", "norm", "add", "norm", "mlp", "norm", "add"),
    ("linear", "add", "norm", "own", "add"),  # experts, or an MLP with biases: it runs by itself
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standard:
    """The parts of such a layer."""

    input_norm: RMSNorm
    qkv: Linear
    attention: Attention
    output: Linear
    attention_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: Mlp | None
    mlp_out_norm: RMSNorm | None

    def operands(self) -> DecoderLayerOperands:
        """The finalized weights, as the operators take them."""
        attention, spec, mlp = self.attention, self.attention.spec, self.mlp
        return DecoderLayerOperands(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            eps=self.input_norm.eps,
            input_norm=self.input_norm.weight,
            qkv=self.qkv.packed,
            keys_values=self.qkv.rest,
            qkv_bias=self.qkv.bias,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            head_eps=attention.norm_eps,
            cos_sin=attention.rotary.cos_sin,
            output=self.output.packed,
            output_bias=self.output.bias,
            attention_norm=None if self.attention_norm is None else self.attention_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            gate_up=None if mlp is None else mlp.gate_up.packed,
            down=None if mlp is None else mlp.down.packed,
            activation="silu" if mlp is None else mlp.activation,
            mlp_out_norm=None if self.mlp_out_norm is None else self.mlp_out_norm.weight,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            key_scale=attention.tensors.key_scale,
            value_scale=attention.tensors.value_scale,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """What stands behind what mixes a layer's tokens: a product, the sum, a norm, and an MLP that operators know.

    Or the same with norms of what the product and the MLP give.
    """

    mixer: Mixer | None  # None: what mixes the tokens is not all that stands ahead, or operators do not know it
    output: Linear
    mixer_norm: RMSNorm | None  # of the product
    mlp_norm: RMSNorm
    mlp: Mlp | None
    mlp_out_norm: RMSNorm | None

    def operands(self) -> PostOperands:
        """The finalized weights, as the operator takes them."""
        return PostOperands(
            eps=self.mlp_norm.eps,
            output=self.output.packed,
            output_bias=self.output.bias,
            attention_norm=None if self.mixer_norm is None else self.mixer_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            gate_up=None if self.mlp is None else self.mlp.gate_up.packed,
            down=None if self.mlp is None else self.mlp.down.packed,
            activation="silu" if self.mlp is None else self.mlp.activation,
            mlp_out_norm=None if self.mlp_out_norm is None else self.mlp_out_norm.weight,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """A norm and a gated delta net, or gated attention, that operators know."""

    input_norm: RMSNorm
    net: GatedDeltaNet | None
    attention: GatedAttention | None  # one of the two

    def operands(self, tail: PostOperands, states: LayerStates) -> DecoderLayerOperands | DeltaLayerOperands:
        """The finalized weights of the whole layer, which ends with `tail`. states: of one engine's layer."""
        net, attention, norm = self.net, self.attention, self.input_norm.weight
        behind = {field.name: getattr(tail, field.name) for field in dataclasses.fields(tail)}
        if net is not None:
            backend = states.backend
            address = backend.net_address(states, net.operands) if isinstance(backend, NativeNets) else 0
            return DeltaLayerOperands(**behind, input_norm=norm, mix=net.forward, net=address)
        assert attention is not None, "a net or attention"
        spec = attention.spec
        return DecoderLayerOperands(
            **behind,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            input_norm=norm,
            qkv=attention.qkv.packed,
            keys_values=None,
            qkv_bias=attention.qkv.bias,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            head_eps=attention.norm_eps,
            cos_sin=attention.rotary.cos_sin,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            mix=attention.forward,
            key_scale=attention.tensors.key_scale,
            value_scale=attention.tensors.value_scale,
        )


def _mixer(lines: Sequence[Line], eps: float) -> Mixer | None:
    """Of lines ahead of an output product, whose layer's other norm has `eps`."""
    if tuple(line.kind for line in lines) != ("norm", "own"):
        return None
    from octavo.layers.mixers.delta_net import GatedDeltaNet
    from octavo.layers.mixers.gated_attention import GatedAttention

    norm, own = (line.owner for line in lines)
    net = own if type(own) is GatedDeltaNet else None
    attention = own if type(own) is GatedAttention else None
    if (net is None and attention is None) or "forward" in own.__dict__ or norm.eps != eps:
        return None
    product = own.project if attention is None else own.qkv
    is_plain = product.called_as == "linear" and product.out_dtype is None
    is_known = product.bias is None or attention is not None
    return Mixer(input_norm=norm, net=net, attention=attention) if is_plain and is_known else None


def tail_form(lines: Sequence[Line]) -> Tail | None:
    """The end of a layer of these lines whose tokens a line of its own mixes; None of another."""
    kinds = tuple(line.kind for line in lines)
    end = next((end for end in _ENDS if kinds[-len(end) :] == end), ())
    if "attend" in kinds or not end:
        return None
    owners = [line.owner for line in lines[-len(end) :]]
    norms = [owner for owner, kind in zip(owners, end, strict=True) if kind == "norm"]
    output, mlp = owners[0], owners[end.index("mlp")] if "mlp" in end else None
    if output.out_dtype is not None or not (mlp is None or _is_plain(mlp)) or len({norm.eps for norm in norms}) > 1:
        return None
    mixer = _mixer(lines[: -len(end)], norms[0].eps) if len(norms) == 1 else None
    mixer_norm, mlp_norm, mlp_out_norm = norms if len(norms) == 3 else (None, norms[0], None)
    return Tail(
        mixer=mixer, output=output, mixer_norm=mixer_norm, mlp_norm=mlp_norm, mlp=mlp, mlp_out_norm=mlp_out_norm
    )


def _is_plain(mlp: Mlp) -> bool:
    """Whether both of its products are what the operators compute: they take the weights, and ask no layer."""
    return all(
        isinstance(each, Linear) and each.called_as == "linear" and each.bias is None and each.out_dtype is None
        for each in (mlp.gate_up, mlp.down)
    )


def standard_form(lines: Sequence[Line]) -> Standard | None:
    """The parts of a layer of these lines; None where it has another form."""
    kinds = tuple(line.kind for line in lines)
    if kinds[:4] != _BEGINNING or kinds[4:] not in _ENDS:
        return None
    norms = [line.owner for line in lines if line.kind == "norm"]
    input_norm, qkv, attention, attending, output = (line.owner for line in lines[:5])
    attention_norm, mlp_norm, mlp_out_norm = (None, norms[1], None) if len(norms) == 2 else norms[1:]
    mlp = next((line.owner for line in lines if line.kind == "mlp"), None)
    is_known = (
        isinstance(attention, Attention)
        and attending is attention
        and type(attention).rope_and_store is Attention.rope_and_store
        and type(attention).attend is Attention.attend
        and qkv.rest_from == "k"
        and len({norm.eps for norm in norms}) == 1
        and qkv.out_dtype is output.out_dtype is None
        and (mlp is None or _is_plain(mlp))
    )
    if not is_known:
        return None
    return Standard(
        input_norm=input_norm,
        qkv=qkv,
        attention=attention,
        output=output,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        mlp=mlp,
        mlp_out_norm=mlp_out_norm,
    )

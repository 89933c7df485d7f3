"""A model family as a trainer runs it: the engine's own facts, weight map and layers, read without an engine.

Owns the way from an Octavo model on the meta device to a plan: what each layer's parameters are called in the trainer's
model, and which layer's forward runs (`octavo.rl.decoder`). Knows no family by name. Invariant: what the
engine would compute is planned whole or refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.attention.mods import NO_MODS, AttentionMods
from octavo.attention.mods.choice import with_mods
from octavo.attention.mods.loading import mods_of_layers
from octavo.cache.specs import AttentionSpec, StateSpec, with_state_dtype
from octavo.checkpoint.arch import Arch, Rope
from octavo.checkpoint.config_reader.checkpoint import arch_from_config
from octavo.checkpoint.config_reader.families import FAMILIES
from octavo.layers.base import Layer
from octavo.layers.embedding import Embedding, OutputHead, TiedEmbedding
from octavo.layers.norm import RMSNorm
from octavo.models import ARCHITECTURES
from octavo.models.base import Model, with_numbers
from octavo.models.causal_lm import CausalLM
from octavo.ops.rope import rope_table

STATE_DTYPES = ("float32", "bfloat16")
_MIXERS = ("delta", "conv")  # of layers with states, that parts with gradients run; and Mamba-2
_ONE_MIXER = "a converted layer has one of attention, gated delta nets, Mamba-2 and short convolutions"
_EXPERTS = "mlp.experts."
# Facts of Arch that the engine's layers read, or that no bit follows from. The ends read others, which their classes
# in `convert` name: a fact that nobody names is refused where it is not at its default.
LAYER_FACTS = {
    "name", "dtype", "intermediate_size", "num_heads", "num_kv_heads", "head_size", "max_position", "default_length",
    "layers", "moe_layers", "moe", "latent", "delta", "conv", "mamba", "activation", "attention_bias", "output_bias",
    "mlp_bias", "qk_norm", "head_gates", "norms_behind", "attention_scale", "eos_token_ids", "bos_token_id",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """What one layer's lines compute with."""

    layer: Layer  # the engine's, on the meta device: its forward runs
    spec: AttentionSpec | StateSpec
    rope: Rope
    names: Mapping[str, Sequence[str]]  # parameter of the engine's layer -> the trainer's, whose rows make it up
    routed: bool  # a router over experts stands in the place of the MLP

    @property
    def attends(self) -> bool:
        """Whether it keeps K and V, and turns what it keeps."""
        return isinstance(self.spec, AttentionSpec)

    @property
    def attention(self) -> AttentionSpec:
        """Of a layer that attends."""
        assert isinstance(self.spec, AttentionSpec), "the layer keeps a state"
        return self.spec

    @property
    def state(self) -> StateSpec:
        """Of a layer that keeps one."""
        assert isinstance(self.spec, StateSpec), "the layer attends"
        return self.spec


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FamilyPlan:
    """A trainer's model, as the engine would run it."""

    arch: Arch
    layers: Sequence[LayerPlan]
    norm_offset: float
    ends: Mapping[str, str]  # of this model: "norm.weight", "head.weight", "embedding.weight" -> the trainer's name
    own_ends: Sequence[str]  # what the family does at its ends otherwise than `CausalLM`


def plan_of(
    config: Mapping[str, Any],
    name: str,
    dtype: torch.dtype,
    mods: AttentionMods | None = None,
    max_model_len: int | None = None,
    state_dtype: str = "float32",
) -> FamilyPlan:
    """The plan of a model whose config.json is `config` and whose class is called `name`. Raises ValueError."""
    arch = arch_from_config({**config, "architectures": [name]}, f"the config of {name}")
    if state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype must be {' or '.join(STATE_DTYPES)}, got {state_dtype!r}")
    length = max_model_len or arch.default_length or arch.max_position
    if length > arch.max_position:
        raise ValueError(f"max_model_len={length} exceeds the {arch.max_position} positions of the model")
    arch = dataclasses.replace(arch, max_position=length)
    model = cast(Model, ARCHITECTURES.resolve(name)(arch, dtype))
    specs = _specs_of(model, arch, name, state_dtype)
    names = _names(model)
    own_mods = [NO_MODS] * arch.num_layers
    if mods is not None:
        own_mods = mods_of_layers(mods, arch.num_layers, arch.layers_of_each)
    layers = []
    for index, kind in enumerate(arch.layers):
        prefix = f"layers.{index}."
        layers.append(
            LayerPlan(
                layer=cast(Layer, cast(nn.Module, model).get_submodule(prefix[:-1])),
                spec=_with_own(specs[index], own_mods[index]),
                rope=kind.rope,
                names={path.removeprefix(prefix): found for path, found in names.items() if path.startswith(prefix)},
                routed=index in arch.moe_layers,
            )
        )
    ends = {path: found[0] for path, found in names.items() if not path.startswith("layers.")}
    norm_offset = getattr(model, "norm_offset", 0.0)
    return FamilyPlan(arch=arch, layers=layers, norm_offset=norm_offset, ends=ends, own_ends=_own_ends(model))


def _specs_of(model: Model, arch: Arch, name: str, state_dtype: str) -> list[AttentionSpec | StateSpec]:
    """What each layer keeps. Raises ValueError for layers that keep what no part with gradients reads."""
    if getattr(type(model), "run_layers", CausalLM.run_layers) is not CausalLM.run_layers:
        reason = "its layers run in parts, each with a state of its own"
        raise ValueError(f"octavo.rl does not run {name} yet: {reason}, and {_ONE_MIXER}")
    specs: list[AttentionSpec | StateSpec] = []
    for index, kind in enumerate(arch.layers):
        spec = model.layer_specs[index]
        if isinstance(spec, AttentionSpec):
            specs.append(spec)
        elif isinstance(spec, StateSpec) and (kind.mixer in _MIXERS or (arch.mamba and arch.mamba.num_heads)):
            specs.append(with_state_dtype(spec, state_dtype))
        else:
            kept = "nothing of a sequence (an MLP or experts alone)"
            if isinstance(spec, StateSpec):
                kept = f"a state ({kind.mixer})" + " of Mamba-1" * (kind.mixer == "mamba")
            raise ValueError(f"octavo.rl does not run {name} yet: its layer {index} keeps {kept}, and {_ONE_MIXER}")
    return specs


def _with_own(spec: AttentionSpec | StateSpec, mods: AttentionMods) -> AttentionSpec | StateSpec:
    return with_mods(spec, mods) if isinstance(spec, AttentionSpec) else spec


def _own_ends(model: Model) -> list[str]:
    """What a model does ahead of its layers and behind them that `octavo.rl.convert` does not know."""
    methods = ("forward", "logits", "draw")
    found = [f"a method {name}" for name in methods if getattr(type(model), name) is not getattr(CausalLM, name)]
    known = {"embedding": (Embedding, TiedEmbedding), "norm": (RMSNorm,), "head": (OutputHead,)}
    parts = {name: getattr(model, name, None) for name in known}
    return found + [f"{type(parts[name]).__name__} as {name}" for name in known if type(parts[name]) not in known[name]]


def architecture_of(model: nn.Module) -> str:
    """The name by which the engine knows the model's class, through the classes that wrappers put before it."""
    for each in type(model).__mro__:
        if each.__name__ in FAMILIES:
            return each.__name__
    raise ValueError(
        f"octavo.rl does not run {type(model).__name__}: it runs what the engine runs, {', '.join(FAMILIES)}; "
        "a model that PEFT or another library wraps is to be merged or unwrapped first"
    )


def rotary_table(arch: Arch, rope: Rope, device: torch.device) -> Tensor:
    """The engine's table of the rotation, as long as the longest sequence."""
    facts = dataclasses.asdict(rope)
    del facts["interleaved"]
    size = arch.head_size if arch.latent is None else arch.latent.rope_size
    return rope_table(size, arch.max_position, **facts).to(device)


def _names(model: Model) -> dict[str, list[str]]:
    """Parameter of the engine's model -> the trainer's names, in the order of its rows; of experts, a checkpoint's."""
    held = {stored: own for own, stored in model.trainer_names.items()}
    theirs = {target: held.get(name, name) for name, target in model.weight_map.items()}
    found = {}
    for path, _ in cast(nn.Module, model).named_parameters():
        numbers = [part for part in path.split(".") if part.isdigit()]
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        module_path, _, own = path.rpartition(".")
        layer = cast(Layer, cast(nn.Module, model).get_submodule(module_path))
        shards = [""] if (pattern, "") in theirs else list(layer.shards(own))
        found[path] = [with_numbers(theirs[pattern, shard], numbers) for shard in shards]
    return found


class Parameters:
    """The trainer's parameters of one layer, by the engine's names. Looked up at each use: wrappers replace them."""

    def __init__(self, module: nn.Module, prefix: str, plan: LayerPlan) -> None:
        """`module`: the trainer's layer, whose parameters' names begin by `prefix` in its model."""
        self.module = module
        self._names = {
            path: [name.removeprefix(prefix) for name in names]
            for path, names in plan.names.items()
            if not path.startswith(_EXPERTS)
        }
        expert = next((names[0] for path, names in plan.names.items() if path.startswith(_EXPERTS)), "")
        self._places: dict[str, tuple[list[str], str]] = {}  # name -> its modules' names, its own
        self._experts = expert.removeprefix(prefix).partition(".experts.")[0] + ".experts"

    @property
    def experts(self) -> tuple[str, str]:
        """What the trainer's layer calls the two tensors that hold all experts of the engine's."""
        return f"{self._experts}.gate_up_proj", f"{self._experts}.down_proj"

    def __contains__(self, path: str) -> bool:
        """Whether the engine's layer has such a parameter."""
        return path in self._names

    def missing(self, others: Sequence[str] = ()) -> list[str]:
        """Names, and some others, that the trainer's layer lacks."""
        known = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return [name for names in (*self._names.values(), others) for name in names if name not in known]

    def unused(self, others: Sequence[str] = ()) -> list[str]:
        """Parameters of the trainer's layer that are neither the engine's nor among some others."""
        used = {name for names in (*self._names.values(), others) for name in names}
        return [name for name, own in self.module.named_parameters() if name not in used and own.numel()]

    def rows(self, path: str) -> list[Tensor]:
        """The parameters whose rows make up the engine's."""
        return [self.named(name) for name in self._names[path]]

    def one(self, path: str) -> Tensor | None:
        """The one parameter that is the engine's; None where it has none."""
        return self.rows(path)[0] if path in self._names else None

    def needed(self, path: str) -> Tensor:
        """The one parameter that is the engine's, which it has."""
        return self.rows(path)[0]

    def biases(self, path: str, layer: Layer, count: int) -> list[Tensor | None]:
        """Of the `count` weights of the engine's `layer`, in order; None where one has none."""
        rows = self.rows(path) if path in self._names else []
        if len(rows) == count:
            return list(rows)
        own = dict(zip(layer.shards("bias"), rows, strict=True)) if rows else {}
        return [own.get(projection) for projection in layer.shards("weight")] if own else [None] * count

    def named(self, name: str) -> Tensor:
        """A parameter by its name in the trainer's layer."""
        place = self._places.get(name)
        if place is None:
            *path, last = name.split(".")
            place = self._places[name] = path, last
        (path, last), module = place, self.module
        for part in path:
            module = module._modules.get(part) or getattr(module, part)
        own = module._parameters
        parameter: Tensor = own[last] if last in own else getattr(module, last)  # type: ignore[assignment]
        if hasattr(parameter, "to_local"):
            raise ValueError(f"{name} is sharded where its layer runs: wrap whole decoder layers with fully_shard")
        return parameter

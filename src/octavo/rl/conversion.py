"""convert: a transformers model whose forward becomes Octavo's, in place.

Owns what replaces the forward of the model, its trunk, its layers and its ends. Parameters, their names, modules and
hooks stay the trainer's: every module is called as before, so FSDP gathers and activation checkpointing works as with
any model. Invariant: a sequence's logits and log-probabilities have the bits of an engine with the same weights.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from octavo.attention.mods import AttentionMods
from octavo.rl.autograd.linear import linear
from octavo.rl.autograd.logprob import LogProbs, Support, head_logprob
from octavo.rl.autograd.norm import norm
from octavo.rl.autograd.outside import DTYPES, check_dtype
from octavo.rl.decoder import LayerRun, why_not
from octavo.rl.family import LAYER_FACTS, FamilyPlan, LayerPlan, Parameters, architecture_of, plan_of, rotary_table
from octavo.rl.pack import NO_TOKEN, Pack

_KEPT = "_octavo_forward"  # of a module: what its forward became


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What `octavo.rl.logprobs` asks of a converted model."""

    pack: Pack
    targets: Tensor
    temperature: float
    support: Support | None


@dataclasses.dataclass(eq=False)
class Converted:
    """What the replaced forwards of one model share."""

    plan: FamilyPlan
    dtype: torch.dtype | None
    backend: str | None
    tables: dict[tuple[int, torch.device], Tensor] = dataclasses.field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        """A copy of the model shares it: it holds nothing of the parameters."""
        return self

    def activations(self, weight: Tensor) -> torch.dtype:
        """The dtype of hidden states."""
        return self.dtype or weight.dtype

    def cos_sin(self, index: int, device: torch.device) -> Tensor:
        """The rotary table of layer `index`."""
        ropes = [layer.rope for layer in self.plan.layers]
        key = ropes.index(ropes[index]), device
        if key not in self.tables:
            self.tables[key] = rotary_table(self.plan.arch, ropes[index], device)
        return self.tables[key]


def convert(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    attention_mods: AttentionMods | None = None,
    attention_backend: str | None = None,
    max_model_len: int | None = None,
    state_dtype: str = "float32",
) -> nn.Module:
    """Make the forward of a transformers model Octavo's, in place, and return the model.

    dtype: the sampler's; None: the parameters' own. With bfloat16 and float32 parameters, matrices are rounded in
    every forward, as an engine of dtype="bfloat16" rounds those of a float32 checkpoint. attention_mods,
    attention_backend, max_model_len, state_dtype: as the engine's settings, where it has them (the length decides on
    rotations that depend on the longest request). Before or after `fully_shard`, once. Raises ValueError for a model
    that the engine does not run, and for what would change bits, by name.
    """
    name = architecture_of(model)
    facts = getattr(model, "config").to_dict()  # noqa: B009, a module's attributes are tensors and modules to mypy
    _refuse(model, facts)
    first = next(model.parameters()).dtype
    if (dtype or first) not in DTYPES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype or first}")
    plan = plan_of(facts, name, dtype or first, attention_mods, max_model_len, state_dtype)
    _refuse_ends(plan, name)
    shared = Converted(plan, dtype, attention_backend)
    try:
        trunk, head = model.get_submodule("model"), model.get_submodule("lm_head")
        own_norm = plan.ends["norm.weight"].removeprefix("model.").removesuffix(".weight")
        embedding, last = trunk.get_submodule("embed_tokens"), trunk.get_submodule(own_norm)
        layers = list(trunk.get_submodule("layers").children())
    except AttributeError as error:
        raise ValueError(f"octavo.rl does not run {name} as it is built here: {error}") from None
    runs = [
        _Layer(shared, index, Parameters(layer, f"model.layers.{index}.", own))
        for index, (layer, own) in enumerate(zip(layers, plan.layers, strict=True))
    ]
    for layer, run in zip(layers, runs, strict=True):
        _refuse_layer(layer, run.index)
        run.check()
    known = dict(model.named_parameters(remove_duplicate=False))
    missing = [each for each in plan.ends.values() if each not in known]
    if missing:
        raise ValueError(f"{name} has no parameters {', '.join(missing)}")
    for layer, run in zip(layers, runs, strict=True):
        _replace(layer, run)
    _replace(embedding, _Embedding(shared, embedding))
    _replace(last, _Norm(shared, last))
    _replace(head, _Head(shared, head))
    _replace(trunk, _Trunk(trunk, own_norm))
    _replace(model, _Model(model, name))
    return model


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward, which no compiler traces and which a copy of the module has a copy of.

    It is a method of the module, as a class's own is: libraries that wrap a forward and unwrap it again find it.
    """
    untraced = torch.compiler.disable(_call, reason="octavo.rl has operators of its own")
    module.__dict__[_KEPT] = _Kept(untraced, forward)
    module.__dict__["forward"] = types.MethodType(_converted, module)


class _Kept(functools.partial[Any]):
    """What the forward of a module became."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept(self.func, *copy.deepcopy(self.args, memo))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model that octavo.rl.convert has converted cannot be pickled: save its weights (save_pretrained, or its "
            "state_dict), and convert the model that loads them"
        )


def _call(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return forward(*arguments, **keywords)


def _converted(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """The forward of a converted module. Not decorated: Accelerate takes every decorator away."""
    kept = module.__dict__[_KEPT]
    if _is_to_be_computed_again(module):
        return module._gradient_checkpointing_func(functools.partial(kept, **keywords), *arguments)  # type: ignore[operator]
    return kept(*arguments, **keywords)


def _is_to_be_computed_again(module: nn.Module) -> bool:
    """Whether a layer's way back is to compute it anew, and nobody but its forward sees to it.

    transformers does so in the forward of a layer's class, whose place is taken here; older ones around the call.
    """
    is_asked = module.training and getattr(module, "gradient_checkpointing", False)
    is_layer = isinstance(module.__dict__[_KEPT].args[0], _Layer)
    return bool(is_asked) and is_layer and type(module).__call__ is nn.Module.__call__


def _root_of(model: nn.Module) -> nn.Module | None:
    """The converted model, or what a wrapper such as DistributedDataParallel holds."""
    kept = ((module, module.__dict__.get(_KEPT)) for module in model.modules())
    return next((module for module, each in kept if each is not None and isinstance(each.args[0], _Model)), None)


@contextlib.contextmanager
def in_force(model: nn.Module) -> Iterator[None]:
    """Whatever was put in the place of a converted model's forward since then stands aside: TRL puts its own there.

    Raises ValueError for a model that is not converted.
    """
    root = _root_of(model)
    if root is None:
        raise ValueError(f"{type(model).__name__} is not converted: call octavo.rl.convert(model) first")
    before = root.__dict__.pop("forward", None)
    root.__dict__["forward"] = types.MethodType(_converted, root)
    try:
        yield
    finally:
        del root.__dict__["forward"]
        if before is not None:
            root.__dict__["forward"] = before


def _refuse(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Raises ValueError for what would change bits or be lost."""
    if "forward" in model.__dict__:
        raise ValueError("the model's forward was replaced already, by octavo.rl.convert or another library")
    for field, value in config.items():
        if field.endswith(("dropout", "pdrop")) and isinstance(value, int | float) and value > 0:
            hint = f"set model.config.{field} = 0.0 before octavo.rl.convert"
            raise ValueError(f"config.{field}={value}: a sampler drops nothing, in train() as in eval(): {hint}")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype not in DTYPES:
            raise ValueError(f"{name} is {parameter.dtype}: octavo.rl trains float32, bfloat16 and float16")


def _refuse_ends(plan: FamilyPlan, name: str) -> None:
    """Raises ValueError for what the engine does at the ends of a model and the classes below do not."""
    of_drafters = "layers_of_each", "stream_unit"
    known = {*LAYER_FACTS, *_Embedding.facts, *_Norm.facts, *_Head.facts, *of_drafters}
    for field in dataclasses.fields(plan.arch):
        value = getattr(plan.arch, field.name)
        if field.name not in known and value != field.default:
            raise ValueError(f"octavo.rl does not run {name}: it does not read {field.name}={value}")
    if plan.own_ends:
        raise ValueError(f"octavo.rl does not run {name}: it has {', '.join(plan.own_ends)} of its own")


def _refuse_layer(layer: nn.Module, index: int) -> None:
    """Raises ValueError for what lies around or in a trainer's layer and would not run."""
    if hasattr(layer, "_checkpoint_wrapped_module"):
        raise ValueError(f"layer {index} is wrapped for checkpointing: convert the model first, then wrap it")
    for name, module in layer.named_modules():
        if name and (module._forward_hooks or module._forward_pre_hooks):
            raise ValueError(f"layer {index}: {name} has a hook, which would not run: layers are called whole")


@dataclasses.dataclass(eq=False)
class _Layer:
    """A decoder layer's forward: x [tokens, size] -> the same."""

    shared: Converted
    index: int
    weights: Parameters

    @property
    def plan(self) -> LayerPlan:
        """Not the layer's own: a copied one would hold mods that nothing knows again."""
        return self.shared.plan.layers[self.index]

    def check(self) -> None:
        """Raises ValueError for parameters that are not there or not used, and for layers without parts for them."""
        reason = why_not(self.plan.layer)
        if reason:
            raise ValueError(f"octavo.rl does not run layer {self.index}: {reason}")
        experts = self.weights.experts if self.plan.routed else ()
        for wrong, names in (("no", self.weights.missing(experts)), ("other", self.weights.unused(experts))):
            if names:
                why = "adapters are to be merged first, and a family's trainer_names must have this model's names"
                raise ValueError(f"layer {self.index} has {wrong} parameters {', '.join(names[:3])}: {why}")

    def __call__(self, x: Tensor, pack: Pack) -> Tensor:
        run = LayerRun(
            arch=self.shared.plan.arch,
            plan=self.plan,
            weights=self.weights,
            norm_offset=self.shared.plan.norm_offset,
            cos_sin=self.shared.cos_sin(self.index, x.device) if self.plan.attends else x.new_empty(0),
            backend=self.shared.backend,
            pack=pack,
        )
        return run.forward(x)


@dataclasses.dataclass(eq=False)
class _Embedding:
    facts: ClassVar = ("vocab_size", "hidden_size", "tied", "embedding_scale")
    shared: Converted
    module: nn.Module

    def __call__(self, ids: Tensor) -> Tensor:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        dtype, scale = self.shared.activations(weight), self.shared.plan.arch.embedding_scale
        check_dtype("dtype of octavo.rl.convert", dtype, weight.device)
        rows = torch.nn.functional.embedding(ids, weight).to(dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=dtype).item()


@dataclasses.dataclass(eq=False)
class _Norm:
    facts: ClassVar = ("norm_eps",)
    shared: Converted
    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        return norm(x, self.module.weight, self.shared.plan.arch.norm_eps, self.shared.plan.norm_offset)  # type: ignore[arg-type]


@dataclasses.dataclass(eq=False)
class _Head:
    """Of hidden states [rows, size]: logits float32, or what a request asks of them."""

    facts: ClassVar = ("logit_soft_cap", "logit_divisor")
    shared: Converted
    module: nn.Module

    def __call__(self, hidden: Tensor, ids: Tensor | None = None, request: Request | None = None) -> Tensor | LogProbs:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        soft_cap, divisor = self.shared.plan.arch.logit_soft_cap, self.shared.plan.arch.logit_divisor
        if ids is not None and request is not None:
            return head_logprob(hidden, weight, ids, request.temperature, request.support, soft_cap, divisor)
        logits = linear(hidden, weight, out_dtype=torch.float32)
        logits = logits if divisor == 1.0 else logits / divisor
        return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


@dataclasses.dataclass(eq=False)
class _Trunk:
    """From a pack's ids to hidden states behind the last norm, [tokens, size]. norm: what the trunk calls it."""

    module: nn.Module
    norm: str

    def __call__(self, pack: Pack | None = None, *_: Any, **others: Any) -> Tensor:
        if not isinstance(pack, Pack):
            named = ", ".join(others) or type(pack).__name__
            raise ValueError(f"the trunk of a converted model takes a Pack, not {named}: call octavo.rl.logprobs")
        x = self.module.get_submodule("embed_tokens")(pack.ids)
        for layer in self.module.get_submodule("layers").children():
            x = layer(x, pack=pack)
        hidden: Tensor = self.module.get_submodule(self.norm)(x)
        return hidden


@dataclasses.dataclass(eq=False)
class _Model:
    """The whole: transformers' call with ids [rows, length], or a request of `octavo.rl.logprobs`."""

    module: nn.Module
    name: str

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        octavo: Request | None = None,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        loss_facts = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        device = next(self.module.parameters()).device
        with torch.autocast(device.type, enabled=False):
            if octavo is not None:
                return self._score(octavo, device)
            wrong = [key for key, value in others.items() if not (value is None or value is False)]
            if wrong or input_ids is None:
                named = ", ".join(wrong) or "a call without input_ids"
                why = "it gives logits and a loss, and an engine samples (octavo.LLM, octavo serve)"
                raise ValueError(f"a model of octavo.rl.convert does not take {named}: {why}")
            loss_of = None
            if labels is not None:
                loss_function: Callable[..., Any] = self.module.loss_function  # type: ignore[assignment]
                loss_of = functools.partial(loss_function, labels=labels, **loss_facts)
            found = self._padded(input_ids, attention_mask, position_ids, loss_of, logits_to_keep)
            return_dict = getattr(self.module.config, "return_dict", True) if return_dict is None else return_dict
            return found if return_dict else found.to_tuple()

    def _score(self, request: Request, device: torch.device) -> LogProbs:
        pack = request.pack
        if pack.device.type != device.type:
            raise ValueError(f"the pack lies on {pack.device}, the model on {device}: give Pack device={device!r}")
        pack.check_ids(self.module.config.vocab_size)  # type: ignore[union-attr,arg-type]
        hidden = self.module.get_submodule("model")(pack)
        asked = (request.targets != NO_TOKEN).nonzero().flatten()
        if isinstance(request.support, Tensor):
            request = dataclasses.replace(request, support=request.support[asked])
        found = self.module.get_submodule("lm_head")(hidden[asked], ids=request.targets[asked], request=request)
        zeros = hidden.new_zeros(pack.num_tokens, dtype=torch.float32)
        return LogProbs(*(zeros.index_copy(0, asked, values) for values in found))

    def _padded(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        loss_of: Callable[..., Any] | None,
        keep: int | Tensor,
    ) -> Any:
        known = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        if known.shape != ids.shape:
            raise ValueError(f"attention_mask must be {list(ids.shape)}, 1 for tokens, got {list(known.shape)}")
        counted = known.long().cumsum(1) - 1
        holes = (known[:, 1:] & ~known[:, :-1]).sum(1) + known[:, 0] > 1
        if holes.any():
            place = int(holes.nonzero()[0])
            raise ValueError(f"attention_mask: row {place} has a hole: padding may stand before tokens or behind them")
        if positions is not None and not torch.equal(positions.expand_as(ids)[known], counted[known]):
            raise ValueError("position_ids must count each row's tokens from 0: give packed sequences as rows")
        rows = known.any(1)
        pack = Pack(known.sum(1)[rows].tolist(), ids[known], device=ids.device)
        hidden = self.module.get_submodule("model")(pack)
        numbers = torch.arange(len(hidden), device=ids.device)
        places = torch.full_like(ids, NO_TOKEN, dtype=torch.int64).masked_scatter_(known, numbers)
        places = places[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]  # all, if keep is 0
        wanted = places != NO_TOKEN
        logits = self.module.get_submodule("lm_head")(hidden[places[wanted]])
        padded = logits.new_zeros(*places.shape, logits.shape[1])
        padded = padded.index_put(wanted.nonzero(as_tuple=True), logits)
        loss = None if loss_of is None else loss_of(logits=padded, vocab_size=logits.shape[1])
        base = next(each for each in type(self.module).__mro__ if each.__name__ == self.name)
        return sys.modules[base.__module__].CausalLMOutputWithPast(loss=loss, logits=padded)

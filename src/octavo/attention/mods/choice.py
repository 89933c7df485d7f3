"""Which mods a model's layers get, and whether an engine's settings suit them.

Owns the folding of mods into what every backend knows, the choice of a backend that can run the rest, and the refusals.
Knows no kernel. Invariant: a mod is run, folded whole, or refused by name; it is never dropped.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

from octavo.attention.base import BACKENDS
from octavo.attention.mods import NO_MODS, PROMPT_LENGTH, AttentionMods, NativeForm, and_, within_prompt
from octavo.attention.mods.loading import load_mods, mods_of_layers
from octavo.cache.specs import AttentionSpec, LayerSpec, attention_specs
from octavo.checkpoint.arch import Arch
from octavo.config.engine_config import EngineConfig, Resolved, asked_backend
from octavo.config.settings import ConfigError
from octavo.request.fields import FieldSpec

_LOG = logging.getLogger(__name__)


def mods_of(config: EngineConfig, arch: Arch) -> list[AttentionMods]:
    """Per layer the mods that `config.attention_mods` names. Raises ConfigError."""
    if config.attention_mods is None:
        return [NO_MODS] * arch.num_layers
    try:
        return mods_of_layers(load_mods(config.attention_mods), arch.num_layers, arch.layers_of_each)
    except ValueError as error:
        raise ConfigError("attention_mods", config.attention_mods, str(error)) from None


def with_mods(spec: AttentionSpec, mods: AttentionMods) -> AttentionSpec:
    """The spec of a layer with `mods`, which become the spec's own words if it has words for them."""
    own = NativeForm(window=spec.window, chunk=spec.chunk, soft_cap=spec.soft_cap, alibi_slopes=spec.alibi_slopes)
    whole = and_(AttentionMods(native=own, name="the model's"), mods).native
    if whole is None or not spec.causal or len(whole.alibi_slopes) not in (0, spec.num_heads):
        looks_ahead = spec.causal and not mods.causal
        return dataclasses.replace(spec, mods=within_prompt(mods) if looks_ahead else mods)
    return dataclasses.replace(spec, **dataclasses.asdict(whole), mods=NO_MODS)


def request_fields_of(specs: Iterable[LayerSpec]) -> tuple[FieldSpec, ...]:
    """The fields that some layer's mods read of requests. Raises ConfigError where two differ and share a name."""
    found = dict.fromkeys(field for spec in attention_specs(specs) for field in spec.mods.specs)
    fields = tuple(field for field in found if field is not PROMPT_LENGTH.spec)
    if len({field.name for field in fields}) != len(fields):
        names = [field.name for field in fields]
        raise ConfigError("attention_mods", names, "two request fields share a name and differ")
    return fields


def check_mods_supported(config: EngineConfig, resolved: Resolved, specs: Sequence[AttentionSpec]) -> Resolved:
    """`resolved` with a backend that runs the mods, where none was asked for. Raises ConfigError."""
    modded = [spec.mods for spec in specs if spec.mods is not NO_MODS]
    if not modded:
        return resolved
    name = modded[0].name
    if not BACKENDS.resolve(resolved.attention_backend).capability.mods:
        if asked_backend(config) != "auto":
            raise ConfigError(
                "attention_mods",
                name,
                f"attention backend {resolved.attention_backend} cannot run it",
                "set --attention-backend flex or reference",
            )
        chosen = "flex" if resolved.device == "cuda" else "reference"
        why = {**resolved.why, "attention_backend": f"it runs attention_mods={name}"}
        resolved = dataclasses.replace(resolved, attention_backend=chosen, why=why)
    return resolved if all(mods.causal for mods in modded) else _with_whole_prompts(config, resolved, name)


def knows_prompts(specs: Iterable[LayerSpec]) -> bool:
    """Whether some layer's mods read PROMPT_LENGTH."""
    return any(PROMPT_LENGTH in spec.mods.fields for spec in attention_specs(specs))


def _with_whole_prompts(config: EngineConfig, resolved: Resolved, name: str) -> Resolved:
    """Settings under which every prompt fits one step, for mods that look ahead. Raises ConfigError."""
    why = dict(resolved.why)
    length, tokens = resolved.max_model_len, resolved.max_num_batched_tokens
    reason = f"attention_mods={name} looks ahead of a query, so a prompt is computed in one step"
    if tokens < length and config.max_num_batched_tokens is None:
        tokens = length
        why["max_num_batched_tokens"] = f"max_model_len, since {reason}"
    elif tokens < length and resolved.max_model_len_is_auto:
        length = max(tokens, 2)
        why["max_model_len"] = f"max_num_batched_tokens, since {reason}"
    elif tokens < length:
        raise ConfigError(
            "max_num_batched_tokens", tokens, f"{reason}, and max_model_len is {length}", "raise it to that"
        )
    _LOG.info("%s; cached blocks serve requests whose whole prompts are equal", reason)
    return dataclasses.replace(resolved, looks_ahead=True, max_model_len=length, max_num_batched_tokens=tokens, why=why)

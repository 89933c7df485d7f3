"""config.json and the names of the weights of a drafter that reads hidden states, translated to DraftArch.

Owns what published heads and DFlash drafters leave unsaid, and where a checkpoint keeps modules of multi-token
prediction. Reads no weights. Invariant: what changes the drafts' computation is translated or refused by name; what
fits no target is refused with both numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from octavo.checkpoint.arch import Arch, DraftArch
from octavo.checkpoint.config_reader.checkpoint import read_fields
from octavo.checkpoint.config_reader.families import BLOCK_LAYERS, FAMILIES, HEAD_LAYERS, HEADS
from octavo.checkpoint.config_reader.fields import Fields
from octavo.config.settings import ConfigError

# Mixers of targets whose modules are a layer of theirs that attends; what other hybrids' modules are is not read.
_MODULES_BESIDE = {"attention", "delta"}


def read_head(config: Mapping[str, Any], where: str, method: str, target: Arch, names: Collection[str]) -> DraftArch:
    """The facts of an EAGLE head for `target`. names: of the checkpoint's tensors.

    Raises ValueError, one line, for a head that Octavo does not run or that is not for this target.
    """
    fields = Fields({"rms_norm_eps": 1e-6, **config}, where)
    name = _known_name(fields, method)
    arch = dataclasses.replace(read_fields(fields, HEAD_LAYERS), name=name)
    if arch.num_layers != 1:
        fields.refuse("num_hidden_layers", arch.num_layers, "heads of one layer are run")
    if arch.vocab_size != target.vocab_size:
        fields.refuse("vocab_size", arch.vocab_size, f"the target has {target.vocab_size}: take the head of this model")
    has_embedding = any(name.endswith("embed_tokens.weight") for name in names)
    if method == "eagle":
        if arch.hidden_size != target.hidden_size:
            fields.refuse("hidden_size", arch.hidden_size, f"the target has {target.hidden_size}")
        has_bias = any(name.endswith("fc.bias") for name in names)
        return DraftArch(
            method=method, arch=arch, vocab_size=arch.vocab_size, fc_bias=has_bias, has_embedding=has_embedding
        )
    if not has_embedding and arch.hidden_size != target.hidden_size:
        fields.refuse("hidden_size", arch.hidden_size, f"the target has {target.hidden_size}, whose embedding it takes")
    return DraftArch(
        method=method,
        arch=arch,
        vocab_size=fields.integer("draft_vocab_size", 1, arch.vocab_size, arch.vocab_size, null=arch.vocab_size),
        taps=_taps(fields, target),
        target_size=_target_size(fields, target),
        tap_unit=target.stream_unit,
        norm_before_residual=fields.flag("norm_before_residual", False),
        has_embedding=has_embedding,
    )


def method_of(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Which method a drafter is for, where nobody says it: a whole model is a draft model. names: as in `read_head`."""
    given = config.get("architectures")
    name = str(given[0]) if isinstance(given, list) and given else ""
    found = next((method for method, known in HEADS.items() if name in known and name not in FAMILIES), None)
    if found is not None:
        return found
    own = [each for each in names if not each.startswith("mtp.")]
    if name in HEADS["eagle"] and not {"fc.weight", "model.fc.weight"}.isdisjoint(own):
        return "eagle"
    has_modules = len(own) < len(names) or any(".eh_proj." in each for each in own)
    return "mtp" if has_modules and not any(".layers.0." in each for each in own) else "draft_model"


def _known_name(fields: Fields, method: str) -> str:
    known = HEADS[method]
    if fields.get("architectures", [known[0]]) not in [[name] for name in known]:
        fields.refuse("architectures", fields.get("architectures"), f"method {method!r} knows {', '.join(known)}")
    return known[0]


def read_block(config: Mapping[str, Any], where: str, target: Arch, num_drafts: int) -> DraftArch:
    """The facts of a DFlash drafter for `target`, which is to draft `num_drafts` tokens at once.

    Raises ValueError, one line, for a drafter that Octavo does not run or that is not for this target.
    """
    own = config.get("dflash_config")
    ends = ("bos_token_id", "eos_token_id")  # a drafter begins and ends no text
    known = {name: value for name, value in config.items() if name not in ends}
    given = {"rms_norm_eps": 1e-6, "vocab_size": target.vocab_size, **known}
    given |= own if isinstance(own, Mapping) else {}
    fields = Fields(given, where)
    arch = dataclasses.replace(read_fields(fields, BLOCK_LAYERS), name=_known_name(fields, "dflash"))
    for name, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if getattr(arch, name) != size:
            fields.refuse(name, getattr(arch, name), f"the target has {size}, whose embedding and head it takes")
    for name, usual in (("input_embedding_scale", 1.0), ("output_multiplier", 1.0), ("final_logit_softcapping", 0.0)):
        if fields.number(name, -1e30, 1e30, usual, null=usual) != usual:
            fields.refuse(name, fields.get(name), f"only {usual:g} is implemented")
    if target.embedding_scale != 1.0:
        fields.refuse("hidden_size", arch.hidden_size, "the target scales its embedding, which a block takes as it is")
    block_size = fields.integer("block_size", 2, 1 << 10, 16)
    if num_drafts >= block_size:
        why = f"it drafts {block_size - 1} tokens: lower num_speculative_tokens={num_drafts} to {block_size - 1}"
        fields.refuse("block_size", block_size, why)
    behind = fields.get("target_layer_ids")
    last = target.num_published - 1
    if not isinstance(behind, list) or not behind or any(type(n) is not int or not 0 <= n <= last for n in behind):
        fields.refuse("target_layer_ids", behind, f"the target has layers 0 to {last}")
    # where a file is silent, layers with a window are causal, but for those of transformers' own drafter, whose windows
    # hold a token more on either side
    types = fields.get("layer_types") or ["full_attention"] * arch.num_layers
    looks_back = fields.get("architectures") != [HEADS["dflash"][1]]
    causal = [fields.flag("is_causal", looks_back and kind == "sliding_attention") for kind in types]
    if not looks_back:
        wider = [dataclasses.replace(kind, window=kind.window + (kind.window > 0)) for kind in arch.layers]
        arch = dataclasses.replace(arch, layers=tuple(wider))
    return DraftArch(
        method="dflash",
        arch=arch,
        vocab_size=target.vocab_size,
        taps=tuple((layer + 1) * target.layers_of_each for layer in behind),
        target_size=_target_size(fields, target),
        block_size=block_size,
        mask_token=fields.integer("mask_token_id", 0, target.vocab_size - 1),
        is_causal=tuple(causal),
    )


def _target_size(fields: Fields, target: Arch) -> int:
    size = fields.integer("target_hidden_size", 1, 1 << 20, target.hidden_size, null=target.hidden_size)
    if size != target.hidden_size:
        fields.refuse("target_hidden_size", size, f"the target has {target.hidden_size}")
    return size


def _taps(fields: Fields, target: Arch) -> tuple[int, ...]:
    """The stream behind so many layers, 0: the embedding; where a file is silent, the bottom, the middle and the top.

    A file counts the published model's layers.
    """
    own = Fields({**fields.mapping("eagle_config"), **fields.values}, fields.where)
    own.only("use_aux_hidden_state", True)
    name, last = "eagle_aux_hidden_state_layer_ids", target.num_published
    found = own.get(name, [2, last // 2, last - 3])
    if not isinstance(found, list) or not found or any(type(n) is not int or not 0 <= n < last for n in found):
        own.refuse(name, found, f"the target has {last} layers: numbers from 0 to {last - 1} are needed")
    return tuple(number * target.layers_of_each for number in found)


def read_modules(config: Mapping[str, Any], where: str, target: Arch, names: Collection[str]) -> DraftArch:
    """The facts of the modules of multi-token prediction in a checkpoint, its target's or one of their own.

    Raises ValueError, one line, where there are none, or for another target.
    """
    if not {kind.mixer for kind in target.layers} <= _MODULES_BESIDE:
        limit = f"method: multi-token prediction of {target.name} is not read"
        raise ConfigError("speculative_config", {"method": "mtp"}, limit, "take method ngram, or another drafter")
    text = config.get("text_config")
    fields = Fields({**config, **text} if isinstance(text, Mapping) else config, where)
    under_mtp = any(name.startswith("mtp.") for name in names)
    counted = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
    field = next((name for name in counted if fields.get(name) is not None), counted[1])
    num_modules = fields.integer(field, 0, 64, 1 if under_mtp else 0)
    if not num_modules:
        limit = f"method: {where} has no modules of multi-token prediction ({field}=0)"
        change = "set model to a checkpoint that holds them, or take method ngram"
        raise ConfigError("speculative_config", {"method": "mtp"}, limit, change)
    sizes = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": target.num_published,
    }
    for name, size in sizes.items():
        if fields.get(name) != size:
            fields.refuse(name, fields.get(name), f"the target has {size}: take the modules of this model")
    return DraftArch(
        method="mtp", arch=target, num_modules=num_modules, vocab_size=target.vocab_size, under_mtp=under_mtp
    )

"""A drafter's checkpoint on disk: read, built around its target, and filled.

Owns where the facts of a drafter come from: config.json and the names of its tensors. Holds nothing afterwards. Raises
what reader and loader raise: ValueError, one line. Invariant: a drafter that is returned is whole, and fits its target.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from octavo.checkpoint.arch import Arch, DraftArch
from octavo.checkpoint.config_reader.drafters import method_of, read_block, read_head, read_modules
from octavo.checkpoint.config_reader.fields import read_json
from octavo.checkpoint.safetensors import Checkpoint
from octavo.models.causal_lm import CausalLM
from octavo.models.drafters import DRAFTERS, DraftHead
from octavo.models.drafters.dflash import BlockDrafter

if TYPE_CHECKING:
    from octavo.models.base import Model


def read_drafter(folder: Path, method: str, target: Arch, load_format: str = "auto") -> DraftArch:
    """The facts of the drafter in `folder`, of method eagle, eagle3 or mtp, for a target. load_format: fill_model's."""
    path, names = folder / "config.json", [] if load_format == "dummy" else _names(folder)
    if method == "mtp":
        return read_modules(read_json(path), str(path), target, names)
    return read_head(read_json(path), str(path), method, target, names)


def method_in(folder: Path) -> str:
    """The method of the drafter in `folder`, by its config.json and the names of its tensors."""
    names = _names(folder) if any(folder.glob("*.safetensors")) else []
    return method_of(read_json(folder / "config.json"), names)


def _names(folder: Path) -> list[str]:
    checkpoint = Checkpoint(folder)
    names = list(checkpoint.entries)
    checkpoint.close()
    return names


def build_drafters(draft: DraftArch, target: Model, dtype: torch.dtype) -> list[DraftHead]:
    """On the meta device, to be filled by `checkpoint.loader.fill_model`: one, but of mtp perhaps several modules.

    They reach as far as the target does. Raises ValueError for a target whose ends are not those of
    octavo.models.causal_lm.CausalLM: its embedding and its head are the drafter's as well.
    """
    draft, target = _of_target(draft, target)
    kind = DRAFTERS.resolve(draft.method)
    if draft.method != "mtp":
        return [cast(DraftHead, kind(draft, target, dtype))]
    return [cast(DraftHead, kind(draft, target, dtype, number)) for number in range(draft.num_modules)]


def build_block_drafter(folder: Path, target: Model, dtype: torch.dtype, num_drafts: int) -> BlockDrafter:
    """The drafter of blocks in `folder`, of `num_drafts` drafts, on the meta device, to be filled as the others are.

    Raises ValueError, as `read_drafter` and `build_drafters` do.
    """
    path = folder / "config.json"
    draft, whole = _of_target(read_block(read_json(path), str(path), target.arch, num_drafts), target)
    return BlockDrafter(draft, whole, dtype)


def _of_target(draft: DraftArch, target: Model) -> tuple[DraftArch, CausalLM]:
    """The drafter as long as its target, and the target with its ends."""
    if not isinstance(target, CausalLM):
        raise ValueError(
            f"method {draft.method!r} needs a target with an embedding and a head, {target.arch.name} has none"
        )
    arch = dataclasses.replace(draft.arch, max_position=target.arch.max_position)
    return dataclasses.replace(draft, arch=arch), target

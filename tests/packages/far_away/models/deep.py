"""A family outside of Octavo: Qwen3's layers, in a config.json that calls the number of layers `depth`."""

from __future__ import annotations

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import read_fields
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields
from octavo.models.qwen3 import Qwen3ForCausalLM


class DeepForCausalLM(Qwen3ForCausalLM):
    """See octavo.models.base.Model."""

    @staticmethod
    def read(fields: Fields) -> Arch:
        """The facts of a checkpoint."""
        depth = fields.integer("depth", 1, 1000)
        facts = Family(bias="field", qk_norm=True, head_size=128, usual={"num_hidden_layers": depth})
        return read_fields(fields, facts)


class BrokenForCausalLM:
    """Reads no config."""


class UnmadeForCausalLM(Qwen3ForCausalLM):
    """Reads every config of Qwen3, and cannot be made."""

    def __init__(self) -> None:
        """Takes neither the Arch nor the dtype."""

    @staticmethod
    def read(fields: Fields) -> Arch:
        """The facts of a checkpoint."""
        return read_fields(fields, Family(bias="field", qk_norm=True, head_size=128))


class FailingForCausalLM:
    """Stumbles over every config."""

    @staticmethod
    def read(fields: Fields) -> Arch:
        """Raises ZeroDivisionError."""
        raise ZeroDivisionError(f"in {fields.where}")

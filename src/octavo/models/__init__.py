"""The table of architectures: the name in a config.json -> the class that runs it. Imports none of them."""

from octavo.checkpoint.config_reader.families import FAMILIES
from octavo.registry import Registry

ARCHITECTURES = Registry("architecture", {name: family.model for name, family in FAMILIES.items()})

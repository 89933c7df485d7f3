"""A model outside of Octavo: `"architectures": ["package.module:Class"]`, read by the class itself.

Owns the rule of whose code a config.json may name, and the messages where a class cannot be had or used. Knows no field
of a config. Invariant: nothing is imported but modules of packages that the user listed.
"""

from __future__ import annotations

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.fields import Fields
from octavo.config.quoted import said
from octavo.registry import Registry

_CLASSES = Registry("architecture", {})


def read_outside(fields: Fields, path: str, packages: str | None) -> Arch:
    """What the class at `path`, "package.module:Class", reads in a config.json: its static method `read(fields)`.

    packages: those, with commas, whose modules may be imported. Raises ValueError, one line, for any other, and for a
    class that does not load or cannot read.
    """
    module = path.partition(":")[0]
    listed = [package.strip() for package in (packages or "").split(",")]
    if not any(module == package or module.startswith(f"{package}.") for package in listed if package):
        top = module.partition(".")[0]
        fields.refuse("architectures", [path], f"it names code: if you installed {top!r}, set --model-packages {top}")
    try:
        found = _CLASSES.resolve(path)
    except Exception as error:  # whatever a module does while it is imported
        fields.refuse("architectures", [path], f"it does not load: {said(error)}")
    read = getattr(found, "read", None)
    if not callable(read):
        fields.refuse("architectures", [path], "the class has no static method read(fields) that gives an Arch")
    try:
        arch = read(fields)
    except ValueError:
        raise
    except Exception as error:
        fields.refuse("architectures", [path], f"its read fails: {said(error)}")
    if not isinstance(arch, Arch):
        fields.refuse("architectures", [path], f"its read gives {type(arch).__name__}, no Arch")
    return arch

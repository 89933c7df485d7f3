"""The setting `attention_mods`: from an object, a module's or a file's name to the mods of each layer.

Owns the import of what a name means and the messages where it is something else. Does not evaluate a mod
(`check` does). Invariant: whatever a user gives, and whatever a user's file does, the answer is mods or one ValueError.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.attention.mods import NO_MODS, AttentionMods, PerLayer
from octavo.config.quoted import said

_PARTS = {4: "mask_mod", 5: "score_mod"}  # by the number of their arguments


def load_mods(wish: object) -> PerLayer:
    """What the setting `attention_mods` means: an object as it is, "module:name" or "file.py:name" imported.

    Raises ValueError for anything that is no AttentionMods and no function of a layer's number.
    """
    found = wish
    if isinstance(wish, str):
        place, colon, name = wish.rpartition(":")
        if not colon or not place or not name:
            raise ValueError(f"attention_mods={wish!r}: expected module:name or file.py:name")
        module = _import(wish, place)
        try:
            found = getattr(module, name)
        except AttributeError:
            near = difflib.get_close_matches(name, vars(module), n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ValueError(f"attention_mods={wish!r} does not load: {place} has no {name!r}{hint}") from None
    if isinstance(found, AttentionMods):
        return found
    what = f"attention_mods={wish!r}"
    if found is AttentionMods or (isinstance(found, type) and issubclass(found, AttentionMods)):
        raise ValueError(f"{what} is the class: give an instance, octavo.AttentionMods(mask_mod=...)")
    if callable(found):
        _refuse_mod(what, found)
        return found
    raise ValueError(
        f"{what} must be octavo.AttentionMods, or a function from a layer's number to one, got {type(found).__name__}"
    )


def num_arguments(function: Callable[..., Any]) -> int | None:
    """Positional arguments that a function must be given; None where Python does not know, or any number will do."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters)


def _refuse_mod(what: str, function: Callable[..., Any]) -> None:
    """Refuse a bare mask or score function in the place of a function from a layer's number."""
    count = num_arguments(function)
    if count in (None, 0, 1):
        return
    wrapped = f"octavo.AttentionMods({_PARTS.get(count or 0, 'mask_mod')}={getattr(function, '__name__', 'function')})"
    raise ValueError(
        f"{what} is a function of {count} arguments, where octavo.AttentionMods is needed, or a function from a "
        f"layer's number to one: give {wrapped}"
    )


def _import(wish: str, place: str) -> Any:
    try:
        return _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except SyntaxError as error:
        told = f"{error.filename or place}, line {error.lineno}: {error.msg}"
    except OSError as error:
        told = str(error)
    except SystemExit as error:
        told = f"it ends the program ({said(error)}){_line_of(error, place)}"
    except Exception as error:
        told = f"{said(error)}{_line_of(error, place)}"
    raise ValueError(f"attention_mods={wish!r} does not load: {' '.join(told.split())}")


def _line_of(error: BaseException, place: str) -> str:
    """Where in a file `error` was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
    return f", line {lines[-1]}" if lines else ""


def _load_file(place: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mods_of_layers(wish: PerLayer, num_layers: int, layers_of_each: int = 1) -> list[AttentionMods]:
    """Per layer its mods; a function is asked for each published layer, which is `layers_of_each` of them: see Arch.

    Raises ValueError for a function that fails, and for its answer of another kind.
    """
    if isinstance(wish, AttentionMods):
        return [wish] * num_layers
    per_layer = []
    for layer in range(num_layers // layers_of_each):
        with _told(f"attention_mods of layer {layer} fails"):
            mods = wish(layer)
        mods = NO_MODS if mods is None else mods
        if not isinstance(mods, AttentionMods):
            raise ValueError(
                f"attention_mods of layer {layer} must be AttentionMods or None, got {type(mods).__name__}"
            )
        per_layer += [mods] * layers_of_each
    return per_layer


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {said(error)}") from error

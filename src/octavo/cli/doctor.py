"""`octavo doctor`: what an engine would run with, told before anything is loaded.

Owns the report: versions, machine, devices, compiled operators, model, memory plan, numerics contract and, with
--explain, every setting with its origin and which operators run the layers. Computes nothing itself: the report is made
of what probe, config, memory and the model say. Invariant: it reads a checkpoint's config.json and no weights.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import octavo
from octavo.cache.plan import show_bytes
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import Arch
from octavo.cli import flags
from octavo.config.device_facts import DeviceFacts
from octavo.config.engine_config import SETTINGS, EngineConfig, Resolved, load_config, resolve
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.speculative import SpeculativeConfig
from octavo.kv_connector.table import make_kind, moves_runs
from octavo.observe import setup_logging
from octavo.startup import probe
from octavo.startup.cache import plan_cache
from octavo.startup.memory_plan import with_planned_length
from octavo.worker.backends import backend_classes, backend_facts, buffer_bytes

_LOG = logging.getLogger(__name__)
_DESCRIPTION = "Print versions, devices, the memory plan, the numerics contract and settings. Loads no weights."


def main(argv: Sequence[str]) -> int:
    """Print the report. A setting or model that cannot run is a ValueError after what could be told."""
    parser = flags.Parser(
        prog="octavo doctor",
        usage="octavo doctor [option ...]",
        description=_DESCRIPTION,
    )
    flags.add_switch(parser, "--explain", help="every setting with its origin, and which operators run the layers")
    flags.add_config_flags(parser)
    namespace, dotted = parser.parse(argv)
    setup_logging("warning")
    given = flags.given_config(namespace, dotted)
    config, origins = load_config(given, None, getattr(namespace, "config", None))
    facts = probe.device_facts(config.device)
    _section("Octavo", _machine(facts))
    if getattr(namespace, "explain", False):
        _section("Settings", _settings(config, origins))
    arch = _read_arch(config)
    _section("Model", _model(config, arch))
    layers, built, resolved = _build(arch, config, resolve(config, arch, facts))
    on_gpu = resolved.device == "cuda"
    free, total = (facts.cuda_free_bytes, facts.cuda_total_bytes) if on_gpu else (facts.free_bytes, facts.total_bytes)
    try:
        plan = plan_cache(
            arch,
            resolved,
            built.specs,
            backend_facts(resolved, len(built.specs), arch.layers_of_each),
            free_bytes=free,
            total_bytes=total,
            weight_bytes=built.weight_bytes,
            weights_loaded=False,
            buffer_bytes=functools.partial(buffer_bytes, resolved),
            max_num_drafts=built.num_drafts,
            num_lookahead=built.num_lookahead,
            num_next_tokens=built.num_next_tokens,
            moves_runs=moves_runs(make_kind(read_kv_transfer(config.kv_transfer_config))),
        )
        resolved = with_planned_length(config, arch, resolved, plan)
    finally:  # also where there is no plan
        _section("Runs with", _resolved(resolved))
        if getattr(namespace, "explain", False):
            _section("Layers", layers)
    _section("Memory plan\n" + plan.table(), ())
    contract = probe.numerics_contract(resolved, native=resolved.native, gpu=facts.cuda)
    _section("Numerics contract " + probe.numerics_id(contract), contract.items())
    return 0


def _section(title: str, rows: Iterable[tuple[str, object]]) -> None:
    print(title)
    for name, value in rows:
        print(f"  {name:<28} {value}")
    print()


def _machine(facts: DeviceFacts) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [("octavo", octavo.__version__), ("python", platform.python_version())]
    rows += probe.versions().items()
    rows += [
        ("platform", platform.platform()),
        ("processor", probe.cpu_name()),
        ("cores", facts.num_cores),
        ("instruction sets", " ".join(facts.cpu_features) or "not told"),
        ("memory", f"{show_bytes(facts.free_bytes)} free of {show_bytes(facts.total_bytes)}"),
        ("GPU", f"{facts.cuda}, {show_bytes(facts.cuda_free_bytes)} free" if facts.cuda else "none"),
        ("compiled CPU operators", ", ".join(facts.native_isas) or "none: their reference implementations run, slower"),
    ]
    return rows


def _settings(config: EngineConfig, origins: Mapping[str, str]) -> list[tuple[str, object]]:
    return [(name, f"{getattr(config, name)!r:<24} {origins[name]}") for name in SETTINGS]


def _resolved(resolved: Resolved) -> list[tuple[str, object]]:
    rows: list[tuple[str, Any]] = []
    for name in Resolved.__dataclass_fields__:
        if name not in ("why", "model", "max_model_len_is_auto"):
            value = getattr(resolved, name)
            said = _said(value) if isinstance(value, SpeculativeConfig) else str(value)
            rows.append((name, f"{said:<16} {resolved.why.get(name, '')}".rstrip()))
    return rows


def _said(drafts: SpeculativeConfig) -> str:
    """What is not the default, as `speculative_config` takes it."""
    if not drafts.method:
        return "no drafts"
    plain = SpeculativeConfig()
    given = {field.name: getattr(drafts, field.name) for field in dataclasses.fields(drafts)}
    return json.dumps({name: value for name, value in given.items() if value != getattr(plain, name)}, default=str)


def _read_arch(config: EngineConfig) -> Arch:
    from octavo.checkpoint.config_reader.checkpoint import read_arch
    from octavo.checkpoint.hub import find_model

    folder = find_model(config.model, config.revision, config.download_dir)
    return read_arch(folder, config.model_packages, config.hf_overrides)


class _Built(NamedTuple):
    """What a plan takes of a model and its drafter, which are built without weights."""

    specs: Sequence[LayerSpec]
    weight_bytes: int
    num_drafts: int
    num_lookahead: int
    num_next_tokens: int


def _build(arch: Arch, config: EngineConfig, resolved: Resolved) -> tuple[list[tuple[str, str]], _Built, Resolved]:
    """What runs the lines of the model's layers; what a plan takes; and the settings that mods and drafter ask for."""
    from octavo.attention.mods.choice import mods_of
    from octavo.checkpoint.loader import weight_bytes
    from octavo.worker import model as models

    model, resolved = models.build(arch, config, resolved, mods_of(config, arch))
    layers = model.describe_layers(backend_classes(resolved, arch.num_layers, arch.layers_of_each))
    speculator, num_bytes, resolved = models.build_speculator(model, resolved)
    if num_bytes is None:
        _LOG.warning("the memory plan lacks what %s loads: it has no `build`", resolved.speculative.method)
    built = _Built(
        (*model.layer_specs, *speculator.layer_specs),
        weight_bytes(model, resolved) + (num_bytes or 0),
        speculator.num_drafts,
        speculator.num_lookahead,
        speculator.num_next_tokens,
    )
    return layers, built, resolved


def _model(config: EngineConfig, arch: Arch) -> list[tuple[str, object]]:
    windows = sorted({layer.window for layer in arch.layers if layer.window})
    return [
        ("model", config.model),
        ("architecture", arch.name),
        ("layers", f"{arch.num_published}" + (f", sliding windows {windows}" if windows else "")),
        ("heads", f"{arch.num_heads} query, {arch.num_kv_heads} key/value, of {arch.head_size}"),
        ("hidden, intermediate", f"{arch.hidden_size}, {arch.intermediate_size}"),
        ("vocabulary", arch.vocab_size),
        ("positions", arch.max_position),
        ("stored as", arch.dtype),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

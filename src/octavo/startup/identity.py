"""The identity of an engine's cache: what its blocks are named by where their names leave the process.

Owns the reading of the secret and the gathering of facts. Invariant: the secret is in no config, message or log; an
engine without one has names that no other process can make.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

from octavo.cache.plan import CachePlan
from octavo.config.engine_config import EngineConfig, Resolved
from octavo.config.settings import ConfigError
from octavo.sched.identity import CacheIdentity
from octavo.startup import probe

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 4096
_FIELD = "prefix_cache_secret_file"


def read_secret(config: EngineConfig) -> bytes:
    """The key of block names that `config` names a file for, 32 bytes; empty where it names none. Raises ConfigError.

    White space at both ends of the file does not count.
    """
    path = config.prefix_cache_secret_file
    if path is None:
        return b""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(_FIELD, path, f"cannot be read: {error.strerror}") from None
    limits = f"must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes"
    if len(data) > MAX_SECRET_BYTES:
        raise ConfigError(_FIELD, path, f"{limits}, it has more", "make one with `openssl rand -hex 32`")
    secret = data.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(_FIELD, path, f"{limits}, it has {len(secret)}", "make one with `openssl rand -hex 32`")
    return hashlib.blake2b(secret, digest_size=32, person=b"octavo.secret").digest()


def make_identity(
    resolved: Resolved, plan: CachePlan, contract: Mapping[str, str], digests: Sequence[tuple[str, str]]
) -> CacheIdentity:
    """All parts. contract: see probe.numerics_contract; digests: each worker's, see Worker.identify."""
    groups = [(group.kind, group.block_size, group.layers) for group in plan.groups]
    models, mods = zip(*digests, strict=True)
    return CacheIdentity(
        numerics_id=probe.numerics_id(contract),
        model=" ".join(models),
        cache_dtype=resolved.kv_cache_dtype,
        cache=f"{plan.layout} {groups} {list(map(tuple, plan.tables))}",
        mods=mods[0],
    )


def shared_facts(resolved: Resolved, contract: Mapping[str, str], digests: Sequence[tuple[str, str]]) -> dict[str, str]:
    """What K and V follow from wherever they lie, by name: engines that pass blocks on have all of it in common.

    No bit follows from layouts, block sizes or kernel blocks, so these are not among it.
    """
    options = {name: value for name, value in resolved.attention_options.items() if name != "kernel_block_size"}
    models, mods = zip(*digests, strict=True)
    return {  # what users set comes first, as it is said first
        "model": " ".join(models),
        "dtype": contract["dtype"],
        "kv_cache_dtype": contract["cache"],
        **{name: value for name, value in contract.items() if name != "cache"},
        "attention": probe.attention_names(dataclasses.replace(resolved, attention_options=options)),
        "mods": mods[0],
    }

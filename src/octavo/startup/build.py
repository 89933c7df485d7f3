"""The start of an engine: from a config to a running core, in phases that are timed.

Owns the order of the start. What a device needs is built by its worker; here is decided how large everything is. Holds
nothing afterwards. Invariant: every refusal of a setting or a model folder happens here, before the first request, as
one ValueError.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.cache.groups import TableSpec
from octavo.cache.plan import CachePlan, show_bytes
from octavo.checkpoint.arch import Arch
from octavo.config.engine_config import EngineConfig, Resolved, resolve
from octavo.config.kv_transfer import KVTransferConfig, read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.config.speculative import cheap_tokens
from octavo.engine import EngineCore
from octavo.kv_connector import NO_CONNECTOR, Connector
from octavo.kv_connector.table import Kind, brings, check_groups, make_kind, moves_runs, scheduler_half, secret_of
from octavo.observe import Phases
from octavo.request.fields import FieldSpec
from octavo.sched.identity import LOCAL, CacheIdentity
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from octavo.speculate import NO_SPECULATOR, Speculator
from octavo.startup import probe
from octavo.startup.cache import plan_cache
from octavo.startup.frontend import FrontendParts, find_and_read, load_frontend
from octavo.startup.identity import make_identity, read_secret, shared_facts
from octavo.startup.memory_plan import sized_by, with_planned_length
from octavo.worker.device import Opening
from octavo.worker.executor import Executor, InlineExecutor, ThreadExecutor
from octavo.worker.facts import WorkerFacts, least
from octavo.worker.worker import Worker


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine runs with, as plain data: for whoever stands before it, here or in another process."""

    resolved: Resolved
    memory: CachePlan
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    request_fields: tuple[FieldSpec, ...]  # what the attention reads of a request beside its tokens
    native: str  # instruction set of the compiled operators in use, or "none"
    gpu: str  # its name; empty: none

    def numerics_contract(self) -> dict[str, str]:
        """What its results' bits depend on beside the model and the request. Reads all sources."""
        return probe.numerics_contract(self.resolved, native=self.native, gpu=self.gpu)


class Built(NamedTuple):
    """What a start gives."""

    core: EngineCore
    facts: EngineFacts
    frontend: FrontendParts


def build_core(
    config: EngineConfig,
    phases: Phases,
    opening: Opening,
    *,
    text: bool = True,
    speculator: Speculator = NO_SPECULATOR,
) -> Built:
    """The core, its workers loaded; without `text` no tokenizer: prompts come as ids. opening: of the device.

    Raises ValueError, in one line.
    """
    kind = make_kind(transfer := read_kv_transfer(config.kv_transfer_config))
    secret = read_secret(config) or secret_of(kind, transfer)
    worker = Worker(speculator)
    executor: Executor = InlineExecutor(worker)
    folder, arch, resolved = _begin(config, phases, opening, executor)
    with phases("load the tokenizer"):
        frontend = load_frontend(config, folder, arch, text=text)
    with phases("load the weights"):
        facts = least(executor.call("load", resolved, folder))
    with phases("allocate the cache and the tables"):
        plan = _plan(arch, facts, executor, moves_runs=moves_runs(kind))
        check_groups(kind, transfer, plan.groups, arch.layers_of_each)
        resolved = with_planned_length(config, arch, facts.resolved, plan)
        executor.call("allocate", plan, brings(kind))
    if facts.compiles_ahead:
        with phases("compile kernels"):
            executor.call("compile")
    num_uncaptured = _capture(resolved, executor, phases)
    if resolved.device == "cpu" and resolved.async_scheduling:
        executor = ThreadExecutor(worker)
    engine_facts = EngineFacts(
        resolved=resolved,
        memory=plan,
        vocab_size=arch.vocab_size,
        eos_token_ids=tuple(arch.eos_token_ids),
        request_fields=facts.request_fields,
        native=facts.native,
        gpu=facts.gpu,
    )
    leaves = secret or kind.shares_names  # names leave the process; the contract takes 25 ms
    identity, shared = _identify(engine_facts, executor) if leaves else (LOCAL, dict[str, str]())
    connector = _connect(kind, transfer, plan, identity, shared, executor)
    core = EngineCore(
        _make_scheduler(
            resolved, plan, secret, identity, connector, transfer, has_mods=config.attention_mods is not None
        ),
        executor,
        eos_token_ids=engine_facts.eos_token_ids,
        seed=resolved.seed,
        async_scheduling=resolved.async_scheduling,
        request_fields=facts.request_fields,
        looks_ahead=resolved.looks_ahead,
        num_uncaptured=num_uncaptured,
        session_timeout=resolved.weight_transfer_config.get("session_timeout"),
    )
    return Built(core, engine_facts, frontend)


def _begin(config: EngineConfig, phases: Phases, opening: Opening, executor: Executor) -> tuple[Path, Arch, Resolved]:
    """The model's folder and facts, and the settings, with the device open. Raises ValueError."""
    opens = any(executor.call("begin", config, opening))
    with phases("find and read the model's config"):
        folder, arch = find_and_read(config)
    if opens:
        with phases("import the kernels"):
            executor.call("import_kernels")
    with phases("open the device"):
        return folder, arch, resolve(config, arch, executor.call("open", arch)[0])


def _capture(resolved: Resolved, executor: Executor, phases: Phases) -> int:
    """Capture the graphs that a start needs; how many are left."""
    if resolved.device != "cuda" or resolved.enforce_eager:
        return 0
    with phases("capture the first graphs"):
        return max(executor.call("capture"))


def _plan(arch: Arch, facts: WorkerFacts, executor: Executor, *, moves_runs: bool) -> CachePlan:
    """The cache that every worker gets. moves_runs: see `kv_connector.table.Kind`."""
    resolved = facts.resolved

    def buffer_bytes(tables: Sequence[TableSpec]) -> int:
        return max(executor.call("buffer_bytes", tables))

    return plan_cache(
        arch,
        resolved,
        facts.layer_specs,
        facts.backends,
        free_bytes=facts.free_bytes,
        total_bytes=facts.total_bytes,
        weight_bytes=facts.weight_bytes,
        weights_loaded=True,
        buffer_bytes=buffer_bytes,
        max_num_drafts=facts.num_drafts,
        num_lookahead=facts.num_lookahead,
        num_next_tokens=facts.num_next_tokens,
        moves_runs=moves_runs,
    )


def _identify(facts: EngineFacts, executor: Executor) -> tuple[CacheIdentity, dict[str, str]]:
    """What blocks are named by, and what a peer's K and V must have in common with them."""
    contract, digests = facts.numerics_contract(), executor.call("identify")
    return (
        make_identity(facts.resolved, facts.memory, contract, digests),
        shared_facts(facts.resolved, contract, digests),
    )


def _connect(
    kind: Kind,
    transfer: KVTransferConfig,
    plan: CachePlan,
    identity: CacheIdentity,
    facts: Mapping[str, str],
    executor: Executor,
) -> Connector:
    """Both halves of the connector, if there is one. Raises ConfigError."""
    if not transfer.kv_connector:
        return NO_CONNECTOR
    from octavo.kv_connector.orders import EngineSide

    digest = "" if identity is LOCAL else hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    executor.call("connect", transfer, digest, facts)
    return scheduler_half(
        kind,
        EngineSide(
            transfer=transfer,
            groups=plan.groups,
            block_bytes=plan.bytes_per_block,
            num_blocks=plan.num_blocks,
            identity=digest,
            ask=functools.partial(executor.beside, "transfer"),
        ),
    )


def _make_scheduler(
    resolved: Resolved,
    plan: CachePlan,
    secret: bytes,
    identity: CacheIdentity,
    connector: Connector,
    transfer: KVTransferConfig,
    *,
    has_mods: bool,
) -> Scheduler:
    """has_mods: a user's, which may fail.

    Raises ConfigError where what is remembered of so many blocks takes too much memory.
    """
    caching, limits = resolved.enable_prefix_caching, plan.limits
    try:
        kv = KVManager(
            plan.groups,
            plan.num_blocks,
            enable_prefix_caching=caching,
            secret=secret,
            identity=identity,
            num_next_tokens=plan.limits.num_next_tokens,
            # a step in which a row's mods fail is computed again for the others
            advances=not limits.max_num_drafts and connector is NO_CONNECTOR and not has_mods,
            num_unsure=limits.num_unsure,
        )
    except MemoryError:
        free, total = map(show_bytes, probe.memory_bytes())
        limit = f"the books of {plan.num_blocks} blocks do not fit memory, which has {free} of {total} left"
        field = sized_by(resolved)
        raise ConfigError(field, getattr(resolved, field), limit, "lower it") from None
    return Scheduler(
        kv,
        plan.limits,
        policy=resolved.scheduling_policy,
        priority_aging=resolved.priority_aging,
        enable_chunked_prefill=resolved.enable_chunked_prefill,
        whole_prompts=resolved.looks_ahead,
        connector=connector,
        load_timeout=transfer.timeout,
        load_failure_policy=transfer.load_failure_policy,
        cheap_tokens=cheap_tokens(resolved.speculative, resolved.device),
    )

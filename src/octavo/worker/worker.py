"""Worker: the side of an engine that holds a device.

Owns model, cache, tables and runner of one device, and builds all of them by itself from the resolved settings and the
CachePlan, so that it may live wherever plans, results and messages reach it. Does not know the scheduler, requests or
text; the forms of structured outputs come with the rows, and are compiled here. Invariants: `begin`, `open`, `load`,
`allocate`, `compile` and `capture` are called once each, in this order, the last two if there is anything to do; what
happens later goes by `issue` and, between two steps, by `call`. All of it computes with this worker's operators, and
leaves the process the ones that it had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.mods.choice import mods_of, request_fields_of
from octavo.cache.groups import TableSpec
from octavo.cache.plan import CachePlan, show_bytes
from octavo.checkpoint.arch import Arch
from octavo.checkpoint.digest import WeightsDigest, unseen
from octavo.config.device_facts import DeviceFacts
from octavo.config.engine_config import EngineConfig, Resolved
from octavo.config.kv_transfer import KVTransferConfig
from octavo.device.sleep import CACHE, WEIGHTS, make_memory
from octavo.kv_connector.table import make_kind, worker_half
from octavo.kv_connector.worker import NO_WORKER_CONNECTOR, WorkerConnector
from octavo.observe import Count
from octavo.ops.arrivals import NO_ARRIVALS
from octavo.ops.placement import placed_by
from octavo.plan import StepPlan
from octavo.speculate import NO_SPECULATOR, Speculator, make_speculator, with_method
from octavo.speculate.drafter import load_speculator
from octavo.startup import probe
from octavo.startup.frontend import grammars_of
from octavo.startup.memory_plan import sized_by
from octavo.worker import model as models
from octavo.worker.assembly import make_runner
from octavo.worker.backends import backend_facts, buffer_bytes, compiles_ahead
from octavo.worker.calls import Calls
from octavo.worker.device import Opening, Operators, memory_of, room
from octavo.worker.facts import WorkerFacts
from octavo.worker.results import PendingStep

if TYPE_CHECKING:
    from octavo.models.base import Model
    from octavo.rl.receiver import WeightReceiver

_LOG = logging.getLogger(__name__)


class Worker:
    """One device's model and everything around it."""

    def __init__(self, speculator: Speculator = NO_SPECULATOR) -> None:
        """Nothing is there yet. speculator: who proposes drafts; without one, who the settings name."""
        self._speculator = speculator
        self._connector: WorkerConnector = NO_WORKER_CONNECTOR
        self._weights = WeightsDigest()
        self._operators: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # until `load`
        self._thread = threading.get_ident()  # that issued last
        # Tag -> what has its memory. What a worker holds never leads back to it: one that is let go is gone at once.
        self._tensors: dict[str, Callable[[], list[torch.Tensor]]] = {}

    def begin(self, config: EngineConfig, opening: Opening | None = None) -> bool:
        """Begin to open the device; whether there is a GPU that takes its time. opening: what began in this process."""
        self._config = config
        self._opening = opening or Opening(config)
        return self._opening.opens

    def import_kernels(self) -> None:
        """Import what a GPU's first steps need, while it is being opened."""
        self._opening.import_kernels()

    def open(self, arch: Arch) -> DeviceFacts:
        """The device's facts. Raises ConfigError for mods that `arch` cannot have: before anything that takes long."""
        self._arch, self._device = arch, probe.device_facts(self._config.device)
        self._mods = mods_of(self._config, arch)
        return self._device

    def load(self, resolved: Resolved, folder: Path) -> WorkerFacts:
        """Load the weights. Raises ValueError, in one line, for a model or settings that cannot run."""
        self._folder, self._operators = folder, Operators(resolved)
        tensors = self._tensors
        self._memory = make_memory(resolved, lambda tag: tensors[tag]())
        with room(resolved, "the weights", "load_format", "take a smaller model or dtype"), self._operators:
            self._model, resolved = models.build(self._arch, self._config, resolved, self._mods)
            tensors[WEIGHTS] = functools.partial(models.matrices, self._model)  # vectors take no page of their own
            # names of blocks that leave the process hold a digest of the weights, which takes time
            is_named = self._config.prefix_cache_secret_file is not None or self._config.kv_transfer_config
            seen = self._weights.add if is_named else unseen
            with placed_by(self._memory.allocator(WEIGHTS)):
                size = models.fill(self._model, folder, resolved, seen)
            if self._speculator is NO_SPECULATOR:
                resolved = dataclasses.replace(resolved, speculative=with_method(resolved.speculative))
                self._speculator = make_speculator(resolved.speculative)
            with placed_by(self._memory.allocator(WEIGHTS, always_kept=True)):
                size += load_speculator(self._speculator, self._model, resolved)
            models.check_drafts(self._speculator, self._model, resolved)
            self._opening.join()  # what it loads takes memory
        self._resolved = resolved
        specs = (*self._model.layer_specs, *self._speculator.layer_specs)
        backends = backend_facts(resolved, len(specs), self._arch.layers_of_each)
        free_bytes, total_bytes = memory_of(resolved)
        return WorkerFacts(
            resolved=resolved,
            layer_specs=specs,
            backends=backends,
            weight_bytes=size,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            request_fields=request_fields_of(self._model.layer_specs),
            num_drafts=self._speculator.num_drafts,
            num_lookahead=self._speculator.num_lookahead,
            num_next_tokens=self._speculator.num_next_tokens,
            compiles_ahead=compiles_ahead(resolved, [facts.name for facts in backends], specs),
            native=resolved.native,
            gpu=self._device.cuda,
        )

    def buffer_bytes(self, tables: Sequence[TableSpec]) -> int:
        """What the attention backends keep for themselves with such tables."""
        return buffer_bytes(self._resolved, tables)

    def allocate(self, plan: CachePlan, brings: bool = False) -> None:
        """Allocate the cache and the tables, and be ready for steps. Raises ConfigError for what does not fit.

        brings: of the connector, see Kind.
        """
        resolved = self._resolved = dataclasses.replace(self._resolved, max_model_len=plan.limits.max_model_len)
        change = "lower it, or max_num_seqs"
        with room(resolved, "the cache and the tables", sized_by(resolved), change), self._operators:
            models.try_mods(self._model, self._mods, resolved)
            grammars = grammars_of(self._config, self._folder, self._arch)
            cache = self._memory.allocator(CACHE)
            parts = self._model, resolved, plan, grammars, self._speculator, cache
            runner = self._runner = make_runner(*parts, brings=brings)
        self._tensors[CACHE] = lambda: [runner.cache]
        receiver = functools.partial(_make_receiver, self._model, resolved, plan, self._config.weight_transfer_config)
        self._plan, self._calls = plan, Calls(runner, receiver, self._memory)

    def identify(self) -> tuple[str, str]:
        """Digests of the model, as far as its weights were seen, and of the mods. Behind `allocate`."""
        from octavo.attention.mods.digest import mods_digest
        from octavo.worker.identity import model_digest

        overrides = self._config.hf_overrides
        model = model_digest(self._model, overrides, self._resolved, self._folder, self._weights)
        return f"{model} {self._speculator.identity()}".rstrip(), mods_digest(self._mods)

    def connect(self, transfer: KVTransferConfig, identity: str, facts: Mapping[str, str]) -> None:
        """Let blocks of the cache come and go as `transfer` says. identity: what their bytes follow from.

        facts: what K and V follow from, however they lie, by name; both empty where no name leaves the process. Raises
        ConfigError.
        """
        from octavo.kv_connector.peers.description import describe
        from octavo.kv_connector.worker.cache_bytes import CacheBytes

        plan, runner, moves = self._plan, self._runner, self._memory.moves
        size, itemsize = plan.bytes_per_block, runner.cache.itemsize
        description = describe(plan.groups, plan.tables, plan.layout, block_bytes=size, itemsize=itemsize, facts=facts)
        views, free_bytes = runner.cache_views, probe.memory_bytes()[0]
        cache = CacheBytes(
            runner.cache_blocks,
            free_bytes,
            views,
            description=description,
            moves=moves,
            computes=runner.computes,
            gates=runner.gates,
        )
        self._connector = worker_half(make_kind(transfer), transfer, cache, identity)

    def transfer(self, name: str, *args: Any) -> Any:
        """What the connector's half here has under `name`, see WorkerConnector; beside the steps, from one thread."""
        return getattr(self._connector, name)(*args)

    def compile(self) -> None:
        """Compile what steps launch, side by side. A start depends on it for its time only."""
        with contextlib.closing(Count("compiling kernels for this model")) as told, self._operators:
            try:
                num_made = self._runner.compile_ahead(told)
            except RuntimeError as error:  # no memory for a step, or no thread
                _LOG.warning("kernels are compiled when they are first launched, one by one: %s", error)
                return
        _LOG.info("%d kernels were compiled", num_made)

    def capture(self) -> int:
        """Capture the graphs that a start needs; how many are left for later, to be asked for as `capture_next`."""
        resolved = self._resolved
        change = "lower it or max_num_seqs, or set --enforce-eager"
        with room(resolved, "the graphs", "gpu_memory_utilization", change), self._operators:
            before, _ = memory_of(resolved)
            self._runner.capture()
            free, _ = memory_of(resolved)
        planned = show_bytes(self._plan.graph_bytes)
        _LOG.info("the first graphs took %s of the %s planned for all", show_bytes(before - free), planned)
        _LOG.info("%s of the GPU's memory are free beside the cache", show_bytes(free))
        return self._runner.num_uncaptured

    def issue(self, plan: StepPlan) -> PendingStep:
        """Issue one step. On a GPU it runs on while the caller goes on; see `Runner.issue`."""
        self._enter_thread()
        with self._operators:
            return self._runner.issue(plan, self._connector.arrivals(plan.load) if plan.load >= 0 else NO_ARRIVALS)

    def call(self, name: str, payload: bytes) -> bytes:
        """Do between two steps what `octavo.worker.calls` has under `name`. Raises ValueError for what it has not."""
        self._enter_thread()
        with self._operators:
            return self._calls.answer(name, payload)

    def beside(self, name: str, payload: bytes) -> bytes:
        """Do, on a thread of its own, what `octavo.worker.calls` has under `name`, and what touches nothing of a step.

        Raises as `call`.
        """
        self._runner.enter_thread()
        with Operators(self._resolved):  # this thread's
            return self._calls.answer(name, payload)

    def _enter_thread(self) -> None:
        """What a GPU's driver is called with is a thread's own: another one that issues steps has to say so."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self._runner.enter_thread()


def _make_receiver(model: Model, resolved: Resolved, plan: CachePlan, transfer: Mapping[str, Any]) -> WeightReceiver:
    from octavo.rl.receiver import WeightReceiver
    from octavo.worker.calibration import calibrate_kv_scales

    rescale = functools.partial(calibrate_kv_scales, model, resolved, plan)
    return WeightReceiver(model, resolved, transfer, rescale=rescale)

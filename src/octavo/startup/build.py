"""The start of an engine: from a config to running parts, in phases that are timed.

Owns the order of the start and the wiring of its parts. Holds nothing afterwards. Invariant: every refusal of a
setting or a model folder happens here, before the first request, as one ValueError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from octavo.attention.base import Capability
from octavo.attention.mods import PROMPT_LENGTH, AttentionMods
from octavo.attention.mods.check import check_mods
from octavo.attention.mods.choice import knows_prompts, mods_of, request_fields_of
from octavo.cache.groups import CacheGroup, make_groups
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import AttentionSpec, attention_specs
from octavo.checkpoint.arch import Arch
from octavo.checkpoint.generation_config import default_sampling
from octavo.checkpoint.loader import build_model, fill_model, weight_bytes
from octavo.config.engine_config import EngineConfig, Resolved, asked_backend, resolve
from octavo.config.settings import ConfigError
from octavo.device.batch import InputBuffers
from octavo.device.block_table import BlockTables
from octavo.device.field_tables import FieldTables
from octavo.device.graphs import ANY_LENGTH, GraphKey, GraphPool, decode_keys, mixed_keys
from octavo.device.request_table import RequestTable
from octavo.device.staging import WriteQueue
from octavo.grammar.compiler import NO_GRAMMARS, Grammars
from octavo.model_state.default import DefaultModelState
from octavo.models.base import Model
from octavo.observe import Count, Phases
from octavo.ops import native
from octavo.ops.rope import rope_table
from octavo.request.fields import FieldSpec
from octavo.request.sampling_params import Limits, SamplingParams
from octavo.sampling.sampler import Sampler
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from octavo.speculate import NO_SPECULATOR, Speculator
from octavo.startup import gc_control, probe
from octavo.startup.cache import (
    KVCacheLayoutPlan,
    apply_mods,
    attention_names,
    backend_of_layers,
    buffer_bytes,
    cache_dtype,
    calibrate_kv_scales,
    capability,
    choose_form,
    make_backends,
)
from octavo.startup.cuda_init import has_driver, open_runtime
from octavo.startup.frontend import find_and_read, load_text, make_limits
from octavo.startup.memory_plan import (
    ITEMSIZE,
    MemoryPlan,
    check_weights,
    graph_tokens,
    plan_memory,
    show_bytes,
    step_limits,
)
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.worker.executor import DeviceExecutor, Executor, InlineExecutor, ThreadExecutor
from octavo.worker.runner import Runner

_LOG = logging.getLogger(__name__)
# Modules of what any step launches, and any with the attention of the default: Python takes as long to import them as
# a GPU to open.
_KERNELS = (
    "embedding.gpu", "gemm.skinny_gemm", "inputs.gpu", "rope.gpu", "sampling.gpu", "inputs.staged_write_gpu",
    "cache_write.zero_blocks_gpu",
)  # fmt: skip
_PAGED_KERNELS = "attention.prefill_kernel", "attention.rope_decode_kernel", "attention.decode_kernel"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What an engine drives."""

    resolved: Resolved
    arch: Arch
    memory: MemoryPlan
    tokenizer: Tokenizer | NoTokenizer
    limits: Limits
    default_sampling: SamplingParams
    eos_token_ids: Sequence[int]
    grammars: Grammars
    scheduler: Scheduler
    runner: Runner
    executor: Executor
    numerics_contract: Callable[[], dict[str, str]]  # reads all sources, so where it is asked for


def start_engine(
    config: EngineConfig, phases: Phases, *, text: bool = True, speculator: Speculator = NO_SPECULATOR
) -> Parts:
    """Build every part; without `text` no tokenizer: prompts come as ids. Raises ValueError, in one line."""
    folder, arch, opening = _begin(config, phases)
    with phases("open the device"):
        facts = probe.device_facts(config.device)
        resolved = resolve(config, arch, facts)
        mods = mods_of(config, arch.num_layers)  # which may be refused: before anything that takes long
    with phases("load the tokenizer"):
        tokenizer = load_text(config, folder, arch) if text else NoTokenizer()
    with phases("load the weights"), _room(resolved, "the weights", "load_format", "take a smaller model or dtype"):
        model = _build(arch, resolved)
        resolved = apply_mods(model, mods, config, resolved)
        weights = weight_bytes(model, resolved)
        check_weights(weights, arch, resolved, _memory(resolved)[0])
        _fill(model, folder, resolved)
        _check_drafts(speculator.num_drafts, model, resolved)
        opening.join()  # what it loads takes memory
    with (
        phases("allocate the cache and the tables"),
        _room(resolved, "the cache and the tables", _sized_by(resolved), "lower it, or max_num_seqs"),
    ):
        form = choose_form(resolved, make_groups(arch, resolved.block_size, ITEMSIZE[resolved.kv_cache_dtype]))
        free_bytes, total_bytes = _memory(resolved)
        memory = plan_memory(
            arch, resolved, form.groups, free_bytes, weight_bytes=weights, total_bytes=total_bytes, weights_loaded=True,
            tables=form.tables, buffer_bytes=buffer_bytes(resolved, form),
        )  # fmt: skip
        resolved = dataclasses.replace(resolved, max_model_len=memory.max_model_len)
        fields = _try_mods(model, mods, resolved)
        # without text it is loaded when the first form is asked for
        grammars = Grammars(
            lambda: tokenizer if text else load_text(config, folder, arch), arch.vocab_size, arch.eos_token_ids
        )
        runner = make_runner(model, arch, resolved, form, memory.num_blocks, grammars, speculator)
        scheduler = _make_scheduler(resolved, form.groups, memory.num_blocks, speculator.num_drafts)
    _compile(runner, resolved, phases)
    _capture(runner, resolved, phases, memory.graph_bytes)
    return Parts(
        resolved=resolved,
        arch=arch,
        memory=memory,
        tokenizer=tokenizer,
        limits=make_limits(
            tokenizer,
            vocab_size=arch.vocab_size,
            max_model_len=resolved.max_model_len,
            max_logprobs=resolved.max_logprobs,
            config=config,
            request_fields=fields,
        ),
        default_sampling=default_sampling(folder, config),
        eos_token_ids=arch.eos_token_ids,
        grammars=grammars,
        scheduler=scheduler,
        runner=runner,
        executor=_make_executor(runner, resolved),
        numerics_contract=functools.cache(lambda: _contract(resolved, facts.cuda)),
    )


def _begin(config: EngineConfig, phases: Phases) -> tuple[Path, Arch, threading.Thread]:
    """The model's folder and architecture, and a thread that opens a GPU; meanwhile, what kernels wait for.

    One that is open is left alone: it may be another than the first, which is a thread's own.
    """
    opens = config.device != "cpu" and not torch.cuda.is_initialized() and has_driver()
    cuda = torch.version.cuda if opens else None
    opening = threading.Thread(target=_open, args=[cuda], daemon=True)
    opening.start()
    with phases("find and read the model's config"):
        found = find_and_read(config)
    if cuda:
        with phases("import the kernels"), gc_control.loading():
            for name in (*_KERNELS, *(_PAGED_KERNELS if asked_backend(config) in ("auto", "paged") else ())):
                importlib.import_module(f"octavo.ops.{name}")
    return *found, opening


def _open(cuda: str | None) -> None:
    """Open the GPU, and let torch load what it takes longest to: 40 to 110 ms for the first call of an operator."""
    if not cuda:
        return
    open_runtime(cuda)
    with contextlib.suppress(Exception), torch.device("cuda"):  # what fails here fails again where it is needed
        from octavo.ops.compile import launch  # need Triton
        from octavo.ops.gemm import gpu as matmul

        launch.open_driver()
        matmul.open_library()
        torch.zeros(2, 2, dtype=torch.bfloat16).index_select(0, torch.zeros(1, dtype=torch.int64))
        rope_table(8, 4)


def _contract(resolved: Resolved, gpu: str) -> dict[str, str]:
    return probe.numerics_contract(
        device=resolved.device,
        dtype=resolved.dtype,
        quantization=resolved.quantization,
        native=native.isa(),
        attention=attention_names(resolved),
        cache=resolved.kv_cache_dtype,
        numerics=resolved.numerics,
        gpu=gpu,
    )


def _build(arch: Arch, resolved: Resolved) -> Model:
    shortened = dataclasses.replace(arch, max_position=resolved.max_model_len)  # sizes the rotary tables
    return build_model(shortened, getattr(torch, resolved.dtype))


def _fill(model: Model, folder: Path | None, resolved: Resolved) -> None:
    """Load the weights, once the operators that pack them are chosen."""
    _set_up(resolved)
    device = torch.device(resolved.device)
    fill_model(model, folder, resolved.quantization, resolved.load_format, device=device, seed=resolved.seed)


def make_runner(
    model: Model,
    arch: Arch,
    resolved: Resolved,
    form: KVCacheLayoutPlan,
    num_blocks: int,
    grammars: Grammars = NO_GRAMMARS,
    speculator: Speculator = NO_SPECULATOR,
) -> Runner:
    """Allocate the cache and the tables for `model` and wire them to a runner."""
    device = torch.device(resolved.device)
    pool = KVCachePool(
        form.groups, num_blocks=num_blocks, dtype=cache_dtype(resolved), device=device, layout=form.layout,
        tables=form.tables,
    )  # fmt: skip
    calibrate_kv_scales(model, resolved, form)
    block_sizes = [block_map.kernel_block_size for block_map in pool.block_maps]
    _LOG.info("attention backend %s: %s", attention_names(resolved), resolved.why.get("attention_backend", "chosen"))
    _LOG.info("cache layout %s, blocks of %d, kernel blocks of %s", pool.layout.name, resolved.block_size, block_sizes)
    queue = WriteQueue() if device.type == "cuda" else None
    limits = step_limits(resolved, speculator.num_drafts)
    requests = RequestTable(limits, device=device, queue=queue)
    tables = BlockTables(
        form.groups, limits, device=device, block_maps=pool.block_maps,
        sources=[table.group for table in form.tables], queue=queue,
    )  # fmt: skip
    buffers = InputBuffers(requests, tables, limits, device=device, queue=queue)
    sampler = Sampler(
        limits,
        vocab_size=arch.vocab_size,
        device=device,
        tokens=requests.token_ids.data,
        prompt_lens=requests.prompt_len.data,
        logprobs_mode=resolved.logprobs_mode,
        max_logprobs=resolved.max_logprobs,
        grammars=grammars,
        queue=queue,
    )
    ahead = knows_prompts(model.layer_specs)
    fields = FieldTables(
        request_fields_of(model.layer_specs), limits, device=device, queue=queue,
        known={PROMPT_LENGTH.spec.name: requests.prompt_len.data} if ahead else {},
    )  # fmt: skip
    backends = make_backends(model, resolved, form, pool, fields)
    state = DefaultModelState(model.layer_specs, backends, pool, fields)
    graphs = GraphPool(_graph_keys(model, resolved, [backend.capability for backend in backends]))
    return Runner(model, state, pool, requests, tables, buffers, sampler, graphs, speculator=speculator)


def _graph_keys(model: Model, resolved: Resolved, capabilities: Sequence[Capability]) -> list[GraphKey]:
    """The steps to capture: those that every attention backend lets a graph hold."""
    if resolved.device != "cuda" or resolved.enforce_eager:
        return []
    needs = {fact for spec in attention_specs(model.layer_specs) for fact in spec.facts}
    if resolved.kv_cache_dtype != resolved.dtype:
        needs.add("cache_dtypes")
    held = {"decode", "mixed"}
    for facts in capabilities:
        held &= frozenset() if needs & facts.eager else facts.graphs
    rows = resolved.max_num_seqs
    lengths = {n for facts in capabilities for n in facts.graph_lengths if n < resolved.max_model_len}
    decode = decode_keys(rows, sorted(lengths), model.fused_sampling_rows()) if "decode" in held else []
    if "mixed" not in held:
        return decode
    bounded = any(facts.bounded_mixed for facts in capabilities)
    length = min(lengths) if bounded and lengths else ANY_LENGTH
    return decode + mixed_keys(rows, graph_tokens(model.arch, resolved), length, bounded=bounded)


def _make_executor(runner: Runner, resolved: Resolved) -> Executor:
    if resolved.device != "cpu":
        return DeviceExecutor(runner.issue)
    return ThreadExecutor(runner.execute) if resolved.async_scheduling else InlineExecutor(runner.execute)


def _try_mods(model: Model, mods: Sequence[AttentionMods], resolved: Resolved) -> tuple[FieldSpec, ...]:
    """Evaluate the mods as far as that is possible without a request; gives the request fields that they read."""
    fields = request_fields_of(model.layer_specs)
    slack = max(capability(name).hint_slack for name in backend_of_layers(resolved, len(mods)))
    pairs = zip(mods, model.layer_specs, strict=True)
    layers = [(own, spec) for own, spec in pairs if isinstance(spec, AttentionSpec)]
    check_mods(layers, fields, resolved.max_model_len, resolved.device, slack)
    return fields


def _check_drafts(num_drafts: int, model: Model, resolved: Resolved) -> None:
    """Raises ValueError where a query may see tokens behind its own: it would see drafts that are rejected."""
    if num_drafts and (resolved.looks_ahead or not all(spec.causal for spec in attention_specs(model.layer_specs))):
        raise ValueError(
            f"num_drafts={num_drafts} needs attention in which no query sees a later token: take a causal model, and "
            "mods that do not look ahead, or no speculator"
        )


def _make_scheduler(resolved: Resolved, groups: Sequence[CacheGroup], num_blocks: int, num_drafts: int) -> Scheduler:
    kv = KVManager(groups, num_blocks, enable_prefix_caching=resolved.enable_prefix_caching)
    return Scheduler(
        kv,
        step_limits(resolved, num_drafts),
        policy=resolved.scheduling_policy,
        priority_aging=resolved.priority_aging,
        enable_chunked_prefill=resolved.enable_chunked_prefill,
        whole_prompts=resolved.looks_ahead,
    )


def _compile(runner: Runner, resolved: Resolved, phases: Phases) -> None:
    """Compile what steps launch, side by side. A start depends on it for its time only."""
    if resolved.device != "cuda" or not runner.compiles_ahead:
        return
    with phases("compile kernels"), contextlib.closing(Count("compiling kernels for this model")) as told:
        try:
            num_made = runner.compile_ahead(told)
        except RuntimeError as error:  # no memory for a step, or no thread
            _LOG.warning("kernels are compiled when they are first launched, one by one: %s", error)
            return
    _LOG.info("%d kernels were compiled", num_made)


def _capture(runner: Runner, resolved: Resolved, phases: Phases, planned: int) -> None:
    if resolved.enforce_eager or resolved.device != "cuda":
        return
    change = "lower it or max_num_seqs, or set --enforce-eager"
    with phases("capture the first graphs"), _room(resolved, "the graphs", "gpu_memory_utilization", change):
        before, _ = _memory(resolved)
        runner.capture()
        free, _ = _memory(resolved)
    _LOG.info("the first graphs took %s of the %s planned for all", show_bytes(before - free), show_bytes(planned))
    _LOG.info("%s of the GPU's memory are free beside the cache", show_bytes(free))


@contextlib.contextmanager
def _room(resolved: Resolved, what: str, field: str, change: str) -> Iterator[None]:
    """Say which part of the start ran out of memory, and what to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if not on_host and not isinstance(error, torch.OutOfMemoryError):
            raise
        free, total = map(show_bytes, _memory(resolved))
        where = "memory" if on_host else "the GPU"
        limit = f"{what} do not fit {where}, which has {free} of {total} left"
        raise ConfigError(field, getattr(resolved, field), limit, change) from None


def _sized_by(resolved: Resolved) -> str:
    """The setting that the cache's size follows from."""
    if resolved.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    if resolved.kv_cache_memory_bytes is not None or resolved.device == "cpu":
        return "kv_cache_memory_bytes"
    return "gpu_memory_utilization"


def _set_up(resolved: Resolved) -> None:
    if resolved.device == "cuda":
        from octavo.ops.gemm import gpu as matmul

        matmul.select(resolved.numerics)
    torch.set_num_threads(resolved.num_threads)
    native.select(resolved.native)
    if native.available():
        native.set_num_threads(resolved.num_threads)


def _memory(resolved: Resolved) -> tuple[int, int]:
    """Free and total bytes of the device, now."""
    if resolved.device == "cuda":
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return free_bytes, total_bytes
    return probe.memory_bytes()

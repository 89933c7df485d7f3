"""The seam between the engine and an attention backend.

Owns the words: Capability (what a backend can do), Setup (what an engine tells it once), AttentionInputs (one step's
batch, for prefill, decode and verification alike), LayerTensors (what a layer brings to each call), the
AttentionBackend protocol, the table of names, and the ForwardContext in which a layer finds all that is its own.
Knows no backend. Invariants: a backend sees lengths, tables and slots, never requests; `prepare` is called once per
pass and cache group, and once more if the last layer attends for fewer tokens; `run` once per layer; no pass runs
behind the preparation of another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from octavo.cache.kernel_blocks import MultipleOf
from octavo.cache.specs import AttentionSpec, LayerSpec
from octavo.ops.arrivals import NO_GATES, Gates
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.inputs.tensors import LogitTokens
from octavo.ops.norm.kept_sum import keep_sum
from octavo.ops.rope import Rotation
from octavo.registry import Registry
from octavo.states.base import NO_STATES, LayerStates

BACKENDS = Registry(
    "attention backend",
    {
        "reference": "octavo.attention.reference:ReferenceBackend",
        "cpu": "octavo.attention.cpu:CpuBackend",
        "paged": "octavo.attention.paged:PagedBackend",
        "mla": "octavo.attention.mla:MlaBackend",
        "flex": "octavo.attention.flex.backend:FlexBackend",
        "flash": "octavo.attention.flash:FlashBackend",
        "flashinfer": "octavo.attention.flashinfer:FlashInferBackend",
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What an engine tells its backends once: limits that size persistent buffers, options, the cache's dtype."""

    max_num_rows: int = 0
    max_num_tokens: int = 0  # of a step
    max_model_len: int = 0
    num_blocks: int = 0  # kernel blocks of a layer's view
    block_size: int = 0  # tokens per kernel block
    reproducible: bool = True
    cache_dtype: torch.dtype | None = None  # of a quantized cache; None: the queries'
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # EngineConfig.attention_config
    fields: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # per request field, by row


NO_SETUP = Setup()


def no_buffers(setup: Setup) -> int:
    """Of a backend that keeps nothing, or next to nothing, on the device."""
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """What a backend can do, as queryable facts."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # of queries, and of caches that are not quantized
    head_sizes: tuple[int, ...] = ()  # empty: any
    kernel_block_sizes: tuple[int | MultipleOf, ...] = (MultipleOf(1),)  # tokens per block that it takes
    layouts: tuple[str, ...] = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")  # of the cache, the preferred first
    window: bool = True
    chunk: bool = False
    soft_cap: bool = True
    alibi: bool = False
    sinks: bool = False
    non_causal: bool = False
    latent: bool = False  # takes AttentionSpec.value_size
    mods: bool = False  # any AttentionMods
    hint_slack: int = 0  # tokens by which queries of a hint's rectangle may end behind the longest request
    cache_dtypes: tuple[torch.dtype, ...] = ()  # of quantized caches that it takes beside the queries' own dtype
    eager: frozenset[str] = (
        frozenset()
    )  # names of facts above (or "cache_dtypes") that a slow reference implementation serves
    buffer_bytes: Callable[[Setup], int] = no_buffers  # it keeps per distinct spec: masks, partial results
    reads_uninitialized: bool = False  # loads slots that no token has written: fresh blocks are zeroed for it
    reproducible: bool = True  # a row's bits depend neither on its batch nor on how the cache lies
    graphs: frozenset[str] = frozenset()  # steps of which CUDA graphs hold `prepare` and `run`: "decode", "mixed"
    graph_lengths: tuple[int, ...] = ()  # rows of at most so many tokens deserve decode graphs of their own
    bounded_mixed: bool = False  # its mixed graphs are laid out for few rows of several queries, of graph_lengths[0]
    compiles_ahead: bool = False  # it launches Triton kernels only: they are compiled in steps that launch nothing
    paged_operator: bool = False  # `run` is ops.attention.paged_attention and no more: a decoder may call that itself


def mask_spec_of(spec: AttentionSpec) -> MaskSpec:
    """What a query sees, and how its scores are made, in the operators' words."""
    return MaskSpec(spec.scale, spec.window, spec.chunk, spec.causal, spec.soft_cap)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi (Press et al. 2021, arXiv 2108.12409): geometric, from 2^(-8 / n) down, n a power of two.

    Other numbers of heads take the slopes of the power of two below, then every second one of that above.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * (num_heads - power), 2)]
    return tuple(slopes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerTensors:
    """A layer's own tensors, float32 at fixed addresses, that attention reads. None: the layer has none."""

    sinks: torch.Tensor | None = None  # [num_heads]
    key_scale: torch.Tensor | None = None  # [num_kv_heads]: K is what a quantized cache holds times this; None: 1
    value_scale: torch.Tensor | None = None


NO_TENSORS = LayerTensors()


def check_specs(
    name: str,
    capability: Capability,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    setup: Setup = NO_SETUP,
) -> None:
    """Raises ValueError, naming the value and the way out, for what the backend called `name` does not state."""
    if dtype not in capability.dtypes:
        raise ValueError(
            f"attention backend {name!r} takes dtype {_names(capability.dtypes)}, got {_names([dtype])}: set dtype, "
            "or attention_backend='reference'"
        )
    if setup.cache_dtype not in (None, dtype, *capability.cache_dtypes):
        known = _names([dtype, *capability.cache_dtypes])
        raise ValueError(
            f"attention backend {name!r} takes a cache of {known}, got {_names([setup.cache_dtype])}: set "
            "kv_cache_dtype, or attention_backend='reference'"
        )
    for spec in specs:
        if spec.num_heads % spec.num_kv_heads:
            raise ValueError(f"{spec.num_heads} heads do not divide among {spec.num_kv_heads} KV heads")
        if capability.head_sizes and spec.head_size not in capability.head_sizes:
            known = ", ".join(map(str, capability.head_sizes))
            raise ValueError(
                f"attention backend {name!r} takes heads of {known}, got {spec.head_size}: set "
                "attention_backend='reference'"
            )
        for fact in spec.facts:
            if not getattr(capability, fact):
                raise ValueError(
                    f"attention backend {name!r} has no {fact}, which the model needs: set "
                    "attention_backend='reference'"
                )


def _names(dtypes: Iterable[torch.dtype | None]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@dataclasses.dataclass(kw_only=True, slots=True)
class AttentionInputs:
    """One step's batch for one cache group. Row i owns tokens query_start[i] .. query_start[i + 1] - 1.

    The queries of a row are the last of its `seq_lens[i]` tokens: the j-th of its n queries has the logical position
    `seq_lens[i] - n + j`. Their K and V are stored before `run` is called. Table columns beyond
    `cdiv(seq_lens[i], block_size)` hold garbage and must not be read. Padding (rows beyond `num_rows`): seq_len 0,
    table row 0, query_start constant, slot -1.
    """

    num_rows: int
    num_tokens: int
    max_query_len: int  # of this batch
    max_seq_len: int  # upper bound of this batch, never masks
    block_size: int  # tokens per kernel block
    query_start: torch.Tensor  # [num_rows + 1] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    block_table: torch.Tensor  # [num_rows, width] int32, kernel block ids
    slot_mapping: torch.Tensor  # [num_tokens] int64, -1: do not write
    rows: torch.Tensor | None = None  # [num_rows] int64, the table row of each; read where mods are
    min_query_len: int = 0  # host lower bound of a row's queries
    max_long: int | None = None  # host upper bound of rows with several queries, which come last; None: all rows
    is_padded: bool = False  # rows may have fewer queries than `num_tokens` says, of which the last ones are nobody's
    apart: bool = False  # no row reads what another one stores in the same step, though rows may have several queries
    call_checked: bool = False  # whether a layer's tensors were found to fit in this pass

    @property
    def live(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query_start, seq_lens and block_table of the `num_rows` rows."""
        rows = self.num_rows
        return self.query_start[: rows + 1], self.seq_lens[:rows], self.block_table[:rows]

    def of(self, logits: LogitTokens) -> AttentionInputs:
        """The same rows, with the tokens that give logits as the only queries. Slots stay the step's."""
        return dataclasses.replace(
            self,
            num_tokens=len(logits.tokens),
            max_query_len=logits.max_per_row,
            min_query_len=0,
            query_start=logits.query_start,
            max_long=None if logits.max_per_row > 1 else 0,
            call_checked=False,
        )

    def check(self) -> None:
        """Raises ValueError where a tensor is smaller than the host's numbers say. Costs a few comparisons."""
        rows, columns = self.block_table.shape
        if self.max_seq_len > columns * self.block_size:
            raise ValueError(
                f"max_seq_len={self.max_seq_len} exceeds the {columns * self.block_size} tokens that {columns} "
                f"block table columns of {self.block_size} tokens name"
            )
        tokens = self.slot_mapping.shape[0]
        if self.num_rows > rows or self.num_rows > self.seq_lens.shape[0] or self.num_tokens > tokens:
            rows = min(rows, self.seq_lens.shape[0])
            raise ValueError(
                f"{self.num_rows} rows with {self.num_tokens} tokens exceed inputs for {rows} rows and {tokens} tokens"
            )

    def check_call(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Raises ValueError where a layer's tensors do not belong to these inputs.

        The first layer of each pass stands for all, see ForwardContext.begin.
        """
        if self.call_checked:
            return
        if kv.shape[2] != self.block_size:
            raise ValueError(f"a cache view of {kv.shape[2]}-token blocks, inputs for {self.block_size}-token blocks")
        num_queries, num_outputs = q.shape[0], out.shape[0]  # len() takes twice the time
        if num_queries < self.num_tokens or num_outputs < self.num_tokens:
            raise ValueError(
                f"{num_queries} queries and {num_outputs} outputs are fewer than num_tokens={self.num_tokens} of the "
                "inputs that attention was prepared with last: prepare it for the pass that runs"
            )
        self.call_checked = True


class AttentionBackend(Protocol):
    """One per cache group that it serves layers of."""

    capability: Capability

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """`specs`: the distinct ones of the group's layers. Raises ValueError for what it cannot do."""

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Make a plan for the layers that come, one per distinct spec, in buffers that keep their addresses."""

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        spec: AttentionSpec,
        out: torch.Tensor,
        layer: LayerTensors = NO_TENSORS,
    ) -> None:
        """Attend.

        q, out: [tokens, heads, head_size]; kv: [blocks, kv_heads, block_size, 2 * head_size], K then V along the last
        axis, any strides but a contiguous last axis. Latent specs: kv [blocks, 1, block_size, head_size], out
        [tokens, heads, value_size]. A score is scaled, capped, ALiBi's slope is added, the mask and sinks follow.
        """


@runtime_checkable
class FusedRopeBackend(AttentionBackend, Protocol):
    """One that can also do what lies between a layer's projection and its attention."""

    def rotates(self, rotation: Rotation, kv: torch.Tensor, spec: AttentionSpec) -> bool:
        """Whether `run_fused_rope` serves the step's rows in such a layer.

        A layer's tensors do not come with that, but for the rotation's scales of a quantized cache: not with sinks.
        """

    def run_fused_rope(
        self, projected: torch.Tensor, rotation: Rotation, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        """What `qk_norm_rope_store` does with projected [tokens, channels], and `run` with the q that it gives."""


class NoBackend:
    """Of layers, or passes, that do not attend: it can do nothing, and nothing is asked of it."""

    capability = Capability(devices=(), dtypes=())

    def __init__(
        self,
        specs: Sequence[AttentionSpec] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        setup: Setup = NO_SETUP,
    ) -> None:
        """Keeps nothing."""

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """Of no step."""
        raise AssertionError("a layer that does not attend has no backend to prepare")

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        spec: AttentionSpec,
        out: torch.Tensor,
        layer: LayerTensors = NO_TENSORS,
    ) -> None:
        """Of no layer."""
        raise AssertionError("a layer that does not attend, or a pass that only stores, has no backend to run")


NO_BACKEND = NoBackend()


class TableContext:
    """What the layers of one block table share: the inputs of a pass, and a backend that was prepared with them."""

    __slots__ = ("_backend", "backend", "inputs")

    inputs: AttentionInputs

    def __init__(self, backend: AttentionBackend) -> None:
        """`inputs` come with the first step."""
        self._backend = self.backend = backend

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool) -> None:
        """Take in a pass's inputs, and let the backend plan for them."""
        self.inputs, self.backend = inputs, self._backend
        self.backend.prepare(inputs, for_capture=for_capture)

    def prepare_stores(self, inputs: AttentionInputs) -> None:
        """Take in the inputs of a pass that stores and does not attend: nothing is planned, so nothing may run."""
        self.inputs, self.backend = inputs, NO_BACKEND


NO_TABLE = TableContext(NO_BACKEND)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerContext:
    """All that one layer finds of the engine around it. Made once; the inputs in it are those of the step."""

    spec: LayerSpec
    table: TableContext  # NO_TABLE of a layer that does not attend
    table_index: int  # among the context's tables, else -1
    cache: torch.Tensor  # its view: [kernel blocks, kv_heads, kernel block size, channels]
    states: LayerStates = NO_STATES  # of a layer that keeps states

    @property
    def inputs(self) -> AttentionInputs:
        """Of the step."""
        return self.table.inputs

    @property
    def backend(self) -> AttentionBackend:
        """Prepared for the step."""
        return self.table.backend


class Taps:
    """Hidden states of a step that somebody reads beside the last ones, side by side in one tensor that stays."""

    def __init__(self, layers: Sequence[int], buffer: torch.Tensor) -> None:
        """layers: what enters layer i, or for their number what leaves the last norm; buffer: [most tokens, n * size].

        Raises no error for a layer that the model has not: nothing is kept for it.
        """
        self.layers, self._buffer = tuple(layers), buffer

    def keep(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Keep x [tokens, size], and the residual that is still to be added, if it is asked for."""
        size = x.shape[1]
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                out = self._buffer[: len(x), place * size : (place + 1) * size]
                keep_sum(x, residual, out)

    def rehearse(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Keep x and residual wherever anything is kept: what layers that are left out would have launched."""
        for layer in self.layers:
            self.keep(layer, x, residual)

    def of(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, n * size] of the step's tokens."""
        return self._buffer[:num_tokens]


NO_TAPS = Taps((), torch.empty((0, 0)))


@dataclasses.dataclass(kw_only=True, slots=True)
class ForwardContext:
    """What the layers need of a step."""

    layers: Sequence[LayerContext]  # by a layer's number; the same object in every step of an engine
    tables: Sequence[TableContext]  # prepared for the step
    positions: torch.Tensor  # [tokens] int64, logical
    logit_tokens: LogitTokens | None = None  # whose hidden states alone are asked for; None: those of all tokens
    for_capture: bool = False  # as `prepare`'s
    warmup_only: bool = False  # the results are for nobody: layers that launch what others launch may be left out
    taps: Taps = NO_TAPS
    gates: Gates = NO_GATES  # of blocks that come while a graph of this step runs
    prepared: Sequence[AttentionInputs] = ()  # of the tables, with which this pass was prepared; empty: nobody looks

    def begin(self) -> None:
        """A pass begins, whose first layer's tensors are looked at.

        Raises ValueError where another pass was prepared since: layers would find its inputs and its plans.
        """
        for table, inputs in zip(self.tables, self.prepared, strict=False):
            if table.inputs is not inputs:
                raise ValueError(
                    f"a pass of {inputs.num_tokens} tokens begins behind the preparation of another one of "
                    f"{table.inputs.num_tokens}: prepare each pass when the one before it has run"
                )
            inputs.call_checked = False

    def narrow_to_logit_tokens(self, layer: int) -> torch.Tensor | None:
        """Ahead of the last layer, number `layer`: prepare its backend for the tokens that are asked for alone.

        Gives them, [L] int64; None, and nothing is done, where all are.
        """
        if self.logit_tokens is None:
            return None
        own = self.layers[layer]
        own.backend.prepare(own.inputs.of(self.logit_tokens), for_capture=self.for_capture)
        return self.logit_tokens.tokens


class _Current(threading.local):
    """Per thread, since engines of one process may compute at the same time."""

    context: ForwardContext | None = None


_CURRENT = _Current()


@contextlib.contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` this thread's current one for the duration of a forward pass. No nesting.

    Raises ValueError unless it is the one that was prepared last.
    """
    assert _CURRENT.context is None, "a forward pass inside a forward pass"
    context.begin()
    _CURRENT.context = context
    try:
        yield
    finally:
        _CURRENT.context = None


def current_context() -> ForwardContext:
    """The context of the forward pass that is running."""
    context = _CURRENT.context
    assert context is not None, "attention runs only inside forward_context"
    return context

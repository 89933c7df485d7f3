"""Where the bytes go, computed before anything is allocated.

Owns the sizes of workspace, logits and tables, the bytes of a cache block, and the rule that says how many blocks there
are. Asks no device and no model: free memory and the weights' bytes are arguments. Invariant: a plan holds at least one
request of `max_model_len` tokens and the null block.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from octavo.cache.groups import CacheGroup, TableSpec, block_bytes
from octavo.cache.plan import CachePlan, show_bytes
from octavo.cache.policies import blocks_for_request
from octavo.checkpoint.arch import Arch
from octavo.config.engine_config import EngineConfig, Resolved
from octavo.config.settings import ConfigError, flag_name
from octavo.config.speculative import cheap_tokens
from octavo.plan import StepLimits

_LOG = logging.getLogger(__name__)

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
# Of what weights and workspace leave, on CPU: the usual share of the cache, the most that an automatic
# max_model_len may take it to, and the most that an explicit one may.
_CPU_SHARE, _CPU_AUTO_SHARE, _CPU_EXPLICIT_SHARE = 0.25, 0.5, 0.9
_CPU_PACKED_ROWS = 768  # CHUNK_ROWS of native/matmul.cpp
# Of CUDA graphs: tokens of the largest one of a mixed step in a large model; the same times the square of a hidden size
# (issuing takes 0.5 ms a layer, and a token meets 12 to 15 such squares of weights there); bytes of the nodes of all,
# an estimate, which a start compares with what they took.
_GRAPH_TOKENS, _GRAPH_WORK, _GRAPH_NODES = 1024, 1024 * 4096**2, 512 << 20
_SHORTEST = 2  # tokens of the shortest max_model_len: one of a prompt, and one of its output
_OF_USER = ("num_gpu_blocks_override", "kv_cache_memory_bytes")  # rules that take no heed of what is free
NO_REASONS: Mapping[str, str] = {}


def step_limits(resolved: Resolved, max_num_drafts: int = 0, num_lookahead: int = 0) -> StepLimits:
    """What plans keep to, and all that holds rows and tokens is sized by.

    max_num_drafts, num_lookahead: the speculator's.
    """
    return StepLimits(
        max_num_rows=resolved.max_num_seqs,
        max_num_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        max_num_drafts=max_num_drafts,
        num_lookahead=num_lookahead,
    )


def sized_by(resolved: Resolved) -> str:
    """The setting that the cache's size follows from."""
    if resolved.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    if resolved.kv_cache_memory_bytes is not None or resolved.device == "cpu":
        return "kv_cache_memory_bytes"
    return "gpu_memory_utilization"


def check_weights(size: int, arch: Arch, resolved: Resolved, free_bytes: int) -> None:
    """Raises ConfigError for a model whose `size` bytes of weights alone are more than `free_bytes`: before loading."""
    if size > free_bytes:
        dtype = matrix_dtype(arch, resolved)
        limit = f"its weights take {show_bytes(size)} in {dtype}, {show_bytes(free_bytes)} are free"
        raise ConfigError("model", resolved.model, limit, "take a smaller model, or fewer bytes per weight: --dtype")


def matrix_dtype(arch: Arch, resolved: Resolved) -> str:
    """Of matrices: those stored as bfloat16 stay so under float32, since products widen them exactly.

    Not where other weights are to come, which may be float32.
    """
    stays = (arch.dtype, resolved.dtype) == ("bfloat16", "float32") and resolved.load_format != "dummy"
    stays = stays and not resolved.weight_transfer_config
    return arch.dtype if stays else resolved.dtype


def plan_memory(
    arch: Arch,
    resolved: Resolved,
    groups: Sequence[CacheGroup],
    free_bytes: int,
    *,
    weight_bytes: int,
    total_bytes: int = 0,
    weights_loaded: bool = False,
    layout: str,
    tables: Sequence[TableSpec],
    buffer_bytes: int = 0,
    max_num_drafts: int = 0,
    num_lookahead: int = 0,
    why: Mapping[str, str] = NO_REASONS,
) -> CachePlan:
    """Divide `free_bytes` of the device. `total_bytes` is needed on a GPU, whose utilization counts everything.

    weight_bytes: of all weights, as the layers count them.
    layout, tables: of `octavo.startup.cache`, and why the layout.
    buffer_bytes: that attention backends keep for themselves.
    max_num_drafts, num_lookahead: the speculator's.

    Raises ConfigError with the numbers if not one request of max_model_len fits, unless max_model_len is automatic:
    then it is shortened to what fits.
    """
    workspace = _workspace_bytes(arch, resolved)
    logits = _logits_bytes(arch, resolved, max_num_drafts)
    graphs = _graph_bytes(arch, resolved)
    table_bytes = _table_bytes(resolved, groups, tables)
    per_block = max(block_bytes(groups, ITEMSIZE[resolved.kv_cache_dtype]), 1)
    parts = {
        "weights": 0 if weights_loaded else weight_bytes,
        "workspace": workspace + logits + table_bytes + buffer_bytes,
        "graphs": graphs,
    }
    fitted = _fit_blocks(resolved, groups, free_bytes, total_bytes, per_block, parts, max_num_drafts + num_lookahead)
    length = fitted.max_model_len
    shortened = {"max_model_len": f"what {fitted.rule} holds"} if length < resolved.max_model_len else {}
    return CachePlan(
        device=resolved.device,
        limits=step_limits(dataclasses.replace(resolved, max_model_len=length), max_num_drafts, num_lookahead),
        groups=tuple(groups),
        layout=layout,
        tables=tuple(tables),
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        weights_loaded=weights_loaded,
        workspace_bytes=workspace,
        logits_bytes=logits,
        graph_bytes=graphs,
        table_bytes=table_bytes,
        buffer_bytes=buffer_bytes,
        bytes_per_block=per_block,
        block_size=resolved.block_size,
        num_blocks=fitted.num_blocks,
        blocks_per_request=fitted.per_request,
        why={**why, "num_blocks": fitted.rule, **shortened},
    )


def with_planned_length(config: EngineConfig, arch: Arch, resolved: Resolved, plan: CachePlan) -> Resolved:
    """The settings with the length that the plan holds. Where nobody asked for a shorter one, a warning says it."""
    if plan.max_model_len < resolved.max_model_len:
        why = {**resolved.why, "max_model_len": plan.why["max_model_len"]}
        resolved = dataclasses.replace(resolved, max_model_len=plan.max_model_len, why=why)
    usual = arch.default_length or arch.max_position
    if config.max_model_len is None and resolved.max_model_len < usual:
        why_short = resolved.why["max_model_len"]
        field = "max_num_batched_tokens" if why_short.startswith("max_num_batched_tokens") else sized_by(resolved)
        _LOG.warning(
            "max_model_len is %d, not the checkpoint's %d: it is %s; %s %s (%s), or set max_model_len (%s) to what you "
            "need, or to auto, which means what fits",
            resolved.max_model_len,
            usual,
            why_short,
            "set" if getattr(resolved, field) is None else "raise",
            field,
            flag_name(field),
            flag_name("max_model_len"),
        )
    return resolved


def _logits_bytes(arch: Arch, resolved: Resolved, max_num_drafts: int) -> int:
    """Logits of the largest step as computed, as processed, and room to sort."""
    rows, cheap = resolved.max_num_seqs, cheap_tokens(resolved.speculative, resolved.device)
    lines = min(rows * (1 + max_num_drafts), rows + cheap if cheap else resolved.max_num_batched_tokens)
    return 3 * 4 * lines * arch.vocab_size


class _Fitted(NamedTuple):
    """How many blocks fit, for requests of how many tokens, and the rule that said so."""

    num_blocks: int
    max_model_len: int
    per_request: int  # blocks of a request of max_model_len
    rule: str


def _fit_blocks(
    resolved: Resolved,
    groups: Sequence[CacheGroup],
    free_bytes: int,
    total_bytes: int,
    per_block: int,
    parts: Mapping[str, int],
    num_ahead: int,
) -> _Fitted:
    """What `parts`, bytes by name, leave of the free bytes, in blocks. Raises ConfigError, see `plan_memory`.

    num_ahead: tokens that a step may need blocks for beyond its budget.
    """
    max_new = resolved.max_num_batched_tokens + num_ahead
    needed = functools.partial(blocks_for_request, groups, drafts=num_ahead > 0)
    per_request = needed(resolved.max_model_len, max_new)
    available = free_bytes - sum(parts.values())
    if resolved.device == "cuda":
        available -= int((1.0 - resolved.gpu_memory_utilization) * total_bytes)
    num_blocks, rule = _count_blocks(resolved, available, per_block, per_request)
    length = resolved.max_model_len
    if num_blocks - 1 < per_request:
        length = _fit_length(resolved, needed, num_blocks - 1, max_new)
        if not resolved.max_model_len_is_auto or length < _SHORTEST:
            taken = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
            left = f"{show_bytes(max(available, 0))} are left of {show_bytes(free_bytes)} after {taken}"
            least = per_request + 1
            if rule in _OF_USER:
                if resolved.max_model_len_is_auto:
                    least = needed(_SHORTEST, max_new) + 1
                left = "" if least * per_block <= available else left  # empty: it is not memory that lacks
            step = _fit_step(resolved, needed, num_blocks - 1, num_ahead)
            raise _too_small(resolved, left, per_block, (least, per_request + 1), num_blocks, length, step)
        per_request = needed(length, max_new)
    return _Fitted(num_blocks, length, per_request, rule)


def _table_bytes(resolved: Resolved, groups: Sequence[CacheGroup], tables: Sequence[TableSpec]) -> int:
    """Tokens, block tables and a step's copies of them, one int32 each, and the slots of a step's tokens.

    Persistent tables have a row more than requests run at once: padding reads it.
    """
    rows, step = resolved.max_num_seqs, resolved.max_num_batched_tokens
    total = 4 * (rows + 1) * resolved.max_model_len
    for table in tables:
        group, size = groups[table.group], table.kernel_block_size
        columns = group.num_blocks(resolved.max_model_len) * (group.block_size // (size or group.block_size))
        if group.is_attention:
            total += 4 * (2 * rows + 1) * max(columns, 1) + 8 * step
        else:  # read by row, where it is
            total += 4 * (rows + 1) * max(columns, 1)
    return total


def _graph_bytes(arch: Arch, resolved: Resolved) -> int:
    """The logits and activations of the largest graphs, which the others share, and what the driver keeps of each."""
    if resolved.device != "cuda" or resolved.enforce_eager:
        return 0
    largest = dataclasses.replace(resolved, max_num_batched_tokens=graph_tokens(arch, resolved))
    return 4 * resolved.max_num_seqs * arch.vocab_size + _workspace_bytes(arch, largest) + _GRAPH_NODES


def graph_tokens(arch: Arch, resolved: Resolved) -> int:
    """Tokens of the largest mixed step that a GPU runs as a graph: beyond, issuing it hides behind running it."""
    return min(resolved.max_num_batched_tokens, max(_GRAPH_TOKENS, _GRAPH_WORK // arch.hidden_size**2))


def _workspace_bytes(arch: Arch, resolved: Resolved) -> int:
    """A layer's largest set of live tensors, counted in float32 since norms and attention widen.

    A compiled decoder keeps all of its buffers, of the activations' type, a quarter larger than they were needed, and
    each thread what it packs rows into.
    """
    heads = max((2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size, 3 * _mixer_channels(arch))
    mlp, hidden = arch.intermediate_size, arch.hidden_size
    if arch.moe is not None:
        mlp = max(mlp, arch.moe.expert_size * arch.moe.experts_per_token)
    live = 4 * resolved.max_num_batched_tokens * (4 * hidden + max(heads, 3 * mlp))
    if resolved.device != "cpu" or resolved.native == "none":
        return live
    kept = 5 * hidden + heads + arch.num_heads * arch.head_size + 3 * mlp
    packed = 4 * resolved.num_threads * _CPU_PACKED_ROWS * max(hidden, mlp)
    return max(live, resolved.max_num_batched_tokens * ITEMSIZE[resolved.dtype] * kept * 5 // 4 + packed)


def _mixer_channels(arch: Arch) -> int:
    """What a layer with a state projects a token to: that, its convolution's result and the layer's live at once."""
    widths = [0]
    if arch.delta is not None:
        own = arch.delta
        widths.append(2 * own.num_key_heads * own.key_size + 2 * own.num_value_heads * (own.value_size + 1))
    if arch.mamba is not None:
        widths.append(2 * (arch.mamba.inner_size + arch.mamba.num_groups * arch.mamba.state_size))
    if arch.conv is not None:
        widths.append(3 * arch.hidden_size)
    return max(widths)


def _count_blocks(resolved: Resolved, available: int, per_block: int, per_request: int) -> tuple[int, str]:
    """Blocks of the cache, and the rule that said so."""
    if resolved.num_gpu_blocks_override is not None:
        return resolved.num_gpu_blocks_override, "num_gpu_blocks_override"
    if resolved.kv_cache_memory_bytes is not None:
        return resolved.kv_cache_memory_bytes // per_block, "kv_cache_memory_bytes"
    available = max(available, 0)
    if resolved.device == "cuda":
        return available // per_block, f"gpu_memory_utilization={resolved.gpu_memory_utilization:g}"
    need = resolved.max_num_seqs * per_request + 1
    usual = int(available * _CPU_SHARE) // per_block
    if need <= usual:
        return need, f"enough for max_num_seqs={resolved.max_num_seqs} requests of max_model_len"
    share = _CPU_AUTO_SHARE if resolved.max_model_len_is_auto else _CPU_EXPLICIT_SHARE
    most = int(available * share) // per_block
    if usual < per_request + 1 <= most:
        return per_request + 1, "one request of max_model_len"
    return usual if usual > per_request else min(most, per_request + 1), "a share of the free memory"


def _fit_length(resolved: Resolved, needed: Callable[[int, int], int], num_blocks: int, max_new: int) -> int:
    """The longest request, at most max_model_len, that `num_blocks` hold; 0 if none."""
    low, high = 0, resolved.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if needed(middle, max_new) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _fit_step(resolved: Resolved, needed: Callable[[int, int], int], num_blocks: int, num_ahead: int) -> int:
    """The largest max_num_batched_tokens with which `num_blocks` hold a request of max_model_len; 0: none does.

    Steps of fewer tokens need fewer blocks of windows and of open chunks at once.
    """

    def fits(tokens: int) -> bool:
        return needed(resolved.max_model_len, tokens + num_ahead) <= num_blocks

    if resolved.looks_ahead or not resolved.enable_chunked_prefill or not fits(resolved.max_num_seqs):
        return 0
    low, high = resolved.max_num_seqs, resolved.max_num_batched_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _too_small(
    resolved: Resolved, left: str, per_block: int, needs: tuple[int, int], num_blocks: int, fits: int, step: int
) -> ConfigError:
    """fits, step: the max_model_len, and the max_num_batched_tokens, that would do; 0: none.

    needs: blocks, the null block among them, of the shortest request that would do, and of the longest.
    left: what memory is left, empty: it is not what lacks.
    """
    least, usual = needs
    length = f" of {_SHORTEST} tokens" if least < usual else ""
    limit = (
        f"one request{length} needs {least} blocks ({show_bytes(least * per_block)}), the cache would have "
        f"{max(num_blocks, 0)} ({show_bytes(max(num_blocks, 0) * per_block)})"
    )
    limit += f": {left}" if left else ""
    unit = 1
    if resolved.num_gpu_blocks_override is not None:
        field = "num_gpu_blocks_override"
    elif resolved.kv_cache_memory_bytes is not None:
        field, unit = "kv_cache_memory_bytes", per_block
    else:
        field = "max_model_len"
    if field != "max_model_len":
        change = f"set it to at least {least * unit}"
        if least < usual:
            change += f", or to {usual * unit} for requests of {resolved.max_model_len} tokens"
        if fits >= _SHORTEST:
            change += f", or --max-model-len to at most {fits}"
    else:
        change = "free some memory"
        if fits >= _SHORTEST:
            change = f"set --max-model-len to at most {fits}, or auto"
    if step:
        change += f", or --max-num-batched-tokens to at most {step}"
    return ConfigError(field, getattr(resolved, field), limit, change)

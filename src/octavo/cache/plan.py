"""CachePlan: what an engine's memory holds, as it was planned: the cache above all.

Owns the plan's words and how people read them. It is made once (`octavo.startup.cache.plan_cache`), by an engine and by
`octavo doctor` alike, and is all that a worker is told of its cache: plain data, which may go to another process.
Invariant: a plan holds at least one request of `max_model_len` tokens and the null block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from octavo.cache.groups import CacheGroup, TableSpec
from octavo.cache.parts import layer_bytes
from octavo.cache.policies import most_decoding
from octavo.plan import StepLimits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """How large the cache is, how it lies and who reads it, and the bytes by purpose. `why` explains what was chosen.

    `num_blocks` counts the null block 0.
    """

    device: str
    limits: StepLimits  # max_model_len: shortened if it was automatic and did not fit
    groups: tuple[CacheGroup, ...]
    layout: str  # a name of `octavo.cache.layout.LAYOUTS`
    tables: tuple[TableSpec, ...]  # with the kernel block size of each
    block_size: int
    num_blocks: int
    blocks_per_request: int  # of max_model_len tokens, in all groups
    bytes_per_block: int
    free_bytes: int  # when the plan was made
    weight_bytes: int
    weights_loaded: bool  # then they are not part of free_bytes
    workspace_bytes: int  # activations of max_num_batched_tokens
    logits_bytes: int
    graph_bytes: int  # of a GPU's graphs: their own activations and logits, and their nodes
    table_bytes: int
    buffer_bytes: int  # of attention backends: masks, partial results
    why: Mapping[str, str]  # by field: what decided it

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return self.limits.max_model_len

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache."""
        return self.num_blocks * self.bytes_per_block

    @property
    def max_requests(self) -> float:
        """Requests of max_model_len tokens that the cache holds at once."""
        return (self.num_blocks - 1) / self.blocks_per_request

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds, in requests of max_model_len."""
        return int(self.max_requests * self.max_model_len)

    def table(self) -> str:
        """The plan for people, one purpose per line."""
        state = "loaded" if self.weights_loaded else "to be loaded"
        blocks = f"{self.num_blocks} blocks of {self.bytes_per_block} bytes; {self.why['num_blocks']}"
        rows = [
            ("free memory", self.free_bytes, f"on {self.device}, now"),
            ("weights", self.weight_bytes, state),
            ("workspace", self.workspace_bytes, "activations of the largest step"),
            ("logits", self.logits_bytes, "of the largest step, while sampling"),
            ("graphs", self.graph_bytes, "captured steps, which share one memory; estimated"),
            ("tables", self.table_bytes, "tokens and blocks of every row"),
            ("attention", self.buffer_bytes, "masks and partial results of its backends"),
            ("KV cache", self.kv_bytes, blocks),
        ]
        lines = [f"  {name:<12} {show_bytes(size):>10}  {remark}" for name, size, remark in rows if size]
        lines.append(f"  The {self.capacity()}{self._why_length()}.")
        lines += self._show_states()
        reasons = [self.why[name] for name in ("enable_prefix_caching", "snapshot_interval") if name in self.why]
        lines += [f"  Prefixes: {reason}." for reason in reasons]
        lines.append(f"  Its layout is {self.layout}, {self.why['layout']}; {self._show_tables()}.")
        return "\n".join(lines)

    def capacity(self) -> str:
        """What the cache holds, in a few words."""
        return (
            f"cache holds {self.num_tokens} tokens: {self.max_requests:.1f} requests of "
            f"max_model_len={self.max_model_len}"
        )

    def _show_states(self) -> list[str]:
        """What layers with states keep, a line per kind of layer."""
        inputs = [group for group in self.groups if group.kind == "inputs"]
        states = [group for group in self.groups if group.kind == "state"]
        lines = []
        for state, tokens in zip(states, inputs, strict=True):
            size, blocks = self.bytes_per_block, state.parts.blocks
            used = len(state.layers) * layer_bytes(state.parts.tensors)
            most = -(-tokens.chunk // tokens.block_size) * tokens.parts.blocks
            lines.append(
                f"  States: one of {len(state.layers)} layers together takes {show_bytes(blocks * size)} "
                f"({blocks} blocks, {show_bytes(used)} used); the inputs of an open chunk of {tokens.chunk} tokens "
                f"take {show_bytes(most * size)}."
            )
            if self.limits.max_num_drafts:
                lines.append(self._show_decoding(state, tokens))
        return lines

    def _show_decoding(self, state: CacheGroup, tokens: CacheGroup) -> str:
        """What a row that decodes has at once of a kind of layer, with drafts and without."""
        counts = [[most_decoding(group, n) for group in (state, tokens)] for n in (self.limits.num_unsure, 0)]
        (states, inputs), (state_alone, chunk) = counts
        with_drafts, without = (
            show_bytes(self.bytes_per_block * (own * state.parts.blocks + num * tokens.parts.blocks))
            for own, num in counts
        )
        return (
            f"  Drafts: a row that decodes has up to {states} of these states and the inputs of {inputs} blocks at "
            f"once, {with_drafts}; without drafts {state_alone} and {chunk}, {without}."
        )

    def _why_length(self) -> str:
        return f", {self.why['max_model_len']}" if "max_model_len" in self.why else ""

    def _show_tables(self) -> str:
        """Who reads it, in which blocks."""
        attention = [table for table in self.tables if table.backend]
        sizes = dict.fromkeys((table.backend, table.kernel_block_size) for table in attention)
        readers = (f"{name} reads {size} at a time" if size else f"{name} keeps nothing" for name, size in sizes)
        return ", ".join((f"of blocks of {self.block_size} tokens", *(readers if sizes else ("no layer attends",))))


def show_bytes(size: int) -> str:
    """A size for people: 512 B, 1.5 KiB, 3.0 GiB."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"

"""What a draft of an EAGLE-3-shaped drafter takes beside 0.6b, one row: its eight kernels, and both ends of it joined.

    python bench/h200/draft.py [--length 300] [--tiles]

Four passes as behind a step of one row, in one CUDA graph, behind a read that leaves none of their weights in the L2.
First bits: drafts, the state and the cache of joined ends against the kernels one by one, over many tokens, rows and
temperatures. Then microseconds a draft, by turns, behind that read (as an engine's steps) and one pass behind another,
with the head's weights told to leave the L2 first, by an access window of a graph's nodes, too; and each kernel's
microseconds, by the profiler, from the end of what began before it. --tiles: the entry's other tiles. Some 30 s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo.bench import gpu_profile
from octavo.ops.attention import rope_decode
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch
from octavo.ops.compile import driver
from octavo.ops.decoder import PostOperands, post_attention
from octavo.ops.embedding import beside_gemv
from octavo.ops.embedding.beside import project_beside
from octavo.ops.gemm import LinearWeight, pack_linear
from octavo.ops.inputs.tensors import DraftRows, RowTensors
from octavo.ops.rope import Rotation, rope_table
from octavo.ops.sampling import drafts_head
from octavo.ops.sampling.drafts import draw_drafts_of

BF16, CUDA, BLOCK, EPS = torch.bfloat16, torch.device("cuda"), 64, 1e-6
SIZE, INNER, HEADS, PLACES, VOCAB = 1024, 3072, Heads(16, 8, 128), 32000, 151936
MASK = MaskSpec(scale=128**-0.5)
COPY = 4.3e12  # bytes a second
_PROFILED, _FLUSHED = 8, 128 << 20  # replays; numbers that are read


class Drafter:
    """A head's weights."""

    def __init__(self) -> None:
        """Random ones."""
        torch.manual_seed(0)
        q, kv = HEADS.num_heads * HEADS.size, HEADS.num_kv_heads * HEADS.size

        def weight(n: int, k: int) -> LinearWeight:
            return pack_linear(torch.randn(n, k, dtype=BF16, device=CUDA) * k**-0.5)

        def norm() -> Tensor:
            return torch.rand(SIZE, device=CUDA) + 0.5

        self.table = torch.randn(VOCAB, SIZE, dtype=BF16, device=CUDA)
        self.norms, self.last = (norm(), norm()), norm()
        self.qkv, self.head = weight(q + 2 * kv, 2 * SIZE), weight(PLACES, SIZE)
        self.end = PostOperands(
            eps=EPS,
            output=weight(SIZE, q),
            output_bias=None,
            attention_norm=None,
            mlp_norm=norm(),
            gate_up=weight(2 * INNER, SIZE),
            down=weight(SIZE, INNER),
            activation="silu",
            mlp_out_norm=None,
        )
        self.target_ids = torch.randperm(VOCAB, device=CUDA)[:PLACES].sort().values
        self.cos_sin = rope_table(HEADS.size, 4096).to(CUDA)

    def weights(self) -> dict[str, Tensor]:
        """By name."""
        end = self.end
        assert end.gate_up is not None and end.down is not None
        of_end = {"output": end.output.storage, "gate_up": end.gate_up.storage, "down": end.down.storage}
        return {"qkv": self.qkv.storage, **of_end, "head": self.head.storage}


class Passes:
    """So many passes of a row behind its first `length` tokens."""

    leaves = False  # whether the head's weights leave the L2 first

    def __init__(self, drafter: Drafter, length: int, count: int) -> None:
        """The row's tensors."""
        ints: dict[str, Any] = {"dtype": torch.int32, "device": CUDA}
        self.drafter, self.count, last = drafter, count, length + count
        columns = -(-last // BLOCK)
        self.block_table = torch.arange(1, 1 + columns, **ints)[None]
        self.query_start = torch.arange(2, **ints)
        self.seq_lens = [torch.tensor([length + i + 1], **ints) for i in range(count)]
        self.positions = [torch.tensor([length + i], device=CUDA) for i in range(count)]
        self.slots = [BLOCK + position for position in self.positions]  # blocks follow each other from 1 on
        shape = (1 + columns, HEADS.num_kv_heads, BLOCK, 2 * HEADS.size)
        generator = torch.Generator(CUDA).manual_seed(length)
        self.kv = torch.randn(shape, device=CUDA, generator=generator).to(BF16)
        self.token = torch.tensor([17], device=CUDA)
        self.state = torch.randn(1, SIZE, device=CUDA, generator=generator).to(BF16)
        self.temperatures = torch.tensor([0.0, 0.8], device=CUDA)
        self.seeds = torch.tensor([3, 4], device=CUDA)
        token_ids, total = torch.zeros(2, 4096, **ints), torch.full((2,), length + 1, **ints)
        self.rows = torch.tensor([1], device=CUDA)
        self.table, self.live = RowTensors(token_ids, total, total), (torch.zeros(1, **ints), torch.ones(1, **ints))
        self.planner = Planner(HEADS, MASK, BF16, CUDA, Scratch(CUDA))

    def run(self) -> tuple[list[Tensor], Tensor]:
        """(drafts, the last state)."""
        own, drafts = self.drafter, []
        token, state = self.token, self.state
        for place in range(self.count):
            plan = self.planner.plan(
                self.query_start,
                self.seq_lens[place],
                num_tokens=1,
                max_query_len=1,
                max_seq_len=4096,
                for_capture=True,
            )
            sides = token, own.table, 1.0, state, own.norms, EPS
            projected, stream = project_beside(*sides, own.qkv, None, normed=False, behind_draw=place > 0)
            rotation = Rotation(
                positions=self.positions[place],
                cos_sin=own.cos_sin,
                q_norm=None,
                k_norm=None,
                eps=EPS,
                slot_mapping=self.slots[place],
            )
            out = projected.new_empty(1, HEADS.num_heads, HEADS.size)
            of_row = self.query_start, self.seq_lens[place], self.block_table
            given: dict[str, Any] = {"mask_spec": MASK, "plan": plan, "scratch": self.planner._scratch}
            rope_decode.fused_rope_decode(projected, rotation, self.kv, *of_row, out, **given)
            x, residual = post_attention(own.end, out.flatten(1), stream)
            state = x if residual is None else x + residual
            rows = DraftRows(
                self.rows, self.live, self.table, place, self.temperatures, self.seeds, 1.0, vocab_size=VOCAB
            )
            token = draw_drafts_of(state, own.last, EPS, own.head, own.target_ids, rows)
            drafts.append(token)
        return drafts, state


@contextlib.contextmanager
def _ends(entry: bool, head: bool, tile: tuple[int, int] | None = None, leaves: bool = False) -> Iterator[None]:
    """With these ends joined; tile: warps and stages of the entry; leaves: the head's weights leave the L2 first."""
    with contextlib.ExitStack() as stack:
        for module, joined in ((beside_gemv, entry), (drafts_head, head)):
            if not joined:
                stack.enter_context(mock.patch.object(module, "serves", lambda *args: False))
        if tile is not None:
            stack.enter_context(mock.patch.object(beside_gemv, "tile_for", lambda *shape: beside_gemv.Tile(*tile)))
        stack.enter_context(mock.patch.object(Passes, "leaves", leaves))
        yield


def _captured(run: Callable[[], Any], leaving: Tensor | None = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(a graph, what it leaves). leaving: a weight that leaves the L2 first."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = run()
    if leaving is not None:
        sizes = {leaving.data_ptr(): 2 * leaving.numel()}
        if not driver.let_leave(graph.raw_cuda_graph(), sizes):
            print("  no node is given the head's weight: nothing leaves first", flush=True)
    graph.instantiate()
    return graph, result


def _least(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay, the least of 40."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return 1000 * min(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def _check_bits(drafter: Drafter) -> None:
    """Joined ends in graphs, replayed over other tokens, states and temperatures, against separate kernels."""
    wrong, tried, different = 0, 0, set()
    for length in (300, 255, 1030):
        ours, theirs = Passes(drafter, length, 4), Passes(drafter, length, 4)
        graphs = []
        for passes, joined in ((ours, True), (theirs, False)):
            with _ends(joined, joined):
                graphs.append(_captured(passes.run))
        for trial in range(60):
            state = torch.randn(1, SIZE, device=CUDA).to(BF16)
            for passes in (ours, theirs):
                passes.token.fill_((trial * 7919 + 5) % VOCAB)
                passes.state.copy_(state)
                passes.seeds.fill_(trial)
                passes.temperatures[1] = 0.0 if trial % 3 == 0 else 0.3 + 0.1 * (trial % 7)
            for graph, _ in graphs:
                graph.replay()
            torch.cuda.synchronize()
            (drafts, last), (expected, expected_last) = graphs[0][1], graphs[1][1]
            same = torch.equal(torch.cat(drafts), torch.cat(expected)) and torch.equal(last, expected_last)
            same &= torch.equal(ours.table.token_ids, theirs.table.token_ids) and torch.equal(ours.kv, theirs.kv)
            wrong, tried = wrong + (not same), tried + 1
            different.add(tuple(torch.cat(drafts).tolist()))
    print(f"bits: {wrong} of {tried} runs of four drafts DIFFER; {len(different)} different drafts", flush=True)


class Timer:
    """Graphs of passes behind a read, and of the read alone."""

    def __init__(self, drafter: Drafter, length: int) -> None:
        """Memory to be read."""
        self.drafter, self.length = drafter, length
        self.source, self._held = torch.zeros(_FLUSHED, dtype=torch.float32, device=CUDA), []  # type: ignore[var-annotated]
        self.alone, _ = _captured(lambda: self.source.sum())

    def _captured(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph, held = _captured(run, self.drafter.head.storage if Passes.leaves else None)
        self._held.append(held)
        return graph

    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        """[four passes behind a read, twelve by themselves]."""
        four, twelve = Passes(self.drafter, self.length, 4), Passes(self.drafter, self.length, 12)
        return [
            self._captured(lambda: (four, self.source.sum(), four.run())),
            self._captured(lambda: (twelve, twelve.run())),
        ]

    def time(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> tuple[float, float]:
        """Microseconds of a draft (behind a read, one behind another)."""
        return (_least(graphs[0]) - _least(self.alone)) / 4, _least(graphs[1]) / 12


def _time_all(timer: Timer, kinds: dict[str, Any]) -> None:
    """By turns."""
    graphs: dict[str, list[torch.cuda.CUDAGraph]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for name, kind in kinds.items():
        with _ends(*kind):
            graphs[name] = timer.graphs()
    for _ in range(3):
        for name, own in graphs.items():
            times.setdefault(name, []).append(timer.time(own))
    print("us a draft                       behind a read   in a row", flush=True)
    for name, own in times.items():
        print(f"  {name:28s} {min(a for a, _ in own):8.2f} {min(b for _, b in own):10.2f}", flush=True)


def _profile(drafter: Drafter, length: int, joined: tuple[bool, bool]) -> None:
    """Each kernel of the second to fourth pass, in the order in which they begin."""
    from torch.profiler import ProfilerActivity, profile

    with _ends(*joined):
        graph, _ = _captured(Passes(drafter, length, 4).run)
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    launches = sorted(gpu_profile.launches(profiler), key=lambda launch: launch[1])
    each = 8 - joined[0] - joined[1]
    assert len(launches) == 4 * each * _PROFILED, (len(launches), each)
    passes = [launches[i : i + each] for i in range(0, len(launches), each)]
    sums, names = [[0.0] * 3 for _ in range(each)], [name for name, _, _ in passes[0]]
    later = [i for i in range(4, len(passes)) if i % 4]
    for i in later:
        origin = latest = max(end for _, _, end in passes[i - 1])
        for own, (_, start, end) in zip(sums, passes[i], strict=True):
            for place, us in enumerate((max(end - max(start, latest), 0.0), start - origin, end - origin)):
                own[place] += us / len(later)
            latest = max(latest, end)
    ends = " and ".join(f"{'joined' if is_joined else 'apart'}" for is_joined in joined)
    print(f"kernels of a draft, its ends {ends}: us, begins, ends", flush=True)
    for name, own in zip(names, sums, strict=True):
        print("  " + " ".join(f"{us:7.2f}" for us in own) + f"  {name[:50]}", flush=True)


def _time_head(drafter: Drafter, size: int) -> None:
    """A head of states of another size, and its draw: apart and joined, one behind another."""
    passes, head = Passes(drafter, 300, 1), pack_linear(torch.randn(PLACES, size, dtype=BF16, device=CUDA) * size**-0.5)
    state, norm = torch.randn(1, size, device=CUDA).to(BF16), torch.rand(size, device=CUDA) + 0.5
    rows = DraftRows(
        passes.rows, passes.live, passes.table, 0, passes.temperatures, passes.seeds, 1.0, vocab_size=VOCAB
    )

    def run() -> list[Tensor]:
        return [draw_drafts_of(state, norm, EPS, head, drafter.target_ids, rows) for _ in range(8)]

    times, tokens = [], []
    for joined in (False, True):
        with _ends(True, joined):
            graph, drafts = _captured(run)
        times.append(_least(graph) / 8)
        tokens.append(torch.cat(drafts).clone())
    verdict = "same" if torch.equal(*tokens) else "DIFFER"
    print(
        f"us of a head of {PLACES} x {size} and its draw: apart {times[0]:.2f}, joined {times[1]:.2f}, {verdict}",
        flush=True,
    )


def _try(part: Callable[..., None], *args: Any) -> None:
    """A part that fails leaves the others to run."""
    try:
        part(*args)
    except Exception as error:
        print(f"  {part.__name__} FAILED: {error!r:.800}", flush=True)


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    began, drafter = time.monotonic(), Drafter()
    num_bytes = {name: 2 * weight.numel() for name, weight in drafter.weights().items()}
    needs = ", ".join(f"{name} {1e6 * size / COPY:.1f}" for name, size in num_bytes.items())
    print(f"us of the bytes: {needs}, all {1e6 * sum(num_bytes.values()) / COPY:.1f}", flush=True)
    both, timer = (True, True), Timer(drafter, args.length)
    _try(_check_bits, drafter)
    for joined in ((False, False), both):
        _try(_profile, drafter, args.length, joined)
    kinds: dict[str, Any] = {
        "eight kernels": (False, False),
        "entry and product": (True, False),
        "head and draw": (False, True),
        "both": (True, True),
        "eight kernels, weights leave": (False, False, None, True),
        "both, weights leave": (True, True, None, True),
    }
    for tile in ((1, 5), (1, 8), (2, 4)) if args.tiles else ():
        kinds[f"entry {tile[0]} warps, {tile[1]} stages"] = (True, True, tile)
    _try(_time_all, timer, kinds)
    for size in (2048, 4096):
        _try(_time_head, drafter, size)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

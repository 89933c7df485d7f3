"""The input kernels against their twins, under Triton's interpreter and, from tests/gpu, on a GPU."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from octavo.device.staging import HostQueue, PinnedRing, StagedTensor, WriteQueue
from octavo.ops.inputs import commit_drafts_eager, commit_tokens_eager, gather_inputs_eager
from octavo.ops.inputs import draft_passes_gpu as gpu_passes
from octavo.ops.inputs import gpu as gpu_inputs
from octavo.ops.inputs import staged_write_gpu as gpu_staged_write
from octavo.ops.inputs.draft_passes import lay_out_passes_eager
from octavo.ops.inputs.tensors import GroupTables, PassTensors, RowTensors, StepInputs

MAX_ROWS, MAX_LEN, MAX_TOKENS = 9, 700, 1500
BLOCK_SIZES = (16, 8)


class World:
    """Random tables with room for a padded batch, all buffers poisoned; equal seeds give equal worlds."""

    def __init__(
        self, seed: int, device: str, counts: list[int], padded_rows: int, padded_tokens: int, width: int = 1
    ) -> None:
        rng = np.random.default_rng(seed)

        def ints(high: int, *shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.integers(0, high, shape).astype(np.int32)).to(device)

        token_ids = ints(4000, MAX_ROWS + 1, MAX_LEN)
        num_computed = ints(MAX_LEN - max(counts, default=0), MAX_ROWS + 1)
        num_computed[MAX_ROWS] = 0
        self.table = RowTensors(token_ids, num_computed + 1, num_computed)
        chosen = rng.permutation(MAX_ROWS)[: len(counts)]
        rows = np.full(padded_rows, MAX_ROWS)
        rows[: len(counts)] = chosen
        starts = np.full(padded_rows + 1, sum(counts), np.int32)
        starts[: len(counts)] = np.cumsum([0, *counts])[:-1]
        self.step = StepInputs(
            max_query_len=max(counts, default=1),
            rows=torch.from_numpy(rows).to(device),
            query_start=torch.from_numpy(starts).to(device),
            input_ids=torch.full((padded_tokens,), -7, device=device),
            positions=torch.full((padded_tokens,), -7, device=device),
            seq_lens=torch.full((padded_rows,), -7, dtype=torch.int32, device=device),
            next_positions=torch.full((padded_rows,), -7, device=device),
            turn=torch.tensor([1], dtype=torch.int32, device=device),
            results=torch.full((2, MAX_ROWS, width), -7, dtype=torch.int64, pin_memory=device == "cuda"),
            counts=torch.full((2, MAX_ROWS), -7, dtype=torch.int64, pin_memory=device == "cuda"),
        )
        tables = [ints(999, MAX_ROWS + 1, MAX_LEN // size + 1) for size in BLOCK_SIZES]
        for table in tables:
            table[MAX_ROWS] = 0
        outs = [torch.full_like(table, -7) for table in tables]
        slots = torch.full((len(tables), MAX_TOKENS), -7, dtype=torch.int64, device=device)
        self.groups = GroupTables(tables, outs, slots, BLOCK_SIZES)

    def args(self) -> tuple[StepInputs, RowTensors, GroupTables]:
        return self.step, self.table, self.groups

    def assert_equal(self, twin: World) -> None:
        names = {
            "step": ("input_ids", "positions", "seq_lens", "next_positions", "turn"),
            "table": ("num_computed", "total_len", "token_ids"),
        }
        for part, fields in names.items():
            for name in fields:
                ours, expected = (getattr(getattr(world, part), name) for world in (self, twin))
                assert torch.equal(ours.cpu(), expected), name
        assert torch.equal(self.groups.slots.cpu(), twin.groups.slots)
        for ours, expected, size in zip(self.groups.outs, twin.groups.outs, BLOCK_SIZES, strict=True):
            for entry, length in enumerate(twin.step.seq_lens.tolist()):  # what lies beyond a live prefix is garbage
                live = -(-length // size) if length else ours.shape[1]
                assert torch.equal(ours[entry, :live].cpu(), expected[entry, :live]), (entry, size)


def _case(rng: random.Random) -> tuple[list[int], int, int]:
    counts = sorted(rng.choice([1, 1, 1, 2, 5, 16, 17, 100, 300]) for _ in range(rng.randrange(1, MAX_ROWS)))
    return counts, rng.randrange(len(counts), MAX_ROWS + 1), sum(counts) + rng.choice([0, 0, 1, 9, 290])


def check_gather(device: str, cases: int = 12) -> None:
    rng = random.Random(3)
    shapes = [([1, 1, 1], 3, 3), ([1, 1], 4, 4), ([], 4, 4), *(_case(rng) for _ in range(cases))]
    for seed, (counts, rows, tokens) in enumerate(shapes):
        ours, twin = World(seed, device, counts, rows, tokens), World(seed, "cpu", counts, rows, tokens)
        gpu_inputs.gather(*ours.args())
        gather_inputs_eager(*twin.args())
        ours.assert_equal(twin)


def check_commit(device: str) -> None:
    counts = [1, 1, 1, 4, 4]
    sample_of = torch.tensor([0, 1, -1, 2, -1, -1], dtype=torch.int32)
    tokens, failed = torch.tensor([11, 3999, 5]), torch.tensor([0, 2, 0], dtype=torch.uint8)
    worlds = World(1, device, counts, 6, 11, 3), World(1, "cpu", counts, 6, 11)
    gathers, commits = (gpu_inputs.gather, gather_inputs_eager), (gpu_inputs.commit, commit_tokens_eager)
    for world, gather, commit in zip(worlds, gathers, commits, strict=True):
        where = world.step.rows.device
        for turn, added in ((0, 0), (1, 3)):
            gather(*world.args())
            for again, drawn in ((False, tokens + added), (True, tokens + added + 1)):
                samples = sample_of.to(where), drawn.to(where), failed.to(where)
                commit(world.step, world.table, *samples, again=again)
            if where.type == "cuda":
                torch.cuda.synchronize()
            expected = [12 + added, 4000 + added + (2 << 32), 6 + added]
            assert world.step.results[turn, :, 0].tolist()[:4] == [*expected, -7]
            assert (world.step.results[turn, :, 1:] == -7).all()
            assert (
                world.step.results[0, :3, 0] == torch.tensor([12, 4000 + (2 << 32), 6])
            ).all()  # the turn before holds
    worlds[0].assert_equal(worlds[1])


_HELD = 3


def check_commit_drafts(device: str) -> None:
    """All that can become of 3 drafts: (drafts, drawn and failed at each place, tokens that count)."""
    cases = [
        ([5, 6, 7], [5, 6, 7, 8], [0, 0, 0, 0], 4),
        ([5, 6, 7], [5, 9, 7, 8], [0, 0, 0, 0], 2),
        ([5, 6, 7], [9, 6, 7, 8], [0, 0, 0, 0], 1),
        ([5, 6, 7], [5, 6, 7, 8], [0, 0, 2, 0], 3),  # what fails is never accepted
        ([5, 6, 7], [5, 6, 7, 8], [0, _HELD, 0, 0], 1),
        ([5, 6, 7], [5, 6, 7, 8], [_HELD, 0, 0, 0], 0),
        ([5, 6, 7], [9, 6, 7, 8], [0, _HELD, _HELD, 2], 1),  # rejected before it might have been held
        ([5], [5, 8], [0, 0], 2),
        ([], [8], [0], 1),
        ([], [8], [_HELD], 0),
    ]
    rng = random.Random(4)
    for _ in range(4):
        chosen = rng.sample(cases, 6)
        counts = [1 + len(drafts) for drafts, *_ in chosen] + [4]  # the last row is a prompt's chunk
        worlds = World(2, device, counts, 8, sum(counts) + 2, 4), World(2, "cpu", counts, 8, sum(counts) + 2, 4)
        commits = gpu_inputs.commit_runs, commit_drafts_eager
        for world, gather, commit in zip(worlds, (gpu_inputs.gather, gather_inputs_eager), commits, strict=True):
            _commit_one(world, gather, commit, chosen, counts)
        worlds[0].assert_equal(worlds[1])


def _commit_one(world: World, gather: Any, commit: Any, cases: list[Any], counts: list[int]) -> None:
    where, table, rows = world.step.rows.device, world.table, world.step.rows.tolist()
    before = table.total_len.tolist()
    for row, (drafts, *_) in zip(rows, cases, strict=False):
        table.token_ids[row, before[row] : before[row] + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    gather(*world.args())
    starts = np.cumsum([0, *counts])[:6].tolist()
    numbers = [[*starts, -1, -1], [*(len(drafts) for drafts, *_ in cases), 0, 0]]
    sample_of, num_drafts = (torch.tensor(each, dtype=torch.int32, device=where) for each in numbers)
    drawn = torch.tensor([token for _, tokens, *_ in cases for token in tokens], device=where)
    failed = torch.tensor([code for *_, codes, _ in cases for code in codes], dtype=torch.uint8, device=where)
    commit(world.step, table, sample_of, num_drafts, drawn, failed, _HELD)
    if where.type == "cuda":
        torch.cuda.synchronize()
    for entry, (drafts, tokens, codes, count) in enumerate(cases):
        row, packed = rows[entry], world.step.results[0, entry].tolist()
        assert [word & 0xFFFFFFFF for word in packed[: len(tokens)]] == tokens
        pairs = zip(drafts, tokens, codes, strict=False)
        last = next((at for at, (draft, token, code) in enumerate(pairs) if draft != token or code), len(drafts))
        told = [code if at <= last else 0 for at, code in enumerate(codes)]
        assert [word >> 32 for word in packed[: len(tokens)]] == told
        assert world.step.counts[0, entry] == count, (drafts, tokens, codes)
        assert table.total_len[row] == before[row] + count
        assert table.num_computed[row] == before[row] - 1 + count
        assert table.token_ids[row, before[row] : before[row] + count].tolist() == tokens[:count]
    assert table.num_computed[rows[6]] == before[rows[6]] - 1 + counts[6]
    assert table.total_len[rows[6]] == before[rows[6]]
    assert (world.step.results[1] == -7).all() and (world.step.counts[1] == -7).all()


def check_lay_out_passes(device: str) -> None:
    """Behind steps of all kinds: rows that sampled and did not, rejected drafts, ends at max_model_len, padding."""
    rng = random.Random(5)
    shapes = [([1, 1, 1], 3, 3), ([1], 4, 4), ([], 4, 4), ([5, 5, 5, 5], 4, 20), *(_case(rng) for _ in range(4))]
    for seed, (counts, rows, tokens) in enumerate(shapes):
        worlds = World(seed, device, counts, rows, tokens), World(seed, "cpu", counts, rows, tokens)
        sample_of = torch.tensor([rng.choice([0, 1, 2, -1]) for _ in range(rows)], dtype=torch.int32)
        accepted = torch.tensor([rng.randrange(count) + 1 for count in counts], dtype=torch.int32)
        found = []
        for world, lay_out in zip(worlds, (gpu_passes.lay_out, _lay_out_eager), strict=True):
            (gpu_inputs.gather if world is worlds[0] else gather_inputs_eager)(*world.args())
            table, where = world.table, world.step.rows.device
            own = world.step.rows[: len(counts)]
            table.num_computed[own] += accepted.to(where)  # as a commit leaves them
            table.total_len[own] = (table.num_computed[own] + 1).clamp(max=MAX_LEN)
            passes = _passes(len(world.groups.tables), where)
            lay_out(world.step, table, sample_of.to(where), world.groups, passes, 690)
            found.append((world, passes))
        (ours, own_passes), (twin, expected) = found
        for name, filled in (("last", rows), ("tokens", rows), ("behind", tokens)):
            pair = (getattr(passes, name)[:filled].cpu() for passes in (own_passes, expected))
            assert torch.equal(*pair), (seed, name)
        for name in ("positions", "next_positions", "seq_lens", "slots"):
            pair = (getattr(passes, name)[..., :rows].cpu() for passes in (own_passes, expected))
            assert torch.equal(*pair), (seed, name)
        for own_out, out, size in zip(ours.groups.outs, twin.groups.outs, BLOCK_SIZES, strict=True):
            for entry, length in enumerate(expected.seq_lens.amax(0).tolist()[:rows]):
                assert torch.equal(own_out[entry, : -(-length // size)].cpu(), out[entry, : -(-length // size)])


def _passes(num_groups: int, device: torch.device) -> PassTensors:
    shape = 6, 16
    longs = torch.full((3, *shape), -7, device=device)
    return PassTensors(
        last=torch.full((16,), -7, device=device),
        tokens=torch.full((16,), -7, device=device),
        behind=torch.full((MAX_TOKENS,), -7, device=device),
        positions=longs[0],
        next_positions=longs[1],
        seq_lens=longs[2].to(torch.int32),
        slots=torch.full((num_groups, *shape), -7, device=device),
    )


def _lay_out_eager(*args: Any) -> None:
    lay_out_passes_eager(*args[:-1], max_model_len=args[-1])


def check_staged_write(device: str) -> None:
    ints = torch.zeros(2000, dtype=torch.int32, device=device)
    longs, floats = torch.zeros(50, dtype=torch.int64, device=device), torch.zeros(50, device=device)
    values = {
        (ints, 3): np.arange(5, dtype=np.int32),
        (ints, 900): np.arange(700, dtype=np.int32) - 9,
        (longs, 2): np.array([-1, 1 << 40]),
        (floats, 49): np.array([0.25], np.float32),
    }
    words = [value.view(np.int32) for value in values.values()]
    first = 4 * len(words)
    header = []
    for (target, start), run in zip(values, words, strict=True):
        header += [target.data_ptr() + start * target.element_size(), first | len(run) << 32]
        first += len(run)
    upload = np.concatenate([np.array(header, np.int64).view(np.int32), *words])
    gpu_staged_write.RunWriter()(torch.from_numpy(upload).to(device), len(words), max(map(len, words)))
    for (target, start), value in values.items():
        assert torch.equal(target[start : start + len(value)].cpu(), torch.from_numpy(value))
    assert int(ints.count_nonzero()) == 4 + 699 and int(longs.count_nonzero()) == 2


class _Ring(PinnedRing):
    """Memory that is read at once: nothing to wait for, and dirty when it is handed out again."""

    def __init__(self) -> None:
        self._slots = [torch.full((1 << 14,), -5, dtype=torch.int32)]

    def take(self, num_words: int) -> tuple[torch.Tensor, Any]:
        assert num_words <= len(self._slots[0])
        return self._slots[0], SimpleNamespace(record=lambda: None)


def check_write_queue(device: str) -> None:
    """Random writes to tensors that share a queue leave what the eager tensors hold."""
    rng = np.random.default_rng(7)
    where, cpu = torch.device(device), torch.device("cpu")
    queue = WriteQueue(_Ring() if where == cpu else None)
    eager = HostQueue()
    kinds = [(40, torch.int32), (300, torch.int64), (0, torch.float32), (0, torch.int64)]
    twins = [
        (StagedTensor(9, width, dtype, where, queue), StagedTensor(9, width, dtype, cpu, eager))
        for width, dtype in kinds
    ]

    def stage() -> None:
        at = int(rng.integers(len(kinds)))
        width, row, values = kinds[at][0], int(rng.integers(9)), rng.integers(0, 1 << 20, 9 * 300)
        way = rng.integers(3)
        if width == 0:
            for tensor in twins[at]:
                tensor.stage_one(row, int(values[0]))
        elif way == 0:  # over what was staged before, often
            start = int(rng.integers(width + 1))  # maybe nothing
            for tensor in twins[at]:
                tensor.stage(row, start, values[: width - start])
        else:
            rows = np.sort(rng.permutation(9)[: int(rng.integers(1, 9))])
            for tensor in twins[at]:
                if way == 1:
                    tensor.stage_each(rows, values[: len(rows)] % width, values[: len(rows)])
                else:
                    lengths = values[: len(rows)] % width + 1
                    starts = (values[-len(rows) :] % (width - lengths + 1)).astype(np.int64)
                    tensor.stage_lines(rows, lengths, values[: lengths.sum()], starts)

    for num_writes in (0, 1, 1, 1, 1, 2, 3, 30, 0, 1):
        for _ in range(num_writes):
            stage()
        queue.apply()
        eager.apply()
        for ours, expected in twins:
            assert torch.equal(ours.data.cpu(), expected.data)


CHECKS: dict[str, Callable[[str], None]] = {
    "gather": check_gather,
    "commit": check_commit,
    "commit_drafts": check_commit_drafts,
    "lay_out_passes": check_lay_out_passes,
    "staged_write": check_staged_write,
    "write_queue": check_write_queue,
}
INTERPRETED = {name: functools.partial(check, "cpu") for name, check in CHECKS.items()}

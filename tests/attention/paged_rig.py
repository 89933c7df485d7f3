"""What the tests of the Triton attention share, and what Triton's interpreter checks of it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any
from unittest import mock

import torch

from batches import Batch, History, make_batch, make_history, run_backend, to_device
from contract_rig import Setting, make_step
from octavo.attention.base import BACKENDS, LayerTensors, Setup, alibi_slopes
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import paged as operator
from octavo.ops.attention import paged_attention_eager, paged_plan
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch, Tile
from octavo.ops.attention.paged_workload import LEAF, count_leaves, count_tiles

FEW, MANY = 1, 16  # processors to plan for: rows are walked almost whole, or by many programs; few rows undivided
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": 70},
    {"chunk": 400},
    {"causal": False},
    {"causal": False, "window": 300},
    {"soft_cap": 9.0},
    {"sinks": [0.5, -2.0, 3.0, 1.0]},
    {"slopes": [0.5, 0.25, 0.125, 0.0625]},
    {"key_scale": [0.5, 2.0], "value_scale": [3.0, 0.25], "soft_cap": 9.0},
)


def attend(
    batch: Batch,
    *,
    processors: int = 0,
    scratch: Scratch | None = None,
    tile: Tile | None = None,
    least_known: bool = False,
    graph_queries: int = 0,
    **options: Any,
) -> torch.Tensor:
    """The operator's result over a poisoned output. tile: for rows of many queries; least_known: of each row.

    graph_queries: by the plan of a graph whose rows have up to so many.
    """
    q, kv = batch.q, batch.kv
    scratch = scratch or Scratch(q.device)
    tensors = {name: options.pop(name, None) for name in ("key_scale", "value_scale", "sinks", "slopes")}
    mask_spec = MaskSpec(scale=q.shape[2] ** -0.5, **options)
    heads = Heads(q.shape[1], kv.shape[1], q.shape[2])
    plan = Planner(heads, mask_spec, q.dtype, q.device, scratch, processors, cache_dtype=kv.dtype).plan(
        batch.query_start,
        batch.seq_lens,
        num_tokens=graph_queries * len(batch.seq_lens) or len(q),
        max_query_len=graph_queries or int(batch.query_start.diff().max()),
        max_seq_len=int(batch.seq_lens.max()),
        min_query_len=int(batch.query_start.diff().min()) if least_known else 0,
        for_capture=graph_queries > 0,
        tile=tile,
    )
    assert not (least_known and plan.rows), "rows of few queries were looked for where there are none"
    out = torch.full_like(q, 7.0)
    paged_attention(*batch.args(), out, mask_spec=mask_spec, plan=plan, scratch=scratch, **tensors)
    return out


def heavy_history(length: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> History:
    """Heavy-tailed, so that another order of a sum shows."""
    history = make_history(length, length, heads, kv_heads, size, dtype)
    factor = torch.exp2(6 * torch.rand(length, kv_heads, 1, generator=torch.Generator().manual_seed(6)) - 4)
    history.kv = (history.kv.float() * factor).to(dtype)
    return history


def narrowed(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch over a quantized cache, whose slots that no row owns are NaN, or some number where there is none."""
    if dtype == torch.int8:
        kv = (batch.kv.float() * 9).clamp(-127, 127).nan_to_num(77.0).round()
    else:
        kv = batch.kv.float().clamp(-448, 448)
    return dataclasses.replace(batch, kv=kv.to(dtype))


def attend_by(kernel: str, batch: Batch, processors: int, **options: Any) -> tuple[torch.Tensor, bool]:
    """The result, and whether the kernel of `octavo.ops.attention` that has a module of this name made it."""
    answers = []
    module = getattr(operator, kernel)
    launch = module.launch

    def spy(*args: Any, **more: Any) -> bool:
        answers.append(launch(*args, **more))
        return answers[-1]

    with mock.patch.object(module, "launch", spy):
        out = attend(batch, processors=processors, **options)
    return out, answers == [True]


def compare_with_reference(seed: int, device: torch.device, dtypes: list[torch.dtype], max_tokens: int) -> None:
    """A random ragged batch against the reference implementation in float32."""
    rng = random.Random(seed)
    group, kv_heads, head_size = rng.choice([1, 2, 3, 4]), rng.choice([1, 2]), rng.choice([15, 16, 24, 64])
    dtype = rng.choice(dtypes)
    options = {"window": rng.choice([0, 0, 1, 17, 100, 513]), "soft_cap": rng.choice([0.0, 30.0, 5.0])}
    rows = []
    for _ in range(rng.randrange(1, 4)):
        seq_len = rng.randrange(1, rng.choice([40, 700, max_tokens]))
        history = make_history(rng.randrange(10**6), seq_len, group * kv_heads, kv_heads, head_size, dtype)
        rows.append((history, seq_len, min(seq_len, rng.choice([1, 1, 5, rng.randrange(1, 60)]))))
    batch = make_batch(rows, rng.choice([16, 48, 64, 128]), seed=seed, heads_last=rng.random() < 0.5)
    batch = to_device(batch, device)
    expected = torch.empty(batch.q.shape, device=device)
    paged_attention_eager(*batch.args(), expected, mask_spec=MaskSpec(head_size**-0.5, **options))
    tolerance = {
        torch.float32: {"atol": 2e-5, "rtol": 0.0},
        torch.float16: {"atol": 2e-3, "rtol": 2**-9},
        torch.bfloat16: {"atol": 1e-2, "rtol": 2**-6},
    }[dtype]
    for processors in (FEW, MANY):
        got = attend(batch, processors=processors, **options).float()
        torch.testing.assert_close(got, expected, **tolerance)


CPU = torch.device("cpu")


def _history(num_tokens: int = 600) -> Any:
    return make_history(5, num_tokens, 4, 2, 16, torch.float16)


def check_reference() -> None:
    for seed in range(8):
        compare_with_reference(seed, CPU, [torch.float32, torch.float16], 1200)


def check_lean_tiles_equal_the_reference() -> None:
    with mock.patch.object(paged_plan, "shared_bytes", lambda device: 99 << 10):
        for seed in range(3):
            compare_with_reference(seed, CPU, [torch.float32, torch.float16], 1200)


def check_decode_prefill_and_chunks_agree() -> None:
    history = _history()
    for options in ({}, {"window": 70, "soft_cap": 20.0}):
        whole = attend(make_batch([(history, 600, 600)], 16), **options)
        for end in (1, 64, 65, LEAF - 1, LEAF, LEAF + 1, 600):
            one = attend(make_batch([(history, end, 1)], 16), **options)[0]
            assert torch.equal(one, whole[end - 1]), end
        assert torch.equal(attend(make_batch([(history, 550, 50)], 16), **options), whole[500:550])


def check_splits_and_neighbours_do_not_move_bits() -> None:
    row = (_history(1300), 1300, 3)
    alone = attend(make_batch([row], 16), processors=FEW)
    assert torch.equal(attend(make_batch([row], 16), processors=MANY), alone)
    other = make_history(8, 600, 4, 2, 16, torch.float16)
    crowd = attend(make_batch([(other, 600, 70), (other, 17, 1), row, (other, 30, 5)], 16, seed=1))
    assert torch.equal(crowd[71:74], alone)


def compare_few_with_divided(history: History, block_size: int, device: torch.device, options: dict[str, Any]) -> None:
    """Rows that `attend_few` takes, and takes again with the same scratch, against the same rows divided."""
    lists = {name: torch.tensor(value, device=device) for name, value in options.items() if isinstance(value, list)}
    options = options | lists
    batch = to_device(make_batch([(history, len(history.kv), 3), (history, 300, 1)], block_size), device)
    divided, scratch = attend(batch, processors=FEW, **options), Scratch(device)
    for _ in range(2):
        assert torch.equal(attend(batch, processors=MANY, scratch=scratch, **options), divided), options


def check_few_rows_have_the_bits_of_divided_ones() -> None:
    for options in FEATURES[1::5]:
        compare_few_with_divided(_history(), 64, CPU, options)


def check_block_size_placement_and_layout_do_not_move_bits() -> None:
    rows = [(_history(), 600, 20), (_history(), 33, 1)]
    expected = attend(make_batch(rows, 16))
    for seed, block_size in enumerate((16, 48, 64, 128)):
        batch = make_batch(rows, block_size, seed=seed, heads_last=bool(seed % 2))
        assert torch.equal(attend(batch), expected), block_size


def check_slid_out_blocks_are_not_read() -> None:
    batch = make_batch([(_history(), 600, 4)], 16)
    expected = attend(batch, window=100)
    gone = (600 - 4 + 1 - 100) // 16
    batch.kv[batch.block_table[0, :gone].long()] = float("nan")
    batch.block_table[0, :gone] = 2**31 - 1
    assert torch.equal(attend(batch, window=100), expected)


def check_a_padding_token_becomes_zero_and_tokens_beyond_the_rows_stay() -> None:
    batch = make_batch([(_history(), 9, 2)], 16)
    batch.query_start = torch.tensor([0, 2, 3], dtype=torch.int32)
    batch.seq_lens = torch.tensor([9, 0], dtype=torch.int32)
    batch.block_table = torch.cat([batch.block_table, torch.zeros_like(batch.block_table)])
    batch.q = torch.cat([batch.q, batch.q])
    for processors in (FEW, MANY):
        out = attend(batch, processors=processors)
        assert (out[:2] != 7).all() and (out[2] == 0).all() and (out[3] == 7).all()


def check_rows_that_do_not_fit_the_scratch_are_not_split() -> None:
    batch = make_batch([(_history(1300), 1300, 1)], 16)
    expected = attend(batch, processors=MANY)
    assert torch.equal(attend(batch, processors=MANY, scratch=Scratch(CPU, limit=64)), expected)


def check_long_rows_are_merged_to_the_same_bits() -> None:
    """Where a batch may have long rows, a kernel of its own folds those."""
    history = make_history(5, 1500, 4, 2, 16, torch.float16)
    rows = [(history, 1500, 2), (history, 300, 1), (history, 1290, 3)]
    for options in ({}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 1200}):
        expected = attend(make_batch(rows, 16), processors=FEW, **dict(options))
        with mock.patch.multiple(paged_plan, _FOLDS=4, _LONG=5):
            for processors in (FEW, MANY):
                assert torch.equal(attend(make_batch(rows, 16), processors=processors, **dict(options)), expected)


def check_the_division_is_whole_and_even() -> None:
    """Every leaf of every short row belongs to one program, and none has much more than its part."""
    rng = random.Random(3)
    for kind in ({}, {"window": 700}, {"chunk": 400}) * 4:
        kv_heads, programs = rng.choice([1, 2, 8]), rng.choice([3, 24])
        counts = [rng.choice([0, 0, 1, 1, 2, 9]) for _ in range(rng.randrange(1, 9))]
        lengths = [rng.randrange(count, 6000) if count else 0 for count in counts]
        planner = Planner(Heads(kv_heads, kv_heads, 16), MaskSpec(scale=1.0, **kind), torch.float16, CPU, Scratch(CPU))
        start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        with mock.patch.multiple(paged_plan, _ROW_PROGRAMS=programs, _WIDE_ROW_PROGRAMS=programs, MAX_SHORT_QUERIES=2):
            plan = planner.plan(
                start,
                torch.tensor(lengths, dtype=torch.int32),
                num_tokens=sum(counts),
                max_query_len=2,
                max_seq_len=6000,
            )
        assert plan.rows
        work = plan.work.tolist()
        starts = [(work[2 * g], work[2 * g + 1]) for g in range(plan.rows.programs + 1)]
        assert starts == sorted(starts)
        leaves = {}
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if 0 < count <= plan.rows.short:
                first = max(length - count - kind.get("window", 10**9) + 1, 0)
                first = (length - count) // kind["chunk"] * kind["chunk"] if "chunk" in kind else first
                leaves[row] = max(count_leaves(length) - count_leaves(first + 1) + 1, 1)
        total = [
            (row * kv_heads + head, leaf) for row in leaves for head in range(kv_heads) for leaf in range(leaves[row])
        ]
        parts = [sum(begin <= place < end for place in total) for begin, end in itertools.pairwise(starts)]
        assert sum(parts) == len(total)
        assert not total or max(parts) <= 4 * (len(total) / len(parts) + 2)


def check_rows_of_many_queries_alone() -> None:
    """What knows that there are no short rows launches nothing for them, and gives the same bits."""
    history = make_history(5, 300, 4, 2, 16, torch.float16)
    batch = make_batch([(history, 300, 300), (history, 90, 70), (history, 200, 65)], 16)
    for options in ({}, {"window": 50}):
        assert torch.equal(attend(batch, least_known=True, **options), attend(batch, **options))


def check_a_graph_holds_rows_of_fewer_queries() -> None:
    """Of rows that verify, some may have fewer drafts than the graph has room for, or none: also more than a tile."""
    for heads, queries in ((4, 17), (8, 3), (16, 9), (16, 17)):
        history = make_history(7, 300, heads, 1, 16, torch.float16)
        batch = make_batch([(history, 300, queries), (history, 90, 1), (history, 200, 2), (history, 170, 5)][:4], 16)
        assert torch.equal(attend(batch, graph_queries=max(queries, 5)), attend(batch)), (heads, queries)


def check_tiles_of_long_rows_are_numbered_without_gaps() -> None:
    rng = random.Random(4)
    for num_rows, queries, short in ((1, 64, 4), (3, 1, 0), (40, 32, 4), (700, 64, 1)):
        counts = [rng.choice([0, 1, 4, 5, 64, 65, 300]) for _ in range(num_rows)]
        start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        tile_start = torch.full((num_rows + 1,), -7, dtype=torch.int32)
        count_tiles[(1,)](start, tile_start, num_rows, short, QUERIES=queries, ROWS=512)
        tiles = [-(-count // queries) if count > short else 0 for count in counts]
        assert tile_start.tolist() == list(itertools.accumulate(tiles, initial=0))


def check_features_equal_the_reference() -> None:
    """Every fact that the backend states, over layouts and kernel blocks; quantized caches with scales."""
    full = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32, scale=0.2)
    changes: list[dict[str, Any]] = [
        {"chunk": 48},
        {"alibi_slopes": alibi_slopes(4)},
        {"alibi_slopes": alibi_slopes(4), "soft_cap": 9.0},
        {"sinks": True},
        {"sinks": True, "window": 40},
        {"causal": False},
        {"causal": False, "window": 30},
        {"causal": False, "alibi_slopes": alibi_slopes(4)},
    ]
    rows = [(make_history(n, n, 4, 2, 32, torch.float32), n, queries) for n, queries in ((90, 1), (64, 40), (270, 3))]
    for index, change in enumerate(changes):
        spec = dataclasses.replace(full, **change)
        layer = LayerTensors(sinks=torch.tensor([0.5, -2.0, 3.0, 1.0]) if spec.sinks else None)
        step = make_step(rows, (Setting(), Setting("BLNHC", 128, 64))[index % 2])
        outs = [
            step.run(BACKENDS.resolve(name)([spec], torch.float32, CPU), spec, layer) for name in ("paged", "reference")
        ]
        torch.testing.assert_close(*outs, atol=1e-5, rtol=0, msg=str(change))


def check_quantized_caches_equal_the_reference() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32, scale=0.2)
    layer = LayerTensors(key_scale=torch.tensor([0.02, 0.05]), value_scale=torch.tensor([0.5, 0.03]))
    for stored in (torch.float8_e4m3fn, torch.int8):
        rows = []
        for n, queries in ((90, 1), (64, 40)):
            history = make_history(n, n, 4, 2, 32, torch.float32)
            rows.append(
                (dataclasses.replace(history, kv=(history.kv * 30).round().clamp(-99, 99).to(stored)), n, queries)
            )
        step = make_step(rows, Setting())
        outs = [
            step.run(BACKENDS.resolve(name)([spec], torch.float32, CPU, Setup(cache_dtype=stored)), spec, layer)
            for name in ("paged", "reference")
        ]
        torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-5)


def check_backend_equals_reference() -> None:
    for ours, expected in zip(
        run_backend("paged", torch.float32, CPU), run_backend("reference", torch.float32, CPU), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


INTERPRETED = {name: check for name, check in list(globals().items()) if name.startswith("check_")}

"""Which steps take which graph: no device is needed to say."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref

import msgspec
import numpy as np
import pytest
import torch

from octavo.device.batch import BatchOrder, StepShape
from octavo.device.graphs import ANY_LENGTH, EAGER, GraphKey, GraphPool, decode_keys, mixed_keys, verify_keys
from octavo.device.request_table import RequestTable
from octavo.device.staging import HostQueue
from octavo.layers.decoder import num_unlike
from octavo.ops import captures
from octavo.plan import NewRow, StepLimits, StepPlan
from octavo.request.sampling_params import SamplingParams

POOL = GraphPool([*decode_keys(100), *mixed_keys(100, 200)])


def work(num_tokens: list[int], *, is_decode: bool = False) -> StepShape:
    counts = np.array(num_tokens)
    return StepShape(
        rows=np.arange(len(counts)),
        num_tokens=counts,
        query_start=np.r_[0, np.cumsum(counts)].astype(np.int32),
        seq_lens=counts,
        max_query_len=int(counts.max()),
        max_seq_len=int(counts.max()),
        sampling=np.arange(len(counts)),
        is_decode=is_decode,
    )


@pytest.mark.parametrize(("counts", "long"), [([1], 0), ([1, 1, 2, 30], 2), ([5], 1), ([1, 1], 0)])
def test_rows_of_several_tokens_are_counted(counts: list[int], long: int) -> None:
    assert work(counts).num_long == long


def test_sizes_end_at_the_limits() -> None:
    assert [key.num_rows for key in decode_keys(20)] == [1, 2, 4, 8, 16, 20]
    assert [key.num_rows for key in decode_keys(1)] == [1]
    mixed = [(16, 16), (32, 20), (64, 20), (128, 20), (130, 20)]
    assert [(key.num_tokens, key.num_rows) for key in mixed_keys(20, 130)] == mixed
    assert mixed_keys(20, 128) == mixed_keys(20, 130)[:-1]


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (3, 4), (5, 8), (8, 8), (97, 100), (100, 100)])
def test_decode_steps_take_the_next_size(rows: int, padded: int) -> None:
    key = POOL.dispatch(work([1] * rows, is_decode=True))
    assert (key.num_rows, key.num_tokens, key.is_decode) == (padded, padded, True)


def test_short_rows_take_the_graph_of_their_length() -> None:
    """Where a backend's grid grows with the longest row that a graph serves."""
    pool = GraphPool(decode_keys(20, (100, 1000)))
    for longest, length in ((1, 100), (100, 100), (101, 1000), (1000, 1000), (1001, ANY_LENGTH)):
        for rows, padded in ((1, 1), (3, 4), (17, 20), (20, 20)):
            step = msgspec.structs.replace(work([1] * rows, is_decode=True), max_seq_len=longest)
            assert pool.dispatch(step) == GraphKey(padded, padded, length, is_decode=True)
    assert pool.dispatch(work([1] * 21, is_decode=True)) is EAGER
    pool = GraphPool(decode_keys(200, (100,)))
    for longest, padded in ((100, 144), (101, 192)):  # longer rows have fewer sizes
        step = msgspec.structs.replace(work([1] * 129, is_decode=True), max_seq_len=longest)
        assert pool.dispatch(step).num_rows == padded


def test_rows_that_only_draw_have_graphs_without_logits() -> None:
    """At the counts where a model draws as it multiplies; other rows, and other counts, have those with logits."""
    keys = decode_keys(100, (50,), drawn=range(65, 97))
    drawn = [key for key in keys if not key.gives_logits]
    assert [(key.num_rows, key.max_seq_len == 50) for key in drawn] == [
        *((size, True) for size in (72, 80, 88, 96)),
        (96, False),
    ]
    assert set(keys) - set(drawn) == set(decode_keys(100, (50,)))
    pool = GraphPool(keys)
    for rows, longest in itertools.product((1, 64, 65, 72, 90, 97), (50, 51)):
        step = msgspec.structs.replace(work([1] * rows, is_decode=True), max_seq_len=longest)
        plain, other = pool.dispatch(step, needs_logits=False), pool.dispatch(step)
        assert plain == dataclasses.replace(other, gives_logits=other.num_rows not in range(65, 97))
        assert other.gives_logits and other.num_rows >= rows
    assert all(key.gives_logits for key in (pool.dispatch(work([1] * 9), needs_logits=False), EAGER))


def test_a_start_captures_what_draws_and_leaves_its_second_for_last(no_device: None) -> None:
    keys = decode_keys(96, drawn=range(65, 513))
    pool, captured = GraphPool([*keys, *mixed_keys(96, 100)]), []
    pool.capture_first(lambda key: captured.append(key) or torch.zeros(1), lambda key: None, lambda key: None)
    decode = [key for key in captured if key.is_decode]
    assert [(key.num_rows, key.gives_logits) for key in decode] == [(96, False), (1, True)]
    left = pool.missing_keys()
    assert left[-4:] == [key for key in reversed(keys) if key.gives_logits and key.num_rows > 65]
    assert all(not key.is_decode or key.num_rows <= 64 or not key.gives_logits for key in left[:-4])


def test_bounded_graphs_of_mixed_steps_serve_short_rows_of_which_few_have_several_tokens() -> None:
    """As a backend wants them whose grid is laid out for both."""
    keys = mixed_keys(100, 1000, 500, bounded=True)
    assert [key.max_long for key in keys] == [8, 8, 8, 8, 8, 8, 8, 12, 15]
    assert all(key.max_long == key.num_rows and key.max_seq_len == ANY_LENGTH for key in mixed_keys(100, 1000))
    pool = GraphPool(keys)
    for counts, size in (([1] * 8, 16), ([2] * 8, 16), ([2] * 9, 768), ([2] * 15, 1000), ([1] * 80 + [20] * 8, 256)):
        assert pool.dispatch(work(counts)).num_tokens == size
    for counts in ([2] * 16, [501], [1] * 101):
        assert pool.dispatch(work(counts)) is EAGER


def test_what_is_no_decode_step_takes_no_decode_graph() -> None:
    """2.10: a prompt's chunk of one token has a decode step's shape."""
    key = POOL.dispatch(work([1, 1]))
    assert (key.num_tokens, key.num_rows, key.is_decode) == (16, 16, False)
    assert POOL.dispatch(work([1, 1, 30])).num_tokens == 32
    assert POOL.dispatch(work([129])).num_tokens == 200
    assert POOL.dispatch(work([201])) is EAGER
    assert GraphPool().dispatch(work([1], is_decode=True)) is EAGER


def test_a_step_is_a_decode_step_if_every_row_computes_what_it_sampled() -> None:
    requests = RequestTable(
        StepLimits(max_num_rows=4, max_num_tokens=32, max_model_len=32), device=torch.device("cpu"), queue=HostQueue()
    )
    for row, known in enumerate((5, 1)):
        requests.add(
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=np.arange(known),
                num_prompt=known,
                num_computed=0,
                block_ids=[[1]],
                sampling=SamplingParams(),
                seed=0,
            )
        )

    lay_out = BatchOrder(requests)

    def step(rows: list[int], counts: list[int]) -> StepShape:
        return lay_out(StepPlan(step=0, rows=np.array(rows), num_tokens=np.array(counts)))

    first = step([0, 1], [4, 1])  # the second row's prompt of one token, all of the first's but one
    assert first.rows.tolist() == [1, 0] and first.sampling.tolist() == [0] and not first.is_decode
    last = step([0, 1], [1, 1])  # the first row's last prompt token beside a decode
    assert last.sampling.tolist() == [0, 1] and not last.is_decode
    assert step([0, 1], [1, 1]).is_decode


def test_rows_that_decode_again_are_laid_out_as_from_the_start() -> None:
    """Steps of changing rows, some of which start anew: what is remembered of the last step changes nothing."""
    rng = np.random.default_rng(5)
    limits = StepLimits(max_num_rows=6, max_num_tokens=99, max_model_len=99)
    tables = [RequestTable(limits, device=torch.device("cpu"), queue=HostQueue()) for _ in range(2)]
    lay_out, num_kept = BatchOrder(tables[0]), 0
    last = work([1])
    for number in range(200):
        new_rows = [
            NewRow(
                row=int(row),
                request_id="",
                token_ids=[1] * int(rng.integers(1, 9)),
                num_prompt=1,
                num_computed=0,
                block_ids=[[1]],
                sampling=SamplingParams(),
                seed=0,
            )
            for row in rng.permutation(6)[: 6 if number == 0 else int(rng.integers(4) == 0)]
        ]
        for table in tables:
            for new in new_rows:
                table.add(new)
        left = tables[0].prefill_len_np - tables[0].num_computed_upper
        rows = np.arange(6 if rng.integers(4) else 5)
        plan = StepPlan(step=number, new_rows=new_rows, rows=rows, num_tokens=np.maximum(left[rows], 1))
        step, fresh = lay_out(plan), BatchOrder(tables[1])(plan)
        for field in msgspec.structs.fields(StepShape):
            assert np.array_equal(getattr(step, field.name), getattr(fresh, field.name)), field.name
        assert np.array_equal(tables[0].num_computed_upper, tables[1].num_computed_upper)
        assert not (step.rows is last.rows and not (step.is_decode and last.is_decode))
        num_kept += step.rows is last.rows
        last = step
    assert 20 < num_kept < 180


def test_rows_that_verify_again_are_laid_out_as_from_the_start() -> None:
    """Steps of the same arrays and of others, some of whose rows are at the end of their prompts once more."""
    rng = np.random.default_rng(7)
    limits = StepLimits(max_num_rows=4, max_num_tokens=99, max_model_len=999, max_num_drafts=3)
    tables = [RequestTable(limits, device=torch.device("cpu"), queue=HostQueue()) for _ in range(2)]
    for table in tables:
        table.prefill_len_np[:] = [5, 20, 9, 3]
    lay_out, num_kept, last = BatchOrder(tables[0]), 0, work([1])
    arrays = np.arange(4), np.full(4, 4), np.full(4, 3)
    for number in range(200):
        if rng.integers(3) == 0:
            drafts = np.full(4, 3) if rng.integers(2) else rng.integers(0, 4, 4)
            arrays = rng.permutation(4), drafts + 1, drafts
        rows, num_tokens, num_drafts = arrays
        computed = tables[0].prefill_len_np[rows] + rng.integers(-1 if rng.integers(8) == 0 else 0, 50, 4)
        plan = StepPlan(step=number, rows=rows, num_tokens=num_tokens, num_drafts=num_drafts, computed=computed)
        step, fresh = lay_out(plan), BatchOrder(tables[1])(plan)
        for field in msgspec.structs.fields(StepShape):
            assert np.array_equal(getattr(step, field.name), getattr(fresh, field.name)), field.name
        assert np.array_equal(tables[0].num_computed_upper, tables[1].num_computed_upper)
        assert step.num_logit_tokens == 4 + num_drafts.sum() and step.max_logits_per_row == 1 + num_drafts.max()
        num_kept += step.query_start is last.query_start
        last = step
    assert 20 < num_kept < 180


@pytest.mark.parametrize(("kinds", "num"), [("a", 1), ("aaaa", 2), ("baaa", 2), ("aaabaaab", 4), ("aab", 3)])
def test_a_rehearsal_goes_through_a_layer_of_each_kind_behind_the_first_and_the_last(kinds: str, num: int) -> None:
    assert num_unlike(list(kinds)) == num


class Graph:
    """In place of a CUDA graph."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        pass


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures without one."""
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": object,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda device=None: None,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("octavo.device.graphs._alias", lambda output: output)


def test_a_start_captures_the_largest_and_the_smallest(no_device: None) -> None:
    """Of each kind and length; what the others need is made room for, and they come when asked for, or in turn."""
    keys = [*decode_keys(100, (50,)), *mixed_keys(100, 200)]
    pool, rehearsed, captured, reserved, loaded = GraphPool(keys), [], [], [], []

    def issue(key: GraphKey) -> torch.Tensor:
        assert key in rehearsed or key in loaded
        captured.append(key)
        return torch.zeros(1)

    pool.capture_first(issue, rehearsed.append, reserved.append, loaded.append)
    assert not loaded
    assert captured == rehearsed == pool.first_keys()
    assert [(key.num_tokens, key.max_seq_len == 50, key.is_decode) for key in captured] == [
        (200, False, False),
        (100, True, True),
        (100, False, True),
        (16, False, False),
        (1, True, True),
        (1, False, True),
    ]
    assert reserved == pool.missing_keys() and set(reserved) == set(keys) - set(captured)
    for is_decode in (True, False):
        sizes = [key.num_tokens for key in reserved if key.is_decode is is_decode]
        assert sizes == sorted(sizes, reverse=True)
    key = pool.dispatch(work([1] * 37, is_decode=True))
    assert key in reserved and pool.has(key, issue) and captured[-1] == key
    assert pool.has(key, issue) and captured.count(key) == 1
    assert not pool.has(EAGER, issue)
    while left := pool.missing_keys():
        assert pool.has(left[0], issue)
    assert sorted(captured) == sorted(keys)
    assert sorted(loaded) == sorted(reserved)


def test_a_graph_without_memory_is_done_without(no_device: None, caplog: pytest.LogCaptureFixture) -> None:
    """Its steps take the next larger graph, or none; it is not tried again."""
    pool = GraphPool(decode_keys(20))
    pool.capture_first(lambda key: torch.zeros(1), lambda key: None, lambda key: None)

    def fail(key: GraphKey) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    step = work([1] * 5, is_decode=True)
    assert pool.dispatch(step).num_rows == 8
    assert not pool.has(pool.dispatch(step), fail)
    assert [record.getMessage() for record in caplog.records] == ["no graph for steps of 8 tokens in 8 rows: no room"]
    assert pool.dispatch(step).num_rows == 16 and 8 not in [key.num_rows for key in pool.missing_keys()]
    for _ in range(2):
        assert not pool.has(pool.dispatch(step), fail) or pool.dispatch(step).num_rows == 20
    assert pool.has(pool.dispatch(step), fail), "the largest was captured by the start"


def test_a_plain_decode_step_is_tried_again_with_less(no_device: None) -> None:
    """At the start or later: a drafter's stores may be what there is no room for. Other steps have none."""
    tried: list[GraphKey] = []
    is_heavy = True

    def issue(key: GraphKey) -> torch.Tensor:
        tried.append(key)
        if is_heavy and key.is_decode:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(1)

    def lighten(error: RuntimeError, key: GraphKey) -> bool:
        nonlocal is_heavy
        assert key is tried[-1]
        was, is_heavy = is_heavy, False
        return was

    pool = GraphPool([*decode_keys(20), *verify_keys(4, 100, lambda rows: 3)])
    pool.capture_first(issue, lambda key: None, lambda key: None, lighten=lighten)
    assert [key.num_rows for key in tried if not key.num_drafts] == [20, 20, 1]
    is_heavy = True
    whole = next(key for key in pool.missing_keys() if key.num_drafts and key.is_decode)
    assert not pool.has(whole, issue) and tried.count(whole) == 1
    key = pool.dispatch(work([1] * 5, is_decode=True))
    assert pool.has(key, issue) and tried.count(key) == 2
    is_heavy = True
    with pytest.raises(torch.OutOfMemoryError):
        GraphPool(decode_keys(20)).capture_first(issue, lambda key: None, lambda key: None)


def test_a_second_try_finds_the_memory_that_the_first_one_took(no_device: None) -> None:
    """A traceback keeps what its functions have made, and the graph that was begun."""
    made: list[weakref.ref[torch.Tensor]] = []

    def issue(key: GraphKey) -> torch.Tensor:
        assert all(each() is None for each in made)
        hidden = torch.zeros(1)
        made.append(weakref.ref(hidden))
        if len(made) == 1:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(1)

    pool = GraphPool(decode_keys(1))
    pool.capture_first(issue, lambda key: None, lambda key: None, lighten=lambda error, key: True)
    assert len(made) == 2


def test_a_capture_that_broke_leaves_the_pool_to_the_next_one(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does beside which somebody waits for the device: CUDA ends it, and torch goes on recording memory."""
    pool, ended, breaks = GraphPool(decode_keys(20)), [], [True]
    pool.capture_first(lambda key: torch.zeros(1), lambda key: None, lambda key: None)

    def end(graph: Graph) -> None:
        if breaks:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(Graph, "capture_end", end)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *own: ended.append(own), raising=False)
    step = work([1] * 5, is_decode=True)
    assert not pool.has(pool.dispatch(step), lambda key: torch.zeros(1))
    assert ended == [(0, (0, 1))]
    breaks.clear()
    assert pool.has(pool.dispatch(step), lambda key: torch.zeros(1)) and len(ended) == 1


def test_who_waits_for_the_device_waits_for_a_capture(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of NCCL's that meets its peer, say, on a thread of its own."""
    order, begins = [], threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: order.append("waited"))

    def wait() -> None:
        begins.set()
        captures.wait_for_device()

    waits = threading.Thread(target=wait)

    def issue(key: GraphKey) -> torch.Tensor:
        waits.start()
        assert begins.wait(60)
        waits.join(0.05)  # it would be over by now
        order.append("captured")
        return torch.zeros(1)

    pool = GraphPool(decode_keys(20))
    pool.capture_first(lambda key: torch.zeros(1), lambda key: None, lambda key: None)
    order.clear()
    assert pool.has(pool.dispatch(work([1] * 5, is_decode=True)), issue)
    waits.join()
    assert order == ["captured", "waited"]


def test_every_backend_has_a_say_in_what_is_captured() -> None:
    from octavo.attention.base import BACKENDS

    assert BACKENDS.resolve("reference").capability.graphs == frozenset()
    assert BACKENDS.resolve("flex").capability.graphs == {"decode", "mixed"}
    assert BACKENDS.resolve("flex").capability.graph_lengths and not BACKENDS.resolve("paged").capability.graph_lengths

"""What a start compiles before there are requests: which steps stand for all, and passes over them without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

triton = pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from families import SHARED, write_model  # noqa: E402
from insides import runner_of  # noqa: E402
from octavo import LLM  # noqa: E402
from octavo.attention import mla, paged  # noqa: E402
from octavo.cache.specs import StateSpec, StateTensor  # noqa: E402
from octavo.config.engine_config import Resolved  # noqa: E402
from octavo.device.graphs import GraphKey, GraphPool, decode_keys, mixed_keys  # noqa: E402
from octavo.ops.attention import paged_plan  # noqa: E402
from octavo.ops.compile import launch, side_by_side  # noqa: E402
from octavo.plan import StepLimits  # noqa: E402
from octavo.startup.cache import plan_cache  # noqa: E402
from octavo.states import choice  # noqa: E402
from octavo.states.gpu import GpuStates  # noqa: E402
from octavo.worker.assembly import make_runner  # noqa: E402
from octavo.worker.backends import backend_facts, buffer_bytes, compiles_ahead  # noqa: E402
from octavo.worker.compile_ahead import Shape, compile_ahead, step_shapes  # noqa: E402
from octavo.worker.runner import Runner  # noqa: E402
from octavo.worker.worker import Worker  # noqa: E402

SHARED_BYTES, PROCESSORS = 232448, 132  # an H200's
ROWS, TOKENS, LENGTH = 64, 4096, SHARED["max_model_len"]
NUM_BLOCKS = 2000
_OF_STATES = (
    "short_convolution",
    "convolve_prompts",
    "decode_convolution",
    "scan_gates",
    "mamba2_scan",
    "mamba2_decode",
    "mamba2_advance",
    "delta_blocks",
    "delta_scan",
    "delta_advance",
    "delta_ready",
    "delta_decode",
    "delta_chunks",
    "delta_walk",
)
LIMITS = StepLimits(max_num_rows=8, max_num_tokens=64, max_model_len=64)


@pytest.mark.parametrize("limits", [(256, 8192, 40960), (64, 4096, 1280), (1, 100, 100), (3, 16, 8)])
def test_steps_of_all_sizes_stand_for_the_others(limits: tuple[int, int, int]) -> None:
    rows, tokens, length = limits
    asked = StepLimits(max_num_rows=rows, max_num_tokens=tokens, max_model_len=length)
    shapes = step_shapes(asked, decodes=True)
    for shape in shapes:
        assert shape.num_rows <= min(rows, shape.num_tokens) and shape.num_tokens <= tokens
        assert shape.max_query_len <= shape.max_seq_len <= length
        assert shape.num_rows * length >= shape.num_tokens, "the rows have so many tokens"
    sizes = [shape.num_tokens for shape in shapes]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1
    assert sizes[0] == tokens or rows * length < tokens
    prompts = step_shapes(asked, decodes=False)
    assert prompts == [shape for shape in shapes if shape.max_query_len > 1]
    assert any(shape.every for shape in prompts) or length == 1
    if rows >= 8 and tokens >= 64:  # kernels differ by the queries of a row, where those are few
        few = {(shape.num_rows, shape.max_query_len) for shape in shapes}
        assert {(count, queries) for count in (2, 4, 8) for queries in (2, 4, 8)} <= few


@pytest.mark.parametrize("most", [1, 4, 16])
def test_steps_with_drafts_have_no_more_logits_than_there_is_room_for(most: int) -> None:
    asked = StepLimits(max_num_rows=256, max_num_tokens=8192, max_model_len=4096, max_num_drafts=most)
    drafted = [shape for shape in step_shapes(asked, decodes=False) if shape.num_drafts]
    assert {shape.num_drafts for shape in drafted} == {most} and len(drafted) > 5
    for shape in drafted:
        work = shape.drafts
        assert work is not None and work.num_logit_tokens == shape.num_rows * (1 + most) <= 256
        assert work.num_logit_tokens <= shape.num_tokens and work.max_logits_per_row == 1 + most


class Steps:
    """In place of a runner."""

    def __init__(self, *keys: GraphKey) -> None:
        self.keys, self.issued = keys, list[Any]()

    def graph_keys(self) -> tuple[GraphKey, ...]:
        return self.keys

    def rehearse(self, key: GraphKey) -> None:
        self.issued.append(key)

    def rehearse_step(self, shape: Shape) -> None:
        self.issued.append(shape)

    def rehearse_writes(self) -> None:
        self.issued.append("writes")


@pytest.mark.parametrize("with_graphs", [True, False])
@pytest.mark.parametrize("is_settled", [True, False])
def test_two_steps_find_out_whether_kernels_are_missing(
    monkeypatch: pytest.MonkeyPatch, is_settled: bool, with_graphs: bool
) -> None:
    made = SimpleNamespace(is_settled=lambda seconds: is_settled, num_made=0 if is_settled else 7)
    monkeypatch.setattr(side_by_side, "compiling", lambda told, num_threads: contextlib.nullcontext(made))
    runner = Steps(*(decode_keys(8) if with_graphs else []))
    assert compile_ahead(runner, lambda *_: None, LIMITS) == made.num_made
    shapes = step_shapes(LIMITS, decodes=not with_graphs)
    everything = [*runner.keys, *shapes, "writes"]
    assert runner.issued == (everything[:2] if is_settled else everything)


@pytest.mark.parametrize("with_graphs", [True, False])
def test_a_drafter_is_among_the_steps_that_find_out(monkeypatch: pytest.MonkeyPatch, with_graphs: bool) -> None:
    """A start without one may have compiled all but what it launches."""
    made = SimpleNamespace(is_settled=lambda seconds: True, num_made=0)
    monkeypatch.setattr(side_by_side, "compiling", lambda told, num_threads: contextlib.nullcontext(made))
    runner = Steps(*(decode_keys(8) if with_graphs else []))
    compile_ahead(
        runner, lambda *_: None, StepLimits(max_num_rows=8, max_num_tokens=64, max_model_len=64, max_num_drafts=3)
    )
    assert [shape.num_drafts for shape in runner.issued if isinstance(shape, Shape)][-1:] == [3]
    assert len(runner.issued) == 3


def test_a_triton_that_compiles_nothing_aside_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "can_compile", lambda: False)
    runner = Steps(*decode_keys(8))
    assert compile_ahead(runner, lambda *_: None, LIMITS) == 0 and not runner.issued


@pytest.mark.parametrize("error", [RuntimeError("no thread can be started"), torch.OutOfMemoryError("no room")])
def test_a_start_goes_on_without_and_says_why(caplog: pytest.LogCaptureFixture, error: RuntimeError) -> None:
    def fail(told: Any) -> int:
        raise error

    worker = Worker()
    worker._runner = cast(Runner, SimpleNamespace(compile_ahead=fail))
    with caplog.at_level(logging.WARNING):
        worker.compile()
    assert f"one by one: {error}" in caplog.text


def test_a_start_compiles_where_kernels_are_launched_as_they_are() -> None:
    resolved = cast(Resolved, SimpleNamespace(device="cuda"))
    assert compiles_ahead(resolved, ["paged"]) and compiles_ahead(resolved, ["paged", "mla"])
    assert not compiles_ahead(resolved, ["paged", "flex"])
    assert not compiles_ahead(cast(Resolved, SimpleNamespace(device="cpu")), ["paged"])
    states = StateSpec(
        states=(StateTensor("s", (4, 8), "float32"),), inputs=(StateTensor("x", (8,), "float32"),), chunk=8
    )
    assert not compiles_ahead(resolved, ["paged"], [states]), "it may look at what nothing has computed"
    assert compiles_ahead(resolved, ["paged"], [dataclasses.replace(states, in_graphs=True)])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The kernels that would be compiled, for a Hopper that is not there: its tensors are the CPU's."""
    names: list[str] = []

    def submit(self: side_by_side.Pass, *_: Any, **__: Any) -> Future[Any]:
        names.append(self.naming)
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace())
        return future

    no_device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: f"a Hopper of {tmp_path}",
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(side_by_side.Pass, "submit", submit)
    monkeypatch.setattr(side_by_side.Pass, "is_settled", lambda *_: False)
    monkeypatch.setattr(driver, "_active", no_device)
    monkeypatch.setattr(launch, "_has_pdl", lambda device: True)
    for module in (paged_plan, paged, mla):
        for name, value in (("can_run_on", True), ("shared_bytes", SHARED_BYTES), ("num_processors", PROCESSORS)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda device, value=value: value)
    for backend in (paged.PagedBackend, mla.MlaBackend):
        monkeypatch.setattr(backend, "capability", dataclasses.replace(backend.capability, devices=("cpu", "cuda")))
    monkeypatch.setattr(choice, "state_backend", lambda device: GpuStates())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: zeros(*args, **options))
    yield names


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("Mistral", {"_qk_norm_rope_store": 2, "attend_rows": 2, "attend_tiles": 2, "product": 8}),
        ("Qwen3-MoE", {"_qk_norm_rope_store": 2, "attend_rows": 2, "_grouped_product": 4, "product": 8}),
        (
            "Nemotron-H",
            {
                "short_convolution": 1,
                "convolve_prompts": 1,
                "scan_gates": 2,
                "mamba2_scan": 3,
                "product": 8,
            },
        ),
        ("Qwen3.5", {"delta_blocks": 2, "delta_scan": 2, "delta_advance": 1, "_gated_by": 1, "product": 8}),
        ("DeepSeek-V3", {"_latent_rope_store": 1, "_attend": 2, "_merge": 1, "_grouped_product": 4, "product": 8}),
    ],
)
def test_a_pass_finds_the_kernels_of_all_steps_and_changes_no_state(
    found: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, kernels: dict[str, int]
) -> None:
    write_model(family, tmp_path)
    shared = SHARED | {"model": str(tmp_path), "dtype": "float32", "attention_backend": "reference", "native": "off"}
    with LLM(device="cpu", num_gpu_blocks_override=NUM_BLOCKS, **shared) as llm:
        engine, is_latent = llm.engine, "DeepSeek" in family
        resolved: Resolved = dataclasses.replace(
            engine.resolved,
            attention_backend="mla" if is_latent else "paged",
            max_num_seqs=ROWS,
            max_num_batched_tokens=TOKENS,
        )
        plan = plan_cache(
            engine.arch,
            resolved,
            runner_of(engine).model.layer_specs,
            backend_facts(resolved, engine.arch.num_layers),
            free_bytes=1 << 40,
            total_bytes=0,
            weight_bytes=0,
            weights_loaded=True,
            buffer_bytes=functools.partial(buffer_bytes, resolved),
        )
        assert plan.num_blocks == NUM_BLOCKS
        runner = make_runner(runner_of(engine).model, resolved, plan)
        if not is_latent:
            runner._graphs = GraphPool([*decode_keys(ROWS), *mixed_keys(ROWS, 1024)])
        states = [runner._pool.buffer.fill_(0), runner._buffers.positions, runner._buffers.seq_lens]
        before = [state.clone() for state in states]
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        runner.compile_ahead(lambda *_: None)
    assert all(map(torch.equal, states, before))
    assert {"_gather", "_draw", "_cut", "_settle", "_list", "_leaf_sums", "_allow_bits"} <= {*found}
    counts = Counter(found)
    assert all(counts[name] >= least for name, least in kernels.items()), counts
    alike = {name: count for name, count in kernels.items() if name in _OF_STATES}
    assert {name: counts[name] for name in alike} == alike, "layers that are alike launch the same kernels"
    assert len(found) < 120, "few kernels serve all steps"


@pytest.mark.parametrize(
    ("given", "kernels"),
    [
        ({"method": "ngram"}, ["_look_up"]),
        ({"method": "eagle3", "model": "octavo-tiny-eagle3"}, ["_qk_norm_rope_store"]),
        ({"method": "mtp", "model": "octavo-tiny-mtp"}, ["_qk_norm_rope_store"]),
        ({"method": "draft_model", "model": "octavo-tiny"}, ["_qk_norm_rope_store"]),
    ],
    ids=lambda each: each["method"] if isinstance(each, dict) else "",
)
def test_a_pass_finds_the_kernels_of_drafts_as_well(
    found: list[str], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], kernels: list[str]
) -> None:
    """Behind prompts too, and of steps that verify beside them: none is left to the first requests."""
    speculative = {"num_speculative_tokens": 3, **given}
    shared = {"dtype": "float32", "attention_backend": "reference", "native": "off", "max_model_len": 512}
    with LLM(device="cpu", num_gpu_blocks_override=400, speculative_config=speculative, **shared) as llm:
        engine, worker = llm.engine, llm.engine.core._executor._worker
        resolved: Resolved = dataclasses.replace(
            engine.resolved, attention_backend="paged", max_num_seqs=16, max_num_batched_tokens=256
        )
        speculator, model = worker._speculator, runner_of(engine).model
        specs = [*model.layer_specs, *speculator.layer_specs]
        plan = plan_cache(
            engine.arch,
            resolved,
            specs,
            backend_facts(resolved, len(specs)),
            free_bytes=1 << 40,
            total_bytes=0,
            weight_bytes=0,
            weights_loaded=True,
            buffer_bytes=functools.partial(buffer_bytes, resolved),
            max_num_drafts=speculator.num_drafts,
            num_lookahead=speculator.num_lookahead,
            num_next_tokens=speculator.num_next_tokens,
        )
        proposed = list[int]()
        propose = type(speculator).propose

        def counted(self: Any, step: Any) -> None:
            proposed.append(step.batch.total_tokens)
            propose(self, step)

        monkeypatch.setattr(type(speculator), "propose", counted)
        runner = make_runner(model, resolved, plan, speculator=speculator)
        tokens = runner._requests.token_ids.data.clone()
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        runner.compile_ahead(lambda *_: None)
    assert {"_gather", "_draw", *kernels} <= {*found} and {1, 256} <= {*proposed}
    assert torch.equal(runner._requests.token_ids.data, tokens)

"""A worker that is built by itself: from settings, a folder and a plan, and asked by name for the rest."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.cache.plan import CachePlan
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.loader import build_model
from octavo.config.engine_config import EngineConfig, resolve
from octavo.config.settings import ConfigError
from octavo.grammar.compiler import Grammars
from octavo.observe import Phases
from octavo.plan import NewRow, StepPlan, StepResult
from octavo.request.sampling_params import StructuredOutputsParams
from octavo.request.thinking import ClosingMark
from octavo.startup import build, frontend
from octavo.startup.cache import plan_cache
from octavo.startup.frontend import find_and_read
from octavo.worker.device import Opening
from octavo.worker.model import check_state_dtype
from octavo.worker.worker import Worker
from plan_wire import decode, encode

CONFIG = EngineConfig(device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=40)


def start_worker() -> tuple[Worker, CachePlan]:
    """One that nothing but plain data has reached, as one in another process would be."""
    worker = Worker()
    worker.begin(CONFIG)
    folder, arch = find_and_read(CONFIG)
    resolved = resolve(CONFIG, arch, worker.open(arch))
    facts = worker.load(resolved, Path(str(folder)))
    plan = plan_cache(
        arch,
        facts.resolved,
        facts.layer_specs,
        facts.backends,
        free_bytes=facts.free_bytes,
        total_bytes=facts.total_bytes,
        weight_bytes=facts.weight_bytes,
        weights_loaded=True,
        buffer_bytes=worker.buffer_bytes,
        max_num_drafts=facts.num_drafts,
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=CachePlan)
    assert sent == plan
    worker.allocate(sent)
    return worker, sent


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**{name: getattr(CONFIG, name) for name in ("device", "dtype", "max_model_len", "max_num_seqs")}) as llm:
        yield llm


def test_a_worker_is_fed_by_bytes_alone_and_gives_the_engines_tokens(llm: LLM) -> None:
    prompt = llm.get_tokenizer().encode("def add(a, b):\n")
    greedy = SamplingParams(temperature=0, max_tokens=6)
    expected = list(llm.generate({"prompt_token_ids": prompt}, greedy)[0].outputs[0].token_ids)
    worker, plan = start_worker()
    assert plan.limits.max_model_len == 128 and plan.num_blocks == 40 and plan.why["num_blocks"]
    new = NewRow(
        row=1,
        request_id="r",
        token_ids=prompt,
        num_prompt=len(prompt),
        num_computed=0,
        block_ids=[[3, 4]],
        sampling=SamplingParams(temperature=0),
        seed=1,
    )
    found: list[int] = []
    for step in range(6):
        row = {"rows": np.array([1]), "num_tokens": np.array([1 if step else len(prompt)])}
        sent = decode(encode(StepPlan(step=step, new_rows=[] if step else [new], **row)), StepPlan)
        result = decode(encode(worker.issue(sent).result()), StepResult)
        found += result.tokens[0].tolist()
    assert found == expected


def test_calls_have_a_table_and_typed_messages(llm: LLM) -> None:
    core = llm.engine.core
    with pytest.raises(
        ValueError, match=r"unknown call 'capture_all' of a worker: known are capture_next, .*take_spans"
    ):
        core.ask_workers("capture_all", bool)
    with pytest.raises(ValueError, match="Expected `bool`, got `str`"):
        core.ask_workers("time_issue", type(None), "yes")
    with pytest.raises(ValueError, match="take_digests needs digest_logits before"):
        core.ask_workers("take_digests", dict[str, dict[int, int]])
    assert core.ask_workers("capture_next", bool) == [False], "a CPU has no graphs"
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_the_parts_of_issuing_are_timed_while_somebody_wants_to_know(llm: LLM) -> None:
    core, runner = llm.engine.core, runner_of(llm.engine)
    for wanted in (True, True, False):
        core.ask_workers("time_issue", type(None), wanted)
        llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        (spans,) = core.ask_workers("take_spans", list[tuple[str, int, int]])
        names = [name for name, start, end in spans if start <= end]
        assert names.count("apply") == names.count("stage") == (len(spans) // 2) and bool(spans) is wanted
    assert not {"_apply", "_bring"} & set(vars(runner))


class _Recorder(Worker):
    """Notes the order of what it is told, and says that its steps can be compiled ahead."""

    told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("begin", "import_kernels", "open", "load", "buffer_bytes", "allocate", "compile", "capture"):
            _Recorder.told.append(name)
        return super().__getattribute__(name)

    def load(self, *args: Any) -> Any:
        return msgspec.structs.replace(super().load(*args), compiles_ahead=True)

    def compile(self) -> None:
        pass


def test_a_start_tells_its_workers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _Recorder.told.clear()
    monkeypatch.setattr(build, "Worker", _Recorder)
    phases = Phases()
    core, facts, text = build.build_core(CONFIG, phases, Opening(CONFIG))
    assert _Recorder.told == ["begin", "open", "load", "buffer_bytes", "allocate", "compile"]
    names = [name for name, _, _ in phases.entries if name != "start Python"]
    assert names == [
        "find and read the model's config",
        "open the device",
        "load the tokenizer",
        "load the weights",
        "allocate the cache and the tables",
        "compile kernels",
    ]
    assert (facts.memory.num_blocks, facts.vocab_size) == (40, text.arch.vocab_size)
    assert not core.capture_next() and core.scheduler.kv.num_free_blocks == 39
    core.close()


def test_blocks_whose_books_do_not_fit_are_refused_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **fields: object) -> None:
        raise MemoryError

    monkeypatch.setattr(build, "KVManager", fail)
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override=40: the books of 40 blocks do not fit.*; lower it"):
        build.build_core(CONFIG, Phases(), Opening(CONFIG))


FORMS = [
    SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-f]{3,9}")),
    SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    SamplingParams(temperature=0, max_tokens=12),
]


def test_checks_and_masks_need_no_object_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form travels with the row. Where nothing is shared the worker compiles it too, and never within a step."""
    answers, owners = [], []
    stepping, wrong = threading.local(), list[str]()
    build_form, make_mark, step = Grammars._build, ClosingMark.__init__, Worker.issue

    def noted(grammars: Grammars, structured: StructuredOutputsParams) -> Any:
        owners[-1].add(id(grammars))
        wrong.extend(["a form"] * getattr(stepping, "is_inside", False))
        return build_form(grammars, structured)

    def marked(mark: ClosingMark, *args: Any) -> None:
        wrong.extend(["a mark"] * getattr(stepping, "is_inside", False))
        make_mark(mark, *args)

    def issue(worker: Worker, plan: StepPlan) -> Any:
        stepping.is_inside = True
        try:
            return step(worker, plan)
        finally:
            stepping.is_inside = False

    monkeypatch.setattr(Grammars, "_build", noted)
    monkeypatch.setattr(ClosingMark, "__init__", marked)
    monkeypatch.setattr(Worker, "issue", issue)
    for shares in (True, False):
        owners.append(set())
        if not shares:
            monkeypatch.setattr(frontend, "_tokenizer_files", lambda folder: ())
        with LLM(device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4) as llm:
            outputs = llm.generate(["x = ", "Is it? ", "def f"], FORMS, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1] and not wrong
    assert [len(own) for own in owners] == [1, 2]


@pytest.mark.parametrize(
    ("layouts", "chosen", "is_run"),
    [(("LBHNC", "BLNHC"), "BLNHC", True), (("LBHNC", "LBNHC"), "LBHNC", False)],
)
def test_the_plan_says_that_a_block_is_one_run_where_it_is(layouts: tuple[str, ...], chosen: str, is_run: bool) -> None:
    """It said so too where no backend takes such a layout."""
    worker = Worker()
    worker.begin(CONFIG)
    folder, arch = find_and_read(CONFIG)
    facts = worker.load(resolve(CONFIG, arch, worker.open(arch)), Path(str(folder)))
    plan = plan_cache(
        arch,
        facts.resolved,
        facts.layer_specs,
        [backend._replace(layouts=layouts) for backend in facts.backends],
        free_bytes=facts.free_bytes,
        total_bytes=facts.total_bytes,
        weight_bytes=facts.weight_bytes,
        weights_loaded=True,
        buffer_bytes=worker.buffer_bytes,
        moves_runs=True,
    )
    assert plan.layout == chosen and plan.why["layout"].endswith(" with a block in one run") == is_run


def test_states_in_bfloat16_beside_float32_are_refused_on_a_gpu() -> None:
    """Its kernels give them other last places in other cuts of a prompt."""
    config = dataclasses.replace(CONFIG, model="octavo-tiny-hybrid", state_dtype="bfloat16")
    worker = Worker()
    worker.begin(config)
    _, arch = find_and_read(config)
    resolved = resolve(config, arch, worker.open(arch))
    specs = build_model(arch, torch.float32).layer_specs
    check_state_dtype(specs, resolved)
    on_gpu = dataclasses.replace(resolved, device="cuda")
    with pytest.raises(ConfigError, match=r"state_dtype='bfloat16': on a GPU float32 .* set float32, or dtype="):
        check_state_dtype(specs, on_gpu)
    for field in ({"dtype": "bfloat16"}, {"state_dtype": "float32"}):
        check_state_dtype(specs, dataclasses.replace(on_gpu, **field))
    check_state_dtype([spec for spec in specs if isinstance(spec, AttentionSpec)], on_gpu)

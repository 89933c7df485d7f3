"""The engine on a CUDA device: the CPU engine's answers, the same bits in every setting, and never a wait (M5.7)."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from inputs_rig import CHECKS
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.bench.shapes import SHAPES
from octavo.device.graphs import GraphKey
from octavo.device.staging import StagedTensor, WriteQueue
from octavo.ops.compile import launch
from settings_matrix import SETTINGS
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
NUM_OUTPUT = 32
KINDS = ("float32", "bfloat16")
CACHE = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 1024}
GPU_SETTINGS: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "no graphs": {"enforce_eager": True, "max_num_seqs": 50},
    "no graphs, chunks of 64": {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 50},
    "blocks of 128": {"block_size": 128, "max_num_seqs": 50},
    "blocks of 48": {"block_size": 48, "max_num_seqs": 50},
    "blocks of 144": {"block_size": 144, "max_num_seqs": 50},
    "kernel blocks of 16": {"block_size": 64, "attention_config": {"kernel_block_size": 16}, "max_num_seqs": 50},
    "few graphs": {"max_num_seqs": 3},
    "waiting for each step": {"async_scheduling": False, "max_num_seqs": 50},
}
Result = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    text = resources.files("octavo").joinpath("assets/octavo-tiny/held_out_prompts.json").read_text()
    return json.loads(text)[:50]


@contextlib.contextmanager
def make_llm(**fields: Any) -> Iterator[LLM]:
    if "num_gpu_blocks_override" not in fields:
        fields = CACHE | fields
    with LLM(device="cuda", **fields) as llm, no_waits():
        yield llm


def params_of(count: int, max_tokens: int = NUM_OUTPUT, **fields: Any) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.9, seed=1000 + index, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **fields)
        for index in range(count)
    ]


def generate(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> Result:
    results = []
    for output in llm.generate(prompts, params):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        entries = completion.logprobs or []
        results.append((tokens, [entry[token].logprob for entry, token in zip(entries, tokens, strict=bool(entries))]))
    return results


@pytest.fixture(scope="module")
def alone(prompts: list[str]) -> dict[str, Result]:
    """Each prompt by itself."""
    results = {}
    for dtype in KINDS:
        with make_llm(dtype=dtype, enable_prefix_caching=False, max_num_seqs=1) as llm:
            pairs = zip(prompts, params_of(len(prompts)), strict=True)
            results[dtype] = [generate(llm, [prompt], [own])[0] for prompt, own in pairs]
    return results


@pytest.mark.parametrize("check", CHECKS)
def test_input_kernels_equal_their_references(check: str) -> None:
    CHECKS[check]("cuda")


def test_staged_writes_of_several_tensors_arrive_in_order() -> None:
    device = torch.device("cuda")
    queue = WriteQueue()
    ints, longs = (StagedTensor(4, 1000, dtype, device, queue) for dtype in (torch.int32, torch.int64))
    floats, seeds = (StagedTensor(4, 0, dtype, device, queue) for dtype in (torch.float32, torch.int64))
    expected = torch.zeros(2, 4, 1000, dtype=torch.int64)
    for turn in range(6):  # more turns than pinned slots
        for value in (-1, turn):
            floats.stage_one(turn % 4, value + 0.5)
            seeds.stage_one(turn % 4, value << 40)
        for at, tensor in enumerate((ints, longs)):
            tensor.stage(turn % 4, 5, range(turn, turn + 700))
            tensor.stage(turn % 4, 7, [-turn])  # over what was staged before
            tensor.stage_each(np.array([3, 0]), np.array([999, 998]), np.array([turn, turn << 20]))
            expected[at, turn % 4, 5:705] = torch.arange(turn, turn + 700)
            expected[at, turn % 4, 7] = -turn
            expected[at, 3, 999], expected[at, 0, 998] = turn, turn << 20
        queue.apply()
    assert torch.equal(ints.data.cpu().long(), expected[0]) and torch.equal(longs.data.cpu(), expected[1])
    assert floats.data.tolist() == [4.5, 5.5, 2.5, 3.5] and seeds.data.tolist() == [n << 40 for n in (4, 5, 2, 3)]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", GPU_SETTINGS)
def test_every_setting_gives_the_same_bits(prompts: list[str], alone: dict[str, Result], name: str, dtype: str) -> None:
    with make_llm(dtype=dtype, **GPU_SETTINGS[name]) as llm:
        for _ in range(2):  # the second time the prefix cache is warm
            assert generate(llm, prompts, params_of(len(prompts))) == alone[dtype]


def test_order_and_neighbours_change_nothing(prompts: list[str], alone: dict[str, Result]) -> None:
    with make_llm(dtype="bfloat16", max_num_seqs=64) as llm:
        params = params_of(len(prompts))
        backwards = generate(llm, prompts[::-1], params[::-1])
        assert backwards[::-1] == alone["bfloat16"]
        crowd = [SamplingParams(temperature=2.0, max_tokens=5 + index % 40, ignore_eos=True) for index in range(50)]
        mixed = list(itertools.chain.from_iterable(zip(prompts, prompts, strict=True)))
        both = generate(llm, mixed, list(itertools.chain.from_iterable(zip(crowd, params, strict=True))))
        assert both[1::2] == alone["bfloat16"]


def test_many_threads_have_the_bits_of_one(prompts: list[str], alone: dict[str, Result]) -> None:
    """None of them is the thread that made the engine, and each may have to launch the first kernel of a step."""
    with make_llm(dtype="bfloat16", max_num_seqs=50) as llm, ThreadPoolExecutor(len(prompts)) as pool:
        params = params_of(len(prompts))
        answers = pool.map(lambda index: generate(llm, [prompts[index]], [params[index]])[0], range(len(prompts)))
        assert list(answers) == alone["bfloat16"]


def test_log_probabilities_asked_or_not(prompts: list[str], alone: dict[str, Result]) -> None:
    """Without them a decode step is one graph; with them the sampler runs after it."""
    plain = [
        SamplingParams(temperature=0.9, seed=1000 + index, max_tokens=NUM_OUTPUT, ignore_eos=True)
        for index in range(50)
    ]
    with make_llm(dtype="bfloat16", max_num_seqs=50) as llm:
        tokens = [tokens for tokens, _ in generate(llm, prompts, plain)]
    assert tokens == [tokens for tokens, _ in alone["bfloat16"]]


def test_float32_gives_the_cpu_engines_answers(prompts: list[str]) -> None:
    greedy = [SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=0)] * len(prompts)
    with LLM(device="cpu", dtype="float32") as llm:
        expected = generate(llm, prompts, greedy)
    with make_llm(dtype="float32") as llm:
        found = generate(llm, prompts, greedy)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_features_with_and_without_graphs(prompts: list[str]) -> None:
    features = [
        {"top_p": 0.9, "top_k": 40},
        {"min_p": 0.05},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"logit_bias": {5: 4.0}},
        {"min_tokens": 8},
        {"allowed_token_ids": list(range(300))},
        {},
        {},
    ]
    params = [own for fields in features for own in params_of(1, **fields)]
    with make_llm(dtype="bfloat16") as llm:
        together = generate(llm, prompts[: len(params)], params)
    with make_llm(dtype="bfloat16", enforce_eager=True) as llm:
        apart = [generate(llm, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=False)]
    assert together == apart


def test_prompt_log_probabilities_do_not_depend_on_chunks(prompts: list[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    found = []
    for chunk in (64, 1024):
        with make_llm(dtype="bfloat16", max_num_batched_tokens=chunk, max_num_seqs=16) as llm:
            outputs = llm.generate(prompts[:8], params)
            found.append([output.prompt_logprobs for output in outputs])
    assert found[0] == found[1]


def test_a_graph_captured_before_any_request_holds_up_to_max_model_len(prompts: list[str]) -> None:
    ids = list(range(1, 1001))
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)
    found = []
    for eager in (False, True):
        with make_llm(dtype="bfloat16", enforce_eager=eager, max_num_seqs=4) as llm:
            outputs = llm.generate([{"prompt_token_ids": ids}, {"prompt_token_ids": ids[:3]}], params)
            found.append([(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]
    assert len(found[0][0][0]) == 24


FEW_SIZES = {"dtype": "bfloat16", "max_num_seqs": 24, "max_num_batched_tokens": 512}


def test_graphs_captured_before_and_between_steps_give_the_same_bits(
    prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start captures few: the others come when a step asks for them, with requests running, or all at once."""
    monkeypatch.setattr(launch, "has_compiled", lambda: False)  # else the start captures all
    params = [own for count in (3, 9, 14, 30) for own in params_of(6, count)]
    prompts = (prompts * 2)[: len(params)]
    found = []
    for at_once in (False, True):
        with make_llm(**FEW_SIZES) as llm:
            graphs = runner_of(llm.engine)._graphs
            keys = [*graphs._mixed, *graphs._decode]
            assert 0 < len(graphs.missing_keys()) < len(keys)
            if at_once:
                llm.engine.capture_rest()
                assert not graphs.missing_keys()
            before = len(graphs.missing_keys())
            found.append(generate(llm, prompts, params))
            assert at_once or len(graphs.missing_keys()) < before, "steps have captured theirs"
            llm.engine.capture_rest()
            assert not graphs.missing_keys() and [*graphs._mixed, *graphs._decode] == keys, "none was refused"
            found.append(generate(llm, prompts, params))
    assert found[0] == found[1] == found[2] == found[3]


def test_steps_whose_graphs_find_no_memory_are_eager(
    prompts: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits, one line for each, and later captures as if nothing had been."""
    monkeypatch.setattr(launch, "has_compiled", lambda: False)
    params, found = params_of(5, 8), []
    for fails in (False, True):
        with make_llm(**FEW_SIZES) as llm:
            runner = runner_of(llm.engine)
            record, left = runner._record, [3]

            def fail(key: GraphKey, record: Any = record, left: list[int] = left, **options: Any) -> torch.Tensor:
                output = record(key, **options)
                if left[0]:
                    left[0] -= 1
                    raise torch.OutOfMemoryError("no memory for this test")
                return output

            if fails:
                monkeypatch.setattr(runner, "_record", fail)
            found.append([generate(llm, prompts[:count], params[:count]) for count in (5, 3)])
            llm.engine.capture_rest()
            assert not runner._graphs.missing_keys()
            found[-1].append(generate(llm, prompts[:5], params))
    assert found[0] == found[1]
    assert sum("no memory for this test" in record.getMessage() for record in caplog.records) == 3


def test_nan_logits_fail_one_request_only(tmp_path: Path) -> None:
    """A prompt token whose embedding is NaN, in a model with an output head of its own."""
    shape = SHAPES["tiny"] | {"tie_word_embeddings": False, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [7, 8, token]} for token in (5, 6, 9)]
    with LLM(str(tmp_path), load_format="dummy", device="cuda", enable_prefix_caching=False, **CACHE) as llm:
        healthy = [output.outputs[0] for output in llm.generate(prompts, params)]
        runner_of(llm.engine).model.embedding.weight[6] = float("nan")
        found = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert [completion.finish_reason for completion in found] == ["length", "error", "length"]
    assert [found[index].token_ids for index in (0, 2)] == [healthy[index].token_ids for index in (0, 2)]


_LOST_DEVICE = """
import torch
from octavo import LLM, SamplingParams

llm = LLM(device="cuda", kv_cache_memory_bytes=1 << 28, enforce_eager=True)
llm.generate("a", SamplingParams(max_tokens=2))
model = llm.engine.core._executor._worker._runner.model
forward = model.forward
def broken(input_ids, positions):
    torch._assert_async(torch.zeros(1, device="cuda"))
    return forward(input_ids, positions)
model.forward = broken
for attempt in range(2):
    try:
        llm.generate("a", SamplingParams(max_tokens=2))
    except RuntimeError as error:
        print(attempt, str(error).splitlines()[0][:100])
"""


def test_a_device_error_stops_the_engine() -> None:
    """In a process of its own: the CUDA context is lost."""
    run = subprocess.run([sys.executable, "-c", _LOST_DEVICE], capture_output=True, text=True, timeout=120)
    lines = [line for line in run.stdout.splitlines() if line[:2] in ("0 ", "1 ")]
    assert len(lines) == 2, run.stderr
    assert "the engine stopped" in lines[1]

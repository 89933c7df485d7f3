"""Users' attention mods through LLM and the HTTP server; the flex backend's bits, alone and in company."""

from __future__ import annotations

import dataclasses
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eager_graphs import EagerGraphs
from engine_checks import assert_idle
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.attention.flex.backend import FlexBackend
from octavo.device.graphs import decode_keys, mixed_keys
from user_mods import EXTRA, FIVE, per_layer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "serve"))
PROMPTS = ["Once upon a time there was a little", "The sun was warm and the birds sang in the tall green trees. Then"]
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}


def logprobs(
    llm: LLM, prompts: list[str] | str, extra: dict[str, Any] | None = EXTRA, tokens: int = 6
) -> list[list[float]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, extra_args=extra, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [[next(iter(entry.values())).logprob for entry in output.logprobs or ()] for output in outputs]


def near(ours: list[list[float]], expected: list[list[float]]) -> bool:
    return all(a == pytest.approx(b, abs=2e-4) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("name", FIVE)
def test_a_users_mod_on_flex_equals_reference(make_llm: Callable[..., LLM], name: str) -> None:
    ours, expected = (
        logprobs(make_llm(**LIMITS, attention_backend=backend, attention_mods=FIVE[name]), PROMPTS)
        for backend in ("flex", "reference")
    )
    assert near(ours, expected)


def test_the_server_runs_mods_that_a_file_names(make_llm: Callable[..., LLM]) -> None:
    """All five, a layer each, one with data of the request; a wrong value of it is the client's mistake."""
    from server_rig import RunningServer

    expected = logprobs(make_llm(**LIMITS, attention_backend="reference", attention_mods=per_layer), PROMPTS)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    mods = f"--attention-mods={HERE / 'user_mods.py'}:per_layer"
    with RunningServer("--dtype=float32", "--attention-backend=flex", mods, *flags) as server:
        body = {
            "model": "octavo-tiny",
            "prompt": PROMPTS,
            "temperature": 0,
            "max_tokens": 6,
            "logprobs": 0,
            "ignore_eos": True,
            "extra_args": EXTRA,
        }
        reply = server.wait_ready().request("POST", "/v1/completions", body)
        assert reply.status == 200, reply.body
        ours = [choice["logprobs"]["token_logprobs"] for choice in reply.json()["choices"]]
        assert near(ours, expected)
        refused = server.request("POST", "/v1/completions", {**body, "extra_args": {"instructions": "five"}})
        assert refused.status == 400 and b"extra_args.instructions: must be an integer" in refused.body


@pytest.mark.parametrize(
    ("count", "sizes"), [(5, (0, 32)), pytest.param(32, (0, 16, 32, 64), marks=pytest.mark.slow)], ids=["5", "32"]
)
def test_K4_7_flex_has_the_same_bits_alone_and_in_a_shuffled_batch(
    make_llm: Callable[..., LLM], held_out_prompts: list[str], count: int, sizes: tuple[int, ...]
) -> None:
    """Each prompt by itself, without a cache, against chunks, prefix hits and neighbours of other lengths."""
    prompts = [(prompt * 9)[: 20 + 17 * index % 61] for index, prompt in enumerate(held_out_prompts[:count])]
    prompts[0] = (held_out_prompts[0] * 9)[:300]
    shuffled = random.Random(1).sample(range(count), count)
    for size in sizes:
        options: dict[str, Any] = {"backend": "flex"}
        if size:
            options |= {"flex_attn_block_m": size, "flex_attn_block_n": size}
        fields = {"max_model_len": 128, "block_size": size or 16, "attention_config": options}
        single = make_llm(**fields, max_num_seqs=1, enable_prefix_caching=False)
        alone = [logprobs(single, prompt, None, 3)[0] for prompt in prompts]
        crowded = make_llm(**fields, max_num_seqs=count, max_num_batched_tokens=48)
        for turn in range(2):  # the second time the prefix cache is warm
            hits = crowded.engine.scheduler.kv.stats.hits
            assert logprobs(crowded, [prompts[index] for index in shuffled], None, 3) == [alone[i] for i in shuffled]
            assert (crowded.engine.scheduler.kv.stats.hits > hits) == bool(turn)


@pytest.mark.parametrize("kernel_block", [16, 32])
def test_F1_5_and_F1_G6_steps_in_flight_and_split_blocks_change_nothing(
    make_llm: Callable[..., LLM], kernel_block: int
) -> None:
    """Kernel blocks of a split cache block: the pool has num_blocks times as many, and all of them are in use."""
    fields = {**LIMITS, "block_size": 64, "num_gpu_blocks_override": 5, "attention_mods": FIVE["near"]}
    options = {"backend": "flex", "kernel_block_size": kernel_block}
    results = []
    for asynchronous in (False, True):
        llm = make_llm(**fields, attention_config=options, async_scheduling=asynchronous, enable_prefix_caching=False)
        results.append(logprobs(llm, PROMPTS * 2, tokens=20))
    expected = logprobs(
        make_llm(**{**fields, "block_size": kernel_block, "num_gpu_blocks_override": 40}, attention_backend="flex"),
        PROMPTS * 2,
        tokens=20,
    )
    assert results[0] == results[1] == expected


@pytest.mark.parametrize("tiles", [1, 2])
def test_K4_7_flex_has_the_same_bits_in_steps_padded_as_for_graphs(
    make_llm: Callable[..., LLM], held_out_prompts: list[str], monkeypatch: pytest.MonkeyPatch, tiles: int
) -> None:
    """Longer rows are issued as they are. Two tiles as on a GPU, but the reference's have bits of their own."""
    sizes = FlexBackend.sizes
    if tiles == 2:
        monkeypatch.setattr(FlexBackend, "sizes", lambda *args: dataclasses.replace(sizes(*args), prefill_lines=64))
    prompts = [(prompt * 9)[: 20 + 37 * index % 211] for index, prompt in enumerate(held_out_prompts[:7])]
    results = []
    keys = [*decode_keys(8, (60,)), *mixed_keys(8, 64, 60, bounded=True)]
    for padded in (False, True):
        llm = make_llm(**LIMITS, attention_backend="flex")
        if padded:
            runner = runner_of(llm.engine)
            pool = runner._graphs = EagerGraphs(runner, keys)
            runner.capture()
        results.append(logprobs(llm, prompts, None, 4))
        assert_idle(llm)
    assert results[0] == results[1] if tiles == 1 else near(*results)
    assert {key.is_decode for key in pool.replayed} == {True, False}


def test_fields_part_the_prefix_cache_of_a_running_engine(make_llm: Callable[..., LLM]) -> None:
    """The same prompt under other data finds nothing of it in the cache, and computes what a fresh engine does."""
    fields: dict[str, Any] = {**LIMITS, "attention_backend": "reference", "attention_mods": FIVE["with_data"]}
    llm, other = make_llm(**fields), {"instructions": 30, "sharpness": 0.5}
    prompt = PROMPTS[1] * 2
    logprobs(llm, prompt)
    before = llm.engine.scheduler.kv.stats.hits
    ours = logprobs(llm, prompt, other)
    assert llm.engine.scheduler.kv.stats.hits == before
    assert ours == logprobs(make_llm(**fields, enable_prefix_caching=False), prompt, other)
    logprobs(llm, prompt, other)
    assert llm.engine.scheduler.kv.stats.hits > before


def test_the_example_serves_documents_that_do_not_see_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(HERE.parents[1] / "examples" / "document_mask.py"))
    example["main"]()
    shown = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": '" in line)
    assert shown["two documents"] == shown["the second one"] != shown["one document"]
    with LLM(dtype="float32", attention_mods=example["mods"]) as llm:
        encode = llm.get_tokenizer().encode
        first, second = encode("The cat sat on the mat."), encode(" Once upon a time there was a")
        ids = [0] * len(first) + [1] * len(second)
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, extra_args={"document_ids": ids}, logprobs=0
        )
        changed = [*encode("A dog ran."), *[first[-1]] * len(first)][: len(first)]
        outputs = llm.generate([first + second, changed + second], params)
    scores = [
        [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[len(first) + 1 :]] for output in outputs
    ]
    assert scores[0] == scores[1], "what the first document says changes nothing in the second"

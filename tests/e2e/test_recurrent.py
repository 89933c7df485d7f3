"""Layers that keep states, in a model out of tree: a request's bits in every setting, and an oracle in plain torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import recurrent_rig as rig
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.attention.mods import NO_MODS
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.cli.main import main as cli
from octavo.config.device_facts import DeviceFacts
from octavo.config.engine_config import EngineConfig, resolve
from octavo.sched import scheduler
from octavo.worker import model as models
from octavo.worker.backends import compiles_ahead
from test_drafts import Counts, K, Oracle, answers, facts, make_engine, run

LENGTHS = (1, 7, 8, 9, 16, 17, 30, 33, 48, 65, 100, 2, 15, 31, 64, 3, 40)
SHARED = 21  # tokens with which every second prompt begins
MAIN, LONG = "RecurrentForCausalLM", "LongChunksForCausalLM"
MODELS = [MAIN, LONG, "EndsWithStateForCausalLM", "StatesAloneForCausalLM"]
GPU = DeviceFacts(
    num_cores=2,
    free_bytes=8 << 30,
    total_bytes=16 << 30,
    cuda="NVIDIA H200",
    cuda_capability=(9, 0),
    cuda_free_bytes=100 << 30,
    cuda_total_bytes=140 << 30,
)
Result = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """An engine's settings, by the name of a class of the package."""
    sys.path.insert(0, str(rig.PACKAGES))
    folder = tmp_path_factory.mktemp("recurrent")
    yield lambda name: rig.write_checkpoint(folder / name, name)
    sys.path.remove(str(rig.PACKAGES))
    for name in [name for name in sys.modules if name.partition(".")[0] == "far_away"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def alone(settings: Callable[[str], dict[str, Any]]) -> Callable[[str], Result]:
    """What each request says by itself."""
    known: dict[str, Result] = {}

    def results(name: str) -> Result:
        if name not in known:
            with LLM(**settings(name), enable_prefix_caching=False) as llm:
                known[name] = [one for index in range(len(LENGTHS)) for one in generate(llm, [index])]
        return known[name]

    return results


def tokens_of(index: int) -> list[int]:
    own = [(7 * i * i + 3 * i + 31 * index) % 290 + 3 for i in range(LENGTHS[index])]
    return own if index % 2 else [*((5 * i) % 290 + 3 for i in range(min(SHARED, len(own)))), *own[SHARED:]]


def params_of(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9 * (index % 3), seed=50 + index, max_tokens=14, ignore_eos=True, logprobs=0, detokenize=False
    )


def generate(llm: LLM, indices: Sequence[int]) -> Result:
    prompts = [{"prompt_token_ids": tokens_of(index)} for index in indices]
    outputs = llm.generate(prompts, [params_of(index) for index in indices], use_tqdm=False)
    return [chosen(output) for output in outputs]


def chosen(output: Any) -> tuple[list[int], list[float]]:
    """The tokens and their log-probabilities."""
    one = output.outputs[0]
    return list(one.token_ids), [e[token].logprob for e, token in zip(one.logprobs, one.token_ids, strict=True)]


def poison(engine: Any, *, fresh: bool) -> None:
    """NaN in all of the cache; fresh: and in each block as it is handed out, which takes steps one at a time."""
    pool, blocks = runner_of(engine)._pool, engine.scheduler.kv._pool
    pool.buffer.fill_(torch.nan)
    reserve = blocks.reserve

    def reserved(count: int) -> list[int]:
        found: list[int] = reserve(count)
        pool.data[:, found] = 0xFF
        return found

    if fresh:
        blocks.reserve = reserved


@contextlib.contextmanager
def engine_of(own: dict[str, Any], **fields: Any) -> Iterator[LLM]:
    """With NaN in every byte that nobody has written."""
    with LLM(**{"async_scheduling": False, **own, **fields}) as llm:
        poison(llm.engine, fresh=not {"async_scheduling": False, **fields}["async_scheduling"])
        yield llm
        llm.engine.scheduler.kv.check()
        assert llm.engine.scheduler.kv.usage == 0.0
        pool = runner_of(llm.engine)._pool
        null = pool.buffer.view(pool.num_blocks, -1)[0]
        assert null.float().isnan().all(), "nothing is written to the null block"


@pytest.mark.parametrize("name", MODELS)
def test_its_answers_are_those_of_one_pass_over_all_tokens(
    settings: Callable[[str], dict[str, Any]], alone: Callable[[str], Result], name: str
) -> None:
    """Against the recurrence in float64, token by token, without any cache."""
    from far_away.models import recurrent

    own = settings(name)
    weights = load_file(Path(own["model"]) / "model.safetensors")
    pattern = getattr(recurrent, name).pattern
    for index, (tokens, logprobs) in enumerate(alone(name)):
        prompt = tokens_of(index)
        expected = rig.oracle(weights, pattern, prompt + tokens)[len(prompt) - 1 : -1]
        got = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (got - torch.tensor(logprobs)).abs().max() < 2e-4
        if index % 3 == 0:
            assert expected.argmax(-1).tolist() == tokens


SETTINGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    {"max_num_batched_tokens": 13, "max_num_seqs": 9, "async_scheduling": True},
    {"max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 64, "async_scheduling": True, "snapshot_interval": 3},
    {"block_size": 48, "snapshot_interval": 0},
    {"block_size": 64, "snapshot_interval": 3, "max_num_batched_tokens": 40},
    {"block_size": 64, "async_scheduling": True},
    {"snapshot_interval": 0, "max_num_batched_tokens": 33},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
]


@pytest.mark.parametrize("name", MODELS)
def test_H_8_every_setting(
    settings: Callable[[str], dict[str, Any]], alone: Callable[[str], Result], name: str
) -> None:
    """Cut prompts, found prefixes, sizes of blocks, kept states, a step in flight."""
    for fields in SETTINGS:
        if name == LONG and fields.get("block_size") == 48:
            continue
        with engine_of(settings(name), **fields) as llm:
            for _ in range(2):  # the second time prefixes are found
                assert generate(llm, range(len(LENGTHS))) == alone(name), fields
            assert llm.engine.scheduler.kv.stats.hits > 0, fields


def test_H_8_any_batch(settings: Callable[[str], dict[str, Any]], alone: Callable[[str], Result]) -> None:
    with engine_of(settings(MAIN), enable_prefix_caching=False) as llm:
        for count in range(1, len(LENGTHS) + 1):
            indices = [(3 * count + 5 * i) % len(LENGTHS) for i in range(count)]
            assert generate(llm, indices) == [alone(MAIN)[index] for index in indices]


@pytest.mark.parametrize("name", [MAIN, LONG])
@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_H_8_preempted_requests(
    settings: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str, in_flight: bool
) -> None:
    """Short prompts grow long in a pool that holds few of them so; and one is aborted meanwhile."""
    monkeypatch.setattr(scheduler, "HEADROOM_BLOCKS", 0)  # so that more is preempted
    own = {**settings(name), "max_model_len": 96, "max_num_batched_tokens": 40, "max_num_seqs": 16}
    asked = [
        (
            tokens_of(index)[: 1 + index % 3],
            SamplingParams(
                temperature=0.9 * (index % 2), seed=index, max_tokens=60, ignore_eos=True, logprobs=0, detokenize=False
            ),
        )
        for index in range(12)
    ]
    with LLM(**own, enable_prefix_caching=False) as llm:
        least = llm.engine.memory.blocks_per_request
        expected = facts(run(llm.engine, asked))
    fields = {"num_gpu_blocks_override": least + 1, "async_scheduling": in_flight, "kv_cache_memory_bytes": None}
    with engine_of(own, **fields) as llm:
        found = facts(run(llm.engine, asked, abort="r2"))
        assert {name: found[name] for name in expected if name != "r2"} == {
            name: expected[name] for name in expected if name != "r2"
        }
        assert llm.engine.scheduler.num_preemptions >= 3


@pytest.mark.parametrize("name", [MAIN, LONG, "StatesAloneForCausalLM"])
@pytest.mark.parametrize("interval", [0, 1, 3])
def test_H_4_a_prefix_is_found_at_every_border(
    settings: Callable[[str], dict[str, Any]], name: str, interval: int
) -> None:
    """And another request between the two changes nothing."""
    own, prompt = settings(name), [(11 * i * i + 5) % 290 + 3 for i in range(150)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0, detokenize=False)

    def ask(llm: LLM, tokens: list[int]) -> Any:
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return output

    near = [place + cut for cut in range(0, 150, 16) for place in (-1, 0, 1, 8)]
    cuts = [cut for cut in near if 0 < cut < 150] if interval == 1 else range(1, 150, 14)
    with LLM(**own, enable_prefix_caching=False) as llm:
        cold = {cut: chosen(ask(llm, [*prompt[:cut], 299])) for cut in cuts}
    with engine_of(own, snapshot_interval=interval) as llm:
        ask(llm, prompt)
        found = {}
        for cut in cuts:
            output = ask(llm, [*prompt[:cut], 299])
            assert chosen(output) == cold[cut], cut
            found[cut] = output.num_cached_tokens
            ask(llm, [299, *prompt[:cut]])
        if interval == 1:
            # inputs are kept of the chunk that is open when a step ends: within others who asks first finds less
            inside = {cut for cut in cuts if name == LONG and cut % 32 == 16 and cut < len(prompt) // 32 * 32}
            assert found == {cut: cut // 16 * 16 - 16 * (cut in inside) for cut in cuts}
        elif interval:
            step = math.lcm(3 * (32 if name == LONG else 8), 16)
            assert all(found[cut] >= cut // step * step for cut in cuts) and max(found.values()) >= 96
        else:
            again = ask(llm, prompt)
            assert again.num_cached_tokens == 144


@pytest.fixture(scope="module")
def plain(settings: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """What a model's requests say without drafts."""
    known: dict[str, Any] = {}

    def outputs(name: str) -> dict[str, Any]:
        if name not in known:
            engine = make_engine(None, **settings(name))
            known[name] = run(engine, jobs())
            engine.close()
        return known[name]

    return outputs


def jobs() -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            tokens_of(index),
            SamplingParams(
                temperature=0.9 * (index % 2), seed=index, max_tokens=30, ignore_eos=True, logprobs=1, detokenize=False
            ),
        )
        for index in range(9)
    ]


@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.0], ids=["right", "partly right", "wrong"])
@pytest.mark.parametrize("name", [MAIN, LONG])
def test_H_8_H_2_drafts(
    settings: Callable[[str], dict[str, Any]],
    plain: Callable[[str], dict[str, Any]],
    name: str,
    wrong: float,
    in_flight: bool,
) -> None:
    """A rejected draft leaves dead inputs behind, and at most a state that is written again.

    Steps of 50 tokens hold parts of prompts beside rows with drafts, and rows with none.
    """
    oracle, expected = Oracle(), plain(name)
    oracle.answers, oracle.wrong = answers(expected), wrong
    engine = make_engine(oracle, **settings(name), async_scheduling=in_flight, max_num_batched_tokens=50)
    counts = Counts(engine)
    poison(engine, fresh=not in_flight)
    for aborted in ("", "r5"):
        found = facts(run(engine, jobs(), aborted))
        for key in set(found) - {aborted}:
            assert found[key] == facts(expected)[key]
    assert counts.num_drafted > 100
    assert counts.num_accepted > 50 if wrong < 1 else counts.num_accepted < 30
    kinds = [{*zip(plan.num_tokens.tolist(), plan.num_drafts.tolist(), strict=False)} for plan in counts.plans]
    mixed = [each for each in kinds if any(drafts for _, drafts in each)]
    assert any(max(tokens - drafts for tokens, drafts in each) > 1 for each in mixed), "beside a part of a prompt"
    assert any((1, 0) in each for each in mixed), "beside a row that decodes"
    engine.close()


def test_drafts_that_reach_too_far_are_refused(settings: Callable[[str], dict[str, Any]]) -> None:
    oracle = Oracle()
    oracle.num_drafts = 4
    with pytest.raises(
        ValueError, match=r"'num_speculative_tokens': 4.* every 8 tokens.* num_speculative_tokens to at most 3"
    ):
        make_engine(oracle, **settings(MAIN))
    assert 2 * K < 8


def test_H_5_a_quantized_cache_beside_states(settings: Callable[[str], dict[str, Any]]) -> None:
    own = {**settings(MAIN), "kv_cache_dtype": "fp8"}
    with LLM(**own, enable_prefix_caching=False) as llm:
        expected = [one for index in range(len(LENGTHS)) for one in generate(llm, [index])]
    with engine_of(own, max_num_batched_tokens=33) as llm:
        assert generate(llm, range(len(LENGTHS))) == expected
        assert generate(llm, range(len(LENGTHS))) == expected


def test_H_5_what_loads_unwritten_bytes_finds_zeros(
    settings: Callable[[str], dict[str, Any]], alone: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.ops import states

    gather, store, seen, seen_inputs = states.gather_states, states.store_inputs, [], []

    def checked(stores: Any, table: Any, rows: Any, borders: Any, chunk: int) -> Any:
        for row in rows[borders == 0].tolist():
            ids = table[row, : stores[0].blocks].long()
            seen.append(bool((stores[0].data[ids[ids > 0]] == 0).all()) and bool((ids > 0).any()))
        return gather(stores, table, rows, borders, chunk)

    def checked_inputs(stores: Any, table: Any, rows: Any, positions: Any, size: int, inputs: Any) -> None:
        last, blocks = int(positions[-1]) // size, stores[0].blocks
        ids = table[rows[-1], last * blocks : (last + 1) * blocks].long()
        seen_inputs.append(bool((stores[0].data[ids] == 0).all()) and bool((ids > 0).all()))
        store(stores, table, rows, positions, size, inputs)

    monkeypatch.setattr(states, "gather_states", checked)
    monkeypatch.setattr(states, "store_inputs", checked_inputs)
    with engine_of(settings("ZeroedForCausalLM")) as llm:  # with prefix caching the first border has a block too
        assert generate(llm, [10]) == [alone(MAIN)[10]]
    assert seen[0] and seen_inputs[0]


def test_a_gpu_runs_such_layers_without_graphs_and_says_why(settings: Callable[[str], dict[str, Any]]) -> None:
    config = EngineConfig(model=settings(MAIN)["model"], model_packages="far_away", device="cuda")
    arch = read_arch(Path(config.model), "far_away")
    resolved = resolve(config, arch, GPU)
    assert resolved.device == "cuda" and not resolved.enforce_eager
    model, resolved = models.build(arch, config, resolved, [NO_MODS] * arch.num_layers)
    assert resolved.enforce_eager and resolved.why["enforce_eager"] == "no graph holds a layer with a state: layer 0"
    assert not compiles_ahead(resolved, ["paged"], model.layer_specs)
    arch = SimpleNamespace(layers_of_each=2)  # as Falcon-H1's, whose layers are two of the engine's
    twice: Any = SimpleNamespace(layer_specs=[None, None, None, model.layer_specs[0]], arch=arch)
    resolved = models._without_graphs(twice, dataclasses.replace(resolved, enforce_eager=False))
    assert resolved.why["enforce_eager"] == "no graph holds a layer with a state: layer 1"


def test_doctor_prints_what_states_take(
    settings: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    own = settings(MAIN)
    assert cli(["doctor", "--model", own["model"], "--model-packages", "far_away"]) == 0
    said = capsys.readouterr().out
    assert "States: one of 3 layers together takes" in said
    assert "the inputs of an open chunk of 8 tokens take" in said

"""Steps in which every row verifies, as graphs hold them: padded, whole where rows only draw. Replayed eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eager_graphs import EagerGraphs
from insides import runner_of
from octavo.config.engine_config import EngineConfig
from octavo.device.graphs import decode_keys, verify_keys
from octavo.frontend.engine import Engine
from octavo.request.sampling_params import SamplingParams

K = 3
EAGLE = {"method": "eagle3", "model": "octavo-tiny-eagle3", "num_speculative_tokens": K}
WORDS = [[17, 40, 17, 40, 17, 40, 9], [5, 6, 7, 8] * 4, list(range(30, 49)), [11] * 12]


def make_engine(**fields: Any) -> Engine:
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 6, **fields}
    return Engine(EngineConfig(**settings))


def answers(engine: Engine, params: list[SamplingParams]) -> list[Any]:
    for index, own in enumerate(params):
        engine.add(f"r{index}", WORDS[index % len(WORDS)], own)
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [
        [
            (one.token_ids, [entry[token].logprob for entry, token in zip(one.logprobs or (), one.token_ids)])
            for one in done[f"r{index}"].outputs
        ]
        for index in range(len(params))
    ]


def plain_and_drafted(params: list[SamplingParams], **fields: Any) -> tuple[list[Any], list[Any], EagerGraphs]:
    engine = make_engine(**fields)
    expected = answers(engine, params)
    engine.close()
    config = {"method": "ngram", "num_speculative_tokens": K, "adaptive_depth": False}
    engine = make_engine(speculative_config=config, **fields)
    runner = runner_of(engine)
    keys = [*decode_keys(6), *verify_keys(6, 512, lambda rows: K)]
    graphs = runner._graphs = EagerGraphs(runner, keys)
    found = answers(engine, params)
    engine.close()
    return expected, found, graphs


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False, **fields})


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["alone", "one in flight"])
def test_S_13_whole_steps_of_rows_that_only_draw(in_flight: bool, backend: str) -> None:
    """Of 3 and 5 rows, in graphs of 4 and 6: padding changes nothing, and drafts are proposed within."""
    for count in (3, 5):
        own = [params(seed=seed, temperature=0.3 * (seed % 3)) for seed in range(count)]
        expected, found, graphs = plain_and_drafted(own, async_scheduling=in_flight, attention_backend=backend)
        assert found == expected
        whole = [key for key in graphs.replayed if key.num_drafts and key.is_decode]
        assert len(whole) > 3 and {key.num_rows for key in whole} >= {4 if count == 3 else 6}
        assert len(graphs.replayed) < count * 24


def test_S_13_rows_with_features_take_the_graph_of_hidden_states() -> None:
    own = [params(logprobs=2, seed=1, temperature=1.0), params(repetition_penalty=1.2), params(bad_words=["a"])]
    expected, found, graphs = plain_and_drafted(own)
    assert found == expected
    assert any(key.num_drafts and not key.is_decode for key in graphs.replayed)
    assert not any(key.num_drafts and key.is_decode for key in graphs.replayed[:3])


def test_S_13_a_chunk_of_a_prompt_never_takes_the_graph() -> None:
    """A chunk of 1 + K tokens is no verification: it samples from its last token alone, or from none."""
    own = [params(max_tokens=4), params(max_tokens=30)]
    expected, found, graphs = plain_and_drafted(own, max_num_batched_tokens=1 + K, max_num_seqs=2)
    assert found == expected
    tokens = [key.num_tokens for key in graphs.replayed if key.num_drafts]
    assert tokens and max(tokens) <= (1 + K) * 2


def accepted_behind_plain_steps(*, leaves: bool) -> tuple[int, bool]:
    """How many drafts of one row were accepted behind steps of 26; whether graphs stored what the drafter keeps."""
    engine = make_engine(max_num_seqs=26, kv_cache_memory_bytes=32 << 20, speculative_config=EAGLE)
    runner, stored = runner_of(engine), []
    runner._graphs = EagerGraphs(runner, decode_keys(26))
    propose = runner._drafter.propose

    def spy(*args: Any, for_capture: bool = False) -> None:
        stored.append(for_capture)
        propose(*args, for_capture=for_capture)

    runner._drafter.propose = spy
    if leaves:
        for key in decode_keys(26):
            assert [runner._drafter.leave_graphs(RuntimeError("no room"), key) for _ in range(2)] == [True, False]
    answers(engine, [params(max_tokens=8)] * 25 + [params(max_tokens=32)])
    accepted = engine.stats.num_accepted_tokens
    engine.close()
    return accepted, any(stored)


BREAKS = [
    (torch.OutOfMemoryError("no room"), False),
    (RuntimeError("CUDA error: out of memory"), False),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
    (RuntimeError("CUDA error: operation not permitted when stream is capturing"), True),
]


@pytest.mark.parametrize(("error", "for_good"), BREAKS)
@pytest.mark.parametrize("in_stores", [False, True], ids=["elsewhere", "in its stores"])
def test_only_stores_that_cannot_be_captured_leave_graphs_for_good(
    in_stores: bool, error: RuntimeError, for_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, or where the model's own part breaks, one graph is captured without them."""
    engine = make_engine(max_num_seqs=26, kv_cache_memory_bytes=32 << 20, speculative_config=EAGLE)
    runner, (small, *_, large) = runner_of(engine), decode_keys(26)
    drafter, whole = runner._drafter, verify_keys(4, 100, lambda rows: K)[-2]

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(RuntimeError), torch.inference_mode():
        patch.setattr(drafter._speculator, "propose", fail)
        runner._record(whole)  # whose failure says nothing of stores
    with monkeypatch.context() as patch:
        patch.setattr(drafter._speculator if in_stores else runner.model, "propose" if in_stores else "forward", fail)
        with pytest.raises(RuntimeError), torch.inference_mode():
            runner._record(large)
    assert drafter.is_within(small) and drafter.is_within(large) and drafter.is_within(whole)
    assert [drafter.leave_graphs(error, large) for _ in range(2)] == [True, False]
    assert not drafter.is_within(large) and drafter.is_within(whole)
    assert drafter.is_within(small) != (for_good and in_stores)
    engine.close()


def test_where_no_graph_could_be_captured_with_a_drafters_stores_steps_store_behind_it() -> None:
    accepted, within = accepted_behind_plain_steps(leaves=False)
    assert accepted and within
    assert accepted_behind_plain_steps(leaves=True) == (accepted, False)


def test_a_row_count_has_two_graphs_as_deep_as_its_batch() -> None:
    keys = verify_keys(300, 8192, lambda rows: min(4, 256 // rows - 1))
    by_rows = {key.num_rows: (key.num_drafts, key.num_tokens) for key in keys}
    assert by_rows[1] == (4, 5) and by_rows[64] == (3, 256) and by_rows[128] == (1, 256)
    assert max(by_rows) == 128 and len(keys) == 2 * len(by_rows)

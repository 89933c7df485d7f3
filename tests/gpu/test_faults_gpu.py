"""A GPU that is too small or lost: what must fail does, says why, and nothing else fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM, SamplingParams
from octavo.bench.shapes import SHAPES
from octavo.config.engine_config import EngineConfig
from octavo.request.sampling_params import RequestOutputKind
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.client import Supervision
from octavo.serve.engine.refusals import EngineDeadError

pytestmark = pytest.mark.gpu
HERE = Path(__file__).resolve().parent
MIB = 1 << 20
LIBRARY_BYTES = 128 * MIB  # what the thread that opens the GPU beside a start may take


@contextlib.contextmanager
def room_of(num_bytes: int) -> Iterator[None]:
    """torch may take so many bytes more than it has, of which what others have left free is filled."""
    torch.cuda.empty_cache()
    reserved, filling = torch.cuda.memory_reserved(), []
    while torch.cuda.memory_reserved() == reserved:
        filling.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
    filling.pop()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        filling.clear()
        torch.cuda.empty_cache()


def model_of(folder: Path, **facts: Any) -> dict[str, Any]:
    """Settings for a small model with a large vocabulary, 78 MiB of random weights, and a cache of 64 MiB.

    Its products are compared with the library's while it is loaded, which takes some 500 MiB for a moment.
    """
    (folder / "config.json").write_text(json.dumps(SHAPES["tiny"] | {"vocab_size": 151936} | facts))
    fields = {"model": str(folder), "tokenizer": "octavo-tiny", "load_format": "dummy", "device": "cuda"}
    return fields | {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 * MIB, "max_model_len": 1024}


PROMPT = {"prompt_token_ids": [7] * 20}
FEW = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)


def test_a_model_larger_than_the_gpu_is_refused_before_it_is_made(tmp_path: Path) -> None:
    fields = model_of(tmp_path, hidden_size=32768, num_hidden_layers=200, intermediate_size=131072)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pytest.raises(ValueError, match=r"its weights take \d+\.\d GiB in bfloat16, \d+\.\d GiB are free"):
        LLM(**fields)
    assert torch.cuda.memory_reserved() < before + LIBRARY_BYTES


@pytest.mark.parametrize(
    ("room", "change", "message"),
    [
        (40, {}, "load_format='dummy'.*the weights do not fit the GPU, which has .* left; take a smaller model"),
        (
            1000,
            {"kv_cache_memory_bytes": 2048 * MIB},
            "kv_cache_memory_bytes=.*the cache and the tables do not fit the GPU.*lower it, or max_num_seqs",
        ),
        (
            1000,
            {"kv_cache_memory_bytes": 700 * MIB, "max_num_seqs": 512, "numerics": "fast"},  # 297 MiB of logits
            r"gpu_memory_utilization=.*the graphs do not fit the GPU.*enforce_eager",
        ),
    ],
    ids=["weights", "cache", "graphs"],
)
def test_a_start_says_what_does_not_fit_and_what_to_change(
    tmp_path: Path, room: int, change: dict[str, Any], message: str
) -> None:
    """Memory that the driver calls free, and does not give. Afterwards it is all there again."""
    fields = model_of(tmp_path) | change
    with room_of(room * MIB), pytest.raises(ValueError, match=message) as caught:
        LLM(**fields)
    assert "\n" not in str(caught.value)
    with LLM(**fields, enforce_eager=True) as llm:
        assert llm.generate(PROMPT, FEW)


def test_a_step_without_memory_stops_the_engine_and_says_what_to_change(tmp_path: Path) -> None:
    fields = model_of(tmp_path, max_position_embeddings=8192) | {"enforce_eager": True, "max_model_len": 8192}
    with LLM(**fields) as llm:
        llm.generate(PROMPT, FEW)
        with room_of(8 * MIB), pytest.raises(RuntimeError) as caught:
            llm.generate({"prompt_token_ids": [7] * 8000}, FEW)
        said = "the activations of a step of 8000 tokens in 1 rows do not fit the GPU beside weights, graphs and cache"
        assert said in str(caught.value) and "lower gpu_memory_utilization" in str(caught.value)
        with pytest.raises(RuntimeError, match="the engine stopped"):
            llm.generate(PROMPT, FEW)
    with LLM(**fields) as llm:
        assert llm.generate(PROMPT, FEW)


def test_a_lost_gpu_ends_what_ran_and_the_server_comes_back(tmp_path: Path) -> None:
    """An assertion that fails in a kernel takes the process's CUDA context along."""
    quick = Supervision(first_delay=0.05, max_delay=0.05, max_failures=9)
    config = EngineConfig(**model_of(tmp_path), enforce_eager=True)

    def params(seed: int, max_tokens: int) -> SamplingParams:
        kind = RequestOutputKind.DELTA
        return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, output_kind=kind, detokenize=False)

    async def tokens_of(engine: AsyncEngine, name: str, seed: int, max_tokens: int) -> list[int]:
        stream = engine.generate(name, [20, 21, 22], params(seed, max_tokens))
        return [token async for output in stream for token in output.outputs[0].token_ids]

    async def main() -> None:
        command = [sys.executable, str(HERE / "losing_engine.py")]
        engine = await AsyncEngine.start(config, command=command, supervision=quick)
        try:
            await engine.wait_ready(60)
            expected = await tokens_of(engine, "before", 5, 12)
            life = engine._client._life
            long = asyncio.create_task(tokens_of(engine, "beside", 5, 900))
            await asyncio.sleep(0.3)
            with pytest.raises(EngineDeadError):
                await tokens_of(engine, "poisoned", 666, 12)
            with pytest.raises(EngineDeadError):
                await long
            assert "assert" in engine.error, engine.error
            with pytest.raises(EngineDeadError):
                await tokens_of(engine, "too early", 5, 12)
            await engine.wait_ready(60)
            assert engine._client._life is not life and engine.stats["num_restarts"] == 1
            assert await tokens_of(engine, "after", 5, 12) == expected
        finally:
            await engine.close()

    asyncio.run(main())

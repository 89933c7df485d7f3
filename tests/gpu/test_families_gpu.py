"""Every family on a GPU as users start it: the CPU engine's tokens, and the same ones alone as in a batch.

`make test-gpu-families` runs this file, engines side by side.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from families import CASES, FAMILIES, MAX_MODEL_LEN, SHARED, Steps, answers, keeps_states, write_model
from graph_guard import no_host_reads
from octavo import LLM
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 21 * MAX_MODEL_LEN // 16 + 1  # of 16 tokens, as many as the longest case asks for
WITHOUT_GRAPHS = {"DeepSeek-V2", "DeepSeek-V3"}  # latent attention is issued kernel by kernel


@dataclasses.dataclass
class Made:
    """An engine on a GPU, and what it is compared with."""

    llm: LLM
    steps: Steps
    expected: dict[str, list[list[int]]]  # per case the CPU engine's, for float32; else nothing


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((family, dtype), id=f"{family}-{dtype}", marks=pytest.mark.xdist_group(f"{family}-{dtype}"))
        for dtype in ("float32", "bfloat16")
        for family in FAMILIES
    ],
)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    family, dtype = request.param
    with tempfile.TemporaryDirectory() as folder:
        write_model(family, Path(folder))
        pool = {"kv_cache_memory_bytes": 1 << 30} if keeps_states(family) else {"num_gpu_blocks_override": NUM_BLOCKS}
        settings = SHARED | pool | {"model": folder, "dtype": dtype}
        expected = {}
        if dtype == "float32":
            with LLM(device="cpu", num_threads=1, **settings) as llm:
                expected = {case: answers(llm, *CASES[case]) for case in CASES}
        with no_host_reads() as captured, LLM(device="cuda", **settings) as llm, no_waits():
            assert bool(captured) == (family not in WITHOUT_GRAPHS)
            yield Made(llm, Steps.of(llm), expected)


@pytest.mark.parametrize("case", CASES)
def test_answers(made: Made, case: str) -> None:
    prompts, count = CASES[case]
    made.steps.seen.clear()
    found = answers(made.llm, prompts, count)
    assert made.steps.num_mixed or case != "mixed step"
    if made.expected:
        assert found == made.expected[case]
    if len(prompts) == 17:
        assert [answers(made.llm, [prompt], count)[0] for prompt in prompts] == found, "alone and in a batch"
    assert answers(made.llm, prompts, count) == found, "again, on what the cache kept of the prompts"

"""What a step allocates, and that the plan knows what is kept beside the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.cache.plan import show_bytes
from octavo.cli import main as cli
from octavo.layers import fusions
from octavo.ops.decoder import post_attention
from random_models import GEMMA, settings_of, token_prompts

PROMPTS = token_prompts(40, 7, 1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)


class Allocations(TorchDispatchMode):
    """Bytes of each new storage that an operator gives, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {_storage(x) for x in tree_leaves((args, kwargs))}
        new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and _storage(x) not in known]
        self.sizes += [x.untyped_storage().nbytes() for x in new]
        return out


def _storage(value: Any) -> int | None:
    """Where its memory begins; None for what is no tensor."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("backend", ["cpu", "reference", "flex"])
def test_no_allocation_of_a_step_grows_with_the_pool(tmp_path: Path, backend: str) -> None:
    """Prefill and decode over a pool eight times as large allocate the same, storage by storage."""
    found = []
    for num_blocks in (64, 512):
        with LLM(
            **settings_of(GEMMA, tmp_path),
            dtype="float32",
            attention_backend=backend,
            block_size=32,
            num_gpu_blocks_override=num_blocks,
            max_model_len=64,
            max_num_seqs=4,
            async_scheduling=False,
            enable_prefix_caching=False,
        ) as llm:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            with Allocations() as allocations:
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            found.append(allocations.sizes)
    assert len(found[0]) > 20, "the steps ran under the mode"
    assert found[0] == found[1]


def test_behind_the_last_attention_a_prompt_is_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chunk that nobody samples from as well; a prompt that owes log-probabilities is all of its tokens."""
    counts: list[int] = []

    def leave(operands: Any, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, Any]:
        counts.append(len(attended))
        return post_attention(operands, attended, residual)

    monkeypatch.setattr(fusions, "post_attention", leave)
    with LLM(
        **settings_of(GEMMA, tmp_path),
        dtype="float32",
        attention_backend="reference",
        max_num_batched_tokens=32,
        max_model_len=64,
        max_num_seqs=4,
        async_scheduling=False,
        enable_prefix_caching=False,
    ) as llm:
        for prompt_logprobs, expected in ((None, [(32, 1), (16, 2), (2, 2)]), (1, [(32, 32), (16, 16), (2, 2)])):
            counts.clear()
            params = SamplingParams(
                temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False, prompt_logprobs=prompt_logprobs
            )
            llm.generate(token_prompts(40, 8), params, use_tqdm=False)
            steps = [counts[at : at + 6] for at in range(0, len(counts), 6)]
            assert steps == [[num_tokens] * 5 + [num_last] for num_tokens, num_last in expected]


def test_doctors_plan_holds_the_memory_of_tables_and_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `octavo doctor` prints is an engine's own plan, and its backends keep no more than it says."""
    fields = {"block_size": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "max_model_len": 128}
    settings, sizes = settings_of(GEMMA, tmp_path), []
    options = [part for name, value in fields.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert cli.main(["doctor", "-m", str(tmp_path), "--attention-backend", "flex", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    with LLM(**settings, dtype="float32", attention_backend="flex", **fields) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        memory, backends = llm.engine.memory, [table.backend for table in runner_of(llm.engine)._model_state._tables]
    for name, size in (("tables", memory.table_bytes), ("attention", memory.buffer_bytes)):
        (line,) = (line for line in lines if line.split()[:1] == [name] and " of " in line)
        assert line.split()[1:3] == show_bytes(size).split() and size > 0, line
        sizes.append(size)
    masks = [rows for backend in backends for rows in backend._buffers.values()]
    kept = sum(x.nbytes for rows in masks for x in vars(rows).values() if isinstance(x, torch.Tensor))
    assert len(masks) == 3 and 0 < kept <= memory.buffer_bytes

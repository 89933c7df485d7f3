"""Latent attention on a CUDA device: its kernels against their references, and a DeepSeek model against the CPU's."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from latent_rig import CHECKS
from model_rig import make_reference
from octavo import LLM, SamplingParams
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PROMPTS = [random.Random(seed).choices(range(199), k=5 + 23 * seed) for seed in range(6)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check: str, dtype: torch.dtype) -> None:
    CHECKS[check](CUDA, dtype)


def test_deepseek_answers_as_on_the_cpu_and_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_reference("deepseek3", vocab_size=4096).save_pretrained(tmp_path)
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    settings: dict[str, Any] = {
        "model": str(tmp_path),
        "tokenizer": "octavo-tiny",
        "dtype": "float32",
        "max_model_len": 256,
    }
    settings["num_gpu_blocks_override"] = 80
    with LLM(**settings, device="cpu") as llm:
        expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]
    found = []
    for setting in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 32}):
        with LLM(**settings, device="cuda", **setting) as llm, no_waits():
            outputs = llm.generate(prompts, GREEDY)
            outputs += [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        answers = [output.outputs[0] for output in outputs]
        found.append([[lp.logprob for entry in answer.logprobs for lp in entry.values()] for answer in answers])
        assert [list(answer.token_ids) for answer in answers] == expected * 2
        assert found[-1][: len(prompts)] == found[-1][len(prompts) :], "alone and in a batch"
    assert found[0] == found[1] == found[2]

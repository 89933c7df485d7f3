"""Wrong attention mods on a CUDA device: refused before a kernel reads outside of a table, which would be its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM, AttentionMods, SamplingParams
from octavo.attention import and_, document, request_field
from octavo.config.settings import ConfigError

pytestmark = pytest.mark.gpu
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 100, "device": "cuda", "num_gpu_blocks_override": 64}
BACKENDS = pytest.mark.parametrize("backend", ["reference", "flex"])


@BACKENDS
def test_a_short_table_is_refused_and_the_device_lives(backend: str) -> None:
    short, kind = torch.ones(80, dtype=torch.bool, device="cuda"), request_field("kind")
    for mods in (
        AttentionMods(mask_mod=lambda b, h, q, kv: short[kv]),
        AttentionMods(mask_mod=lambda b, h, q, kv: short[kind[b]], fields=(kind,)),
        AttentionMods(mask_mod=lambda b, h, q, kv: short.cpu()[kv]),
    ):
        with pytest.raises(ConfigError, match="mask_mod fails"):
            LLM(**LIMITS, attention_backend=backend, attention_mods=mods)
        assert torch.ones(3, device="cuda").sum().item() == 3


@BACKENDS
def test_a_table_of_max_model_len_serves_its_last_position(backend: str) -> None:
    table = torch.ones(100, dtype=torch.bool, device="cuda")
    mods = and_(document(), AttentionMods(mask_mod=lambda b, h, q, kv: table[kv] & table[q]))
    with LLM(**LIMITS, attention_backend=backend, attention_mods=mods) as llm:
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, extra_args={"document_ids": [1, 2]})
        assert len(llm.generate([[5] * 97], params)[0].outputs[0].token_ids) == 3


def test_what_a_mod_raises_in_a_step_ends_its_requests_only() -> None:
    broken: list[int] = []

    def fails(b, h, q_idx, kv_idx):
        return kv_idx < (100 if not broken else {}[0])

    with LLM(**LIMITS, attention_backend="reference", attention_mods=AttentionMods(mask_mod=fails)) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        before = llm.generate([[5] * 20], params)[0].outputs
        broken.append(1)
        failed = llm.generate([[5] * 9, [6] * 9], params)
        assert [output.outputs[0].stop_reason for output in failed] == ["attention_mod_failed"] * 2
        broken.clear()
        assert llm.generate([[5] * 20], params)[0].outputs == before

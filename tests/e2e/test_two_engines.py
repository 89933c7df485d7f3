"""Engines of one process with other settings: each keeps its operators, bits and threads, and so does the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library is built")
SETTINGS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "reference": {"native": "off"},
    "another library": {"native": native.built_isas()[-1] if native.available() else "off", "num_threads": 2},
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16", "bfloat16_chain": "pairs", "num_threads": 2},
    "reference in bfloat16, on a thread of its own": {"native": "off", "dtype": "bfloat16", "async_scheduling": True},
}


def _bits(llm: LLM) -> list[Any]:
    params = SamplingParams(seed=1, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    outputs = llm.generate([[5, 6, 7, 8], list(range(10, 50))], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


def _state_of_process() -> list[Any]:
    facts = [native.isa(), native.num_threads(), native.multiplies_in_pairs(), torch.get_num_threads()]
    return [*facts, torch.get_default_dtype(), torch.is_inference_mode_enabled()]


def test_an_engine_keeps_its_bits_beside_any_other(make_llm: Callable[..., LLM]) -> None:
    """Each as it was when it was the last that had been made, in turn and all at once."""
    process, alone, llms = _state_of_process(), {}, {}
    for name, settings in SETTINGS.items():
        llms[name] = make_llm(max_model_len=128, **{"num_threads": 1, **settings})
        alone[name] = _bits(llms[name])
    assert alone["compiled"] == alone["another library"] != alone["reference"], "these do not tell engines apart"
    assert {name: _bits(llm) == alone[name] for name, llm in llms.items()} == dict.fromkeys(llms, True)
    seen: dict[str, bool] = {}
    threads = [
        threading.Thread(target=lambda name=name: seen.update({name: _bits(llms[name]) == alone[name]}))
        for name in llms
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == dict.fromkeys(llms, True)
    assert _state_of_process() == process


@pytest.mark.parametrize("chain", ["single", "pairs"])
def test_what_runs_outside_of_engines_follows_the_usual_chain_whatever_engines_there_were(
    make_llm: Callable[..., LLM], chain: str
) -> None:
    """A trainer beside no engine computes as one beside an engine, and as an engine of another process."""
    usual = native.multiplies_in_pairs()
    make_llm(dtype="bfloat16", bfloat16_chain=chain, max_model_len=128)
    assert native.multiplies_in_pairs() == usual
    assert usual == (make_llm(dtype="bfloat16", max_model_len=128).engine.resolved.bfloat16_chain == "pairs")


def test_a_wrong_library_is_refused_and_changes_nothing() -> None:
    before = _state_of_process()
    with pytest.raises(ValueError, match=r"'x87'.*known are none"):
        native.Serving("x87", "single", 1)
    with pytest.raises(ValueError, match="native"):
        LLM(native="x87")
    assert _state_of_process() == before

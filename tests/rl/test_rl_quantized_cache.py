"""New weights under a quantized cache: its scales are those of the weights that serve, as of a start with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from octavo import LLM
from octavo.request.outputs import WeightsSpan
from rl_rig import TINY
from sleep_rig import move_memory
from weights_rig import Weights, answers, give, old_weights, other_weights, params

from pages_double import PagesDouble  # isort: skip, its folder is known through sleep_rig

FIELDS = {"dtype": "bfloat16", "max_model_len": 256}


@pytest.fixture(scope="module")
def new() -> Weights:
    return other_weights(3)


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_W_6_a_quantized_cache_has_the_scales_of_the_weights_that_serve(cache: str, new: Weights, tmp_path: Path):
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    save_file(new, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), **FIELDS, kv_cache_dtype=cache) as fresh:
        expected = answers(fresh)
    with LLM(TINY, **FIELDS, kv_cache_dtype=cache) as llm:
        before = answers(llm)
        give(llm, new, "new")
        assert answers(llm) == expected != before
        give(llm, old_weights(), "old again")
        assert answers(llm) == before


@pytest.mark.parametrize("cache", ["fp8", "auto"])
def test_W_6_what_old_scales_stored_is_computed_again(cache: str, new: Weights):
    """A request that was to keep its K and V: they mean something else under other scales."""
    with LLM(TINY, **FIELDS, kv_cache_dtype=cache) as llm:
        engine, prompt = llm.engine, [5, 6, 7] * 30
        engine.add("a", prompt, params(max_tokens=20))
        for _ in range(6):
            engine.step()
        give(llm, new, "new", on_running="keep_kv")
        outputs = [output for _ in iter(lambda: engine.has_unfinished, False) for output in engine.step()]
        spans = outputs[-1].outputs[0].weight_versions
        assert spans[-1] == WeightsSpan("new", spans[-1].start, 20, mixed=cache == "auto")
        stats = engine.core.weights.stats
        assert (stats.num_kept, stats.num_recomputed) == ((1, 0) if cache == "auto" else (0, 1))


def test_W_6_scales_are_measured_while_the_cache_sleeps(new: Weights, monkeypatch: pytest.MonkeyPatch):
    """Who touched the cache then would end by a signal."""
    move_memory(monkeypatch, PagesDouble())
    fields = {**FIELDS, "dtype": "float32", "kv_cache_dtype": "fp8", "native": "off", "num_gpu_blocks_override": 60}
    with LLM(TINY, **fields) as llm:
        give(llm, new, "new")
        expected = answers(llm)
        give(llm, old_weights(), "old")
        llm.sleep(2)
        llm.wake_up(["weights"])
        give(llm, new, "new again")
        assert llm.wake_up() and answers(llm) == expected

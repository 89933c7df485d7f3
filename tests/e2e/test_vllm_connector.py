"""A connector that was written for vLLM runs as it is (C.14)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_checks import GOOD_PROMPT, assert_idle
from octavo import LLM, SamplingParams
from octavo.config.settings import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [GOOD_PROMPT * 9, "x = 1\n" + GOOD_PROMPT * 7]
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=2)
CONFIG: dict[str, Any] = {
    "kv_connector": "MemoryConnector",
    "kv_connector_module_path": "vllm_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"label": "here"},
}
Make = Callable[..., LLM]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, and the module `vllm` of octavo-vllm."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "packages"))
    monkeypatch.syspath_prepend(str(ROOT / "adapters" / "octavo-vllm" / "src"))
    import vllm_connector

    yield vllm_connector
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_connector")]:
        del sys.modules[name]


def bits(outputs: list[Any]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def settle(llm: LLM) -> Any:
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert_idle(llm)
    return llm.engine.scheduler.stats()


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None goes on beside the steps, since its thread had no processor: what is computed meanwhile is not saved."""
    monkeypatch.setattr("octavo.kv_connector.guard._AT_ONCE", 30.0)


SPLIT = {"block_size": 16, "attention_config": {"kernel_block_size": 8}}


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC", "LBNHC split", "BLNHC split"])
@pytest.mark.usefixtures("looks_at_once")
def test_C_14_a_subclass_of_vllms_base_saves_loads_and_answers(layout, theirs, make_llm: Make):
    """Blocks that are split for the attention kernel are shown whole where a token's heads lie together."""
    fields = {"max_model_len": 512, "kv_cache_layout": layout.split()[0], **(SPLIT if "split" in layout else {})}
    expected = bits(make_llm(**fields).generate(PROMPTS, PARAMS))
    llm = make_llm(**fields, kv_transfer_config=CONFIG)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert bits(outputs) == expected and theirs.KEPT
    assert outputs[0].kv_transfer_params["label"] == "here" and outputs[0].kv_transfer_params["num_blocks"] >= 5
    settle(llm)
    assert sum(call.startswith("finished") for call in theirs.CALLS) == 2, "once for each request"
    assert llm.reset_prefix_cache() and bits(llm.generate(PROMPTS, PARAMS)) == expected
    assert settle(llm).num_loaded_tokens >= 64
    theirs.LOST.add(2)
    assert llm.reset_prefix_cache() and bits(llm.generate(PROMPTS, PARAMS)) == expected
    assert settle(llm).num_load_failures == 2
    order = [call for call in theirs.CALLS if not call.startswith(("finished", "wait_for_layer"))]
    assert order == ["start_load_kv", "wait_for_save"] * (len(order) // 2)


def test_C_14_what_it_cannot_have_is_refused_by_name(theirs, make_llm: Make, monkeypatch):
    with pytest.raises(ConfigError, match=r"takes whole blocks, .* have their heads apart; set kv_cache_layout"):
        make_llm(**SPLIT, kv_cache_layout="LBHNC", kv_transfer_config=CONFIG)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.base", None)
    with pytest.raises(ConfigError, match="octavo-vllm"):
        make_llm(kv_transfer_config=CONFIG)


METHODS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")


@pytest.mark.parametrize(
    "method", [*METHODS, "request_finished", "reset_cache", "shutdown", "start_load_kv", "get_finished"]
)
@pytest.mark.usefixtures("looks_at_once")
def test_what_its_methods_raise_stays_with_it(method: str, theirs, make_llm: Make, monkeypatch, caplog):
    def fails(*_: object, **__: object) -> Any:
        raise RuntimeError(f"no {method}")

    expected = bits(make_llm(max_model_len=512).generate(PROMPTS, PARAMS))
    llm = make_llm(max_model_len=512, kv_transfer_config=CONFIG)
    assert bits(llm.generate(PROMPTS, PARAMS)) == expected
    settle(llm)
    monkeypatch.setattr(theirs.MemoryConnector, method, fails, raising=False)
    llm.reset_prefix_cache()
    llm.reset_prefix_cache(reset_connector=True) if method == "reset_cache" else None
    assert bits(llm.generate(PROMPTS, PARAMS)) == expected
    settle(llm)
    llm.close()
    assert f"RuntimeError: no {method} at test_vllm_connector.py" in caplog.text


def test_one_that_cannot_be_made_is_refused_by_name(theirs, make_llm: Make, monkeypatch):
    def fails(*_: object, **__: object) -> Any:
        raise RuntimeError("no server")

    for method in ("__init__", "register_kv_caches"):
        with monkeypatch.context() as patched:
            patched.setattr(theirs.MemoryConnector, method, fails)
            with pytest.raises(ConfigError, match=r"MemoryConnector'.*: cannot be made: RuntimeError: no server at"):
                make_llm(max_model_len=512, kv_transfer_config=CONFIG)

"""CachePlan: bytes per block, the size of the cache, and the refusal of what does not fit."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from architectures import ARCH, CPU
from octavo import LLM, SamplingParams
from octavo.cache.groups import CacheGroup, block_bytes, make_groups, table_of_each
from octavo.cache.plan import CachePlan, show_bytes
from octavo.cache.policies import blocks_for_request
from octavo.cache.specs import LayerSpec, NoCache, StateSpec, StateTensor
from octavo.checkpoint import loader
from octavo.checkpoint.arch import Arch, LayerKind
from octavo.config.device_facts import DeviceFacts
from octavo.config.engine_config import EngineConfig, Resolved, resolve
from octavo.config.settings import ConfigError
from octavo.layers.attention import plain_specs
from octavo.observe import LOGGER
from octavo.ops import native
from octavo.sched.kv_manager import KVManager
from octavo.startup.memory_plan import check_weights, plan_memory, with_planned_length
from patience import patient

SLIDING = dataclasses.replace(ARCH, layers=(LayerKind(window=64),) * 4 + (LayerKind(),) * 2)
FULL = plain_specs(ARCH)[0]
STATE = StateSpec(
    states=(StateTensor("sum", (8, 100), "float32"),), inputs=(StateTensor("x", (100,), "bfloat16"),), chunk=64
)
HYBRID = (dataclasses.replace(FULL, chunk=48),) * 3 + (FULL, STATE, NoCache(), STATE)
GPU = dataclasses.replace(CPU, cuda="NVIDIA H200")
PER_BLOCK = 2 * 2 * 2 * 16 * 2 * 16  # layers, K and V, heads, channels, bytes, tokens


def plan(
    free_bytes: int, arch: Arch = ARCH, facts: DeviceFacts = CPU, total_bytes: int = 0, **fields: Any
) -> CachePlan:
    made = resolve(EngineConfig(**fields), arch, facts)
    groups, weights = make_groups(plain_specs(arch), made.block_size), weight_bytes(arch, made)
    return plan_memory(
        arch, made, groups, free_bytes, weight_bytes=weights, total_bytes=total_bytes, **lying(groups, made)
    )


def lying(groups: tuple[CacheGroup, ...], resolved: Resolved) -> dict[str, Any]:
    """A layout, and a table per group, in kernel blocks as the settings say."""
    tables = table_of_each(groups, [resolved.kernel_block_size or group.block_size for group in groups])
    return {"layout": "LBHNC", "tables": tables, "why": {"layout": "for this test"}}


def weight_bytes(arch: Arch, resolved: Resolved) -> int:
    return loader.weight_bytes(loader.build_model(arch, getattr(torch, resolved.dtype)), resolved)


def numbers(**fields: Any) -> Resolved:
    return resolve(EngineConfig(**fields), ARCH, CPU)


def test_a_block_counts_the_layers_of_the_largest_group() -> None:
    assert block_bytes(make_groups(plain_specs(ARCH), 16), 2) == PER_BLOCK
    assert block_bytes(make_groups(plain_specs(SLIDING), 16), 2) == PER_BLOCK
    assert block_bytes(make_groups(plain_specs(ARCH), 32), 4) == 4 * PER_BLOCK


@pytest.mark.parametrize("specs", [plain_specs(ARCH), plain_specs(SLIDING), HYBRID], ids=["full", "sliding", "hybrid"])
@pytest.mark.parametrize("length", [1, 16, 17, 100, 2048])
@pytest.mark.parametrize("step", [1, 16, 512, 4096])
def test_the_scheduler_needs_what_the_plan_counts(specs: Sequence[LayerSpec], length: int, step: int) -> None:
    groups = make_groups(specs, 16)
    need = blocks_for_request(groups, length, step, drafts=False)
    assert KVManager(groups, need + 1).fits_alone(length, step)
    assert need < 2 or not KVManager(groups, need).fits_alone(length, step)


def test_weights_as_the_layers_keep_them() -> None:
    matrices = 2 * ((64 + 2 * 32) * 64 + 64 * 64 + 3 * 64 * 128) + 1000 * 64
    vectors = 4 * (2 * (2 * 64 + 2 * 16) + 64)  # norms stay float32
    padding = 24 * 64  # the output head's 1000 rows fill 32 panels of 32
    assert weight_bytes(ARCH, numbers()) == 2 * (matrices + padding + 1000 * 64) + vectors
    tied = dataclasses.replace(ARCH, tied=True)
    assert weight_bytes(ARCH, numbers()) - weight_bytes(tied, numbers()) == 2 * 1000 * 64
    int8 = weight_bytes(tied, numbers(quantization="int8"))
    assert int8 == (matrices + padding) * 34 // 32 + vectors
    assert weight_bytes(tied, numbers(native="off")) == 4 * matrices + vectors
    widened = numbers(dtype="float32")
    assert weight_bytes(ARCH, widened) == 2 * (matrices + padding + 1000 * 64) + vectors
    made = numbers(dtype="float32", load_format="dummy")
    assert weight_bytes(ARCH, made) == 4 * (matrices + padding + 1000 * 64) + vectors


def test_plenty_of_memory_gives_every_request_its_full_length() -> None:
    made = plan(64 << 30)
    assert made.num_blocks == 64 * 128 + 1
    assert made.max_requests == 64.0
    assert made.num_tokens == 64 * 2048
    assert "max_num_seqs=64" in made.why["num_blocks"]


def test_a_quarter_of_what_is_left_is_the_usual_share() -> None:
    made = plan(64 << 20)
    left = made.free_bytes - made.weight_bytes - made.workspace_bytes - made.logits_bytes - made.table_bytes
    left -= made.graph_bytes
    assert made.num_blocks == left // 4 // PER_BLOCK
    assert made.max_model_len == 2048


def test_one_full_request_may_take_more_than_the_usual_share() -> None:
    fields: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    needed = 129 * PER_BLOCK
    base = plan(64 << 20, **fields)
    other = base.weight_bytes + base.workspace_bytes + base.logits_bytes + base.table_bytes
    made = plan(other + 2 * needed + 1000, **fields)
    assert made.num_blocks == 129 and made.why["num_blocks"] == "one request of max_model_len"


def test_an_automatic_length_shrinks_to_what_fits() -> None:
    made = plan(64 << 20, num_gpu_blocks_override=11)
    assert made.max_model_len == 10 * 16 and made.num_blocks == 11 and made.max_requests == 1.0
    assert made.why["max_model_len"] == "what num_gpu_blocks_override holds"
    assert "max_model_len=160, what num_gpu_blocks_override holds" in made.table()


@pytest.mark.parametrize(
    ("fields", "length", "said"),
    [
        (
            {"num_gpu_blocks_override": 11},
            160,
            "what num_gpu_blocks_override holds; raise num_gpu_blocks_override (--num-",
        ),
        ({"kv_cache_memory_bytes": 11 * PER_BLOCK}, 160, "raise kv_cache_memory_bytes (--kv-cache-memory-bytes)"),
        (
            {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
            64,
            "raise max_num_batched_tokens (--max-num",
        ),
        ({}, 2048, ""),
        ({"num_gpu_blocks_override": 11, "max_model_len": 100}, 100, ""),
        ({"num_gpu_blocks_override": 11, "max_model_len": -1}, 160, ""),
    ],
)
def test_a_length_that_nobody_asked_for_is_told(
    fields: dict[str, Any], length: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request was refused, or cut, at 160 tokens of a model with 2048 positions, and no word at the start."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    planned = with_planned_length(EngineConfig(**fields), ARCH, numbers(**fields), plan(64 << 20, **fields))
    assert planned.max_model_len == length
    assert {record.levelname for record in caplog.records} == ({"WARNING"} if said else set())
    if said:
        assert f"max_model_len is {length}, not the checkpoint's 2048: it is " in caplog.text and said in caplog.text
        assert "set max_model_len (--max-model-len)" in caplog.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_gpu_blocks_override": 100}, "set it to at least 129, or --max-model-len to at most 1584"),
        ({"kv_cache_memory_bytes": 50 * PER_BLOCK}, f"set it to at least {129 * PER_BLOCK}"),
        ({"kv_cache_memory_bytes": 1}, "the cache would have 0"),
        ({"max_num_batched_tokens": 64}, "one request needs 129 blocks"),
    ],
)
def test_an_explicit_length_that_does_not_fit_is_refused_with_numbers(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(2 << 20, max_model_len=2048, **fields)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_smaller_step_that_would_do_is_named_and_does() -> None:
    """States and windows take blocks for what a step adds: a hybrid's refusal named the length alone."""
    groups = make_groups(HYBRID, 16)
    size = block_bytes(groups, 2)

    def planned(num_blocks: int, **fields: Any) -> CachePlan:
        own = {"max_num_seqs": 4, "max_model_len": 1024, "dtype": "bfloat16", **fields}
        made = numbers(kv_cache_memory_bytes=num_blocks * size, **own)
        return plan_memory(ARCH, made, groups, 64 << 20, weight_bytes=0, **lying(groups, made))

    needed = {tokens: blocks_for_request(groups, 1024, tokens, drafts=False) + 1 for tokens in (4, 512)}
    assert needed[4] < needed[512]
    enough = needed[512] - 1
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens to at most (\d+)$") as caught:
        planned(enough, max_num_batched_tokens=512)
    most = int(re.findall(r"\d+", str(caught.value))[-1])
    assert planned(enough, max_num_batched_tokens=most).num_blocks == enough
    with pytest.raises(ConfigError, match="one request needs"):
        planned(enough, max_num_batched_tokens=most + 1)
    with pytest.raises(ConfigError, match="one request needs") as caught:
        planned(needed[4] - 1, max_num_batched_tokens=512)
    assert "batched" not in str(caught.value)


DRAFTS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("octavo-tiny-hybrid", {}),
        ("octavo-tiny-hybrid", {"max_model_len": 64}),
        ("octavo-tiny-hybrid", {"block_size": 64, "enable_prefix_caching": False, "speculative_config": DRAFTS}),
        (
            "octavo-tiny",
            {"max_model_len": 64, "speculative_config": {**DRAFTS, "method": "mtp", "model": "octavo-tiny-mtp"}},
        ),
    ],
)
def test_the_least_number_of_blocks_is_named_and_serves(model: str, fields: dict[str, Any]) -> None:
    """567 blocks were asked for, those of 2048 tokens, where 18 serve; and 22.8 GiB were said to be left of 22.8."""
    own = {"model": model, "dtype": "float32", **fields}
    with pytest.raises(ConfigError, match=r"^num_gpu_blocks_override=2: one request .*; set it to at least ") as few:
        LLM(**own, num_gpu_blocks_override=2)
    assert "left" not in str(few.value)
    least = int(re.findall(r"at least (\d+)", str(few.value))[0])
    with pytest.raises(ConfigError, match=rf"^num_gpu_blocks_override={least - 1}: .* needs {least} blocks"):
        LLM(**own, num_gpu_blocks_override=least - 1)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(**own, num_gpu_blocks_override=least) as llm:
        outputs = llm.generate([{"prompt_token_ids": [5]}] * 2, params, use_tqdm=False)
        assert {len(output.outputs[0].token_ids) for output in outputs} == {llm.engine.memory.max_model_len - 1}


def test_what_a_usual_length_needs_is_named_too() -> None:
    """And memory, where that is what lacks."""
    groups = make_groups(HYBRID, 16)
    least, usual = (blocks_for_request(groups, tokens, 512, drafts=False) + 1 for tokens in (2, 2048))
    made = numbers(num_gpu_blocks_override=2)
    assert 2 < least < usual and made.max_num_batched_tokens == 512
    given = {"weight_bytes": 0, **lying(groups, made)}
    with pytest.raises(ConfigError) as refused:
        plan_memory(ARCH, made, groups, 1 << 30, **given)
    assert str(refused.value).endswith(f"; set it to at least {least}, or to {usual} for requests of 2048 tokens")
    with pytest.raises(ConfigError, match=r"needs .*: 0 B are left of 1.0 MiB after workspace .*; set it to at least"):
        plan_memory(ARCH, made, groups, 1 << 20, **given)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="one request needs"):
        plan(1000)


def test_loaded_weights_are_not_counted_twice() -> None:
    made = numbers()
    groups = make_groups(plain_specs(ARCH), 16)
    weights = weight_bytes(ARCH, made)
    before = plan_memory(ARCH, made, groups, 64 << 20, weight_bytes=weights, **lying(groups, made))
    after = plan_memory(
        ARCH, made, groups, (64 << 20) - weights, weight_bytes=weights, weights_loaded=True, **lying(groups, made)
    )
    assert after.num_blocks == before.num_blocks


def test_a_gpu_is_used_up_to_its_utilization() -> None:
    small = plan(10 << 30, facts=GPU, total_bytes=10 << 30, gpu_memory_utilization=0.5)
    large = plan(10 << 30, facts=GPU, total_bytes=10 << 30, gpu_memory_utilization=0.9)
    assert large.kv_bytes - small.kv_bytes == pytest.approx(4 << 30, abs=2 * PER_BLOCK)


def test_the_table_shows_every_purpose() -> None:
    text = plan(64 << 30).table()
    for purpose in ("free memory", "weights", "workspace", "logits", "tables", "KV cache", "64.0 requests"):
        assert purpose in text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")])
def test_sizes_for_people(size: int, text: str) -> None:
    assert show_bytes(size) == text


def test_block_tables_of_kernel_blocks_are_counted() -> None:
    plain, split = (
        plan(1 << 30, block_size=128, attention_config=config) for config in ({}, {"kernel_block_size": 16})
    )
    kernel_blocks = (65 + 64) * (2048 // 16 - 2048 // 128)  # rows of the table and of a step's copy, columns
    assert split.table_bytes - plain.table_bytes == 4 * kernel_blocks


def test_a_refusal_says_what_took_the_memory() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(2 << 20, max_model_len=2048)
    assert "after weights" in str(refused.value) and "workspace" in str(refused.value)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    size = weight_bytes(ARCH, numbers())
    check_weights(size, ARCH, numbers(), size)
    with pytest.raises(ConfigError, match=r"its weights take .* in bfloat16"):
        check_weights(size, ARCH, numbers(), size - 1)


_FULL_STEP = """
import json, re
from pathlib import Path
from octavo import LLM, SamplingParams

def kilobytes(name):  # not getrusage's, which begin with the parent's
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

with LLM(dtype="float32", max_num_batched_tokens=8192, max_num_seqs=8, enable_prefix_caching=False) as llm:
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": [5] * 9}, params)
    before = kilobytes("VmRSS")
    llm.generate([{"prompt_token_ids": [5 + i] * 2040} for i in range(4)], params)
    grown = (kilobytes("VmHWM") - before) * 1024
    memory = llm.engine.memory
    print(json.dumps([grown - 4 * memory.blocks_per_request * memory.bytes_per_block, memory.workspace_bytes]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not native.available(), reason="counts pages as Linux does, of the compiled operators"
)
def test_the_largest_step_takes_what_was_planned_for_it() -> None:
    """In a process of its own, whose largest size is this step's."""
    run = subprocess.run([sys.executable, "-c", _FULL_STEP], capture_output=True, text=True, timeout=patient(300))
    assert run.returncode == 0, run.stderr
    taken, planned = json.loads(run.stdout)
    assert planned / 2 < taken < planned

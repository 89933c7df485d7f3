"""EngineConfig: fields, layers, and the cross-checks of resolve."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from architectures import ARCH, CPU
from octavo.checkpoint.arch import Arch
from octavo.config.device_facts import DeviceFacts
from octavo.config.engine_config import MAX_THREADS, EngineConfig, Resolved, load_config, resolve
from octavo.config.settings import ConfigError, parse_bytes, parse_length, python_names

GPU = dataclasses.replace(
    CPU, cuda="NVIDIA H200", cuda_capability=(9, 0), cuda_free_bytes=100 << 30, cuda_total_bytes=140 << 30
)


def resolved(arch: Arch = ARCH, facts: DeviceFacts = CPU, **fields: Any) -> Resolved:
    return resolve(EngineConfig(**fields), arch, facts)


def load(**kwargs: Any) -> tuple[EngineConfig, dict[str, str]]:
    return load_config(python_kwargs=kwargs, environ={})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("16k", 16000), ("16K", 16384), ("25.6k", 25600), ("1M", 1 << 20), ("auto", -1), ("-1", -1)],
)
def test_lengths(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("4G", 4 << 30), ("4GiB", 4 << 30), ("1.5M", 3 << 19), ("2k", 2048)]
)
def test_byte_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "k", "16kk", "0.3333k", "1e400k", "nan", "16 tokens"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        load(max_model_len=text)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("dtype", "float17", "did you mean float16?"),
        ("dtype", 16, "expected text"),
        ("block_size", 12, "8 or a multiple of 16"),
        ("block_size", 4, "from 8 to 1024"),
        ("block_size", 1040, "from 8 to 1024"),
        ("block_size", True, "expected a whole number"),
        ("block_size", 16.0, "expected a whole number"),
        ("max_num_seqs", 0, "from 1 to 65536"),
        ("max_num_seqs", "many", "expected a whole number"),
        ("max_num_seqs", "9" * 5000, "expected a whole number"),
        ("max_model_len", 1, "from 2 to"),
        ("max_model_len", -2, "from 2 to"),
        ("max_model_len", "long", "16K, or auto"),
        ("max_num_batched_tokens", "auto", "from 1 to 16777216"),
        ("max_num_batched_tokens", -1, "from 1 to 16777216"),
        ("max_num_batched_tokens", "many", "16k or 16K; change"),
        ("gpu_memory_utilization", 0.0, "greater than 0, at most 1"),
        ("gpu_memory_utilization", 1.01, "greater than 0, at most 1"),
        ("gpu_memory_utilization", float("nan"), "greater than 0, at most 1"),
        ("kv_cache_memory_bytes", "4Q", "512M"),
        ("num_gpu_blocks_override", 1, "from 2 to"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**63, "from 0 to"),
        ("enable_prefix_caching", "maybe", "true or false"),
        ("enable_prefix_caching", 1, "true or false"),
        ("attention_config", "{", "a mapping"),
        ("attention_config", "[" * 100_000, "a mapping"),
        ("attention_config", '["backend"]', "a mapping"),
        ("attention_config", {"bakend": "cpu"}, "did you mean backend?"),
        ("override_generation_config", {"temprature": 1}, "did you mean temperature?"),
        ("tensor_parallel_size", 2, "one device"),
        ("scheduling_policy", "lifo", "fcfs, priority"),
        ("model", "", "expected text"),
        ("model", "a\nb", "expected text"),
        ("num_threads", 0, "from 1 to 1024"),
    ],
)
def test_a_wrong_value_names_field_value_and_limit_in_one_line(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}=") and said in message and "\n" not in message and len(message) < 300


def test_none_from_python_is_the_default_and_from_elsewhere_no_value() -> None:
    names = ("speculative_config", "kv_transfer_config", "hf_overrides", "seed", "dtype", "enable_prefix_caching")
    config, origins = load_config(python_kwargs=dict.fromkeys((*names, "kv_offloading_size")), environ={})
    assert config == EngineConfig() and {origins[name] for name in names} == {"default"}
    with pytest.raises(ConfigError, match=r"enable_prefix_caching=None.*true or false"):
        load_config(yaml_path="a.yaml", yaml_values={"enable_prefix_caching": None}, environ={})
    with pytest.raises(ConfigError, match="did you mean seed"):
        load_config(python_kwargs={"sed": None}, environ={})


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        load(max_model_length=5)


def test_a_config_is_frozen_and_checks_itself() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 32  # type: ignore[misc]
    with pytest.raises(ConfigError, match="8 or a multiple of 16"):
        EngineConfig(block_size=24)
    with pytest.raises(ConfigError, match="load_config"):
        EngineConfig(max_model_len="16k")  # type: ignore[arg-type]


def test_layers_in_order_and_their_origins(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("max-model-len: 16k\nmax_num_seqs: 4\nblock_size: 32\nnum_threads: 1\nseed: 7\n")
    config, origins = load_config(
        {"max_num_seqs": "6"}, {"max_num_seqs": 5, "block_size": 64}, path, {"OCTAVO_NUM_THREADS": "3", "HOME": "/"}
    )
    assert (config.max_model_len, config.max_num_seqs, config.block_size) == (16000, 6, 64)
    assert (config.num_threads, config.seed, config.dtype) == (3, 7, "auto")
    assert origins["max_model_len"] == f"file {path}"
    assert origins["max_num_seqs"] == "command line"
    assert origins["block_size"] == "Python argument"
    assert origins["num_threads"] == "environment"
    assert origins["dtype"] == "default"
    assert set(origins) == {field.name for field in dataclasses.fields(EngineConfig)}


def test_an_error_names_the_layer(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("block_size: 13\n")
    with pytest.raises(ConfigError, match=r"block_size=13 \(from file .*settings.yaml\)"):
        load_config(yaml_path=path, environ={})


def test_an_unknown_environment_variable_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo"):
        load_config(environ={"OCTAVO_MODLE": "x", "OCTAVO_DEVICE": "cuda", "OCTOPUS": "y"})
    assert "OCTAVO_MODLE is ignored; did you mean OCTAVO_MODEL?" in caplog.text
    assert "OCTAVO_DEVICE is ignored; known are OCTAVO_MODEL, " in caplog.text
    assert "OCTOPUS" not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['true']",
        "model: !!str x",
        "attention_config: &a {backend: cpu}",
        "a: &a [x]\nb: &b [*a, *a]\nmodel: *b",
        "attention_config: {<<: {backend: cpu}}",
        "block_size: 16\nblock_size: 32",
        "block-size: 16\nblock_size: 32",
        "block_size:\t16\n\tseed: 1",
        "- block_size",
        "16: block_size",
        "model: x\n--- \nmodel: y",
        "model: \x00",
        "model: " + "[" * 20_000,
        "block_sice: 16",
        "[model]: x",
        "block_size: 2026-01-01",
    ],
)
def test_yaml_that_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(yaml_path=path, environ={})
    assert "\n" not in str(caught.value)


def test_yaml_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(yaml_path=tmp_path / "missing.yaml", environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(yaml_path=tmp_path, environ={})
    (tmp_path / "large.yaml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="larger than"):
        load_config(yaml_path=tmp_path / "large.yaml", environ={})
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match="not plain YAML"):
        load_config(yaml_path=tmp_path / "binary.yaml", environ={})


def test_an_empty_yaml_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("# nothing\n")
    assert load_config(yaml_path=path, environ={})[0] == EngineConfig()


def test_defaults_on_cpu() -> None:
    made = resolved()
    assert (made.device, made.dtype, made.native, made.attention_backend) == ("cpu", "bfloat16", "x86_64_v3", "cpu")
    assert (made.max_model_len, made.max_num_seqs, made.max_num_batched_tokens) == (2048, 64, 512)
    assert made.num_threads == 2 and made.max_model_len_is_auto
    assert {"dtype", "device", "attention_backend", "max_num_seqs", "max_model_len"} <= set(made.why)


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, 3),
        ({"enable_prefix_caching": False}, 0),
        ({"enable_prefix_caching": False, "kv_transfer_config": {"kv_connector": "host", "kv_role": "kv_both"}}, 3),
    ],
)
def test_no_states_are_kept_that_nobody_looks_for(fields: dict[str, Any], interval: int) -> None:
    made = resolved(**fields, snapshot_interval=3)
    assert made.snapshot_interval == interval and ("snapshot_interval" in made.why) == (interval == 0)


def test_bfloat16_follows_pairs_where_the_processor_multiplies_them() -> None:
    best = dataclasses.replace(CPU, native_isas=("x86_64_v4_bf16", "x86_64_v4", "x86_64_v3"))
    cases: list[tuple[DeviceFacts, dict[str, Any], str]] = [
        (best, {"dtype": "bfloat16"}, "pairs"),
        (best, {"dtype": "bfloat16", "bfloat16_chain": "single"}, "single"),
        (best, {"dtype": "bfloat16", "native": "x86_64_v4"}, "single"),
        (best, {"dtype": "bfloat16", "native": "x86_64_v4", "bfloat16_chain": "pairs"}, "pairs"),
        (best, {"dtype": "bfloat16", "native": "off"}, "single"),
        (best, {"dtype": "bfloat16", "quantization": "int8"}, "single"),
        (best, {"dtype": "float32"}, "single"),
        (best, {"dtype": "float32", "bfloat16_chain": "pairs"}, "single"),
        (CPU, {"dtype": "bfloat16"}, "single"),
        (CPU, {"dtype": "bfloat16", "bfloat16_chain": "pairs"}, "pairs"),
    ]
    for facts, settings, chain in cases:
        assert resolved(facts=facts, **settings).bfloat16_chain == chain, settings
    refused = ({"native": "off"}, {"quantization": "int8", "dtype": "bfloat16"})
    for settings in refused:
        with pytest.raises(ConfigError, match=r"bfloat16_chain.*'pairs'.*set auto or single"):
            resolved(facts=best, bfloat16_chain="pairs", **settings)


def test_threads_follow_the_user_then_omp_num_threads_then_the_cores() -> None:
    facts = dataclasses.replace(CPU, omp_num_threads=3)
    assert resolved(facts=facts).num_threads == 3 and resolved(facts=facts).why["num_threads"] == "OMP_NUM_THREADS"
    assert resolved(facts=facts, num_threads=4).num_threads == 4
    assert resolved(facts=dataclasses.replace(CPU, omp_num_threads=10**6)).num_threads == MAX_THREADS


def test_no_default_is_left_open() -> None:
    open_fields = {"quantization", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
    open_fields |= {"kernel_block_size", "kv_cache_layout"}  # the attention backend decides
    made = resolved()
    assert {name for name in Resolved.__dataclass_fields__ if getattr(made, name) is None} == open_fields


def test_defaults_on_a_gpu() -> None:
    made = resolved(facts=GPU)
    assert (made.device, made.native, made.attention_backend) == ("cuda", "none", "paged")
    assert (made.max_num_seqs, made.max_num_batched_tokens, made.block_size) == (256, 2048 * 4, 64)


def test_without_compiled_operators_the_reference_backend_serves() -> None:
    facts = dataclasses.replace(CPU, native_isas=())
    assert resolved(facts=facts).attention_backend == "reference"
    assert resolved(native="off").attention_backend == "reference"


def test_float16_widens_on_cpu_and_stays_on_a_gpu() -> None:
    half = dataclasses.replace(ARCH, dtype="float16")
    assert resolved(half).dtype == "float32"
    assert resolved(half, GPU).dtype == "float16"


def test_more_logprobs_than_the_vocabulary_has_are_all_of_them() -> None:
    assert [resolved(max_logprobs=most).max_logprobs for most in (-1, 1001, 1000, 5)] == [1000, 1000, 1000, 5]


def test_backends_may_have_another_engine_s_name() -> None:
    assert resolved(attention_backend="TORCH_SDPA").attention_backend == "reference"
    assert resolved(attention_config={"backend": "FLEX_ATTENTION"}).attention_backend == "flex"


def test_the_shorthand_and_the_mapping_say_the_same() -> None:
    assert resolved(attention_backend="reference").attention_backend == "reference"
    assert resolved(attention_config={"backend": "REFERENCE"}).attention_backend == "reference"
    assert resolved(attention_backend="my.module:Backend").attention_backend == "my.module:Backend"


def test_sizes_follow_each_other() -> None:
    assert resolved(max_num_seqs=1000).max_num_batched_tokens == 1000
    assert resolved(max_num_batched_tokens=16).max_num_seqs == 16
    assert resolved(enable_chunked_prefill=False).max_num_batched_tokens == 2048
    assert resolved(enable_chunked_prefill=False, max_num_batched_tokens=100).max_model_len == 100
    assert resolved(max_model_len=100).max_model_len_is_auto is False
    assert resolved(max_model_len=-1).max_model_len_is_auto is True


@pytest.mark.parametrize(
    ("facts", "fields", "said"),
    [
        (CPU, {"device": "cuda"}, "no CUDA device that"),
        (CPU, {"dtype": "float16"}, "float32 and bfloat16"),
        (CPU, {"max_model_len": 4096}, "2048 positions; set --max-model-len to at most 2048"),
        (CPU, {"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_seqs is 8"),
        (
            CPU,
            {"enable_chunked_prefill": False, "max_model_len": 512, "max_num_batched_tokens": 100},
            "max_model_len=512",
        ),
        (CPU, {"attention_backend": "cpu", "native": "off"}, "not in use"),
        (CPU, {"native": "x86_64_v4"}, "there are: x86_64_v3"),
        (CPU, {"attention_config": {"backend": 3}}, "must be a name"),
        (GPU, {"quantization": "int8"}, "CPU only"),
        (GPU, {"attention_backend": "cpu"}, "the device is cuda"),
    ],
)
def test_conflicts_are_refused_with_both_numbers(facts: DeviceFacts, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(facts=facts, **fields)
    assert said in str(caught.value)


def test_two_backends_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep one"):
        EngineConfig(attention_backend="cpu", attention_config={"backend": "reference"})


def test_a_gpu_without_float8_refuses_such_a_cache() -> None:
    ampere = dataclasses.replace(GPU, cuda="NVIDIA A100", cuda_capability=(8, 0))
    with pytest.raises(ConfigError, match=r"'fp8'.* NVIDIA A100 has compute capability 8\.0, .* need 8\.9; set auto"):
        resolved(facts=ampere, kv_cache_dtype="fp8")
    assert resolved(facts=ampere, kv_cache_dtype="int8").kv_cache_dtype == "int8"
    assert resolved(facts=ampere, kv_cache_dtype="fp8", device="cpu").kv_cache_dtype == "fp8"
    assert resolved(facts=dataclasses.replace(GPU, cuda_capability=(8, 9)), kv_cache_dtype="fp8").device == "cuda"


def test_python_is_told_of_arguments_and_of_commands_as_they_are_typed() -> None:
    said = "lower --max-num-seqs, set --no-async-scheduling, or run `octavo doctor --explain`"
    assert python_names(said) == "lower max_num_seqs, set async_scheduling=False, or run `octavo doctor --explain`"
    said = "run `python setup.py build_ext --inplace` or `pip install --no-deps x`, or drop --enforce-eager"
    assert python_names(said) == said.replace("--enforce-eager", "enforce_eager")


@pytest.mark.parametrize(("given", "meant"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_a_short_name_of_a_type_is_hinted_at(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}?"):
        EngineConfig(dtype=given)

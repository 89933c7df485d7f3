"""Options of other engines' start lines: every row of the table, from a command line, a YAML file and Python."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import flags
from octavo.config.engine_config import SETTINGS, EngineConfig, load_config
from octavo.config.option import Option
from octavo.config.settings import ConfigError
from octavo.config.vllm_options import OPTIONS, translate
from octavo.serve.settings import SERVE_SETTINGS, ServeConfig, load_both

KNOWN = {*SETTINGS, *SERVE_SETTINGS}
# the rows that become settings: a value, and what it means
MEANINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "model_path": ("x/y", {"model": "x/y"}),
    "context_length": ("16k", {"max_model_len": 16000}),
    "mem_fraction_static": ("0.5", {"gpu_memory_utilization": 0.5}),
    "enable_memory_saver": ("true", {"enable_sleep_mode": True}),
    "max_running_requests": ("7", {"max_num_seqs": 7}),
    "chunked_prefill_size": ("64", {"max_num_batched_tokens": 64}),
    "kv_offloading_size": (
        "0.5",
        {
            "kv_transfer_config": {
                "kv_connector": "host",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 29},
            }
        },
    ),
    "mamba_cache_dtype": ("bfloat16", {"state_dtype": "bfloat16"}),
    "mamba_ssm_cache_dtype": ("bfloat16", {"state_dtype": "bfloat16"}),
    "mamba_config": ('{"backend": "triton", "enable_stochastic_rounding": false}', {"state_dtype": "float32"}),
    "rope_theta": ("500000", {"hf_overrides": {"rope_theta": 500000.0}}),
    "rope_scaling": (
        '{"rope_type": "linear", "factor": 2}',
        {"hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2}}},
    ),
    "structured_outputs_config": (
        '{"enable_in_reasoning": true, "reasoning_parser": "qwen3", "backend": "xgrammar"}',
        {"enable_in_reasoning": True, "reasoning_parser": "qwen3"},
    ),
    "allowed_origins": (
        '["https://a.example", "https://b.example"]',
        {"cors_origins": "https://a.example,https://b.example"},
    ),
    "disable_uvicorn_access_log": ("", {"access_log": False}),
    "reasoning_config": (
        '{"reasoning_start_str": "<think>", "reasoning_end_str": "Enough.</think>"}',
        {"reasoning_end_text": "Enough.</think>"},
    ),
    "shutdown_timeout": ("5", {"drain_seconds": 5.0}),
}


def _parse(argv: Sequence[str]) -> tuple[EngineConfig, ServeConfig]:
    parser = flags.Parser(prog="octavo serve")
    parser.add_argument("models", nargs="*")
    flags.add_config_flags(parser)
    flags.add_server_flags(parser, SERVE_SETTINGS)
    namespace, dotted = parser.parse(argv)
    return load_both(flags.given_config(namespace, dotted), flags.given_server(namespace), environ={})


def _argv(name: str, option: Option, value: str) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if option.kind == "switch" else [flag, value]


def _rows(**wanted: bool) -> list[str]:
    """Names of the rows that are `idle`, or `refused`, or that `mean` a setting."""
    kind = next(iter(wanted))
    kinds = {
        "mean": lambda option: option.becomes is not None,
        "take": lambda option: option.becomes is None and (option.harmless is None or option.harmless),
        "refuse": lambda option: option.becomes is None and option.harmless is not None,
    }
    return sorted(name for name, option in OPTIONS.items() if kinds[kind](option))


# Each says a part of one setting.
OF_DRAFTS = {"spec_method", "spec_model", "spec_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min"}


def test_every_row_has_a_place_and_a_reason() -> None:
    assert set(MEANINGS) | OF_DRAFTS == set(_rows(mean=True))
    for name, option in OPTIONS.items():
        assert name not in KNOWN, f"{name} is a setting: its row is dead"
        assert (option.becomes is None) == bool(option.reason), name
        assert not option.reason.endswith("."), name


@pytest.mark.parametrize("name", sorted(MEANINGS))
def test_what_means_a_setting_is_that_setting(name: str) -> None:
    value, wanted = MEANINGS[name]
    engine, serve = _parse(_argv(name, OPTIONS[name], value))
    for setting, meant in wanted.items():
        assert getattr(engine if setting in SETTINGS else serve, setting) == meant


def test_options_of_drafts_are_parts_of_one_setting() -> None:
    line = "--spec-method ngram --spec-tokens 3 --ngram-prompt-lookup-min 2 --ngram-prompt-lookup-max 4"
    engine, _ = _parse(line.split())
    parts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert engine.speculative_config == parts
    engine, _ = _parse(["--spec-method", "eagle3", "--spec-model", "a/b", "--spec-tokens", "2"])
    assert engine.speculative_config["model"] == "a/b"
    engine, _ = _parse(["--spec-model", "a/b", "--spec-tokens", "2"])
    assert engine.speculative_config == {"model": "a/b", "num_speculative_tokens": 2}, "its files say the method"


def test_a_part_of_another_engines_mapping_has_a_short_flag(caplog: pytest.LogCaptureFixture) -> None:
    for flag in ("-cc", "-O", "--compilation-config"):
        assert _parse([f"{flag}.mode", "3"]) == (EngineConfig(), ServeConfig())
    assert all(line.startswith("compilation_config=") for line in caplog.messages) and len(caplog.messages) == 3


@pytest.mark.parametrize("name", _rows(take=True))
def test_what_changes_nothing_is_taken_with_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    option = OPTIONS[name]
    value = "anything" if option.harmless is None else next(iter(option.harmless))
    value = next(iter(option.known), value if option.least is None else str(option.least))
    assert _parse(_argv(name, option, value)) == (EngineConfig(), ServeConfig())
    (line,) = caplog.messages
    assert line.startswith(f"{name}=") and line.endswith(f"changes nothing: {option.reason}")
    for short in option.short:
        assert _parse([short] if option.kind == "switch" else [short, value]) == (EngineConfig(), ServeConfig())


@pytest.mark.parametrize("name", ["mamba_backend", "mamba_ssu_algorithm", "gdn_prefill_backend", "kda_prefill_backend"])
def test_a_choice_of_kernels_is_answered_by_what_chooses_them(name: str) -> None:
    assert OPTIONS[name].reason.startswith("kernels of layers that keep states follow from")


@pytest.mark.parametrize("name", _rows(refuse=True))
def test_what_cannot_be_had_is_refused_with_the_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    option = OPTIONS[name]
    with pytest.raises(ConfigError) as refusal:
        _parse(_argv(name, option, "strange"))
    assert str(refusal.value).startswith(f"{name}=") and option.reason in str(refusal.value)
    assert "from command line" in str(refusal.value)
    nothing: list[Any] = [None, False, {}, []]
    if option.kind == "switch":
        assert _parse(["--no-" + name.replace("_", "-")]) == (EngineConfig(), ServeConfig())
    for value in nothing:
        assert translate({name: value}, KNOWN, origin="", server=True) == {}
    assert not caplog.messages or option.harmless


def test_python_arguments_and_yaml_are_read_by_the_same_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def load(**fields: Any) -> EngineConfig:
        return load_config(python_kwargs=fields, environ={})[0]

    taken = load(
        tensor_parallel_size=1,
        swap_space=4,
        enable_lora=False,
        disable_log_stats=True,
        compilation_config={"level": 3},
        distributed_executor_backend=None,
        trust_remote_code=True,
        max_model_len=64,
    )
    assert taken == EngineConfig(max_model_len=64)
    assert [line.partition("=")[0] for line in caplog.messages] == [
        "tensor_parallel_size",
        "swap_space",
        "disable_log_stats",
        "compilation_config",
        "trust_remote_code",
    ]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 \(from Python argument\): an engine"):
        load(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="uvicorn_log_level"):  # a server's
        load(uvicorn_log_level="info")
    path = tmp_path / "vllm.yaml"
    path.write_text("tensor-parallel-size: 1\nserved-model-name: [a, b]\nuvicorn-log-level: info\nmax-model-len: 32\n")
    engine, serve = load_both({}, {}, path, {})
    assert (engine.max_model_len, serve.served_model_name) == (32, "a,b")
    path.write_text("enable-lora: true\n")
    with pytest.raises(ConfigError, match=r"enable_lora=True \(from file .*vllm.yaml\)"):
        load_both({}, {}, path, {})


def test_lines_as_people_write_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    line = (
        "some/model -tp 1 -pp=1 -O3 --dtype half --served-model-name a b --gpu_memory_utilization=0.8 --seed 1 --seed 2"
        " --enable-prefix-caching --no-enable-prefix-caching --enable-chunked-prefill=False --enforce-eager true"
        " --max-model-len None --compilation-config.level 3 --tool_call_parser hermes --max-logprobs 10000000"
    )
    with pytest.raises(ConfigError, match="max_logprobs"):  # beyond any vocabulary
        _parse(line.split())
    engine, serve = _parse(line.replace("10000000", "1000000").split())
    assert (engine.dtype, engine.seed, engine.gpu_memory_utilization) == ("float16", 2, 0.8)
    assert (engine.enable_prefix_caching, engine.enable_chunked_prefill, engine.enforce_eager) == (False, False, True)
    assert (serve.served_model_name, serve.tool_call_parser) == ("a,b", "hermes")


def test_several_options_may_say_parts_of_one_mapping() -> None:
    parts = [
        "--rope-theta",
        "5e5",
        "--hf-overrides",
        '{"max_position_embeddings": 64}',
        "--rope-scaling",
        '{"factor": 2}',
    ]
    merged = {"rope_theta": 5e5, "max_position_embeddings": 64, "rope_scaling": {"factor": 2}}
    assert _parse(parts)[0].hf_overrides == merged
    assert _parse([*parts[2:4], *parts[4:], *parts[:2]])[0].hf_overrides == merged
    with pytest.raises(ConfigError, match="rope_theta='x': expected a number"):
        _parse(["--rope-theta", "x"])


@pytest.mark.parametrize(
    ("line", "state_dtype"),
    [
        ("--mamba-cache-dtype bfloat16", "bfloat16"),
        ("--mamba-cache-dtype bfloat16 --mamba-ssm-cache-dtype auto", "bfloat16"),
        ("--mamba-ssm-cache-dtype float32 --mamba-cache-dtype bfloat16", "float32"),
        ("--mamba-cache-dtype bfloat16 --state-dtype float32", "float32"),
        ("--state-dtype bfloat16 --mamba-cache-dtype auto", "bfloat16"),
    ],
)
def test_the_type_of_the_mamba_cache_is_the_default_of_states(line: str, state_dtype: str) -> None:
    """As vLLM documents the two: `auto` of the second is what the first says."""
    assert _parse(line.split())[0].state_dtype == state_dtype


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mamba-cache-dtype float16", r"mamba_cache_dtype='float16'.*--state-dtype.*change --mamba-cache-dtype"),
        ("--mamba-ssm-cache-dtype float16", r"mamba_ssm_cache_dtype='float16'.*change --mamba-ssm-cache-dtype"),
        ("--mamba-cache-dtype bogus", "mamba_cache_dtype='bogus' .* must be one of: auto, float32, bfloat16, float16"),
        ("--mamba-cache-mode bogus", "mamba_cache_mode='bogus' .* must be one of: align, all, none"),
        ("--mamba-block-size 0", "mamba_block_size='0' .* a whole number of at least 1"),
        ("--mamba-block-size x", "mamba_block_size='x' "),
        ("--mamba-cache-philox-rounds -1", "mamba_cache_philox_rounds="),
        ("--enable-mamba-cache-stochastic-rounding", "enable_mamba_cache_stochastic_rounding=.*to the nearest value"),
        ('--mamba-config {"enable_stochastic_rounding":true}', r"mamba_config.enable_stochastic_rounding=True: states"),
        ('--mamba-config {"backend":"cuda"}', r"mamba_config.backend='cuda': must be one of: triton, flashinfer"),
        ('--mamba-config {"x":1}', "mamba_config=.*unknown key 'x'"),
    ],
)
def test_what_no_state_can_be_is_refused_by_the_users_flag(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _parse(line.split())


def test_compact_json_is_told_by_its_own_reason(caplog: pytest.LogCaptureFixture) -> None:
    _parse(["--structured-outputs-config", '{"disable_any_whitespace": true}'])
    assert "forced JSON is compact" in caplog.text


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    parser = flags.Parser(prog="octavo serve")
    flags.add_config_flags(parser)
    flags.add_server_flags(parser, SERVE_SETTINGS)
    text = " ".join(parser.format_help().split())
    for wanted in (
        "most prompts of one request (from 1 to 65536; default: 1024)",
        "default: 8000",
        "default: 127.0.0.1",
    ):
        assert wanted in text


def test_no_hint_misleads() -> None:
    for near, hint in (("--tensor-paralel-size", "did you mean --tensor-parallel-size?"), ("--key-of-tls", "--help")):
        with pytest.raises(flags.UsageError, match=hint):
            _parse([near, "1"])

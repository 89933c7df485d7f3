"""`octavo doctor` and the facts that it is made of."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import ARCH, CPU
from octavo import LLM
from octavo.cache.plan import show_bytes
from octavo.cli import main as cli
from octavo.config.device_facts import DeviceFacts
from octavo.config.engine_config import EngineConfig, resolve
from octavo.startup import probe

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}
FACTS = DeviceFacts(num_cores=2, free_bytes=4 << 30, total_bytes=8 << 30, native_isas=("x86_64_v3",))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with a config and no weights, on a machine with known facts."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(probe, "device_facts", lambda device: FACTS)
    return tmp_path


def test_doctor_tells_everything_before_weights_exist(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--explain", "-m", str(folder), "--block-size", "32"]) == 0
    text = capsys.readouterr().out
    for said in (
        "torch",
        "platform",
        "x86_64_v3",
        "Qwen3ForCausalLM",
        "Memory plan",
        "Numerics contract",
        "64.0 requests",
    ):
        assert said in text, said
    assert "block_size                   32                       command line" in text
    assert "seed                         0                        default" in text
    assert "Layers\n  all steps                    layers 0-1 and the last norm: ops.decoder, one native call" in text
    options = ["--attention-backend", "reference"]
    assert cli.main(["doctor", "--explain", "-m", str(folder), *options]) == 0
    line = "  other steps                  layers 0-1: add norm linear rope_store -> pre_attention; attend -> itself; "
    assert line + "linear add norm mlp -> post_attention" in capsys.readouterr().out
    assert cli.main(["doctor", "-m", str(folder)]) == 0
    assert "Layers\n" not in capsys.readouterr().out


def test_doctor_says_one_length(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings said 512 and the plan 16."""
    assert cli.main(["doctor", "--explain", "-m", str(folder), "--num-gpu-blocks-override", "2"]) == 0
    said = capsys.readouterr()
    assert "max_model_len                16               what num_gpu_blocks_override holds" in said.out
    assert "max_model_len=16, what num_gpu_blocks_override holds." in said.out
    assert "512 positions" not in said.out and said.err.count("max_model_len is 16, not the checkpoint's 512") == 1


def test_doctor_on_a_setting_that_cannot_run_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "-m", str(folder), "--max-model-len", "1024"]) == 2
    assert "512 positions" in capsys.readouterr().err


def test_doctor_without_a_model_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "-m", str(folder / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "eagle3": {"model": "octavo-tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "octavo-tiny-mtp"},
    "draft_model": {"method": "draft_model", "model": "octavo-tiny"},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_doctor_plans_what_an_engine_with_a_drafter_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**DRAFTS[name], "num_speculative_tokens": 4}
    options = ["--device", "cpu", "--kv-cache-memory-bytes", "20M", "-sc", json.dumps(given)]
    assert cli.main(["doctor", "-m", "octavo-tiny", *options]) == 0
    said = capsys.readouterr().out
    with LLM(device="cpu", kv_cache_memory_bytes="20M", speculative_config=given) as llm:
        plan = llm.engine.memory
    assert f"{plan.num_blocks} blocks of {plan.bytes_per_block} bytes" in said
    assert f"{show_bytes(plan.weight_bytes)}  to be loaded" in said, "the drafter's as well"
    assert f"{show_bytes(plan.logits_bytes)}  of the largest step, while sampling" in said


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["-sc", '{"model": "no/such-drafter", "num_speculative_tokens": 2}'], "no/such-drafter"),
        (["-m", "octavo-tiny-hybrid", "-sc", '{"model": "octavo-tiny-mtp", "num_speculative_tokens": 2}'], "has 8:"),
        (["--kv-cache-dtype", "int8", "-sc", '{"model": "octavo-tiny-eagle3", "num_speculative_tokens": 2}'], "scales"),
        (["-sc", '{"method": "no.such:Thing", "num_speculative_tokens": 2}'], "does not load"),
    ],
)
def test_doctor_refuses_the_drafters_that_an_engine_refuses(
    options: list[str], wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["doctor", "--device", "cpu", *options]) == 2
    said = capsys.readouterr().err
    assert wanted in said and said.count("\n") == 1


def test_doctor_says_what_drafts_take_of_states(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-m", "octavo-tiny-hybrid", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "20M"]
    said = {}
    for size in ("16", "64"):
        drafts = '{"method": "ngram", "num_speculative_tokens": 4}'
        assert cli.main(["doctor", *options, "--block-size", size, "-sc", drafts]) == 0
        said[size] = [line.strip() for line in capsys.readouterr().out.splitlines() if "Drafts: " in line]
    begin = "Drafts: a row that decodes has up to"
    assert said["16"] == [
        f"{begin} 2 of these states and the inputs of 5 blocks at once, 3.4 MiB; without drafts 1 and 4, 2.4 MiB."
    ]
    assert said["64"][0].startswith(f"{begin} 2 of these states and the inputs of 2 blocks at once, ")
    assert cli.main(["doctor", *options]) == 0
    assert "Drafts: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{}", "no drafts"),
        ('{"method": "ngram", "num_speculative_tokens": 4}', '{"method": "ngram", "num_speculative_tokens": 4}'),
        (
            '{"model": "octavo-tiny-mtp", "num_speculative_tokens": 1, "adaptive_depth": false}',
            '{"method": "mtp", "num_speculative_tokens": 1, "model": "octavo-tiny-mtp", "adaptive_depth": false}',
        ),
    ],
)
def test_doctor_says_drafts_as_a_user_writes_them(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu", "-sc", given]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  speculative ")]
    assert line.split(maxsplit=1)[1] == said


def test_doctor_says_where_a_drafter_of_a_users_own_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    given = json.dumps({"method": f"{__name__}:OwnSpeculator", "num_speculative_tokens": 2})
    assert cli.main(["doctor", "--device", "cpu", "-sc", given]) == 0
    assert f"the memory plan lacks what {__name__}:OwnSpeculator loads: it has no `build`" in capsys.readouterr().err


def test_doctor_names_a_drafter_of_a_users_own_that_cannot_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    given = json.dumps({"method": f"{__name__}:Unbuilt", "num_speculative_tokens": 2})
    assert cli.main(["doctor", "--device", "cpu", "-sc", given]) == 2
    assert f"speculative_config='{__name__}:Unbuilt': cannot be built: KeyError" in capsys.readouterr().err


class OwnSpeculator:
    """Loads what only it knows."""

    layer_specs = ()
    num_drafts, num_lookahead, num_next_tokens = 2, 0, 0
    load = identity = allocate = propose = None

    def __init__(self, config: object) -> None:
        """Of settings."""


class Unbuilt(OwnSpeculator):
    """Fails."""

    def build(self, target: object, resolved: object) -> int:
        raise KeyError("x")


def test_facts_of_this_machine_are_sane() -> None:
    free, total = probe.memory_bytes()
    assert 0 < free <= total
    assert probe.num_cores() >= 1 and probe.cpu_name()
    assert probe.versions()["numpy"][0].isdigit()


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("", 8)])
def test_a_cpu_quota_counts(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(probe, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert probe.num_cores() == cores


@pytest.mark.parametrize(("text", "threads"), [("3", 3), (" 2,4", 2), ("", 0), ("many", 0), ("0", 0), ("-1", 0)])
def test_omp_num_threads_is_read(text: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert probe.device_facts("cpu").omp_num_threads == threads


def test_a_memory_limit_counts_without_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "700"),
        ("memory.stat", "anon 1\ninactive_file 300\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(probe, "_CGROUP", tmp_path)
    assert probe.memory_bytes() == (600, 1000)


@pytest.mark.parametrize(("room", "free"), [(1 << 30, 1 << 30), (-1, 0)])
def test_a_limit_of_the_address_space_counts(
    room: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ulimit -v` sets one; else an engine plans a cache that it cannot have."""
    (tmp_path / "statm").write_text("5000 100 100 1 0 100 0\n")
    taken = 5000 * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(probe, "_STATM", tmp_path / "statm", raising=False)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (taken + room, -1))
    assert probe.memory_bytes() == (free, taken + room)


def test_the_numerics_id_names_what_bits_depend_on() -> None:
    resolved = resolve(EngineConfig(dtype="float32"), ARCH, CPU)

    def named(native: str = "x86_64_v3", gpu: str = "", **changes: Any) -> str:
        changed = dataclasses.replace(resolved, **changes)
        return probe.numerics_id(probe.numerics_contract(changed, native=native, gpu=gpu))

    base = named()
    assert base == named(native="x86_64_v4") and base != named(native="none")
    changes: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}]
    changes += [{"attention_backend": "reference"}, {"layer_backends": {"reference": [1]}}, {"bfloat16_chain": "pairs"}]
    for change in changes:
        assert base != named(**change), change
    assert len({base, *(named(device="cuda", gpu=name) for name in "AB")}) == 3


@pytest.mark.parametrize(
    ("native", "changes", "follows"),
    [
        ("x86_64_v3", {}, False),
        ("none", {}, True),
        ("x86_64_v3", {"attention_backend": "flex"}, True),
        ("x86_64_v3", {"layer_backends": {"reference": [1]}}, True),
        ("x86_64_v3", {"attention_backend": "package.module:Class"}, True),
        ("x86_64_v3", {"layer_backends": {"package.module:Class": [0], "cpu": [1]}}, True),
        ("x86_64_v3", {"layer_backends": {"cpu": [1]}}, False),
        ("x86_64_v3", {"layer_backends": {"reference": []}}, False),
    ],
)
def test_where_torch_computes_the_numerics_id_follows_its_bits(
    native: str, changes: dict[str, Any], follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exponentials have other bits on another maker's processor, so two such engines are not of one id."""
    resolved = dataclasses.replace(resolve(EngineConfig(dtype="float32"), ARCH, CPU), **changes)
    seen = set()
    for digest in ("00000001", "00000002"):
        monkeypatch.setattr(probe, "torch_digest", lambda digest=digest: digest)
        seen.add(probe.numerics_id(probe.numerics_contract(resolved, native=native)))
    assert len(seen) == 1 + follows


def test_torchs_bits_are_asked_by_what_other_processors_compute_otherwise() -> None:
    """Its library is told to act as a processor that has less."""
    ask = "from octavo.startup.probe import torch_digest; print(torch_digest())"
    seen = [
        subprocess.run([sys.executable, "-c", ask], env={**os.environ, **own}, capture_output=True, text=True).stdout
        for own in ({}, {}, {"MKL_CBWR": "COMPATIBLE"})
    ]
    assert len(seen[0].strip()) == 8 and seen[0] == seen[1]
    if torch.backends.mkl.is_available():
        assert seen[2] != seen[0]


def test_the_page_of_states_shows_what_doctor_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs/states.md").read_text(encoding="utf-8")
    command, *shown = page.partition("```\noctavo ")[2].partition("\n```")[0].splitlines()
    assert cli.main([*command.split(), "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert shown and set(shown) <= set(said)


def test_the_page_of_states_has_the_sizes_that_doctor_tells(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the bundled hybrid, in the type of the page's figures and in the other one."""
    page = (Path(__file__).parents[1] / "docs/states.md").read_text(encoding="utf-8")
    told = page.partition("a state of all layers takes ")[2].partition(" 16 prompts")[0]
    for dtype, used in (
        ("float32", told.partition(" (in bfloat16")[0]),
        ("bfloat16", told.partition("(in bfloat16")[2]),
    ):
        assert cli.main(["doctor", "--model", "octavo-tiny-hybrid", "--dtype", dtype, "--max-model-len", "512"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "States: one of" in line)
        sizes = re.findall(r"[\d.]+ [KM]iB", used)
        assert len(sizes) >= 2
        assert set(sizes) <= set(re.findall(r"[\d.]+ [KM]iB", line))

"""Bad model folders and bad settings, through LLM and the command line: the start stops with one line (exit code 2)
that says what is wrong, and leaves nothing behind. A bad chat template alone does not stop it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_checks import assert_idle, good_tokens
from octavo import LLM

Octavo = Callable[..., tuple[int, str, str]]
Spoil = Callable[[Path], object]
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


def change(file: str, **fields: Any) -> Spoil:
    """Set fields of a JSON file."""

    def spoil(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(values | fields))

    return spoil


def write(file: str, content: bytes) -> Spoil:
    return lambda folder: (folder / file).write_bytes(content)


def weights(change_tensors: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change_tensors(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def truncate(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 1_000_000)


def header_of_2_to_the_63_bytes(folder: Path) -> None:
    with open(folder / WEIGHTS, "r+b") as file:
        file.write((2**63).to_bytes(8, "little"))


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


def index(shard: str) -> Spoil:
    def spoil(folder: Path) -> None:
        names = load_file(folder / WEIGHTS)
        text = json.dumps({"weight_map": dict.fromkeys(names, shard)})
        (folder / "model.safetensors.index.json").write_text(text)

    return spoil


def make_fifo(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


BAD_FOLDERS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "pytorch weights only": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), ("safetensors", "pytorch_model.bin")),
    "weights cut short": (truncate, (WEIGHTS,)),
    "weights header too long": (header_of_2_to_the_63_bytes, (WEIGHTS, "header")),
    "weights are no safetensors": (write(WEIGHTS, b"\x80\x04."), (WEIGHTS,)),
    "shard outside": (index("../../etc/x"), ("../../etc/x",)),
    "shard missing": (index("model-00001-of-00002.safetensors"), ("model-00001-of-00002.safetensors",)),
    "weights link outside": (link_out, (WEIGHTS,)),
    "tensor missing": (weights(lambda t: t.pop(NORM)), (f"{NORM}: expected [256], found nothing",)),
    "tensor too many": (
        weights(lambda t: t.update({"model.evil": torch.ones(2)})), ("model.evil: expected nothing, found F32 [2]",)),
    "tensor of wrong shape": (
        weights(lambda t: t.update({NORM: torch.ones(7)})), (f"{NORM}: expected [256], found [7]",)),
    "tensor of wrong dtype": (
        weights(lambda t: t.update({NORM: torch.ones(256, dtype=torch.int8)})), (NORM, "BF16", "found I8")),
    "NaN weight": (weights(lambda t: t[NORM][3:4].fill_(torch.nan)), (NORM, "NaN")),
    "vocab_size 0": (change("config.json", vocab_size=0), ("config.json", "vocab_size=0")),
    "vocab_size 10**12": (change("config.json", vocab_size=10**12), ("config.json", "vocab_size=1000000000000")),
    "vocab_size below the tokenizer's": (
        change("config.json", vocab_size=4000), ("tokenizer.json", "token id 4095", "vocab_size 4000")),
    "vocab_size above the weights'": (
        change("config.json", vocab_size=4100), ("embed_tokens.weight: expected [4100, 256], found [4096, 256]",)),
    "heads do not divide": (
        change("config.json", num_attention_heads=3), ("config.json", "num_attention_heads=3")),
    "10**6 layers": (change("config.json", num_hidden_layers=10**6), ("config.json", "num_hidden_layers=1000000")),
    "one layer too many": (change("config.json", num_hidden_layers=8), ("model.layers.7.", "found nothing", "more")),
    "unknown architecture": (
        change("config.json", architectures=["EvilForCausalLM"]), ('architectures=["EvilForCausalLM"]', "known are ")),
    "unknown quantization": (
        change("config.json", quantization_config={"quant_method": "fp8"}), ('quantization_config="fp8"',)),
    "unknown rope": (
        change("config.json", rope_scaling={"rope_type": "warp", "factor": 2}), ('rope_type="warp"', "known are ")),
    "config.json is no JSON": (write("config.json", b"{"), ("config.json", "not valid JSON")),
    "config.json missing": (lambda folder: (folder / "config.json").unlink(), ("config.json", "no such file")),
    "config.json is a FIFO": (make_fifo, ("config.json", "regular file")),
    "tokenizer.json missing": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json", "not found")),
    "tokenizer.json broken": (write("tokenizer.json", b'{"model": 5}'), ("tokenizer.json", "not a usable tokenizer")),
    "tokenizer.json is no text": (write("tokenizer.json", b"\xff\xfe"), ("tokenizer.json", "not UTF-8")),
    "tokenizer_config.json broken": (write("tokenizer_config.json", b"["), ("tokenizer_config.json", "not JSON")),
    "temperature NaN": (
        change("generation_config.json", temperature=float("nan")), ("generation_config.json", "temperature", "nan")),
    "temperature 3": (
        change("generation_config.json", temperature=-3), ("generation_config.json", "temperature", "[0, 1e+30]")),
    "no end of text": (
        change("generation_config.json", eos_token_id=[]), ("generation_config.json", "eos_token_id=[]")),
    "end of text outside the vocabulary": (
        change("generation_config.json", eos_token_id=4096), ("generation_config.json", "eos_token_id=4096")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_stops_the_start_with_one_line(model_folder: Path, octavo: Octavo, name: str) -> None:
    spoil, said = BAD_FOLDERS[name]
    spoil(model_folder)
    with pytest.raises(ValueError) as caught:
        LLM(str(model_folder), dtype="float32")
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in said), message
    code, out, err = octavo("generate", "--model", model_folder, "a")
    assert (code, out) == (2, "") and err == f"octavo: error: {' '.join(message.split())}\n"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("../../x", "../../x"),
        ("m" * 10_000, "mmm"),
        ("", "model"),
        ("a\nb", "model"),
        (5, "model=5"),
        (os.devnull, os.devnull),
    ],
    ids=["path", "10 kB", "empty", "two lines", "number", "device"],
)
def test_an_unknown_model_is_one_line(model: Any, said: str, octavo: Octavo) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        LLM(model)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    if model and isinstance(model, str):
        code, out, err = octavo("generate", "--model", model, "a")
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_an_empty_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "{% for x in %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{% include '/etc/passwd' %}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ '%3000000000d' % 1 }}",
    ],
    ids=["syntax", "sandbox", "loop", "huge", "include", "deep", "percent"],
)
def test_a_hostile_chat_template_fails_only_the_chat(model_folder: Path, template: str) -> None:
    (model_folder / "chat_template.jinja").write_text(template)
    with LLM(str(model_folder), dtype="float32") as llm:
        good = good_tokens(llm)
        with pytest.raises(ValueError, match=r"^template_failed: ") as caught:
            llm.chat([{"role": "user", "content": "secret"}])
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
        assert_idle(llm)
        assert good_tokens(llm) == good


def test_code_beside_the_weights_is_not_run(model_folder: Path, octavo: Octavo) -> None:
    change("config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})(model_folder)
    (model_folder / "modeling_evil.py").write_text("raise SystemExit(77)")
    code, out, err = octavo("generate", "--model", model_folder, "--max-tokens", 4, "--seed", 1, "a")
    assert code == 0 and out and "auto_map is ignored" in err


# Settings as Python arguments, what the refusal says of them, and the flags that mean the same.
BAD_SETTINGS: list[tuple[dict[str, Any], tuple[str, ...], list[str]]] = [
    ({"max_model_len": 4096}, ("max_model_len=4096", "2048 positions"), ["--max-model-len", "4096"]),
    ({"max_model_len": 1}, ("max_model_len=1", "from 2 to"), ["--max-model-len", "1"]),
    ({"block_size": 24}, ("block_size=24", "8 or a multiple of 16, up to 1024"), ["--block-size", "24"]),
    ({"max_num_seqs": 0}, ("max_num_seqs=0", "from 1 to 65536"), ["--max-num-seqs", "0"]),
    ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, ("max_num_batched_tokens=4", "max_num_seqs is 8"),
     ["--max-num-batched-tokens", "4", "--max-num-seqs", "8"]),
    ({"kv_cache_memory_bytes": 4096, "max_model_len": 1024},
     ("kv_cache_memory_bytes=4096", "65 blocks", "at least 3727360"),
     ["--kv-cache-memory-bytes", "4096", "--max-model-len", "1024"]),
    ({"kv_cache_memory_bytes": 200 << 40}, ("kv_cache_memory_bytes", "the cache and the tables do not fit memory"),
     ["--kv-cache-memory-bytes", "200T"]),
    ({"num_gpu_blocks_override": 3, "max_model_len": 1024}, ("num_gpu_blocks_override=3", "65 blocks", "at least 65"),
     ["--num-gpu-blocks-override", "3", "--max-model-len", "1024"]),
    ({"max_logprobs": -2}, ("max_logprobs=-2", "from -1"), ["--max-logprobs", "-2"]),
    ({"dtype": "float16", "device": "cpu"}, ("dtype='float16'", "float32 and bfloat16"),
     ["--dtype", "float16", "--device", "cpu"]),
    ({"quantization": "fp4"}, ("quantization='fp4'", "must be one of int8"), ["--quantization", "fp4"]),
    ({"attention_backend": "flashy"}, ("flashy", "known"), ["--attention-backend", "flashy"]),
    ({"attention_backend": "FLASH_ATTN"}, ("flash", "runs on device cuda"), ["--attention-backend", "FLASH_ATTN"]),
    ({"enable_lora": True}, ("enable_lora=True", "no LoRA"), ["--enable-lora"]),
    ({"tokenizer": "/nowhere"}, ("/nowhere",), ["--tokenizer", "/nowhere"]),
    ({"seed": -1}, ("seed=-1", "from 0 to 9223372036854775807"), ["--seed", "-1"]),
    ({"gpu_memory_utilization": 1.5}, ("gpu_memory_utilization=1.5", "at most 1"), ["--gpu-memory-utilization", "1.5"]),
    ({"override_generation_config": {"temperature": -3}}, ("override_generation_config", "temperature", "[0, 1e+30]"),
     ["--override-generation-config", '{"temperature": -3}']),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said", "argv"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
def test_a_bad_setting_stops_the_start_with_one_line(
    octavo: Octavo, fields: dict[str, Any], said: tuple[str, ...], argv: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        LLM(**fields)
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in said), message
    code, out, err = octavo("generate", *argv, "a")
    assert (code, out) == (2, "") and err.startswith("octavo: error: ") and err.count("\n") == 1
    assert all(part in err for part in (said[0].partition("=")[0], *said[1:])), err


def test_an_unknown_setting_is_named_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"max_model_length=64 .*did you mean max_model_len\?"):
        LLM(max_model_length=64)


@pytest.mark.parametrize(
    "text",
    ["model: !!python/object/apply:os.system [id]\n", "a: &a [1]\nb: [*a, *a]\n", "\tmodel: x\n", "max_modl_len: 5\n"],
    ids=["tag", "anchor", "tab", "near miss"],
)
def test_a_bad_yaml_file_stops_the_start_with_one_line(octavo: Octavo, tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"settings\.yaml") as caught:
        LLM(config_file=str(path))
    assert "\n" not in str(caught.value)
    code, out, err = octavo("generate", "--config", path, "a")
    assert (code, out, err.count("\n")) == (2, "", 1) and "settings.yaml" in err


def test_a_variable_with_a_typing_error_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_NUM_THREAD", "1")
    with LLM(dtype="float32"):
        assert "OCTAVO_NUM_THREAD is ignored; did you mean OCTAVO_NUM_THREADS?" in caplog.text

"""New weights in an engine that runs: what comes of them, what is refused, and what is left where they fail."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo import LLM
from octavo.rl import checksum, current_weights
from octavo.rl.session import WeightConflictError, WeightUpdateError
from rl_rig import TINY
from weights_rig import Weights, answers, old_weights, other_weights

from model_rig import make_reference  # isort: skip, its folder is known through rl_rig

DISK = {"weight_transfer_config": {"backend": "disk"}}


@pytest.fixture(scope="module")
def old() -> Weights:
    return old_weights()


@pytest.fixture(scope="module")
def new() -> Weights:
    return other_weights(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, new: Weights) -> Path:
    path = tmp_path_factory.mktemp("new")
    shutil.copytree(TINY, path, dirs_exist_ok=True)
    save_file(new, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One engine for tests that leave the weights as they were."""
    with LLM(dtype="bfloat16", max_model_len=256, **DISK) as made:
        yield made


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_session_gives_the_engine_that_loads_the_file(
    new: Weights, folder: Path, dtype: str, quantization: str | None
) -> None:
    """RL.W1, RL.W6: bit for bit; of float32 masters too, which are rounded as a file's are, and quantized anew."""
    fields: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "max_model_len": 256}
    with LLM(str(folder), **fields) as fresh:
        wanted = answers(fresh)
    with LLM(**fields, **DISK) as llm:
        before = answers(llm)
        assert before != wanted
        with llm.weights(version="step-1") as load:
            for name, weight in new.items():
                load(name, weight)
            assert answers(llm) == before, "an open session changes nothing"
        assert answers(llm) == wanted and llm.get_weight_version() == "step-1"
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": TINY}})
        llm.finish_weight_update()
        assert answers(llm) == before and llm.get_weight_version() == "2"
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(folder)}})
        llm.finish_weight_update("step-1")
        assert answers(llm) == wanted


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(llm: LLM, new: Weights) -> None:
    """RL.W1: the first five, with what was expected and found; the session is over, and the old weights serve."""
    before, name = answers(llm), "model.layers.0.mlp.up_proj.weight"
    shape = list(new[name].shape)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"names": ["model.nothing"], "dtype_names": ["float32"], "shapes": [[3]]}, "model.nothing: expected nothing"),
        ({"names": [name], "dtype_names": ["float32"], "shapes": [[3, 4]]}, f"{name}: expected {shape}, found [3, 4]"),
        ({"names": [name], "dtype_names": ["int8"], "shapes": [shape]}, f"{name}: expected one of float32"),
        ({"names": [name] * 2, "dtype_names": ["float32"] * 2, "shapes": [shape] * 2}, f"{name}: comes twice"),
        ({"names": [name], "dtype_names": [], "shapes": [shape]}, "as many: got 1, 0 and 1"),
        ({"names": name, "dtype_names": [], "shapes": []}, "names must be a list"),
        ({"names": [name], "dtype_names": ["float32"], "shapes": [[0, -1]]}, "positive integers"),
    ]
    for info, words in bad:
        llm.start_weight_update()
        with pytest.raises(WeightUpdateError) as caught:
            llm.update_weights({"update_info": {**info, "local_key": 0} | _handed(new[name])})
        assert words in str(caught.value)
        assert llm.weight_state()["state"] == "ready"
    with (
        pytest.raises(WeightUpdateError, match=r"expected \[\d+.*\], found nothing.*and \d+ more"),
        llm.weights() as load,
    ):
        load(name, new[name])
    size = new[name].numel()
    for value, said in (
        (float("nan"), f"holds NaN or Inf: {size} in all, the first is nan at [0"),
        (3.4e38, "does not hold"),
    ):
        with pytest.raises(WeightUpdateError, match=re.escape(said)), llm.weights() as load:
            load(name, torch.full_like(new[name], value, dtype=torch.float32))
    with pytest.raises(WeightUpdateError, match="came before with other values"), llm.weights() as load:
        load(name, new[name])
        load(name, new[name] + 1)
    for odd, said in (([1.0], "a tensor, got list"), (new[name].to("meta"), "a dense tensor with values")):
        with pytest.raises(WeightUpdateError, match=rf"{re.escape(name)}: expected {said}"), llm.weights() as load:
            load(name, odd)
    assert answers(llm) == before and llm.get_weight_version() == "default"


def _handed(tensor: Tensor) -> dict[str, int]:
    """A key under which nothing is: what is told is refused before it is looked for."""
    from octavo.rl.transport.local import Handed

    handed = Handed({"x": tensor})
    handed.__enter__()
    return {"local_key": handed.update_info["local_key"]}


def test_moves_that_a_session_does_not_allow_say_so(llm: LLM) -> None:
    """RL.W9: a second session is refused with the age of the first; a move without one names the state."""
    for move in (llm.finish_weight_update, llm.abort_weight_update, lambda: llm.update_weights({})):
        with pytest.raises(WeightConflictError, match="needs an open update, and there is none"):
            move()
    llm.start_weight_update()
    for move in (llm.start_weight_update, llm.init_weight_transfer_engine, lambda: llm.update_weight_version("x")):
        with pytest.raises(WeightConflictError, match=r"while an update is open, for \d+\.\d s by now"):
            move()
    llm.abort_weight_update()
    with pytest.raises(WeightUpdateError, match="on_running must be one of recompute, keep_kv, abort, got 'later'"):
        llm.start_weight_update(on_running="later")
    with pytest.raises(WeightUpdateError, match="unknown weight transfer backend 'x'"):
        llm.init_weight_transfer_engine({"backend": "x", "init_info": {}})


def test_a_tied_weight_may_come_under_both_names_if_they_are_alike(llm: LLM, old: Weights) -> None:
    """RL.W2."""
    assert json.loads((Path(TINY) / "config.json").read_text())["tie_word_embeddings"]
    before = answers(llm)
    with llm.weights("default") as load:
        for name, weight in old.items():
            load(name, weight)
        load("lm_head.weight", old["model.embed_tokens.weight"])
    assert answers(llm) == before, "the same weights give the same bits"
    with pytest.raises(WeightUpdateError, match=r"lm_head.weight: is model.embed_tokens.weight"), llm.weights() as load:
        load("model.embed_tokens.weight", old["model.embed_tokens.weight"])
        load("lm_head.weight", old["model.embed_tokens.weight"] + 1)


def test_a_part_is_taken_where_it_is_asked_for(old: Weights, new: Weights, folder: Path) -> None:
    """RL.W2: and what is packed together comes together."""
    with LLM(dtype="bfloat16", max_model_len=256, **DISK) as llm:
        layer = {name: weight for name, weight in new.items() if ".layers.3." in name}
        with pytest.raises(WeightUpdateError, match=r"k_proj.weight: expected"), llm.weights(partial=True) as load:
            load("model.layers.3.self_attn.q_proj.weight", new["model.layers.3.self_attn.q_proj.weight"])
        with llm.weights(partial=True) as load:
            for name, weight in layer.items():
                load(name, weight)
        found = answers(llm)
        save_file({**{name: weight.float() for name, weight in old.items()}, **layer}, folder / "model.safetensors")
        with LLM(str(folder), dtype="bfloat16", max_model_len=256) as fresh:
            assert answers(fresh) == found
        save_file(new, folder / "model.safetensors")


def test_a_message_of_any_kind_is_refused_and_the_old_weights_serve(llm: LLM) -> None:
    """RL.W10: nothing that a sender says is more than data."""
    before, rng = answers(llm), random.Random(6)
    values: list[Any] = [None, -1, 1 << 70, True, "x", "/etc", b"\x80\x04.", [], [[]], [1], ["x"], {}, {"x": 1}, 0.5]
    keys = ("names", "dtype_names", "shapes", "path", "local_key", "packed", "backend")
    for _ in range(60):
        llm.start_weight_update()
        info = {key: rng.choice(values) for key in rng.sample(keys, rng.randrange(len(keys)))}
        with pytest.raises(ValueError, match=r"."):
            llm.update_weights({"update_info": rng.choice([info, rng.choice(values)])})
        if llm.weight_state()["state"] == "open":  # it was refused before it was sent
            llm.abort_weight_update()
    assert answers(llm) == before


def test_rl_w5_a_checksum_is_of_values_and_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """RL.W5: equal ones have equal checksums in every type that holds them, in pieces or whole; others have not."""
    values = torch.randn(7, 11, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = checksum(values)
    assert re.fullmatch("[0-9a-f]{16}", found) and checksum(values.float()) == checksum(values.double()) == found
    assert checksum(values.t().contiguous().t()) == checksum(values.view(-1)) == found
    others = {"swapped": values.flip(0), "turned": values.t().contiguous(), "shorter": values[:6]}
    for place in range(values.numel()):
        moved, negated, last_bit = values.clone(), values.clone(), values.clone()
        moved.view(-1)[[place, (place + 1) % 77]] = values.view(-1)[[(place + 1) % 77, place]]
        negated.view(-1)[place] *= -1
        last_bit.view(torch.int16).view(-1)[place] ^= 1
        others |= {f"moved {place}": moved, f"negated {place}": negated, f"last bit {place}": last_bit}
    sums = [checksum(each) for each in others.values()]
    assert len({found, *sums}) == 1 + len(sums)
    assert len({checksum(torch.zeros(size)) for size in range(9)}) == 9
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    monkeypatch.setattr(current_weights, "_CHUNK", 5)
    assert checksum(values) == found


def test_updates_leave_no_memory_behind(llm: LLM, old: Weights) -> None:
    """RL.W11: 30 updates take no more memory than the first ones."""
    held = []
    for turn in range(34):
        with llm.weights("default") as load:
            for name, weight in old.items():
                load(name, weight)
        held.append(psutil.Process().memory_info().rss if turn >= 3 else 0)
    assert held[-1] - held[3] < 8 << 20


@pytest.mark.parametrize(
    ("family", "module"), [("deepseek3", "model.layers.{num_hidden_layers}."), ("qwen3-next", "mtp.")]
)
@pytest.mark.parametrize("drafts", [True, False])
def test_new_weights_of_modules_that_draft_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, module: str, drafts: bool
) -> None:
    """None reaches a drafter. Said once an update, and where nothing drafts by modules not at all."""
    model = make_reference(family)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"max_model_len": 64, "skip_tokenizer_init": True, "load_format": "dummy"}
    if drafts:
        settings["speculative_config"] = {"method": "mtp"}
    norm = torch.ones(config["hidden_size"])
    with LLM(str(tmp_path), **settings) as llm:
        for names in (["enorm", "hnorm"], [], ["enorm"]):
            caplog.clear()
            with llm.weights(partial=True) as load:
                load("model.norm.weight", norm)
                for name in names:
                    load(f"{module.format_map(config)}{name}.weight", norm)
            told = [each.getMessage() for each in caplog.records if "method mtp" in each.getMessage()]
            assert len(told) == (drafts and len(names) > 0)
            assert all(f"has {len(names)} tensors of modules" in each for each in told)

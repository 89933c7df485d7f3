"""What a trainer hears when it errs: the message names the field, the value, and who is in the way."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo import LLM
from octavo.frontend.control import SOME_TAGS
from octavo.request.sampling_params import ParameterError
from octavo.rl import Sender, WeightSource
from octavo.rl import sender as sender_module
from octavo.rl.session import WeightUpdateError
from weights_rig import Weights, answers, small_weights


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Weights]]:
    folder = tmp_path_factory.mktemp("small")
    return folder, small_weights(folder, 3)


@pytest.fixture(scope="module")
def llm(sets: tuple[Path, list[Weights]]) -> Iterator[LLM]:
    told = {"backend": "gloo", "timeout": 20}
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True}
    with LLM(str(sets[0]), **fields, weight_transfer_config=told) as made:
        yield made


@pytest.mark.parametrize(
    ("backend", "info", "words"),
    [
        ("disk", {}, "update_info.path must be str, and is missing"),
        ("disk", {"path": 3}, "update_info.path must be str, got 3"),
        ("disk", {"path": ""}, "update_info.path must be a folder's, got ''"),
        ("disk", {"path": "a\0b"}, "update_info.path must be a folder's, got 'a\\x00b'"),
        ("shm", {"names": []}, "update_info.shm_name must be str, and is missing"),
        ("local", {"names": []}, "update_info.local_key must be int, and is missing"),
    ],
)
def test_what_an_update_lacks_is_named_where_it_belongs(
    llm: LLM, backend: str, info: dict[str, Any], words: str
) -> None:
    llm.init_weight_transfer_engine({"backend": backend, "init_info": {}})
    llm.start_weight_update()
    with pytest.raises(WeightUpdateError, match=f"^{re.escape(words)}$"):
        llm.update_weights({"update_info": info})


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "words"),
    [
        (["model.norm.weight"], ["float32"], [[1] * 300_000], "number 0: 300000 sizes: a tensor has at most 16"),
        (["model.norm.weight"], ["float32"], [[1 << 50]], "number 0: all sizes must be positive integers of at most"),
        (["model.norm.weight"], ["float32"], [3], "got 3 as number 0: a list of sizes is needed"),
        (["x" * 1000], ["float32"], [[1]], f"{'x' * 50}...{'x' * 50}"),
        (["x" * 100_000], ["float32"], [[1]], "must hold text, of at most 1024 characters each"),
        (["model.norm.weight"], ["f" * 1000], [[1]], f"found {'f' * 50}"),
    ],
)
def test_a_refusal_repeats_little_of_what_was_told(
    llm: LLM, names: list[str], dtypes: list[str], shapes: list[Any], words: str
) -> None:
    llm.init_weight_transfer_engine({"backend": "shm", "init_info": {}})
    llm.start_weight_update()
    told = {"names": names, "dtype_names": dtypes, "shapes": shapes, "shm_name": f"octavo-weights-{'0' * 32}"}
    with pytest.raises(WeightUpdateError) as caught:
        llm.update_weights({"update_info": told})
    assert words in str(caught.value), str(caught.value)[:2000]
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000, "model.layers.%s.self_attn.k_scale" % ("1" * 5000)])
def test_a_file_with_an_odd_name_is_refused_with_its_path(llm: LLM, tmp_path: Path, name: str) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    llm.init_weight_transfer_engine({"backend": "disk", "init_info": {}})
    llm.start_weight_update()
    with pytest.raises(WeightUpdateError) as caught:
        llm.update_weights({"update_info": {"path": str(tmp_path)}})
    said = str(caught.value)
    assert len(said) < 1000 and (str(tmp_path) in said or "expected nothing, found float32 [1]" in said), said[:2000]


def test_what_a_meeting_lacks_is_named_where_it_belongs(llm: LLM) -> None:
    with pytest.raises(WeightUpdateError, match=r"^init_info\.master_port must be int, got '1'$"):
        llm.init_weight_transfer_engine({"backend": "gloo", "init_info": {"master_address": "h", "master_port": "1"}})


@pytest.mark.parametrize("address", ["", "127.0.0.1\0.elsewhere", "x" * 256, "h\u00f6st\n"])
def test_an_address_that_no_host_has_is_asked_of_nobody(llm: LLM, address: str) -> None:
    """Libraries would read it to its first zero."""
    place = {"master_address": address, "master_port": 80, "world_size": 2}
    with pytest.raises(WeightUpdateError, match=r"^init_info.master_address must be the trainer's, of 1 to 255"):
        llm.init_weight_transfer_engine({"backend": "gloo", "init_info": place})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"start": 5}, "start: Expected"),
        ({"start": {"partial": "no"}}, "start: Expected `bool`, got `str`"),
        ({"start": {}, "finish": []}, "finish: Expected"),
        ({"start": {}, "finish": {"label": "1"}}, "finish: Object contains unknown field `label`"),
    ],
)
def test_what_a_whole_update_says_of_its_ends_is_named(llm: LLM, message: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightUpdateError, match=f"^{words}"):
        llm.update_weights({"update_info": {"path": "/nowhere"}, **message})
    assert llm.weight_state()["state"] == "ready"


def test_an_update_whose_end_is_refused_is_over(
    llm: LLM, sets: tuple[Path, list[Weights]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever refuses it: the next one is not refused for a minute."""

    def refuses(version: str | None = None, **_: Any) -> None:
        raise ParameterError("weights", "must be plain data", "invalid_type")

    monkeypatch.setattr(llm, "finish_weight_update", refuses)
    with pytest.raises(ParameterError):
        Sender(llm, "local").send(WeightSource(sets[1][1]))
    assert llm.weight_state()["state"] == "ready"
    with pytest.raises(ParameterError), llm.weights() as load:
        for name, tensor in sets[1][1].items():
            load(name, tensor)
    assert llm.weight_state()["state"] == "ready"


def test_types_have_one_word_whatever_brings_them(llm: LLM, tmp_path: Path) -> None:
    unknown, wrong = {"model.nothing": torch.zeros(2)}, {"model.norm.weight": torch.zeros(2)}
    for tensors, words in ((unknown, "expected nothing, found float32 [2]"), (wrong, "expected [32], found [2]")):
        save_file(tensors, tmp_path / "model.safetensors")
        heard = []
        for send in (
            lambda given: llm.update_weights({"update_info": {"path": str(tmp_path)}}),
            lambda given: Sender(llm, "shm").send(WeightSource(given)),
            lambda given: Sender(llm, "local").send(WeightSource(given)),
        ):
            if not heard:
                llm.start_weight_update()
            with pytest.raises(WeightUpdateError) as caught:
                send(tensors)
            heard.append(str(caught.value))
        assert len(set(heard)) == 1 and words in heard[0], heard


def test_the_loser_of_two_trainers_hears_who_took_its_place(llm: LLM, sets: tuple[Path, list[Weights]]) -> None:
    """And the winner's group is as it was: its next update goes through, without another meeting."""
    first, second = Sender(llm, "gloo", timeout=20), Sender(llm, "gloo", timeout=20)
    first.send(WeightSource(sets[1][1]), "1")
    second.send(WeightSource(sets[1][2]), "2")
    wanted, met = answers(llm), second._group
    with pytest.raises(WeightUpdateError, match="another trainer took this one's place") as caught:
        first.send(WeightSource(sets[1][1]), "3")
    assert f"is with {met.peer}" in str(caught.value) and answers(llm) == wanted
    second.send(WeightSource(sets[1][1]), "4")
    assert second._group is met and llm.get_weight_version() == "4"
    first.send(WeightSource(sets[1][2]), "5")  # it meets the engine anew
    assert answers(llm) == wanted
    with pytest.raises(WeightUpdateError, match="another trainer took this one's place"):
        second.send(WeightSource(sets[1][2]), "6")
    for each in (first, second):
        each.close()


def test_a_group_that_is_over_says_how_it_ended_and_whom_it_displaced(
    llm: LLM, sets: tuple[Path, list[Weights]]
) -> None:
    """To a client that does not say whose its tensors are."""
    first, second = Sender(llm, "gloo", timeout=20), Sender(llm, "gloo", timeout=20)
    first.send(WeightSource(sets[1][1]), "1")
    second.send(WeightSource(sets[1][2]), "2")
    old, new = first._group.peer, second._group.peer
    llm.start_weight_update()
    spoiled = {name: torch.full_like(tensor, float("nan")) for name, tensor in sets[1][1].items()}
    llm.abort_weight_update()
    second_group = second._group
    with pytest.raises(WeightUpdateError, match="NaN or Inf"):
        second.send(WeightSource(spoiled))
    llm.start_weight_update()
    with pytest.raises(WeightUpdateError, match=r"^there is no group, or it failed") as caught:
        llm.update_weights({"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    said = str(caught.value)
    assert f"the last one was with {new}, and ended: " in said and "holds NaN or Inf" in said
    assert f"it had taken the place of the one with {old}" in said and second_group is not second._group
    first.close()


def test_a_sleep_and_a_pause_say_what_they_were_given(llm: LLM) -> None:
    for call, words in (
        (lambda: llm.sleep(3), "level: must be 0, 1 or 2, got 3"),
        (lambda: llm.sleep("x"), "level: must be 0, 1 or 2, got 'x'"),  # type: ignore[arg-type]
        (lambda: llm.sleep(1, "stop"), "mode: must be one of keep, wait, abort, got 'stop'"),
        (lambda: llm.wake_up("weights"), f"tags: must be {SOME_TAGS}, got 'weights'"),
        (lambda: llm.wake_up(3), f"tags: must be {SOME_TAGS}, got 3"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ParameterError, match=f"^{re.escape(words)}$"):
            call()


def test_a_sender_by_files_leaves_the_bits_and_no_files(
    llm: LLM, sets: tuple[Path, list[Weights]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several files, of which each is gone once it is read; what is refused leaves none behind either."""
    Sender(llm, "local").send(WeightSource(sets[1][1]), "1")
    wanted = answers(llm)
    Sender(llm, "local").send(WeightSource(sets[1][2]), "2")
    assert answers(llm) != wanted
    monkeypatch.setattr(sender_module, "BUFFER_BYTES", 1 << 13)
    tmp_path /= "made"
    sender, paths = Sender(llm, "disk", folder=tmp_path), []
    tell = llm.update_weights

    def listen(told: dict[str, Any]) -> dict[str, Any]:
        paths.extend([told["update_info"]["path"]] if "path" in told["update_info"] else [])
        return tell(told)

    monkeypatch.setattr(llm, "update_weights", listen)
    for source in (WeightSource(sets[1][1]), iter(sets[1][1].items())):
        sender.send(source, "3")
        assert answers(llm) == wanted and len(paths) > 2 and not list(tmp_path.iterdir())
        Sender(llm, "local").send(WeightSource(sets[1][2]), "4")
    assert all(Path(path).parent == tmp_path for path in paths) and len(set(paths)) == len(paths)
    with pytest.raises(WeightUpdateError, match="NaN or Inf"):
        sender.send(WeightSource({name: torch.full_like(t, float("nan")) for name, t in sets[1][1].items()}))
    assert not list(tmp_path.iterdir()) and llm.get_weight_version() == "4"


@pytest.mark.parametrize(
    ("backend", "folder", "words"),
    [
        ("disk", None, r"^folder: backend 'disk' needs one that the engine reads under the same path$"),
        ("disk", "/nowhere/at/all", r"^folder: '/nowhere/at/all' is no folder: No such file or directory$"),
        ("disk", __file__, r"^folder: '.*' is no folder: File exists$"),
        ("shm", "/tmp", r"^folder: is for backend 'disk', and this is 'shm'$"),
        ("x", None, r"unknown backend 'x' of a sender: known are local, disk, shm, gloo, nccl, ipc"),
    ],
)
def test_a_sender_says_what_its_backend_needs(backend: str, folder: str | None, words: str) -> None:
    with pytest.raises(WeightUpdateError, match=words):
        Sender("http://127.0.0.1:1", backend, folder=folder)


def test_a_senders_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ADMIN_KEY", "from the environment")
    assert Sender("http://127.0.0.1:1")._engine._key == "from the environment"
    assert Sender("http://127.0.0.1:1", admin_key="given")._engine._key == "given"

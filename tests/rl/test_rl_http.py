"""Trainers that speak HTTP: torch's own groups, tensors one a call, and what weights an engine has."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo import rl
from octavo.rl.transport.gloo import make_gloo
from octavo.rl.transport.group import Group
from patience import patient
from weights_rig import TINY, old_weights, other_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer

SGLANG_SENDER = Path(__file__).with_name("sglang_sender.py")
GREEDY = {"prompt": list(range(40)), "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True}


def _answer(server: RunningServer) -> tuple[list[str], list[float]]:
    """Tokens and log-probabilities: other weights may say the same tokens."""
    found = server.post("/v1/completions", GREEDY).json()["choices"][0]["logprobs"]
    return found["tokens"], found["token_logprobs"]


def _post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json()
    return found


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    """Of no weight_transfer_config, as somebody starts it who knows nothing of trainers."""
    with RunningServer("--dtype", "bfloat16") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights."""
    path = tmp_path_factory.mktemp("weights")
    save_file({name: weight * 1.25 for name, weight in old_weights().items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("how", ["each", "bucket"])
def test_rl_a4_torchs_own_group_as_sglangs_clients_make_it(own_server: RunningServer, folder: Path, how: str) -> None:
    """RL.A4: the group has a name, tensors come one by one or all of a call as one, and back again."""
    before = _answer(own_server)
    for path in (folder, Path(TINY)):
        command = [sys.executable, str(SGLANG_SENDER), own_server.url, str(path), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=False)
        assert done.stdout == "True\n", done.stderr[-2000:] + own_server.stderr()[-2000:]
        assert own_server.get("/get_weight_version").json() == {"weight_version": f"{how}-1"}
        assert (_answer(own_server) == before) == (path != folder)


def test_rl_a3_tensors_one_a_call_are_one_update(own_server: RunningServer) -> None:
    """As OpenRLHF sends them: its last call says empty_cache, and until then the old weights serve."""
    before, weights = _answer(own_server), other_weights(3)
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    place = ["127.0.0.1", store.port, 1, 2, "openrlhf", "gloo", False]
    made: list[Group] = []
    meet = threading.Thread(
        target=lambda: made.append(Group(make_gloo, "127.0.0.1", store.port, 0, 2, 30.0, store=store))
    )
    meet.start()
    _post(own_server, "/collective_rpc", method="init_process_group", args=place)
    meet.join()
    (group,) = made
    for number, (name, tensor) in enumerate(weights.items(), 1):
        send = threading.Thread(target=group.broadcast, args=(tensor.view(-1).view(torch.uint8), name, 30.0))
        send.start()
        told = {"name": name, "dtype": "torch.float32", "shape": list(tensor.shape)}
        told["empty_cache"] = number == len(weights)  # type: ignore[assignment]
        _post(own_server, "/collective_rpc", method="update_weight", kwargs=told)
        send.join()
        if number == 40:
            assert _answer(own_server) == before
    assert _answer(own_server) != before
    _post(own_server, "/update_weights_from_disk", model_path=TINY)
    assert _answer(own_server) == before
    group.close()


def test_rl_w5_checksums_are_the_files_and_tell_a_changed_bit(own_server: RunningServer, folder: Path) -> None:
    """RL.W5: under vLLM's name and SGLang's; a trainer makes the same of its own tensors."""
    old = old_weights()
    known = _post(own_server, "/weight_checker", action="checksum")
    assert known["checksums"] == {name: rl.checksum(tensor) for name, tensor in old.items()}
    assert known["own_form"] == []
    same = _post(own_server, "/weight_checker", action="compare", baseline=known["checksums"])
    assert same == {"match": True, "mismatches": []}
    assert own_server.get("/weights_checker?action=snapshot").json() == {"success": True, "message": "Success"}
    ranks = own_server.get("/weights_checker").json()
    assert ranks["ranks"][0]["checksums"] == known["checksums"] and len(ranks["per_engine_checksum"]) == 64
    told = _post(own_server, "/get_weights_by_name", name="model.norm.weight", truncate_size=4)
    assert told == old["model.norm.weight"][:4].float().tolist()
    rows = own_server.get("/get_weights_by_name?name=model.layers.1.self_attn.k_proj.weight&truncate_size=2").json()
    assert rows == old["model.layers.1.self_attn.k_proj.weight"][:2].float().tolist()
    weight = old["model.layers.3.mlp.up_proj.weight"].clone()
    weight.view(torch.int16)[5, 7] ^= 1
    changed = folder / "changed"
    changed.mkdir()
    save_file(old | {"model.layers.3.mlp.up_proj.weight": weight}, changed / "model.safetensors")
    _post(own_server, "/update_weights_from_disk", model_path=str(changed))
    found = _post(own_server, "/weight_checker", action="compare", baseline=known["checksums"])
    assert found == {"match": False, "mismatches": ["model.layers.3.mlp.up_proj.weight"]}
    reply = own_server.post("/weights_checker", {"action": "compare"})
    assert reply.status == 400 and "1 weights differ from the snapshot: model.layers.3.mlp" in str(reply.json())
    _post(own_server, "/update_weights_from_disk", model_path=TINY)
    assert own_server.post("/weights_checker", {"action": "compare"}).json()["success"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/weight_checker", {}, "must be checksum or compare"),
        ("/weight_checker", {"action": "reset"}, "send an update"),
        ("/weight_checker", {"action": "compare"}, "baseline"),
        ("/weight_checker", {"action": "compare", "baseline": [1]}, "baseline"),
        ("/weights_checker", {"action": "reset_tensors"}, "send an update"),
        ("/weights_checker", {"skip_tensor_list": ["x"] * 1025}, "skip_tensor_list: may hold at most 1024"),
        ("/weights_checker", {"action": "x" * 5000}, "must be checksum, snapshot or compare"),
        (
            "/collective_rpc",
            {"method": "update_weights", "kwargs": {"update_info": [1, 2]}},
            "update_info[0]: must be object, got int",
        ),
        ("/collective_rpc", {"method": "update_weights", "args": [7]}, "update_info"),
        (
            "/collective_rpc",
            {"method": "update_weights", "kwargs": {"update_info": [{"a_pickled": ""}]}},
            "nothing is unpickled",
        ),
        (
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": 80,
                "rank_offset": 1,
                "world_size": 10**18,
                "backend": "gloo",
            },
            "world_size must be at most 65536",
        ),
        ("/init_weight_transfer_engine", {"backend": "gloo"}, "init_info.master_address must be str, and is missing"),
        ("/get_weights_by_name", {}, "name: is missing"),
        ("/get_weights_by_name", {"name": "model.nothing.weight"}, "has no weight 'model.nothing.weight'"),
        ("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 10**9}, r"[1, 1024], got 1000000000"),
        (
            "/update_weights_from_distributed",
            {"names": [], "dtypes": [], "shapes": [], "load_format": "x"},
            "flattened",
        ),
    ],
)
def test_questions_about_weights_that_cannot_be_answered(
    own_server: RunningServer, path: str, body: dict[str, Any], words: str
) -> None:
    reply = own_server.post(path, body)
    assert reply.status == 400 and words in reply.json()["error"]["message"], reply.body


def test_a_folder_needs_no_meeting_whatever_backend_the_server_was_told(folder: Path) -> None:
    """As a file's update comes to a server that waits for a trainer by gloo."""
    config = '{"backend": "gloo", "timeout": 5}'
    with RunningServer("--dtype", "bfloat16", "--weight-transfer-config", config) as server:
        server.wait_ready()
        before = _answer(server)
        _post(server, "/update_weights_from_disk", model_path=str(folder))
        assert _answer(server) != before
        _post(server, "/update_weights_from_disk", model_path=TINY)
        assert _answer(server) == before
        figures = server.get("/metrics").body.decode()
    assert 'octavo:weights_version_info{engine="0",model_name="octavo-tiny",version=' in figures

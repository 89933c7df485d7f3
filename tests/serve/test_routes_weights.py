"""New weights over HTTP: vLLM's routes, SGLang's, and the methods that clients call by name."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from octavo.checkpoint.hub import find_model
from octavo.rl import Sender
from octavo.rl.session import WeightUpdateError
from octavo.rl.transport.server_calls import ServerCalls
from octavo.serve.routes.weights import METHODS
from server_rig import RunningServer
from test_routes_status import Client

TINY = find_model("octavo-tiny", None, None)
BODY = {"prompt": list(range(40)), "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """octavo-tiny with other weights."""
    path = tmp_path_factory.mktemp("weights") / "new"
    shutil.copytree(TINY, path)
    old = load_file(path / "model.safetensors")
    save_file({name: weight * 1.25 for name, weight in old.items()}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    """octavo-tiny, for tests that change its weights and change them back."""
    with RunningServer("--dtype", "bfloat16", "--weight-transfer-config", '{"backend": "disk"}') as running:
        yield running.wait_ready()


def ids_of(server: RunningServer) -> list[int]:
    reply = server.post("/v1/completions", BODY)
    assert reply.status == 200, reply.body
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def post(server: RunningServer, path: str, body: Any = None) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json()
    return found


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[int]:
    """What an engine says that was started with the other weights."""
    with RunningServer(str(folder), "--dtype", "bfloat16") as running:
        return ids_of(running.wait_ready())


def test_rl_w1_an_update_by_vllms_routes(own_server: RunningServer, folder: Path, wanted: list[int]) -> None:
    """RL.W1: until the end the old weights serve, then the new ones; no cache is reset in between."""
    before = ids_of(own_server)
    assert before != wanted
    assert own_server.get("/weight_info").json()["weight_version"] == "default"
    post(own_server, "/start_weight_update")
    post(own_server, "/update_weights", {"update_info": {"path": str(folder)}})
    assert ids_of(own_server) == before
    conflict = own_server.post("/start_weight_update", {})
    assert (conflict.status, conflict.json()["error"]["code"]) == (409, "weight_update_conflict")
    assert post(own_server, "/finish_weight_update", {"weight_version": "step-1"})["weight_version"] == "step-1"
    assert ids_of(own_server) == wanted
    assert own_server.get("/get_weight_version").json() == {"weight_version": "step-1"}
    reply = post(own_server, "/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}})
    assert reply["meta_info"]["weight_version"] == "step-1"
    post(own_server, "/start_weight_update")
    post(own_server, "/abort_weight_update")
    labelled = post(own_server, "/update_weight_version", {"new_version": "again"})
    assert labelled == {"success": True, "new_version": "again"}
    assert own_server.get("/model_info").json()["weight_version"] == "again"
    post(own_server, "/update_weights_from_disk", {"model_path": str(TINY), "flush_cache": True})
    assert ids_of(own_server) == before
    figures = own_server.get("/metrics").body.decode()
    assert "vllm:rl_weight_update_operation_duration_seconds_count" in figures


def test_rl_s2_a_whole_update_wakes_an_engine_whose_weights_are_gone(
    own_server: RunningServer, folder: Path, wanted: list[int]
) -> None:
    """RL.S2: 503 by name after level 2, and again the right bits after an update."""
    before = ids_of(own_server)
    post(own_server, "/sleep?level=2")
    post(own_server, "/wake_up?tags=weights")
    refused = own_server.post("/v1/completions", BODY)
    assert refused.status == 503 and "discarded at sleep level 2" in refused.json()["error"]["message"]
    while (told := own_server.get("/ready")).status == 200 or told.json()["error"]["code"] != "weights_discarded":
        time.sleep(0.01)
    assert told.status == 503
    own_server.wait_ready(path="/health")  # a trainer's loop is there between two updates
    post(own_server, "/update_weights_from_disk", {"model_path": str(folder)})
    post(own_server, "/wake_up?tags=kv_cache")
    assert ids_of(own_server) == wanted
    rpc = {"method": "update_weights_from_path", "kwargs": {"weight_dir": str(TINY)}}
    assert post(own_server, "/collective_rpc", rpc) == {"results": [None]}
    assert ids_of(own_server) == before
    post(own_server, "/sleep?level=2")  # vLLM's own way back
    post(own_server, "/wake_up?tags=weights")
    assert post(own_server, "/collective_rpc", {"method": "reload_weights"}) == {"results": [None]}
    post(own_server, "/wake_up?tags=kv_cache")
    assert ids_of(own_server) == before


def test_rl_a4_a_recorded_loop_of_sglangs_clients(own_server: RunningServer, folder: Path, wanted: list[int]) -> None:
    """RL.A4: what slime and verl send for one update, byte for byte, in their order."""
    before = ids_of(own_server)
    told = json.dumps(str(folder))
    recorded = [
        (b"GET", "/health_generate", b""),
        (b"POST", "/pause_generation", b"{}"),
        (b"GET", "/flush_cache", b""),
        (b"POST", "/update_weights_from_disk",
         b'{"model_path": %s, "load_format": null, "flush_cache": false, "weight_version": "7"}' % told.encode()),
        (b"POST", "/continue_generation", b"{}"),
        (b"POST", "/generate", b'{"input_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0, "top_p": 1.0, '
         b'"top_k": -1, "max_new_tokens": 4, "stop": null, "stop_token_ids": null, "skip_special_tokens": false, '
         b'"no_stop_trim": true, "spaces_between_special_tokens": false}, "return_logprob": true}'),
        (b"POST", "/abort_request", b'{"rid": "", "abort_all": true}'),
        (b"GET", "/v1/loads?include=core", b""),
        (b"POST", "/release_memory_occupation", b'{"tags": ["kv_cache"]}'),
        (b"POST", "/resume_memory_occupation", b'{"tags": ["kv_cache"]}'),
    ]  # fmt: skip
    replies = {}
    for method, path, body in recorded:
        reply = own_server.request(
            method.decode(),
            path,
            body or None,
            {"User-Agent": "python-requests/2.32.5", "Accept": "*/*"}
            | ({"Content-Type": "application/json"} if body else {}),
        )
        assert reply.status == 200, (path, reply.body)
        replies[path] = reply
    meta = replies["/generate"].json()["meta_info"]
    assert meta["weight_version"] == "7" and len(meta["output_token_logprobs"]) == 4
    assert replies["/update_weights_from_disk"].json()["success"] is True
    assert ids_of(own_server) == wanted
    post(own_server, "/update_weights_from_disk", {"model_path": str(TINY)})
    assert ids_of(own_server) == before


def test_rl_w8_a_meeting_ends_with_its_client_and_stops_nobody(own_server: RunningServer) -> None:
    """RL.W8: requests and questions are answered meanwhile; once nobody waits for its answer it is cut short."""
    before = ids_of(own_server)

    def waits() -> bool:
        return bool(own_server.get("/weight_info").json()["waits_for_trainer"])

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "world_size": 2}
        asked = {"init_info": place, "backend": "gloo"}  # the server's own one, files, meets nobody
        with Client(own_server, asked, "/init_weight_transfer_engine"):
            while not waits():
                pass
            assert ids_of(own_server) == before
            assert own_server.get("/is_paused").json() == {"is_paused": False}
            own_server.wait_ready(path="/health")
        while waits():
            pass
    assert ids_of(own_server) == before


def test_rl_w9_a_session_has_a_name_that_vllms_clients_need_not_know(own_server: RunningServer, folder: Path) -> None:
    """RL.W9: one that names another session is told how its own ended; one that names none goes on as before."""
    first = post(own_server, "/start_weight_update")["session"]
    post(own_server, "/abort_weight_update", {"session": first})
    second = post(own_server, "/start_weight_update")["session"]
    late = {"update_info": {"path": str(folder)}, "session": first}
    for path, body in (("/update_weights", late), ("/finish_weight_update", late), ("/abort_weight_update", late)):
        refused = own_server.post(
            path, {key: body[key] for key in body if key == "session" or path == "/update_weights"}
        )
        assert refused.status == 409 and f"session '{first}' is not open: the update was aborted" in str(refused.json())
    assert own_server.get("/weight_info").json()["state"] == "open" and second != first
    post(own_server, "/abort_weight_update")


def test_rl_w4_one_call_may_be_a_whole_update(own_server: RunningServer, folder: Path, wanted: list[int]) -> None:
    """RL.W4: it begins, brings all tensors and ends. Whatever of it is refused, no update is open behind it."""
    before = ids_of(own_server)
    whole = {"update_info": {"path": str(folder)}, "start": {"on_running": "abort"}, "session": "mine"}
    done = post(own_server, "/update_weights", whole | {"finish": {"weight_version": "step-2"}})
    assert done["weight_version"] == "step-2" and done["num_bytes"] > 0 and "warnings" not in done
    known = own_server.get("/weight_info").json()
    assert (known["state"], known["weight_version"]) == ("ready", "step-2") and ids_of(own_server) == wanted
    for part, words in (
        ({"finish": {"weight_version": ""}}, "weight_version must have"),
        ({"finish": {"weight_version": "x" * 257}, "update_info": {"path": "/nowhere/at/all"}}, "got 257"),
        ({"finish": {"on_running": "no"}}, "on_running"),
        ({"start": {"on_running": "no"}}, "on_running"),
        ({"start": {"is_checkpoint_format": False}}, "is_checkpoint_format"),
        ({"finish": 1}, "finish"),
    ):
        refused = own_server.post("/update_weights", whole | {"update_info": {"path": str(TINY)}} | part)
        assert refused.status == 400 and words in refused.json()["error"]["message"]
        known = own_server.get("/weight_info").json()
        assert (known["state"], known["weight_version"]) == ("ready", "step-2") and ids_of(own_server) == wanted
    post(own_server, "/update_weights_from_disk", {"model_path": str(TINY)})
    assert ids_of(own_server) == before


def test_rl_w9_an_update_that_begins_with_its_tensors_is_in_nobodys_way(own_server: RunningServer) -> None:
    """RL.W9: it is refused while another one is open, which goes on; its own name is the one that was given."""
    before = ids_of(own_server)
    first = post(own_server, "/start_weight_update")["session"]
    begins = {"update_info": {"path": str(TINY)}, "start": {}, "session": "mine"}
    conflict = own_server.post("/update_weights", begins)
    assert conflict.status == 409 and "not possible while an update is open" in conflict.json()["error"]["message"]
    post(own_server, "/abort_weight_update", {"session": first})
    assert "weight_version" not in post(own_server, "/update_weights", begins)
    assert own_server.get("/weight_info").json()["state"] == "open"
    assert own_server.post("/finish_weight_update", {"session": first}).status == 409
    post(own_server, "/finish_weight_update", {"session": "mine"})
    assert ids_of(own_server) == before


def test_rl_w4_a_sender_needs_one_call_for_an_update(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch, wanted: list[int]
) -> None:
    """RL.W4: of a model's weights; tensors that are gathered one by one are begun with the first, and then finished."""
    before, old, asked = ids_of(own_server), load_file(TINY / "model.safetensors"), list[str]()
    begin = ServerCalls._begin

    def note(server: ServerCalls, name: str, body: Mapping[str, Any], num_bytes: int = 0) -> Callable[[], bytes]:
        asked.append(name)
        return begin(server, name, body, num_bytes)

    monkeypatch.setattr(ServerCalls, "_begin", note)
    with contextlib.closing(Sender(own_server.url, "gloo")) as sender:
        sender.send({name: weight * 1.25 for name, weight in old.items()}, "next")
        assert ids_of(own_server) == wanted and asked == ["init_weight_transfer_engine", "update_weights"]
        asked.clear()
        sender.send(iter(old.items()), "last")
        assert ids_of(own_server) == before and asked == ["update_weights", "finish_weight_update"]
        asked.clear()
        nothing: tuple[Any, ...] = ({}, iter(()))
        for each in nothing:
            with pytest.raises(WeightUpdateError, match="expected tensors, got none"):
                sender.send(each, "no")
        assert not asked
    assert own_server.get("/get_weight_version").json() == {"weight_version": "last"}
    post(own_server, "/update_weights_from_disk", {"model_path": str(TINY)})


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/update_weights", {"update_info": {"names": []}}, 409, "needs an open update"),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASVAAAA"}}, 400, "nothing is unpickled"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, 400, "nothing is unpickled"),
        ("/update_weights_from_disk", {"model_path": "/nowhere/at/all"}, 400, "/nowhere/at/all"),
        ("/update_weights_from_disk", {}, 400, "model_path"),
        ("/update_weights_from_disk", {"model_path": str(TINY), "weight_version": "x" * 257}, 400, "got 257"),
        ("/update_weight_version", {}, 400, "new_version"),
        ("/update_weight_version", {"new_version": "a\nb"}, 400, "characters that can be printed, got 'a"),
        ("/collective_rpc", {"method": "__init__"}, 404, ", ".join(METHODS)[:40]),
        ("/collective_rpc", {"method": "update_weight", "args": [1] * 9}, 400, "takes name, dtype"),
        ("/init_weight_transfer_engine", {"init_info": {}, "backend": "carrier pigeon"}, 400, "carrier pigeon"),
    ],
)
def test_what_cannot_be_is_refused_and_the_old_weights_serve(
    own_server: RunningServer, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    before = ids_of(own_server)
    reply = own_server.post(path, body)
    assert reply.status == status and words in reply.json()["error"]["message"], reply.body
    assert own_server.get("/weight_info").json()["state"] == "ready" and ids_of(own_server) == before

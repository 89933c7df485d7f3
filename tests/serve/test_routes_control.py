"""The routes that stop and wake an engine: what they take, answer and refuse, in vLLM's and SGLang's words."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.frontend.control import SOME_TAGS
from octavo.serve.app import ROUTES
from octavo.serve.http.auth import Access
from octavo.serve.routes.rl import RL_ROUTES
from octavo.serve.routes.route import Route
from server_rig import RunningServer, StartServer
from test_routes_status import Client

GREEDY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = GREEDY | {"max_tokens": 1500}


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    """octavo-tiny, for tests that put it to sleep."""
    with RunningServer("--dtype", "float32") as running:
        yield running.wait_ready()


def ids_of(server: RunningServer, **fields: Any) -> list[int]:
    reply = server.post("/v1/completions", GREEDY | fields)
    assert reply.status == 200, reply.body
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def last_of(client: Client, num_tokens: int | None = None) -> tuple[list[int], str]:
    """The token ids of a stream to its end, and its finish reason; or so many of them at least, and none yet."""
    tokens, reason = list[int](), ""
    while num_tokens is None or len(tokens) < num_tokens:
        line = client.read_event()
        if line in ("", "data: [DONE]"):
            break
        if line.startswith("data: "):
            (choice,) = json.loads(line[6:])["choices"]
            tokens += choice["token_ids"]
            reason = choice["finish_reason"] or reason
    return tokens, reason


def test_a_reset_says_whether_it_was_done(own_server: RunningServer) -> None:
    reply = own_server.post("/reset_prefix_cache", None)
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {"success": True}


def test_rl_a6_what_changes_the_engine_is_for_administrators() -> None:
    """RL.A6: and no route depends on a mode of the server."""
    assert all(route.access is Access.ADMIN for route in RL_ROUTES if not route.path.endswith("generate"))
    assert set(RL_ROUTES) < set(ROUTES)


def test_a_page_in_a_browser_moves_nothing(mock_server: RunningServer) -> None:
    for header in ({"Origin": "http://localhost"}, {"Sec-Fetch-Site": "cross-site"}):
        assert mock_server.get("/flush_cache", headers=header).status == 403
        assert mock_server.post("/pause", None, headers=header).status == 403


def test_rl_p1_a_kept_pause_loses_nothing(own_server: RunningServer) -> None:
    """RL.P1, keep: the stream stays open, and says after it what it would have said without."""
    whole = ids_of(own_server, max_tokens=1500)
    with Client(own_server, LONG | {"stream": True}) as client:
        client.read_event()
        assert own_server.post("/pause?mode=keep", None).json() == {"status": "paused"}
        assert own_server.get("/is_paused").json() == {"is_paused": True}
        assert own_server.post("/pause", {"mode": "keep", "clear_cache": True}).status == 200
        with Client(own_server, GREEDY | {"stream": True}) as late:  # waits
            assert own_server.post("/resume", {}).json() == {"status": "resumed"}
            assert own_server.post("/resume", {}).status == 200
            assert last_of(late) == (whole[:8], "length")
        rest, reason = last_of(client)
    assert reason == "length" and rest == whole[-len(rest) :] and len(rest) > 8


def test_rl_p1_an_abort_gives_what_there_is(own_server: RunningServer) -> None:
    """RL.P1, abort: partial token ids and their log-probabilities, with finish_reason "abort"."""
    whole = ids_of(own_server, max_tokens=1500)
    with Client(own_server, LONG | {"logprobs": 0}) as client:
        while own_server.get("/v1/loads").json()["loads"][0]["num_open_reqs"] == 0:
            pass
        assert own_server.post("/pause_generation", {}).json()["status"] == "ok"
        response = client.connection.getresponse()
        (choice,) = json.loads(response.read())["choices"]
    assert response.status == 200 and choice["finish_reason"] == "abort"
    assert choice["token_ids"] == whole[: len(choice["token_ids"])]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert own_server.post("/continue_generation", {"torch_empty_cache": False}).status == 200


def test_a_response_that_was_aborted_is_not_complete(own_server: RunningServer) -> None:
    body: dict[str, Any] = {"input": "say it again", "max_output_tokens": 1500, "temperature": 0}
    body |= {"ignore_eos": True, "request_id": "cut"}
    with Client(own_server, body, "/v1/responses") as client:
        while not own_server.post("/abort_requests", {"request_ids": ["cut"]}).json()["aborted"]:
            has_come, _, _ = select.select([client.connection.sock], [], [], 0)
            assert not has_come, "it ended before it was aborted"
        reply = json.loads(client.connection.getresponse().read())
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "aborted"})


def test_rl_g8_requests_are_aborted_by_the_beginning_of_their_ids(own_server: RunningServer) -> None:
    """RL.G8: a client's own name, a group's beginning, all; a neighbour of another name goes on."""
    for name, body, path in [
        ("mine-7", {"request_ids": ["mine-7"]}, "/abort_requests"),
        ("group-1-a", {"rid": "group-1"}, "/abort_request"),
        ("any", {"abort_all": True}, "/abort_request"),
    ]:
        asked = [LONG | {"stream": True, "request_id": each} for each in (name, "group-2-a")]
        with Client(own_server, asked[0]) as client, Client(own_server, asked[1]) as neighbour:
            client.read_event()
            neighbour.read_event()
            is_all = "abort_all" in body
            assert own_server.post(path, body).json()["aborted"] == 1 + is_all
            assert last_of(client)[1] == "abort"
            assert last_of(neighbour, 8 if not is_all else None)[1] == ("abort" if is_all else "")
    nobody = own_server.post("/abort_requests", {"request_ids": ["nobody", ""]}).json()
    assert nobody == {"status": "aborted", "aborted": 0}
    assert own_server.post("/abort_request", {}).json()["error"]["param"] == "rid"


def test_rl_s3_sleep_and_wake_change_no_bit(own_server: RunningServer) -> None:
    """RL.S3: twice, by tags, and of what never slept: a defined answer each."""
    whole = ids_of(own_server)
    assert own_server.post("/wake_up", None).json() == {"status": "awake"}
    for _ in range(2):
        assert own_server.post("/sleep?level=1&mode=keep", None).json() == {"status": "asleep", "level": 1}
        assert own_server.post("/sleep?level=1", None).status == 200
        assert own_server.get("/is_sleeping").json() == {"is_sleeping": True}
        refused = own_server.post("/resume", None)
        assert refused.status == 409 and "sleeps (level 1" in refused.json()["error"]["message"]
        lighter = own_server.post("/sleep?level=0", None)
        assert lighter.status == 409 and "at level 1 already" in lighter.json()["error"]["message"]
        assert own_server.post("/wake_up?tags=weights", None).json() == {"status": "asleep"}
        assert own_server.post("/wake_up?tags=kv_cache", None).json() == {"status": "awake"}
        assert ids_of(own_server) == whole
    figures = own_server.get("/metrics").body.decode()
    assert 'sleep_state="awake"} 1.0' in figures.replace('engine="0",model_name="octavo-tiny",', "")


def test_rl_s2_after_level_2_nothing_is_made_up(start_server: StartServer) -> None:
    """RL.S2: generation is refused by name until a whole set of weights has come, and not with noise."""
    server = start_server("--dtype", "float32", mock=False)
    assert server.post("/release_memory_occupation", {}).json() == {"success": True}
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status == 200
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status == 200
    reply = server.post("/v1/completions", GREEDY)
    assert reply.status == 503 and "weights were discarded at sleep level 2" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause", {"mode": "stop"}, "mode"),
        ("/pause", {"new": "drop"}, "new"),
        ("/sleep", {"level": 3}, "level"),
        ("/wake_up", {"tags": ["gpu"]}, "tags"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/release_memory_occupation", {"tags": ["x"]}, "tags"),
    ],
)
def test_a_wrong_word_is_named(mock_server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    reply = mock_server.post(path, body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/sleep?level=x", None, "level: must be 0, 1 or 2, got 'x'"),
        ("/sleep?level=7", None, "level: must be 0, 1 or 2, got 7"),
        ("/sleep", {"level": [1]}, "level: must be 0, 1 or 2, got [1]"),
        ("/sleep", {"mode": 3}, "mode: must be one of keep, wait, abort, got 3"),
        (
            "/sleep",
            {"tags": "weights"},
            f"tags: must be {SOME_TAGS}, got 'weights'",
        ),
        ("/sleep", {"tags": ["weights", 3]}, "tags[1]: must be str, got int"),
        ("/pause", {"clear_cache": "perhaps"}, "clear_cache: must be bool, got 'perhaps'"),
        ("/reset_prefix_cache?reset_running_requests=2", None, "reset_running_requests: must be bool, got '2'"),
        ("/update_weights_from_disk", {}, "model_path: is missing"),
        ("/update_weights_from_disk", {"model_path": 3}, "model_path: must be str, got 3"),
        ("/update_weights", {"update_info": 3}, "update_info: must be object or array, got 3"),
        ("/collective_rpc", {"method": "update_weights", "args": [3]}, "update_info: must be object or array, got 3"),
    ],
)
def test_a_value_that_cannot_be_read_is_told_with_what_is_allowed(
    mock_server: RunningServer, path: str, body: dict[str, Any] | None, words: str
) -> None:
    reply = mock_server.post(path, body)
    error = reply.json()["error"]
    assert (reply.status, error["message"]) == (400, words)
    assert error["param"] == words.split(":")[0].split("[")[0]


@pytest.mark.parametrize("route", [r for r in RL_ROUTES if r.method == "POST"], ids=lambda route: str(route.path))
def test_a_body_that_is_none_moves_nothing(mock_server: RunningServer, route: Route) -> None:
    for body in (b"[]", b"{", b'{"a": NaN}', b'{"a": ' * 100_000):
        assert mock_server.post(route.path, body).status == 400
    assert mock_server.request("POST", route.path, b"{}", {"Content-Type": "text/plain"}).status == 415
    assert mock_server.get("/is_paused").json() == {"is_paused": False}


def test_rl_p4_words_of_others(start_server: StartServer) -> None:
    """RL.P4: verl's older keyword, and new requests that are refused while generation is paused."""
    server = start_server()
    reply = server.post("/pause", {"wait_for_inflight_requests": True, "new": "refuse", "colour": "red"})
    assert reply.json() == {"status": "paused", "warnings": ["colour: unknown field, ignored"]}
    refused = server.post("/v1/completions", GREEDY)
    assert (refused.status, refused.json()["error"]["code"]) == (503, "paused")
    assert server.post("/resume", None).status == 200 and server.post("/v1/completions", GREEDY).status == 200


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/pause", {"wait_for_inflight_requests": True}, "length"),
        ("/pause", {"wait_for_inflight_requests": False}, "abort"),
        ("/pause", {}, "abort"),
        ("/pause", {"mode": "wait"}, "length"),
        ("/pause_generation", {}, "abort"),
        ("/pause_generation", {"mode": "in_place"}, ""),
        ("/pause_generation", {"mode": "retract"}, ""),
    ],
    ids=str,
)
def test_rl_p4_a_word_does_to_what_runs_what_it_does_elsewhere(
    own_server: RunningServer, path: str, body: dict[str, Any], reason: str
) -> None:
    """RL.P4, RL.P1: verl's False ends and True waits; SGLang's in_place and retract keep what runs, abort ends it."""
    keeps = reason == ""
    whole = ids_of(own_server, max_tokens=200) if keeps else []
    asked = LONG | {"stream": True} | ({"max_tokens": 40} if reason == "length" else {})
    with Client(own_server, asked) as client:
        tokens, _ = last_of(client, 1)
        assert own_server.post(path, body).status == 200
        load = own_server.get("/v1/loads").json()["loads"][0]["num_open_reqs"]
        assert load == int(keeps) and own_server.get("/is_paused").json() == {"is_paused": True}
        assert own_server.post("/continue_generation", {}).status == 200
        rest, found = last_of(client, 20 if keeps else None)
    if keeps:
        assert found == "" and tokens + rest == whole[: len(tokens + rest)]
    else:
        assert found == reason and (len(tokens + rest) == 40) == (reason == "length")


def test_what_a_trainer_reads_before_it_begins(own_server: RunningServer) -> None:
    config = own_server.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["model_config"]["dtype"] == "torch.float32" and config["weight_transfer_config"] is not None
    assert config["speculative_config"] is None
    assert own_server.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    assert own_server.get("/model_info").json()["is_generation"] is True
    own_server.wait_ready(path="/health_generate")
    assert own_server.post("/flush_cache", None).body == own_server.get("/flush_cache").body == b"Cache flushed.\n"
    assert own_server.get("/get_world_size?" + "&".join(f"a{i}=1" for i in range(100))).status == 200
    assert own_server.post("/pause?" + "&".join(f"a{i}=1" for i in range(100)), None).status == 400

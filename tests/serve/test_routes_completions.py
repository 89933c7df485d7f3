"""/v1/completions on the bundled model: prompts, choices, log-probabilities, echo, streams."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

import pytest

from patience import patient
from server_rig import RunningServer, StartServer

PATH = "/v1/completions"
GREEDY = {"model": "octavo-tiny", "temperature": 0, "max_tokens": 8}


def complete(server: RunningServer, **fields: Any) -> Any:
    reply = server.post(PATH, GREEDY | fields)
    assert reply.status == 200, reply.body[:300]
    return reply.json()


def stream(server: RunningServer, **fields: Any) -> list[Any]:
    reply = server.post(PATH, GREEDY | {"stream": True} | fields)
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.endswith(b"data: [DONE]\n\n")
    return reply.events()[:-1]


def test_a_completion_has_the_fields_that_clients_read(server: RunningServer) -> None:
    made = complete(server, prompt="def add(a, b):")
    assert made["id"].startswith("cmpl-") and made["object"] == "text_completion" and made["model"] == "octavo-tiny"
    (choice,) = made["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert choice["index"] == 0 and choice["logprobs"] is None and choice["finish_reason"] == "length"
    usage = made["usage"]
    assert usage["completion_tokens"] == 8 and usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0} and "warnings" not in made


def test_text_and_its_token_ids_give_the_same(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "def add(a, b):"}).json()["tokens"]
    by_text = complete(server, prompt="def add(a, b):", return_token_ids=True)["choices"][0]
    by_ids = complete(server, prompt=ids, return_token_ids=True)["choices"][0]
    assert by_ids == by_text and by_ids["prompt_token_ids"] == ids and len(by_ids["token_ids"]) == 8


def test_choices_of_several_prompts_are_prompt_major(server: RunningServer) -> None:
    prompts = ["def add(", "import os", "class A"]
    alone = [complete(server, prompt=prompt)["choices"][0]["text"] for prompt in prompts]
    choices = complete(server, prompt=prompts, n=2)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"] for choice in choices] == [text for text in alone for _ in range(2)]
    ids = [server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert [choice["text"] for choice in complete(server, prompt=ids)["choices"]] == alone


def test_seeds_repeat_and_choices_differ(server: RunningServer) -> None:
    fields = {"prompt": "def ", "temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 12}
    texts = [choice["text"] for choice in complete(server, **fields)["choices"]]
    assert texts == [choice["text"] for choice in complete(server, **fields)["choices"]]
    assert len(set(texts)) > 1


def test_echo_and_logprobs_as_evaluations_read_them(server: RunningServer) -> None:
    """Prompt and one token: the first entry is null, each alternative list holds the token itself."""
    ids = server.post("/tokenize", {"prompt": "def add(a, b):\n    return a + b"}).json()["tokens"]
    choice = complete(server, prompt=ids, max_tokens=1, logprobs=1, echo=True, seed=1234)["choices"][0]
    found = choice["logprobs"]
    assert {len(found[name]) for name in found} == {len(ids) + 1}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for token, logprob, top in list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[token] == logprob <= max(top.values()) <= 0 and 1 <= len(top) <= 2
    assert choice["text"].startswith("def add(a, b):\n    return a + b")
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


def test_offsets_count_the_special_tokens_of_an_echoed_text(server: RunningServer) -> None:
    """They stand in the text that the client sent, and in one made of token ids."""
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    made = complete(server, prompt=prompt, max_tokens=2, logprobs=0, echo=True, return_token_ids=True)["choices"][0]
    ids, found = made["prompt_token_ids"], made["logprobs"]
    assert made["text"].startswith(prompt)
    for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[: len(ids)]:
        assert made["text"].startswith(token, offset)
    bare = complete(server, prompt=ids, max_tokens=2, logprobs=0, echo=True)["choices"][0]
    assert bare["text"] == made["text"] and bare["logprobs"] == found


def test_echoed_logprobs_are_those_of_generation(server: RunningServer) -> None:
    made = complete(server, prompt="import os", logprobs=0, return_token_ids=True)["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    scored = complete(server, prompt=ids, max_tokens=1, logprobs=0, echo=True)["choices"][0]
    start = len(made["prompt_token_ids"])
    assert scored["logprobs"]["token_logprobs"][start:-1] == made["logprobs"]["token_logprobs"]


def test_prompt_logprobs_in_vllms_shape(server: RunningServer) -> None:
    choice = complete(server, prompt=[5, 6, 7], prompt_logprobs=2, max_tokens=1)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2
    for token_id, entries in zip((6, 7), rest, strict=True):
        assert set(entries[str(token_id)]) == {"logprob", "rank", "decoded_token"} and len(entries) in (2, 3)


def test_echo_leaves_prompt_logprobs_that_were_asked_for(server: RunningServer) -> None:
    plain = complete(server, prompt=[5, 6, 7], prompt_logprobs=2, max_tokens=1)["choices"][0]
    echoed = complete(server, prompt=[5, 6, 7], prompt_logprobs=2, max_tokens=1, echo=True)["choices"][0]
    assert echoed["prompt_logprobs"] == plain["prompt_logprobs"] and echoed["text"].endswith(plain["text"])


def test_completions_of_one_prompt_are_no_cache_hits(start_server: StartServer) -> None:
    """The prompt counts once, and is computed: that the second one finds the first one's blocks saved nothing of it."""
    server = start_server(mock=False)
    for num_cached in (0, 96):
        made = complete(server, prompt=list(range(100, 200)), n=3, max_tokens=2)
        assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}
    counts = [line for line in server.get("/metrics").body.decode().splitlines() if "tokens_by_source_total{" in line]
    assert [float(line.split()[-1]) for line in counts] == [104.0, 96.0, 0.0]


def test_a_priority_without_effect_is_told(server: RunningServer, start_server: StartServer) -> None:
    warnings = ["priority: has no effect (--scheduling-policy)"]
    assert complete(server, prompt="a", priority=1)["warnings"] == warnings
    assert "warnings" not in complete(server, prompt="a", priority=0)
    assert "warnings" not in complete(start_server("--scheduling-policy", "priority"), prompt="a", priority=1)


def test_tokens_as_ids(server: RunningServer) -> None:
    choice = complete(server, prompt="a", logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)[
        "choices"
    ][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2, "return_token_ids": True}, {"n": 3, "seed": 1, "temperature": 1}]
)
def test_a_stream_adds_up_to_the_whole(server: RunningServer, fields: dict[str, Any]) -> None:
    whole = complete(server, prompt=["def add(", "import"], max_tokens=24, **fields)
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    ids: dict[int, list[int]] = {}
    for event in stream(server, prompt=["def add(", "import"], max_tokens=24, **fields):
        for choice in event["choices"]:
            place = choice["index"]
            texts[place] = texts.get(place, "") + choice["text"]
            if choice["finish_reason"]:
                ends[place] = choice["finish_reason"]
            if choice["logprobs"]:
                logprobs.setdefault(place, []).extend(choice["logprobs"]["token_logprobs"])
            ids.setdefault(place, []).extend(choice.get("token_ids", []))
    for choice in whole["choices"]:
        place = choice["index"]
        assert (texts[place], ends[place]) == (choice["text"], choice["finish_reason"])
        if "logprobs" in fields:
            assert logprobs[place] == choice["logprobs"]["token_logprobs"] and ids[place] == choice["token_ids"]


def test_usage_comes_in_an_event_without_choices(server: RunningServer) -> None:
    events = stream(server, prompt="def ", stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 8
    assert all("usage" not in event for event in events[:-1])
    assert all(event["choices"] for event in stream(server, prompt="def "))
    both = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in stream(server, prompt="def ", stream_options=both)]
    assert counts == sorted(counts) and counts[-1] == 8 and counts[0] >= 1


def test_stop_strings_and_reasons(server: RunningServer) -> None:
    text = complete(server, prompt="def add(", max_tokens=16)["choices"][0]["text"]
    stop = text[4:7]
    choice = complete(server, prompt="def add(", max_tokens=16, stop=stop)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[: text.index(stop)], "stop", stop)


def test_a_null_max_tokens_fills_the_context(server: RunningServer) -> None:
    made = complete(server, prompt=[5] * 2000, max_tokens=None, ignore_eos=True)
    assert made["usage"]["total_tokens"] == 2048
    assert complete(server, prompt=[5] * 2047, max_tokens=100)["usage"]["total_tokens"] == 2048


YES = {"type": "json_schema", "json_schema": {"type": "boolean"}}
TAG = {"format": {"type": "tag", "begin": "<", "content": YES, "end": ">"}}


@pytest.mark.parametrize(
    "form, wanted",
    [
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "a{3}b"}, ("aaab",)),
        (
            {"structural_tag": {"format": {"type": "tag", "begin": "<", "content": YES, "end": ">"}}},
            ("<true>", "<false>"),
        ),
    ],
)
def test_structured_outputs(server: RunningServer, form: dict[str, Any], wanted: tuple[str, ...]) -> None:
    assert complete(server, prompt="say ", structured_outputs=form)["choices"][0]["text"] in wanted


def test_a_prefix_that_is_cached_is_counted(server: RunningServer) -> None:
    ids = list(range(100, 200))
    complete(server, prompt=ids)
    assert complete(server, prompt=ids)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80
    salted = complete(server, prompt=ids, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_truncated_prompt_is_its_end(server: RunningServer) -> None:
    ids = list(range(20, 60))
    wanted = complete(server, prompt=ids[-7:], max_tokens=4, temperature=0, echo=True)["choices"][0]["text"]
    text = server.post("/detokenize", {"model": "octavo-tiny", "tokens": ids}).json()["prompt"]
    whole = server.post("/tokenize", {"model": "octavo-tiny", "prompt": text}).json()["tokens"]
    for prompt in (ids, ids * 500, text):
        reply = complete(server, prompt=prompt, truncate_prompt_tokens=7, max_tokens=4, temperature=0, echo=True)
        assert reply["usage"]["prompt_tokens"] == 7
        if prompt is not text or whole == ids:
            assert reply["choices"][0]["text"] == wanted
    body = {"model": "octavo-tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 1}
    reply = server.post("/v1/chat/completions", body | {"truncate_prompt_tokens": 3}).json()
    assert reply["usage"]["prompt_tokens"] == 3


def test_forms_that_take_long_are_turned_away_and_hold_up_nobody(server: RunningServer) -> None:
    """Forty at once, whose senders then leave: the queue has an end, and what nobody waits for leaves it."""
    grammar = "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1} A{n + 1}" for n in range(30)) + '\nA30: "x'
    with contextlib.ExitStack() as stack:
        connections = []
        for number in range(40):
            form = {"grammar": f'{grammar}{number}"'}
            body = json.dumps({"prompt": "a", "model": "octavo-tiny", "structured_outputs": form}).encode()
            connection = stack.enter_context(socket.create_connection((server.host, server.port)))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            connections.append(connection)
        ready, _, _ = select.select(connections, [], [], patient(30))
        assert ready
        head = ready[0].recv(65536)
        assert head.startswith(b"HTTP/1.1 503") and b"retry-after" in head.lower()
    deadline = time.monotonic() + patient(30)
    body = GREEDY | {"prompt": "say ", "structured_outputs": {"regex": "a{3}c"}}
    while (reply := server.post(PATH, body)).status == 503:  # until it was noticed that they left
        assert time.monotonic() < deadline
    assert reply.json()["choices"][0]["text"] == "aaac"

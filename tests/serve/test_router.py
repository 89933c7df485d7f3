"""The router over real servers: a prefill and a decode engine, each in processes of its own, and every fault (D)."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.sched.pause import BLOCKS_HELD
from ports import free_port
from router_rig import Process, server, settled, until, until_at_least, until_held

PROMPT = "def add(a, b):\n" * 9
ASK = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 7, "logprobs": 2}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "seed": 7, "logprobs": True}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Process, Process]]:
    """The router first, and then the servers: it serves when they are there."""
    folder, ports = tmp_path_factory.mktemp("router"), (free_port(), free_port(), free_port())
    urls = ["--prefill", f"http://127.0.0.1:{ports[0]}", "--decode", f"http://127.0.0.1:{ports[1]}"]
    router = Process(folder / "router.log", ports[2], "router", *urls, "--health-interval", "0.1", "--timeout", "20")
    try:
        # for so long that a deadline brings nothing back while a test waits
        first = server(folder, "kv_producer", ports[0], kv_transfer_timeout=300)
        second = server(folder, "kv_consumer", ports[1], kv_transfer_timeout=300)
        first.wait()
        second.wait()
        until(router, "octavo_router_server_up", 2)
        yield first, second, router
    finally:
        for process in (first, second, router):
            process.child.kill()
            process.child.wait()


def answer(process: Process, **changes: Any) -> Any:
    status, body = process.ask("POST", "/v1/completions", {**ASK, **changes})
    assert status == 200, body
    choice = body["choices"][0]
    return choice["text"], choice["logprobs"], choice["finish_reason"]


def test_D_1_D_2_a_pair_behind_a_router_gives_one_servers_bits(trio):
    first, second, router = trio
    router.wait("/health")
    assert "is up" not in router.log.read_text(), "that a server starts is no warning"
    for changes in ({}, {"temperature": 0.0}, {"prompt": "x", "seed": 3}):
        before = second.metric("vllm:external_prefix_cache_hits_total")
        routed = answer(router, **changes)
        assert routed == answer(second, **changes) and second.metric("vllm:external_prefix_cache_hits_total") >= before
    until_at_least(second, "vllm:external_prefix_cache_hits_total", 65)
    assert router.metric("octavo_router_requests_total") >= 3 and router.metric("octavo_router_server_up") == 2
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    assert router.ask("POST", "/v1/chat/completions", chat)[0] == second.ask("POST", "/v1/chat/completions", chat)[0]
    settled(first, second)


def test_D_2_a_stream_is_passed_on_as_it_comes(trio):
    first, second, router = trio
    status, text = router.ask("POST", "/v1/completions", {**ASK, "stream": True})
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert status == 200 and "".join(event["choices"][0]["text"] for event in events) == answer(second)[0]
    assert text.rstrip().endswith("[DONE]")
    settled(first, second)


def test_P_1_D_2_each_prompt_of_a_list_has_its_own_blocks(trio):
    first, second, router = trio
    router.wait("/health")
    failures, expired = "octavo:kv_load_failures_total", "octavo:kv_expired_holds_total"
    before = second.metric(failures), first.metric(expired), second.metric("vllm:external_prefix_cache_hits_total")
    prompts = [f"{index} of a list, {PROMPT}" for index in range(3)]
    for changes in ({"prompt": prompts}, {"prompt": prompts[1:], "n": 2}, {"n": 3}):
        status, routed = router.ask("POST", "/v1/completions", {**ASK, **changes})
        assert (
            status == 200
            and routed["choices"] == second.ask("POST", "/v1/completions", {**ASK, **changes})[1]["choices"]
        )
    status, text = router.ask(
        "POST", "/v1/completions", {**ASK, "prompt": [f"x{each}" for each in prompts], "stream": True}
    )
    assert status == 200 and '"error"' not in text and text.rstrip().endswith("[DONE]")
    asked = {
        **ASK,
        "max_tokens": 1,
        "n": 2,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "two of one"},
    }
    told = first.ask("POST", "/v1/completions", asked)[1]["kv_transfer_params"]
    assert second.ask("POST", "/v1/completions", {**ASK, "n": 2, "kv_transfer_params": told})[0] == 200
    settled(first, second)
    assert (second.metric(failures), first.metric(expired)) == before[:2]
    until_at_least(second, "vllm:external_prefix_cache_hits_total", before[2] + 401)
    logs = first.log.read_text() + second.log.read_text()
    assert "on offer already" not in logs and "did not end in time" not in logs


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**ASK, "n": 4}),
        ("/v1/completions", {**ASK, "n": 2, "prompt": [f"{index}, {PROMPT}" for index in range(2)]}),
        ("/v1/chat/completions", {**CHAT, "n": 3}),
        ("/generate", {"text": PROMPT, "sampling_params": {"n": 3, "sampling_seed": 7, "max_new_tokens": 9}}),
    ],
)
def test_D_2_several_completions_of_a_prompt_are_of_the_blocks_that_the_first_one_fetches(trio, path, body):
    """The others wait for these and find them in the decode server's own cache."""
    first, second, router = trio
    expected = said_of(second, path, body)
    assert first.ask("POST", "/reset_prefix_cache", {})[0] == second.ask("POST", "/reset_prefix_cache", {})[0] == 200
    names = "vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"
    before, skipped = [second.metric(name) for name in names], router.metric(SKIPPED)
    assert said_of(router, path, body) == expected
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    num_others = num_prompts * ((body.get("n") or body["sampling_params"]["n"]) - 1)
    until_at_least(second, names[0], before[0] + 65 * num_prompts)
    until_at_least(second, names[1], before[1] + 64 * num_others)
    assert router.metric(SKIPPED) == skipped
    settled(first, second)


def test_a_request_that_goes_on_without_a_prefill_server_is_counted(trio):
    first, second, router = trio
    before = router.metric(SKIPPED)
    own = {"do_remote_prefill": False, "do_remote_decode": False}
    for changes in ({"kv_transfer_params": own}, {"prompt_logprobs": 0}, {"echo": True}):
        assert router.ask("POST", "/v1/completions", {**ASK, **changes})[0] == 200
    assert router.metric(SKIPPED) == before + 3
    settled(first, second)


IDS = [3 + (7 * index) % 200 for index in range(90)]
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 12, "logprobs": 2}
THEIRS: dict[str, Any] = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 12}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a response": ("/v1/responses", {"input": PROMPT, "temperature": 0.8, "seed": 7, "max_output_tokens": 12}),
    "of items": (
        "/responses",
        {"input": [{"role": "user", "content": PROMPT}], "instructions": "short", "temperature": 0, "min_tokens": 4},
    ),
    "ids": ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {**DRAWN, "min_tokens": 6}}),
    "SGLang's ids": ("/generate", {"input_ids": IDS, "sampling_params": THEIRS, "return_logprob": True}),
    "text": ("/generate", {"text": PROMPT, "sampling_params": {**THEIRS, "min_new_tokens": 3}}),
    "texts": ("/generate", {"text": [f"{index}{PROMPT}" for index in range(3)], "sampling_params": [THEIRS] * 3}),
    "a list of one": ("/generate", {"input_ids": [IDS], "sampling_params": THEIRS}),
}
SKIPPED = "octavo_router_prefills_skipped_total"
VOLATILE = ("id", "request_id", "created", "created_at", "e2e_latency", "item_id", "usage", "cached_tokens")


def lasting(value: Any) -> Any:
    """What of an answer does not depend on when it was given, or where its blocks come from."""
    if isinstance(value, dict):
        return {name: lasting(own) for name, own in value.items() if name not in VOLATILE}
    return [lasting(own) for own in value] if isinstance(value, list) else value


def said_of(process: Process, path: str, body: dict[str, Any]) -> Any:
    """A whole answer, or what there is of a stream at its end: its pieces depend on the pace."""
    status, answer = process.ask("POST", path, body)
    assert status == 200, answer
    if not body.get("stream"):
        return lasting(answer)
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert not any("error" in event and event["error"] for event in events)
    if "responses" in path:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return lasting(events[-1]["response"])
    assert answer.rstrip().endswith("[DONE]")
    if path == "/generate":
        return [lasting(last) for _, last in sorted({event.get("index", 0): event for event in events}.items())]
    choices = [event["choices"][0] for event in events if event["choices"]]
    logprobs = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    return [token for choice in choices for token in choice["token_ids"]], logprobs, choices[-1]["finish_reason"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_D_2_every_route_that_generates_has_its_prompt_computed_before_and_one_servers_answer(trio, name, streams):
    first, second, router = trio
    path, body = BODIES[name]
    body = {**body, "stream": streams}
    assert first.ask("POST", "/reset_prefix_cache", {})[0] == second.ask("POST", "/reset_prefix_cache", {})[0] == 200
    names = "vllm:prompt_tokens_total", "vllm:external_prefix_cache_hits_total"
    before = first.metric(names[0]), second.metric(names[1])
    routed = said_of(router, path, body)
    until_at_least(first, names[0], before[0] + 1)  # a prefill server computed it
    until_at_least(second, names[1], before[1] + 64)  # a decode server took its blocks
    assert routed == said_of(second, path, body)
    settled(first, second)


def test_P_every_route_that_generates_offers_and_fetches_by_kv_transfer_params(trio):
    first, second, _ = trio
    for number, (path, body) in enumerate(BODIES.values()):
        wanted = {"do_remote_decode": True, "transfer_id": f"own {number}"}
        answer = first.ask("POST", path, {**body, "kv_transfer_params": wanted})[1]
        parts = answer if isinstance(answer, list) else [answer]
        told = [part.get("meta_info", part)["kv_transfer_params"] for part in parts]
        ids = [f"own {number}" + (f"-{place}" if place else "") for place in range(len(parts))]
        assert [own["transfer_id"] for own in told] == ids
        given = {**told[0], "prompts": told} if len(told) > 1 else told[0]
        assert said_of(second, path, {**body, "kv_transfer_params": given}) == said_of(second, path, body)
        settled(first, second)
        status, wrong = second.ask("POST", path, {**body, "kv_transfer_params": {"remote_port": 0}})
        assert status == 400 and wrong["error"]["param"] == "kv_transfer_params.remote_port"
    nested = {"token_ids": IDS, "sampling_params": {"kv_transfer_params": {}}}
    status, wrong = second.ask("POST", "/inference/v1/generate", nested)
    assert status == 400 and "belongs beside sampling_params" in wrong["error"]["message"]
    far = {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "fe80::1%\0"}}}
    for path, body in (
        ("/v1/completions", {**ASK, **far}),
        ("/inference/v1/generate", {**nested, "sampling_params": far}),
    ):
        status, wrong = second.ask("POST", path, body)
        assert status == 400 and "belongs beside extra_args" in wrong["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {**DRAWN, "prompt_logprobs": 0}}),
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {**DRAWN, "skip_reading_prefix_cache": True}}),
        ("/generate", {"input_ids": IDS, "sampling_params": THEIRS, "return_logprob": True, "logprob_start_len": 0}),
        ("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "seed": 1, "skip_reading_prefix_cache": True}),
        ("/v1/completions", {"prompt": PROMPT * 9, "max_tokens": 9, "seed": 1, "truncate_prompt_tokens": -1}),
    ],
)
def test_P_what_a_decode_server_computes_whole_goes_to_it_straight_on_every_route(trio, path, body):
    first, second, router = trio
    before = first.metric("vllm:prompt_tokens_total")
    assert said_of(router, path, body) == said_of(second, path, body)
    assert first.metric("vllm:prompt_tokens_total") == before
    settled(first, second)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [3]}),
        ("/v1/responses", {}),
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": [1]}),
        ("/inference/v1/generate", {"token_ids": "x"}),
        ("/generate", {"text": PROMPT, "input_ids": IDS}),
        ("/generate", {"text": PROMPT, "sampling_params": [THEIRS, {}]}),
        ("/generate", {"text": PROMPT, "sampling_params": [3]}),
        ("/generate", {"text": []}),
        ("/generate", [1]),
        # the prefill server has computed these and offers their blocks, until it hears that nobody wants them
        ("/v1/responses", {"input": PROMPT, "min_tokens": 9, "max_output_tokens": 4}),
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"min_tokens": 9, "max_tokens": 4}}),
        ("/generate", {"text": [PROMPT, "x"], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 4}}),
        ("/v1/completions", b'{"prompt": "a", "prompt": "b", "max_tokens": 1}'),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}'),
        ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}'),
        ("/generate", b'{"text": "\\ud800"}'),
    ],
)
def test_what_is_wrong_with_a_body_of_any_route_the_decode_server_says(trio, path, body):
    first, second, router = trio
    alone, routed = second.ask("POST", path, body), router.ask("POST", path, body)
    assert alone[0] == routed[0] == 400 and routed[1]["error"] == alone[1]["error"]
    settled(first, second)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "prompt_logprobs": 1}),
    ],
)
def test_P_what_a_decode_server_computes_whole_is_not_computed_before(trio, path, body):
    first, second, router = trio
    asked = {"max_tokens": 2, "temperature": 0, **body}
    before = first.metric("vllm:prompt_tokens_total")
    status, routed = router.ask("POST", path, asked)
    assert status == 200 and routed["choices"] == second.ask("POST", path, asked)[1]["choices"]
    assert first.metric("vllm:prompt_tokens_total") == before
    settled(first, second)


def test_P_an_offer_that_a_router_releases_ends(trio):
    first, second, _ = trio
    asked = {**ASK, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "mine"}}
    assert first.ask("POST", "/v1/completions", asked)[1]["kv_transfer_params"]["transfer_id"] == "mine"
    until_held(first)
    for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true", "/flush_cache", "/sleep"):
        status, body = first.ask("POST", path, None)
        assert status == (400 if "flush" in path else 409) and BLOCKS_HELD in body["error"]["message"]
        assert "requests" not in body["error"]["message"] and "/kv_transfer/release" in body["error"]["message"]
    answer = first.ask("POST", "/kv_transfer/release", {"transfer_ids": ["mine", "unknown"]})
    assert answer == (200, {"released": 1})
    settled(first)
    assert second.ask("POST", "/kv_transfer/release", {"transfer_ids": ["mine"]}) == (200, {"released": 0})
    for wrong in ({}, {"transfer_ids": "mine"}, {"transfer_ids": [1]}, {"transfer_ids": [""]}):
        status, body = first.ask("POST", "/kv_transfer/release", wrong)
        assert status == 400 and body["error"]["param"] == "transfer_ids"
    status, body = first.ask("POST", "/kv_transfer/release", {"transfer_ids": ["x"] * 4097})
    assert status == 400 and "at most 4096 ids, got 4097" in body["error"]["message"]


REMOTE = {"remote_host": "127.0.0.1", "remote_port": 1, "transfer_id": "x", "remote_num_tokens": 9}


@pytest.mark.parametrize(
    ("side", "said", "warned"),
    [
        (0, {"do_remote_decode": False, "remote_block_ids": None}, []),
        (1, {"do_remote_prefill": False, **REMOTE}, []),
        (1, {"foo": 1}, ["foo: unknown field, ignored"]),
        (1, {"do_remote_decode": True}, ["do_remote_decode: has no effect: kv_role of this engine is kv_consumer"]),
        (0, {"do_remote_prefill": True, **REMOTE}, ["do_remote_prefill: has no effect: kv_role of this engine is kv_"]),
        (1, {"do_remote_prefill": True}, ["do_remote_prefill: has no effect without remote_host, remote_port, tran"]),
        (1, {"do_remote_prefill": True, "do_remote_decode": True}, ["do_remote_decode: has", "do_remote_prefill: has"]),
        (1, {"max_load_tokens": 0}, ["max_load_tokens: has no effect with p2p"]),
        (1, {"prompts": [{"foo": 1}]}, ["foo: unknown field, ignored"]),
    ],
)
def test_P_what_of_kv_transfer_params_is_not_acted_on_stands_in_the_warnings(trio, side, said, warned):
    tokens = {"token_ids": IDS, "sampling_params": {"max_tokens": 1}}
    response = {"input": PROMPT, "max_output_tokens": 1}
    asked = {"/v1/completions": {**ASK, "max_tokens": 1}, "/v1/chat/completions": {**CHAT, "max_tokens": 1}}
    for path, body in {**asked, "/v1/responses": response, "/inference/v1/generate": tokens}.items():
        status, answer = trio[side].ask("POST", path, {**body, "kv_transfer_params": said})
        told = answer.get("warnings", [])
        assert status == 200 and len(told) == len(warned), told
        assert all(one.startswith(f"kv_transfer_params.{start}") for one, start in zip(told, warned)), told


def test_P_3_D_7_a_decode_server_that_can_take_no_blocks_is_counted_and_named_once(trio, tmp_path):
    """A lasting mismatch: every prompt is computed twice, and the answers are right."""
    first, _, _ = trio
    other = server(tmp_path, "kv_consumer", free_port(), "--dtype", "bfloat16", kv_transfer_timeout=300)
    urls = ["--prefill", f"http://127.0.0.1:{first.port}", "--decode", f"http://127.0.0.1:{other.port}"]
    router = Process(tmp_path / "router.log", free_port(), "router", *urls, "--health-interval", "0.1")
    try:
        other.wait()
        until(router, "octavo_router_server_up", 2)
        for count in (1, 2, 3):
            status, _ = router.ask("POST", "/v1/completions", {**ASK, "prompt": f"{count}{PROMPT}"})
            assert status == 200
            settled(first, other)
            until(router, "octavo_router_kv_load_failures_total", count)
        lines = [line for line in router.log.read_text().splitlines() if "its dtype is 'float32'" in line]
        assert len(lines) == 1 and f"127.0.0.1:{other.port}" in lines[0] and "yours 'bfloat16'" in lines[0]
    finally:
        router.stop()
        other.stop()


def test_P_a_router_answers_what_one_server_answers(trio):
    _, second, router = trio
    chat = [{"role": "user", "content": "hi"}]
    tokens = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    for path, body in (
        ("/completions", tokens),
        ("/v1/completions/", tokens),
        ("/chat/completions", {"messages": chat, "max_tokens": 4, "temperature": 0}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "temperature": 0}),
        ("/responses", {"input": "hi", "max_output_tokens": 4, "temperature": 0}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0}}),
        ("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}),
        ("/tokenize", {"prompt": "x"}),
    ):
        status, routed = router.ask("POST", path, body)
        alone = second.ask("POST", path, body)
        assert status == alone[0] == 200, (path, routed)
        for name in ("choices", "text", "output_ids", "tokens"):
            assert routed.get(name) == alone[1].get(name), path
    for path in ("/models", "/v1/models/", "/v1/models/octavo-tiny", "/version", "/", "/tokenizer_info"):
        assert router.ask("GET", path)[0] == second.ask("GET", path)[0], path
    assert router.ask("HEAD", "/v1/models")[0] == second.ask("HEAD", "/v1/models")[0] == 200
    assert router.ask("GET", "/v1/completions")[0] == second.ask("GET", "/v1/completions")[0] == 405
    assert router.ask("POST", "/sleep", {})[0] == 404, "what changes an engine is asked of that engine"


FORGED = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "transfer_id": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": FORGED}),
        ("/completions", {"prompt": "x", "kv_transfer_params": FORGED}),
        ("/v1/completions", {"prompt": ["x", "y"], "kv_transfer_params": {"prompts": [{}, FORGED]}}),
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}}),
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": [FORGED]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": FORGED}),
        ("/v1/responses", {"input": "x", "kv_transfer_params": FORGED}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}, "kv_transfer_params": FORGED}),
        ("/generate", {"text": "x", "sampling_params": {"kv_transfer_params": FORGED}}),
        ("/generate", {"text": "x", "kv_transfer_params": FORGED}),
    ],
)
def test_P_9_a_client_of_a_router_names_no_blocks_of_its_own(trio, path, body):
    _, _, router = trio
    status, answered = router.ask("POST", path, body)
    assert status == 400 and "kv_transfer_params may say" in answered["error"]["message"], answered


def test_P_9_a_client_of_a_router_says_how_much_is_loaded(trio):
    _, _, router = trio
    answer(router, kv_transfer_params={"max_load_tokens": 0, "max_offload_tokens": 0})
    answer(router, kv_transfer_params={"do_remote_prefill": False, "remote_host": None})


def test_P_9_a_request_that_names_another_host_is_refused_by_it_and_by_the_setting(trio):
    _, second, _ = trio
    asked = {**FORGED, "remote_num_tokens": 8}
    for said, field in (
        ({**asked, "remote_host": "192.0.2.1"}, "kv_transfer_params.remote_host"),
        ({**asked, "remote_addresses": [["127.0.0.1", 9], ["192.0.2.1", 9]]}, "kv_transfer_params.remote_addresses"),
    ):
        status, body = second.ask("POST", "/v1/completions", {**ASK, "kv_transfer_params": said})
        assert status == 400 and body["error"]["param"] == field
        assert "'192.0.2.1'" in body["error"]["message"] and "kv_peers" in body["error"]["message"]


def test_what_is_wrong_with_a_request_the_server_says(trio):
    _, _, router = trio
    for body, status in (({**ASK, "temperature": -1}, 400), ({}, 400), ([1], 400)):
        assert router.ask("POST", "/v1/completions", body)[0] == status
    assert router.ask("GET", "/nowhere")[0] == 404 and router.ask("GET", "/v1/models")[0] == 200


def test_D_6_a_client_that_goes_away_frees_both_sides(trio):
    first, second, router = trio
    for seconds in (0.0, 0.01, 0.05):
        connection = http.client.HTTPConnection("127.0.0.1", router.port)
        body = json.dumps({**ASK, "max_tokens": 300, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        threading.Event().wait(seconds)
        connection.close()
    settled(first, second)


@pytest.mark.slow
def test_D_4_kills_at_random_lose_no_request_and_both_sides_come_back(trio):
    """Prefiller and decoder are killed while requests come; whoever is asked answers, or says 5xx, in time."""
    first, second, router = trio
    expected, stop = answer(second), threading.Event()
    wrong: list[Any] = []
    answered = [0, 0]

    def client() -> None:
        while not stop.is_set():
            try:
                status, body = router.ask("POST", "/v1/completions", ASK, timeout=60)
            except (OSError, http.client.HTTPException) as error:
                wrong.append(error)
                continue
            answered[status != 200] += 1
            if status == 200:
                choice = body["choices"][0]
                if (choice["text"], choice["logprobs"], choice["finish_reason"]) != expected:
                    wrong.append(choice)

    clients = [threading.Thread(target=client) for _ in range(3)]
    for thread in clients:
        thread.start()
    try:
        for turn in range(6):
            victim = (first, second)[turn % 2]
            victim.kill()
            victim.start()
            victim.wait()
            until(router, "octavo_router_server_up", 2)
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert not [each for each in wrong if not isinstance(each, Exception)] and answered[0] > 10
    settled(first, second)
    assert answer(router) == expected

"""Log-probabilities by the million: their count is bounded, and nobody waits while they are written."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from octavo.frontend.messages import MAX_FRAME_BYTES, Add, FrameReader, Updates, decode_from_engine, encode
from octavo.plan import TokenLogprobs
from octavo.request.outputs import FlatLogprobs
from octavo.request.sampling_params import Limits, ParameterError, RequestOutputKind, SamplingParams
from octavo.request.updates import RequestUpdate
from octavo.serve.api.budget import LogprobBudget, count_logprobs
from octavo.serve.engine.process import EngineProcess
from octavo.serve.errors import ApiError
from octavo.serve.http import json_pieces
from octavo.serve.http.exchange import ClientLeftError, Exchange
from octavo.serve.settings import ServeConfig
from paced_app import PacedApp
from server_rig import StartServer
from step_words import entries_of, scores_of

LIMITS = Limits(vocab_size=1000, max_model_len=100)
PROMPT = list(range(40, 60))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def answer(add: Add, index: int) -> tuple[Sequence[int], str]:
    return [30, 31, 32], "length"


@pytest.fixture(scope="module")
def paced() -> Iterator[PacedApp]:
    with PacedApp() as app:
        yield app


def filled(num_positions: int, width: int) -> FlatLogprobs:
    flat = FlatLogprobs(lambda token_id: f"<{token_id}>")
    flat.add((), (), ())
    for position in range(1, num_positions):
        ids = [(position * 7 + at) % 500 for at in range(width)]
        flat.add(ids, [-0.25 * at - position for at in range(width)], range(1, width + 1))
    return flat


def test_what_a_request_asks_for_is_counted_before_it_runs() -> None:
    def count(**fields: Any) -> tuple[int, int]:
        return count_logprobs(SamplingParams(**fields), LIMITS, [10, 20])

    assert count() == (0, 0)
    assert count(prompt_logprobs=4) == (150, 0) and count(prompt_logprobs=-1) == (30 * 1001, 0)
    assert count(logprobs=1, max_tokens=5, n=3) == (0, 3 * 10 * 2)
    assert count(logprobs=0, max_tokens=None) == (0, 90 + 80)
    assert count(logprob_token_ids=[1, 2, 3], max_tokens=5) == (0, 10 * 4)
    assert count(logprobs=1, max_tokens=5, output_kind=RequestOutputKind.DELTA) == (0, 0)


def test_too_many_of_one_request_and_of_all() -> None:
    async def main() -> None:
        budget = LogprobBudget(max_request=100, max_open=150)
        params = SamplingParams(prompt_logprobs=1, max_tokens=1)
        with pytest.raises(ParameterError, match=r"prompt_logprobs: 102 .*100 .--max-request-logprobs") as refused:
            budget.held(params, LIMITS, [51]).__enter__()
        assert refused.value.code == "too_many_logprobs"
        with budget.held(params, LIMITS, [50]):
            with pytest.raises(ApiError, match="150") as full, budget.held(params, LIMITS, [30]):
                pass
            assert full.value.status == 503 and full.value.headers
            with budget.held(params, LIMITS, [25]):
                assert budget.num_open == 150
        assert budget.num_open == 0

    asyncio.run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_server_refuses_what_is_too_much(start_server: StartServer, path: str) -> None:
    server = start_server("--max-request-logprobs", "40")
    asked = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    reply = server.post(path, asked | {"max_tokens": 1, "prompt_logprobs": 20})
    assert reply.status == 400 and reply.json()["error"]["param"] == "prompt_logprobs"
    assert "--max-request-logprobs" in reply.json()["error"]["message"]
    assert server.post(path, asked | {"max_tokens": 1}).status == 200


def test_pieces_are_the_json_of_the_whole() -> None:
    flat = filled(50, 3)
    wanted = [entry and {str(k): vars_of(v) for k, v in entry.items()} for entry in flat]
    found = list(json_pieces.prompt_logprobs(flat))
    assert json.loads(b"".join(found)) == wanted
    large = filled(3000, 4)
    pieces = list(json_pieces.prompt_logprobs(large))
    assert len(pieces) > 4 and max(map(len, pieces)) < 400_000
    assert len(json.loads(b"".join(pieces))) == 3000
    assert b"".join(json_pieces.array([])) == b"[]" and b"".join(json_pieces.array([[b"1"], [b"2"]])) == b"[1,2]"
    assert json.loads(b"".join(json_pieces.prompt_logprobs(FlatLogprobs()))) == []
    assert b"".join(json_pieces.with_fields(b'{"a":1}', [("b", [b"2"])])) == b'{"a":1,"b":2}'


def vars_of(entry: Any) -> dict[str, Any]:
    return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}


def test_others_have_their_turn_while_an_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.http.exchange._PIECE_BYTES", 1000)
    num_turns, turns_at = 0, []
    sent: list[dict[str, Any]] = []

    def pieces() -> Iterator[bytes]:
        for number in range(10):
            turns_at.append(num_turns)
            yield b"%d" % number * 1000

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.create_task(count())
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        await Exchange(scope, receive, send, ServeConfig()).reply_pieces(pieces())
        counting.cancel()

    asyncio.run(main())
    assert turns_at[2:] == sorted(set(turns_at[2:])) and len(turns_at) == 10  # the first two tell that there are more
    start, *bodies = sent
    assert start["status"] == 200 and b"content-length" not in dict(start["headers"])
    assert b"".join(each["body"] for each in bodies) == b"".join(b"%d" % number * 1000 for number in range(10))


def test_a_client_that_leaves_is_written_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.http.exchange._PIECE_BYTES", 1000)
    num_made = 0
    left = asyncio.Event()

    def pieces() -> Iterator[bytes]:
        nonlocal num_made
        while num_made < 1000:
            num_made += 1
            yield b"x" * 1000

    async def send(message: Any) -> None:
        if num_made > 10:
            left.set()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    async def main() -> None:
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        with pytest.raises(ClientLeftError):
            await Exchange(scope, receive, send, ServeConfig()).reply_pieces(pieces())

    asyncio.run(main())
    assert 10 < num_made < 20


def test_nothing_of_an_answer_is_kept(paced: PacedApp) -> None:
    """Without the collector of circles: what is large goes with the answer."""
    gc.collect()
    gc.disable()
    try:
        for body in ({"prompt_logprobs": 3, "logprobs": 1}, {"prompt_logprobs": 3, "stream": True}):
            status, _ = paced.ask(COMPLETIONS, {"prompt": [PROMPT] * 3, "n": 2, **body}, answer)
            assert status == 200
            assert not [each for each in gc.get_objects() if type(each) is FlatLogprobs]
    finally:
        gc.enable()


def test_prompts_scores_travel_as_arrays() -> None:
    """12 bytes each between the processes; a frame that would be too long is cut by positions."""
    width, num_positions = 21, 2000
    entry = TokenLogprobs(list(range(width)), [-0.5] * width, list(range(1, width + 1)))
    packed = scores_of([entry] * num_positions)
    frame = encode(Updates(1, [RequestUpdate("a", prompt_logprobs=packed)]))
    assert len(frame) < 12.1 * width * num_positions < MAX_FRAME_BYTES
    first, rest = packed.cut()
    assert first.num_positions + rest.num_positions == num_positions
    assert entries_of(first) + entries_of(rest) == entries_of(packed)


def test_long_scores_of_one_step_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.messages.MAX_FRAME_BYTES", 2000)
    packed = scores_of([TokenLogprobs([at, 5], [-0.5, -1.0], [2, 1]) for at in range(300)])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        EngineProcess(ours)._send_updates(1, [RequestUpdate("a", [7], prompt_logprobs=packed, finish_reason="length")])
        frames = FrameReader().feed(theirs.recv(1 << 20))
    updates = [update for frame in frames for update in decode_from_engine(frame).updates]
    assert len(frames) > 3 and [entry for each in updates for entry in entries_of(each.prompt_logprobs)] == entries_of(
        packed
    )
    assert [each.tokens for each in updates] == [[]] * (len(updates) - 1) + [[7]]
    assert [each.finish_reason for each in updates] == [None] * (len(updates) - 1) + ["length"]


def test_flat_log_probabilities_take_twelve_bytes() -> None:
    flat = filled(1000, 21)
    num_bytes = sum(len(part) * part.itemsize for part in (flat.token_ids, flat.logprobs, flat.ranks))
    assert num_bytes == 999 * 21 * 12 and isinstance(flat.token_ids, array)
    joined = FlatLogprobs.joined([flat[:300], flat[300:]])
    assert joined == flat and joined.end_indices == flat.end_indices

"""Texts: what the server does with foreign text, off its event loop.

Owns two lanes to the text sandbox: one for what is short, so that nobody waits behind a stranger's megabytes, and one
for what is long; and the bounds that decide between them. Knows no route. Invariants: nothing that holds the
interpreter's lock for longer than some milliseconds is done in this process; after `close` no thread of the lanes
waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from octavo.request.sampling_params import Limits
from octavo.serve.errors import ApiError, bad_request
from octavo.serve.http.strict_json import parse
from octavo.serve.sandbox.text_child import Refusal
from octavo.serve.sandbox.text_lane import ShortLane
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.sandbox import (
    CLOSED,
    LONG_TEXT,
    SandboxError,
    TextSandbox,
    encode_job,
    ids_of,
    render_job,
    telling_of_template,
    telling_of_text,
)
from octavo.text.sandbox_child import Job
from octavo.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

LONG_BODY = 1 << 16  # bytes; the worst JSON of this size takes 30 ms
LONG_LIST = 16_384  # token ids to decode
_PARSE_SECONDS, _PARSE_BYTES = 30.0, 4 << 30
MAX_LONG = 256  # that wait or are worked on; their bodies take memory
_SMALL_VALUES = 2048
_RETRY = [(b"retry-after", b"1")]
_NUM_LONG = 2  # long jobs at once
_R = TypeVar("_R")


class Texts:
    """The tokenizer, the templates and the JSON of one server."""

    def __init__(self, tokenizer: Tokenizer | NoTokenizer) -> None:
        """Nothing is started before `warm`, or before it is needed."""
        self._tokenizer = tokenizer
        self._sandbox = TextSandbox(tokenizer, module="octavo.serve.sandbox.text_child")
        self._short = ShortLane(self._sandbox)
        self._long = ThreadPoolExecutor(_NUM_LONG, "octavo-long-text")
        self._num_long = 0  # that wait or are worked on

    def warm(self) -> None:
        """Start a child for each lane, in the background: the first request shall not wait for it."""
        self._short.open()
        self._long.submit(self._start)

    async def parse(self, body: bytes, max_items: int) -> dict[str, Any]:
        """As strict_json.parse. Raises ApiError."""
        if len(body) <= LONG_BODY:
            return parse(body, max_items)
        job = Job(
            name="check_json",
            data=body,
            options={"max_items": max_items},
            seconds=_PARSE_SECONDS,
            memory_bytes=_PARSE_BYTES,
        )
        try:
            refusal = msgspec.msgpack.decode(await self._in_long(lambda: self._sandbox.ask(job)), type=Refusal)
        except SandboxError as error:
            raise bad_request("too_complex", f"the body takes more than {error.exceeded} to read") from None
        if refusal.code:
            raise bad_request(refusal.code, refusal.message, refusal.param)
        return msgspec.json.decode(body, type=dict[str, Any])  # known to be good: ten times as fast

    async def render_chat(
        self, messages: Any, limits: Limits, *, add_special_tokens: bool = False, **options: Any
    ) -> tuple[str, list[int]]:
        """A conversation's prompt as text and token ids. Raises ParameterError or ApiError.

        add_special_tokens: the tokenizer's own around it, beside what the template wrote; the text is without.
        """
        sandbox = self._sandbox
        if _is_small([messages, *options.values()]):
            job = render_job(sandbox.conversation(messages, **options))
            with telling_of_template(), _answering_without_a_child():
                rendered = (await self._short.ask(job)).decode()
        else:
            rendered = await self._in_long(lambda: sandbox.render(sandbox.conversation(messages, **options)))
        token_ids = await self.encode(rendered, guarded=True, add_special_tokens=add_special_tokens)
        return sandbox.plain(rendered, limits), token_ids

    async def encode(
        self, text: str, *, add_special_tokens: bool = False, guarded: bool = False, num_chars_before: int = 0
    ) -> list[int]:
        """Token ids of a text; see TextSandbox.encode. Raises ParameterError or ApiError."""
        if isinstance(self._tokenizer, NoTokenizer):
            return self._tokenizer.encode(text)
        encode = functools.partial(
            self._sandbox.encode,
            text,
            add_special_tokens=add_special_tokens,
            guarded=guarded,
            num_chars_before=num_chars_before,
        )
        if self._sandbox.is_quick(text, guarded=guarded, num_chars_before=num_chars_before):
            return encode()
        if num_chars_before + len(text) > LONG_TEXT:
            return await self._in_long(encode)
        job = encode_job(text, add_special_tokens=add_special_tokens, guarded=guarded)
        with telling_of_text("messages"), _answering_without_a_child():
            return ids_of(await self._short.ask(job))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises ApiError."""
        if len(token_ids) > LONG_LIST and isinstance(self._tokenizer, Tokenizer):
            return await self._in_long(lambda: self._sandbox.decode(token_ids, skip_special_tokens=skip_special_tokens))
        assert isinstance(self._tokenizer, Tokenizer), "who decodes has a tokenizer"
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """End the children and the lanes' threads."""
        self._short.close()
        self._sandbox.close()
        self._long.shutdown(wait=False, cancel_futures=True)

    async def _in_long(self, work: Callable[[], _R]) -> _R:
        """Work that waits for a child, on a thread. It is not begun for a client that has left. Raises SandboxError."""
        if self._num_long >= MAX_LONG:
            raise ApiError(503, "overloaded", f"{MAX_LONG} long texts wait already", headers=_RETRY)
        self._num_long += 1
        try:
            with _answering_without_a_child():
                return await asyncio.get_running_loop().run_in_executor(self._long, work)
        finally:
            self._num_long -= 1

    def _start(self) -> None:
        try:
            self._sandbox.start()
        except SandboxError as error:  # the first request that needs it tries again
            if str(error) != CLOSED:
                _LOG.error("%s", error)


@contextlib.contextmanager
def _answering_without_a_child() -> Iterator[None]:
    """Within, a job that no child could be had for is a 503."""
    try:
        yield
    except SandboxError as error:
        if error.exceeded:
            raise
        _LOG.error("%s", error)
        raise ApiError(503, "unavailable", "texts cannot be read at this moment", headers=_RETRY) from None


def _is_small(value: Any) -> bool:
    """Whether a JSON value is short, with all that it holds. The look itself ends where it is not."""
    num_values, num_chars, left = 0, 0, [value]
    while left and num_values + len(left) <= _SMALL_VALUES and num_chars <= LONG_TEXT:
        value = left.pop()
        num_values += 1
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, Mapping):
            left += value.values()
            num_values += len(value)
            num_chars += sum(map(len, itertools.islice(value, _SMALL_VALUES)))
        elif isinstance(value, list):
            left += value
    return not left and num_chars <= LONG_TEXT

"""Texts: what the server does with foreign text, off its event loop.

Owns two lanes to the text jail: one for what is short, so that nobody waits behind a stranger's megabytes, and one for
what is long; and the bounds that decide between them. Knows no route. Invariants: nothing that holds the interpreter's
lock for longer than some milliseconds is done in this process; after `close` no thread of the lanes waits.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import msgspec

from octavo.sampling_params import Limits
from octavo.serve.errors import ApiError, bad_request
from octavo.serve.strict_json import parse
from octavo.serve.text_child import Refusal
from octavo.text.jail import LONG_TEXT, JailError, TextJail
from octavo.text.jail_child import Job
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

LONG_BODY = 1 << 16  # bytes; the worst JSON of this size takes 30 ms
LONG_LIST = 16_384  # token ids to decode
_PARSE_SECONDS, _PARSE_BYTES = 30.0, 4 << 30
_SMALL_VALUES = 2048
_NUM_LONG = 2  # long jobs at once
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Texts:
    """The tokenizer, the templates and the JSON of one server."""

    def __init__(self, tokenizer: Tokenizer | NoTokenizer) -> None:
        """Nothing is started before `warm`, or before it is needed."""
        self._tokenizer = tokenizer
        self._jail = TextJail(tokenizer, module="octavo.serve.text_child")
        self._short = ThreadPoolExecutor(1, "octavo-text")
        self._long = ThreadPoolExecutor(_NUM_LONG, "octavo-long-text")

    def warm(self) -> None:
        """Start a child for each lane, in the background: the first request shall not wait for it."""
        for lane in (self._short, self._long):
            lane.submit(self._start)

    async def parse(self, body: bytes, max_items: int) -> dict[str, Any]:
        """As strict_json.parse. Raises ApiError."""
        if len(body) <= LONG_BODY:
            return parse(body, max_items)
        job = Job(
            name="check_json", data=body, options={"max_items": max_items}, seconds=_PARSE_SECONDS,
            memory_bytes=_PARSE_BYTES,
        )  # fmt: skip
        try:
            refusal = msgspec.msgpack.decode(await self._in(self._long, self._jail.ask, job), type=Refusal)
        except JailError as error:
            if not error.exceeded:
                raise
            raise bad_request("too_complex", f"the body takes more than {error.exceeded} to read") from None
        if refusal.code:
            raise bad_request(refusal.code, refusal.message, refusal.param)
        return msgspec.json.decode(body, type=dict[str, Any])  # known to be good: ten times as fast

    async def render_chat(self, messages: Any, limits: Limits, **options: Any) -> tuple[str, list[int]]:
        """A conversation's prompt as text and token ids. Raises ParameterError or ApiError."""
        jail = self._jail
        lane = self._short if _is_small([messages, *options.values()]) else self._long
        rendered = await self._in(lane, lambda: jail.render(jail.conversation(messages, **options)))
        return jail.plain(rendered, limits), await self.encode(rendered, guarded=True)

    async def encode(
        self, text: str, *, add_special_tokens: bool = False, guarded: bool = False, num_chars_before: int = 0
    ) -> list[int]:
        """Token ids of a text; see TextJail.encode. Raises ParameterError or ApiError."""
        if isinstance(self._tokenizer, NoTokenizer):
            return self._tokenizer.encode(text)
        encode = functools.partial(
            self._jail.encode, text, add_special_tokens=add_special_tokens, guarded=guarded,
            num_chars_before=num_chars_before,
        )  # fmt: skip
        if self._jail.is_quick(text, guarded=guarded, num_chars_before=num_chars_before):
            return encode()
        return await self._in(self._long if num_chars_before + len(text) > LONG_TEXT else self._short, encode)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises ApiError."""
        if len(token_ids) > LONG_LIST and isinstance(self._tokenizer, Tokenizer):
            job = functools.partial(self._jail.decode, skip_special_tokens=skip_special_tokens)
            return await self._in(self._long, job, token_ids)
        assert isinstance(self._tokenizer, Tokenizer), "who decodes has a tokenizer"
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """End the children and the lanes' threads."""
        self._jail.close()
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)

    async def _in(self, lane: ThreadPoolExecutor, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            call = functools.partial(work, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(lane, call)
        except JailError as error:
            if error.exceeded:
                raise
            _LOG.error("%s", error)
            headers = [(b"retry-after", b"1")]
            raise ApiError(503, "unavailable", "texts cannot be read at this moment", headers=headers) from None

    def _start(self) -> None:
        try:
            self._jail.start()
        except JailError as error:  # the first request that needs it tries again
            _LOG.error("%s", error)


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

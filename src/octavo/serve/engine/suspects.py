"""Which requests are suspected of ending the engine, by what they ask.

Owns the count of failures that each content was there at, and what follows: content that was running at two is not
served a third time, and a failure that requests explain is none of the machine's. Knows neither processes nor streams.
Invariants: content that was answered is suspected no more; what is refused is refused for a time, and said to be.
"""

from __future__ import annotations

import collections
import hashlib
import time

import msgspec

from octavo.frontend.request_metrics import RequestFacts
from octavo.request.sampling_params import ParameterError, SamplingParams

MAX_FAILURES = 2  # of the engine, at which the same content was running
MEMORY_SECONDS = 600.0
_MAX_SUSPECTS = 4096
_MAX_LEFT = 256  # requests that were given up last
_Content = tuple[list[int], SamplingParams]


class Suspects:
    """One server's. All of it is used on one event loop."""

    def __init__(self) -> None:
        """Nobody is suspected."""
        self._open: dict[str, _Content] = {}
        self._left: collections.deque[tuple[float, _Content]] = collections.deque(maxlen=_MAX_LEFT)
        self._failures: dict[bytes, list[float]] = {}  # content -> when it was there
        self._has_answered = False  # this engine process, anything

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise ParameterError for a request that is not to be served again."""
        if self._failures and self._count(_digest((prompt_token_ids, params))) >= MAX_FAILURES:
            message = f"the engine failed {MAX_FAILURES} times while it served this very request: it is refused for"
            raise ParameterError("prompt", f"{message} {MEMORY_SECONDS / 60:g} minutes", "refused_after_failures")

    def begin(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Take note of a request that the engine is given."""
        self._open[request_id] = prompt_token_ids, params

    def watch(self, event: str, facts: RequestFacts) -> None:
        """As AsyncEngine's observer."""
        if event not in ("finished", "aborted", "failed"):
            return
        content = self._open.pop(facts.request_id, None)
        if content is None:
            return
        if event == "finished":
            self._has_answered = True
            if self._failures:
                self._failures.pop(_digest(content), None)
        else:  # the engine may be stuck in it, though nobody waits for it any more
            self._left.append((time.monotonic(), content))

    def explain(self, seconds: float) -> bool:
        """The engine failed, `seconds` after its last step began. Whether requests, rather than the machine, did it.

        They did if the engine has answered others before, or if some of them were there at an earlier failure.
        """
        since = time.monotonic() - seconds - 1.0
        left = [content for at, content in self._left if at >= since]
        contents = {_digest(content) for content in [*self._open.values(), *left]}
        self._left.clear()
        explained = bool(contents) and (self._has_answered or any(self._count(content) for content in contents))
        for content in contents:
            self._failures.setdefault(content, []).append(time.monotonic())
        while len(self._failures) > _MAX_SUSPECTS:
            del self._failures[next(iter(self._failures))]
        self._has_answered = False
        return explained

    def _count(self, content: bytes) -> int:
        """Failures that are still remembered."""
        times = [at for at in self._failures.get(content, ()) if time.monotonic() - at < MEMORY_SECONDS]
        if times:
            self._failures[content] = times
        else:
            self._failures.pop(content, None)
        return len(times)


def _digest(content: _Content) -> bytes:
    """Of what a request asks: another seed, length or number of answers makes it no other."""
    prompt_token_ids, params = content
    bare = msgspec.structs.replace(params, seed=None, n=1, max_tokens=None)
    return hashlib.blake2b(msgspec.msgpack.encode((prompt_token_ids, bare)), digest_size=16).digest()

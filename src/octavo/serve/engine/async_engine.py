"""AsyncEngine: generation for many at once on one event loop, by an engine in a process of its own.

The asyncio face of a Frontend: owns the queue's bounds, the streams, and what they are told when the engine dies. Knows
neither text nor HTTP. Invariant: every stream ends, with a finished output or an exception; a stream that is closed
before that is aborted in the engine; a stream that nobody reads holds one merged output, not a queue of them.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.hub import find_model
from octavo.config.engine_config import EngineConfig, resolve_max_logprobs
from octavo.frontend.frontend import Frontend, Prompt
from octavo.frontend.messages import COUNTERS, EngineInfo, Updates
from octavo.frontend.request_metrics import RequestFacts
from octavo.kv_connector.table import check_early
from octavo.request.outputs import NOT_THE_MODELS, OUTPUT_FAILED
from octavo.request.sampling_params import Limits, SamplingParams
from octavo.request.updates import RequestUpdate, once_each
from octavo.serve.engine.client import EngineClient, Supervision
from octavo.serve.engine.control import AsyncControl
from octavo.serve.engine.leaving import Leaving
from octavo.serve.engine.model_files import ModelFiles
from octavo.serve.engine.refusals import EngineDeadError, EngineDrainingError, EngineLoadingError, QueueFullError
from octavo.serve.engine.stream import OutputStream, SlowReaderError, Stream
from octavo.serve.engine.suspects import Suspects
from octavo.serve.engine.validate_update import validate_update
from octavo.serve.engine.weights import AsyncWeightMethods
from octavo.startup.frontend import find_and_read, load_frontend, make_limits
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

READY_HEARTBEAT_SECONDS = 1.0  # an engine that was silent for longer is not ready
_SLICE = 64  # updates that are delivered before the loop looks after others
_PACE_WINDOW = 64  # finished requests from which the pace is told

# Called with what happened and the request's facts, which change later: "added", "first_token", "tokens" (later ones),
# "finished", "aborted" (by the client), "failed" (the engine died), "rejected" (the queue is full; never added).
Observer = Callable[[str, RequestFacts], None]


class AsyncEngine(AsyncWeightMethods):
    """Requests in, streams of outputs out. All methods are called on the event loop that ran `start`."""

    def __init__(
        self, config: EngineConfig, arch: Arch, *, max_num_queued_reqs: int, max_num_queued_tokens: int | None
    ) -> None:
        """Use `start`."""
        self.config, self.arch = config, arch
        self.model_name, self.folder = config.model, Path(config.model)  # the folder itself, once it was found
        self.default_sampling = SamplingParams()
        self.state = "loading"  # loading | ready | restarting | draining | dead
        self.error = ""  # why the engine is down, or was last
        self.exit_code = 0  # once dead: 2 for a setting or model that cannot be used, else 1
        self.info: EngineInfo | None = None  # of the engine, once it was ready
        self.max_num_queued_reqs, self.max_num_queued_tokens = max_num_queued_reqs, max_num_queued_tokens
        self._suspects = Suspects()
        self.observers: list[Observer] = [self._suspects.watch]
        self.control = AsyncControl(self.call, self._deliver_now, self.abort_all)
        self.leaving = Leaving(lambda answer: self._client.withdraw(answer))
        self._client: EngineClient
        self._frontend: Frontend  # of the engine process that is there
        self._streams: dict[str, Stream] = {}
        self._undelivered: collections.deque[RequestUpdate] = collections.deque()
        self._delivering = False  # the next slice is on its way
        self._num_unstarted_tokens = 0  # prompt tokens of requests without a first token
        self._changed = asyncio.Event()  # of `state` or of the last open stream; a new one each time
        self._finish_times: collections.deque[float] = collections.deque(maxlen=_PACE_WINDOW)
        self._past_counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)  # of engine processes that are gone
        self._closing = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] | None = None,
        supervision: Supervision | None = None,
        max_num_queued_reqs: int = 1024,
        max_num_queued_tokens: int | None = None,
    ) -> AsyncEngine:
        """Spawn the engine and load the front end's part; the engine may go on loading: see `wait_ready`.

        `command`: another engine child, as tests have. Raises ValueError, in one line, for a bad setting or
        model folder that shows here; what only the engine sees makes it `dead`.
        """
        check_early(config.kv_transfer_config)
        folder, arch = await asyncio.to_thread(find_and_read, config)
        engine = cls(config, arch, max_num_queued_reqs=max_num_queued_reqs, max_num_queued_tokens=max_num_queued_tokens)
        engine.folder = folder
        # the engine process reads the same folder, whatever a hub says by then
        found = dataclasses.replace(config, model=str(folder), revision=None)
        tokenizer = (
            [await asyncio.to_thread(find_model, config.tokenizer, None, config.download_dir)]
            if config.tokenizer
            else []
        )
        files = await asyncio.to_thread(ModelFiles, [folder, *tokenizer])
        client = EngineClient(found, engine, command=command, supervision=supervision, changes=files.changes)
        engine.connect(client, NoTokenizer())
        client.start()
        try:
            front = await asyncio.to_thread(load_frontend, config, folder, arch)
        except BaseException:
            await engine.close()
            raise
        engine.default_sampling = front.default_sampling
        engine.connect(client, front.tokenizer)
        return engine

    def connect(self, client: EngineClient, tokenizer: Tokenizer | NoTokenizer) -> None:
        """Whom requests go to, and whose text their answers have."""
        self._client, self.weights = client, client.weights
        self._begin_anew(tokenizer)

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> OutputStream:
        """Queue a request; its outputs come from the stream, of the kind that `params.output_kind` says.

        A failure of this request alone ends its stream with finish_reason "error" and the cause as stop_reason, e.g.
        "nan_logits". If the engine goes away, reading raises EngineDeadError.

        Raises:
            ParameterError: what the model's limits forbid, and what was there when the engine failed twice.
            QueueFullError: too many requests or tokens wait.
            EngineDeadError: the engine is loading, restarting, draining or dead.
            EngineHaltedError: its weights are gone, or it is paused and refuses.

        """
        self._refuse_if_down()
        self.weights.check()
        self.control.check_new()
        num_prompt = len(prompt_token_ids)
        checked = self._frontend.check(Prompt(prompt_token_ids, prompt, cache_salt), params, priority=priority)
        self._suspects.check(prompt_token_ids, checked.params)
        facts = RequestFacts(
            request_id=request_id,
            params=checked.params,
            num_prompt_tokens=num_prompt,
            max_tokens=checked.max_tokens,
            arrival=time.monotonic(),
        )
        self._admit(facts)
        stream = Stream(facts, self._frontend.queue(request_id, checked))
        self._streams[request_id] = stream
        self._suspects.begin(request_id, prompt_token_ids, checked.params)
        self._num_unstarted_tokens += num_prompt
        self._notify("added", facts)
        return OutputStream(stream, self._abandon)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their streams end with finish_reason "abort". Unknown ids are ignored."""
        for output in self._frontend.abort(request_ids):
            stream = self._streams[output.request_id]
            stream.put(output)
            self._forget(stream, "aborted")

    async def abort_all(self, prefix: str = "") -> list[str]:
        """End every request whose id begins so; their ids. Their streams end with finish_reason "abort"."""
        found = [request_id for request_id in self._streams if request_id.startswith(prefix)]
        await self.abort(found)
        return found

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix. False while blocks are held, unless those requests are to be computed again.

        reset_connector: what the connector keeps for this engine alone, too.
        """
        return await self.control.reset_prefix_cache(
            reset_running_requests=reset_running_requests, reset_connector=reset_connector
        )

    async def call(self, name: str, payload: bytes = b"") -> bytes:
        """Ask the core between two steps; see EngineCore.call.

        Raises EngineDeadError if the engine is down or goes away, ValueError for what the core cannot use, and
        CallWithdrawnError where nobody waits for it: see `leaving`.
        """
        self._refuse_if_down()
        return await self.leaving.answered(name, self._client.call(name, payload))

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Until requests are taken. Raises EngineDeadError with the reason if that will never be, or TimeoutError."""
        async with asyncio.timeout(timeout):
            while self.state != "ready":
                if self.state in ("dead", "draining"):
                    raise EngineDeadError(self.error or f"the server is {self.state}")
                await self._changed.wait()

    async def wait_dead(self) -> str:
        """Until the engine is down for good. Returns why."""
        while self.state != "dead":
            await self._changed.wait()
        return self.error

    async def drain(self, seconds: float) -> bool:
        """Take no more requests and let the open ones finish. What is left then fails with EngineDrainingError.

        Returns whether all of them finished.
        """
        if self.state != "dead":
            self._set_state("draining")
        try:
            async with asyncio.timeout(seconds):
                while self._streams:
                    await self._changed.wait()
        except TimeoutError:
            left = list(self._streams.values())
            self._frontend.drop(list(self._streams))
            for stream in left:
                stream.fail(EngineDrainingError("the server is stopping"))
                self._forget(stream, "failed")
            return False
        return True

    async def close(self) -> None:
        """Stop the engine. Open streams fail."""
        self._closing = True
        await self._client.close()
        self._set_state("dead")

    @property
    def ready(self) -> bool:
        """Whether requests are taken, and the engine was heard of within the last second."""
        is_heard = self.last_heartbeat_age <= READY_HEARTBEAT_SECONDS
        return self.state == "ready" and is_heard and self.weights.are_whole

    @property
    def last_heartbeat_age(self) -> float:
        """Seconds since the engine was heard of, or was started."""
        return time.monotonic() - self._client.last_heartbeat

    @property
    def step_age(self) -> float:
        """Seconds since the engine began its last step or had nothing to do, as far as its heartbeats told."""
        return self._client.step_age

    @property
    def tokenizer(self) -> Tokenizer | NoTokenizer:
        """What makes text of token ids, if anything does."""
        return self._frontend.tokenizer

    @property
    def limits(self) -> Limits:
        """What requests are checked against: the engine's own once it is known."""
        return self._frontend.limits

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def stats(self) -> dict[str, float]:
        """EngineStats by name, as of the last heartbeat; its counters go on over restarts. And what is known here."""
        known = msgspec.structs.asdict(self._client.stats)
        for name in COUNTERS:
            known[name] += self._past_counters[name]
        for backend, (num_bytes, seconds) in known.pop("weights_received_by").items():
            known[f"weight_bytes_by_{backend}"], known[f"weight_seconds_by_{backend}"] = num_bytes, seconds
        for place, count in enumerate(known.pop("accepted_per_position")):
            known[f"num_accepted_at_{place}"] = count
        del known["weights_version"], known["weights_lost_because"]
        known |= self.weights.figures()
        known["num_requests"] = len(self._streams)
        known["num_queued"] = self._num_queued
        known["num_queued_tokens"] = self._num_unstarted_tokens
        known["num_restarts"] = self._client.num_restarts
        known["paused"], known["sleep_level"] = self.control.last.paused, self.control.last.sleep_level
        known["last_heartbeat_age"] = self.last_heartbeat_age
        return known

    @property
    def weights_version(self) -> str:
        """The label of the weights, as of the last heartbeat; empty before the first."""
        return self._client.stats.weights_version

    # What the client tells.

    def engine_up(self, info: EngineInfo) -> None:
        """Requests may come."""
        self.info = info
        self.control.forget()
        self._begin_anew(self.tokenizer)
        if self.state != "draining":
            self._set_state("ready")

    def engine_updates(self, message: Updates) -> None:
        """Bring one step's results to their streams, a slice at a time: a large step must not hold up the loop."""
        self._undelivered.extend(message.updates)
        if not self._delivering:
            self._deliver_slice()

    def _deliver_slice(self) -> None:
        waiting = self._undelivered
        updates = [waiting.popleft() for _ in range(min(len(waiting), _SLICE))]
        self._delivering = bool(waiting)
        if waiting:
            asyncio.get_running_loop().call_soon(self._deliver_slice)
        self._deliver_all(updates)

    def _deliver_now(self) -> None:
        """All that has come."""
        news = list(self._undelivered)
        self._undelivered.clear()
        self._deliver_all(news)

    def _deliver_all(self, news: list[RequestUpdate]) -> None:
        """To each stream its part. What is wrong with one request is no other's trouble."""
        now = time.monotonic()
        by_stream: dict[Stream, list[RequestUpdate]] = {}
        streams, frontend, limits = self._streams, self._frontend, self._frontend.limits
        for update in news:
            stream = streams.get(frontend.request_of(update.request_id) or "")
            if stream is None:  # aborted meanwhile
                continue
            if not validate_update(update, limits, stream.facts.params):
                _LOG.error("request %s: the engine's result is not sound", stream.facts.request_id)
                self._client.abort([update.request_id])
                update = RequestUpdate(update.request_id, finish_reason="error", error="internal_model_error")
            by_stream.setdefault(stream, []).append(update)
        for stream, updates in by_stream.items():
            try:
                self._deliver(stream, updates, now)
            except Exception:
                _LOG.exception("request %s failed", stream.facts.request_id)
                self._give_up(stream, RuntimeError("the output could not be processed"))

    def explains_failure(self) -> bool:
        """Whether the open requests, rather than the machine, are why the engine failed."""
        return self._suspects.explain(self.step_age)

    def engine_down(self, reason: str, *, final: bool, is_users: bool) -> None:
        """Tell every stream."""
        self.error = reason
        self._deliver_now()
        for name in COUNTERS:
            self._past_counters[name] += getattr(self._client.stats, name)
        streams = list(self._streams.values())
        for stream in streams:
            stream.fail(self.weights.failure(reason, final=final))
        self._begin_anew(self.tokenizer)
        for stream in streams:
            self._forget(stream, "failed")
        if final:
            self.exit_code = 0 if self._closing else 2 if is_users else 1
            self._set_state("dead")
        elif self.state != "draining":
            self._set_state("loading" if self.info is None else "restarting")

    def _begin_anew(self, tokenizer: Tokenizer | NoTokenizer) -> None:
        """Without requests; the limits are the engine's own if it is known."""
        config, arch, info = self.config, self.arch, self.info
        logprobs = resolve_max_logprobs(config, arch)
        length = (
            config.max_model_len if config.max_model_len not in (None, -1) else arch.default_length or arch.max_position
        )
        assert length is not None, "a length that is not resolved is the checkpoint's"
        limits = make_limits(
            tokenizer,
            vocab_size=info.vocab_size if info else arch.vocab_size,
            max_model_len=info.max_model_len if info else length,
            max_logprobs=info.max_logprobs if info else logprobs,
            config=config,
            request_fields=info.request_fields if info else (),
            experts=info.experts if info else (0, 0),
        )
        self._frontend = Frontend(self._client, tokenizer, limits)

    def _refuse_if_down(self) -> None:
        if self.state == "ready":
            return
        if self.state == "loading":
            raise EngineLoadingError("the model is being loaded")
        if self.state == "draining":
            raise EngineDrainingError("the server is stopping")
        raise EngineDeadError(f"the engine is {self.state}: {self.error}")

    @property
    def _num_queued(self) -> int:
        """Sequences beyond those that can run at once."""
        return max(self._frontend.num_sequences - (self.info.max_num_seqs if self.info else 0), 0)

    def _admit(self, facts: RequestFacts) -> None:
        """Raise QueueFullError if the request would have to wait behind too much."""
        most, most_tokens = self.max_num_queued_reqs, self.max_num_queued_tokens
        num_running = self.info.max_num_seqs if self.info else 0
        num_open = self._frontend.num_sequences
        if num_open + facts.params.n > num_running + most and num_open:
            self._reject(facts, "requests", most)
        num_tokens = self._num_unstarted_tokens + facts.num_prompt_tokens
        if most_tokens is not None and num_tokens > most_tokens and self._num_unstarted_tokens:
            self._reject(facts, "tokens", most_tokens)

    def _reject(self, facts: RequestFacts, reason: str, limit: int) -> NoReturn:
        facts.finish_reasons = {0: reason}
        self._notify("rejected", facts)
        times = self._finish_times
        pace = len(times) / max(time.monotonic() - times[0], 1e-3) if times else 1.0  # requests per second
        raise QueueFullError(reason, limit, float(min(max(math.ceil(self._num_queued / 4 / pace), 1), 60)))

    def _deliver(self, stream: Stream, updates: list[RequestUpdate], now: float) -> None:
        """The updates of one request in one step."""
        facts, num_before = stream.facts, self._frontend.num_tokens
        for update in updates:
            if update.num_cached > facts.num_cached_tokens and update.request_id == stream.sequence_ids[0]:
                facts.num_cached_tokens, facts.num_loaded_tokens = update.num_cached, update.num_loaded
            if update.queue_time is not None and facts.queue_seconds is None:
                facts.queue_seconds = update.queue_time
        outputs = [output for part in once_each(updates) for output in self._frontend.take(part)]
        num_new = self._frontend.num_tokens - num_before  # what a step brought behind a stop string is not told
        if num_new:
            facts.num_new_tokens = num_new
            facts.num_output_tokens += num_new
            facts.previous_token_at, facts.last_token_at = facts.last_token_at, now
            if facts.first_token_at is None:
                facts.first_token_at = now
                self._num_unstarted_tokens -= facts.num_prompt_tokens
                self._notify("first_token", facts)
            else:
                self._notify("tokens", facts)
        for output in outputs:
            if output.finished and any(o.stop_reason == OUTPUT_FAILED for o in output.outputs):
                self._give_up(stream, RuntimeError("the output could not be processed"))
                return
            facts.finish_reasons |= {o.index: o.finish_reason for o in output.outputs if o.finish_reason is not None}
            facts.is_corrupted |= any(
                o.finish_reason == "error" and o.stop_reason not in NOT_THE_MODELS for o in output.outputs
            )
            if not stream.put(output):
                self._give_up(stream, SlowReaderError("the stream was not read for too long"))
            elif output.finished:
                self._finish_times.append(now)
                self._forget(stream, "finished")

    def _give_up(self, stream: Stream, error: Exception) -> None:
        """End a stream with an exception, and its request in the engine."""
        self._frontend.drop([stream.facts.request_id])
        stream.fail(error)
        self._forget(stream, "failed")

    def _abandon(self, request_id: str) -> None:
        """The reader has left."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.ended:
            stream.ended = True
            self._frontend.drop([request_id])
            self._forget(stream, "aborted")

    def _forget(self, stream: Stream, event: str) -> None:
        """The last word on a request."""
        facts = stream.facts
        if self._streams.pop(facts.request_id, None) is None:
            return
        if facts.first_token_at is None:
            self._num_unstarted_tokens -= facts.num_prompt_tokens
        facts.finished_at = time.monotonic()
        self._notify(event, facts)
        if not self._streams:
            self._announce()

    def _set_state(self, state: str) -> None:
        if self.state != "dead":
            self.state = state
            self._announce()

    def _announce(self) -> None:
        """Wake whoever waits for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _notify(self, event: str, facts: RequestFacts) -> None:
        for observer in self.observers:
            try:
                observer(event, facts)
            except Exception:  # who looks on must not disturb
                _LOG.exception("an observer failed")

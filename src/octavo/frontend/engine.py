"""Engine: a frontend around a core in this process, stepped by its caller.

Owns the start and the end of both, and the last outputs of aborted requests until the next step gives them. For one
thread at a time: `octavo.frontend.sharing.SharedEngine` is for several.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.engine import StepTimes
from octavo.frontend.control import Standing, read_standing
from octavo.frontend.frontend import Checked, Frontend, Prompt
from octavo.frontend.in_process import InProcessClient
from octavo.frontend.messages import EngineStats
from octavo.observe import Phases
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import SamplingParams
from octavo.speculate import NO_SPECULATOR, Speculator
from octavo.startup import warm_start
from octavo.startup.frontend import make_limits

if TYPE_CHECKING:
    from octavo.sched.scheduler import Scheduler


class Engine:
    """Prompts are checked on their way in, outputs come out as text."""

    def __init__(
        self, config: EngineConfig, phases: Phases | None = None, *, speculator: Speculator = NO_SPECULATOR
    ) -> None:
        """Load everything. Raises ValueError, in one line, for a bad setting or model folder.

        speculator: who proposes drafts.
        """
        self.core, facts, text = warm_start.start(config, phases or Phases(), speculator=speculator)
        self.resolved, self.arch, self.memory = facts.resolved, text.arch, facts.memory
        self.tokenizer, self.default_sampling = text.tokenizer, text.default_sampling
        self.limits = make_limits(
            text.tokenizer,
            vocab_size=facts.vocab_size,
            max_model_len=facts.resolved.max_model_len,
            max_logprobs=facts.resolved.max_logprobs,
            config=config,
            request_fields=facts.request_fields,
            experts=facts.resolved.kept_experts,
        )
        self._numerics_contract = functools.cache(facts.numerics_contract)
        self._client, self._grammars = InProcessClient(self.core), text.grammars
        self.frontend = Frontend(
            self._client, text.tokenizer, self.limits, check_form=text.grammars.check, coalesces=True
        )
        self._aborted: list[RequestOutput] = []  # last outputs of aborted requests, for the next step

    @property
    def numerics_contract(self) -> dict[str, str]:
        """What its results' bits depend on beside the model and the request, as `octavo.startup.probe` reads it."""
        return self._numerics_contract()

    @property
    def scheduler(self) -> Scheduler:
        """The core's scheduler, for its figures."""
        return self.core.scheduler

    @property
    def stats(self) -> EngineStats:
        """The core's figures of this moment, for any thread."""
        return self._client.stats

    @property
    def times(self) -> StepTimes:
        """Where the host's time went."""
        return self.core.times

    def check(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> Checked:
        """What `queue` takes. Raises ParameterError for what the model's limits forbid."""
        checked = self.frontend.check(prompt, params, priority=priority)
        if checked.params.thinking is not None:
            self._grammars.prepare(checked.params.thinking)
        return checked

    def queue(self, request_id: str, request: Checked) -> None:
        """Queue a request that `check` let through. Raises ParameterError if its id is in use."""
        self.frontend.queue(request_id, request)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Check and queue a request. Raises ParameterError; then nothing was queued."""
        ready = Prompt(prompt_token_ids, prompt, cache_salt)
        self.queue(request_id, self.check(ready, params.clone(), priority=priority))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; the next step gives their last outputs. Unknown ids are ignored."""
        self._aborted += self.frontend.abort(request_ids)

    def ask(self, name: str, order: object = None) -> Standing:
        """Ask the core for a move of `octavo.sched.pause`. Raises WrongStateError where it is refused."""
        payload = b"" if order is None else msgspec.msgpack.encode(order)
        return read_standing(self._client.call(name, payload).result())

    def settle(self, *, abort: bool) -> None:
        """Once the core is stopped: take what its last steps gave. abort: end every request with what it has."""
        self._aborted += self.frontend.take(self.core.step())
        if abort:
            self._aborted += self.frontend.abort(self.frontend.request_ids)

    def call(self, name: str, payload: bytes = b"") -> bytes:
        """Ask the core between two steps; see EngineCore.call. Raises ValueError for what it cannot use."""
        return self.core.call(name, payload)

    def begin_call(self, name: str, payload: bytes = b"") -> Future[bytes]:
        """As `call`, without waiting for a trainer; see EngineCore.begin_call."""
        return self._client.call(name, payload)

    @property
    def has_unfinished(self) -> bool:
        """Whether a `step` has anything to do. A failed engine has not."""
        return self.core.has_unfinished or (bool(self._aborted) and not self.core.has_failed)

    def step(self) -> list[RequestOutput]:
        """One step of the core, told in text."""
        outputs, self._aborted = self._aborted, []
        updates = self.core.step()
        started = time.perf_counter()
        outputs += self.frontend.take(updates)
        self.times.output += time.perf_counter() - started
        return outputs

    def capture_rest(self) -> None:
        """Capture now what the start has left: a step's graph, else, when one of its size is first asked for."""
        while self.core.capture_next():
            pass

    def run_until_idle(self) -> None:
        """Step until nothing is left, dropping the outputs. For clean-up after aborts."""
        while self.has_unfinished:
            self.step()

    def close(self) -> None:
        """Wait for issued steps and release the worker, its memory too. The engine cannot be used afterwards."""
        self.core.close()
        if self.resolved.device != "cpu":
            gc.collect()  # the next engine is sized by what is free then

"""AsyncLLMEngine: Octavo's engine in a process of its own, with the methods that trainers call on vLLM's.

Owns the start, which its first use waits for, and vLLM's words for moves and outputs. Invariant: what is called by name
is looked up in the server's own table of such methods, and nothing else can be reached.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import ParameterError, SamplingParams
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.routes.weights import METHODS, Rpc
from vllm.arguments import EngineArgs


class AsyncLLMEngine:
    """One engine."""

    def __init__(self, args: EngineArgs) -> None:
        """It starts when it is first used."""
        self._config = args.config()
        self._starting: asyncio.Task[AsyncEngine] | None = None
        self.output_processor = types.SimpleNamespace(get_num_unfinished_requests=self._num_requests)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> AsyncLLMEngine:
        """Raises ValueError, in one line."""
        return cls(engine_args)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come. options: `priority` and `cache_salt`; others must be left out."""
        engine = await self._engine()
        given = {name: value for name, value in options.items() if value is not None}
        unknown = given.keys() - {"priority", "cache_salt"}
        if unknown:
            raise ParameterError(sorted(unknown)[0], "is not supported")
        ids, text = _read(prompt, engine)
        stream = engine.generate(request_id, ids, sampling_params, prompt=text, **given)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests."""
        await (await self._engine()).abort([request_id] if isinstance(request_id, str) else request_id)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """A method that a server knows by name too. Raises ParameterError for another one."""
        if method not in METHODS:
            raise ParameterError("method", f"known are {', '.join(METHODS)}")
        state: Any = types.SimpleNamespace(engine=await self._engine())
        plain = {name: _plain(value) for name, value in (kwargs or {}).items()}
        return [await METHODS[method][1](state, Rpc(method=method, args=[_plain(each) for each in args], kwargs=plain))]

    async def pause_generation(
        self,
        mode: str = "abort",
        *,
        clear_cache: bool | None = None,
        wait_for_inflight_requests: bool | None = None,
    ) -> None:
        """See octavo.LLM. wait_for_inflight_requests: an older word for two of the modes."""
        if wait_for_inflight_requests is not None:
            mode = "wait" if wait_for_inflight_requests else "abort"
        await (await self._engine()).control.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """See octavo.LLM."""
        await (await self._engine()).control.resume()

    async def is_paused(self) -> bool:
        """See octavo.LLM."""
        return (await (await self._engine()).control.standing()).paused

    async def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> None:
        """See octavo.LLM."""
        await (await self._engine()).control.sleep(level, mode, tags)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """See octavo.LLM."""
        return await (await self._engine()).control.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """See octavo.LLM."""
        return bool((await (await self._engine()).control.standing()).asleep)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See octavo.LLM."""
        engine = await self._engine()
        return await engine.reset_prefix_cache(
            reset_running_requests=reset_running_requests, reset_connector=reset_connector
        )

    async def check_health(self) -> None:
        """Raises EngineDeadError unless it answers."""
        await (await self._engine()).control.standing()

    async def aclose(self) -> None:
        """End the engine's process."""
        if self._starting is not None:
            await (await self._starting).close()

    async def _engine(self) -> AsyncEngine:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> AsyncEngine:
        engine = await AsyncEngine.start(self._config)
        await engine.wait_ready()
        return engine

    def _num_requests(self) -> int:
        started = self._starting is not None and self._starting.done() and not self._starting.exception()
        return self._starting.result().num_requests if started and self._starting is not None else 0


def _read(prompt: Any, engine: AsyncEngine) -> tuple[list[int], str | None]:
    """(ids, text) of a prompt. Raises ParameterError."""
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data"):
            raise ParameterError("multi_modal_data", "this model takes tokens alone")
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt), prompt
    return list(prompt), None


def _plain(value: Any) -> Any:
    """A dtype by its name, a shape as a list."""
    if type(value).__name__ == "dtype":
        return str(value)
    return list(value) if isinstance(value, tuple) else value

"""The routes that stop and wake the engine for a trainer, under vLLM's and SGLang's names.

Pause, abort, sleep, the cache. Owns what each takes and answers; the moves are `octavo.serve.engine.control`'s.
Invariants: all of it is for administrators; a move that the engine's state forbids is 409 with that state; what a route
takes may stand in its query or its body, and a field that it does not know is named in `warnings`, or refused by
`strict`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from octavo.config.quoted import quoted
from octavo.frontend.control import A_LEVEL, A_MODE, SOME_TAGS, WrongStateError
from octavo.sched.pause import BLOCKS_HELD
from octavo.serve.engine.control import NEW
from octavo.serve.engine.refusals import EngineDeadError
from octavo.serve.errors import ApiError, bad_request, not_ready
from octavo.serve.http.exchange import Exchange
from octavo.serve.state import ServeState

_MISSING = re.compile(r"missing required field (\w+)")
_PLACE = re.compile(r"(update|init)_info(\.\w+)*")  # of an update's message, by which a refusal begins
_MAX_IDS = 4096  # requests that one abort names
_T = TypeVar("_T", bound=msgspec.Struct)
# SGLang's words for what becomes of requests at a pause.
_SGLANG_MODES = {"abort": ("abort", False), "retract": ("keep", True), "in_place": ("keep", False)}


# What a description says is what a refusal tells of: "must be <description>".
_Mode = Annotated[str, msgspec.Meta(description=A_MODE)]
_Tags = Annotated[list[str] | None, msgspec.Meta(description=SOME_TAGS)]


class Pause(msgspec.Struct, kw_only=True):
    """POST /pause."""

    mode: _Mode = "abort"
    clear_cache: bool | None = None
    new: str = "queue"  # what becomes of requests that come meanwhile
    wait_for_inflight_requests: bool | None = None  # an older word for two of the modes


class Abort(msgspec.Struct, kw_only=True):
    """POST /abort_requests."""

    request_ids: list[str] | None = None


class SglangAbort(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class SglangPause(msgspec.Struct, kw_only=True):
    """POST /pause_generation."""

    mode: str = "abort"


class Sleep(msgspec.Struct, kw_only=True):
    """POST /sleep."""

    level: Annotated[int, msgspec.Meta(description=A_LEVEL)] = 1
    mode: _Mode = "abort"
    tags: _Tags = None


class Tags(msgspec.Struct, kw_only=True):
    """Which memory. None: all."""

    tags: _Tags = None


class Reset(msgspec.Struct, kw_only=True):
    """POST /reset_prefix_cache."""

    reset_running_requests: bool = False
    reset_external: bool = False
    reset_connector: bool = False


class Nothing(msgspec.Struct):
    """No field."""


async def read_options(
    state: ServeState, exchange: Exchange, kind: type[_T], ignored: frozenset[str] = frozenset()
) -> tuple[_T, list[str]]:
    """The query and the body as `kind`, and what is to be said of the rest. ignored: fields that change nothing."""
    given: dict[str, Any] = {}
    known = kind.__struct_fields__
    for name, values in exchange.query().items():
        is_list = name == "tags" or name == "request_ids"
        given[name] = values if is_list else values[-1]
    if exchange.has_body:
        given |= {name: value for name, value in (await exchange.json()).items() if value is not None}
    others = [name for name in given if name not in known and name not in ignored]
    shown = [name[:64] if name[:64].isidentifier() else "a field" for name in others]
    if others and state.config.strict:
        raise bad_request("unknown_field", f"{shown[0]}: unknown field", shown[0])
    try:
        made = msgspec.convert({name: given[name] for name in given if name in known}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise unreadable(error, given, kind) from None
    return made, [f"{name}: unknown field, ignored" for name in shown[:16]]


def unreadable(error: msgspec.ValidationError, given: Mapping[str, Any], kind: type[msgspec.Struct]) -> ApiError:
    """What cannot be read as `kind`: the field, its value, and what may stand there."""
    text = str(error).replace("`", "")
    if missing := _MISSING.search(text):
        return bad_request("missing_field", f"{missing[1]}: is missing", missing[1])
    said, _, place = text.partition(" - at $")
    wanted, _, found = said.removeprefix("Expected ").partition(", got ")
    name = place.lstrip(".").partition(".")[0].partition("[")[0]
    described = next((own.type for own in msgspec.structs.fields(kind) if own.name == name), None)
    if place == f".{name}":
        metas = getattr(described, "__metadata__", ())
        wanted = next((meta.description for meta in metas if meta.description), None) or wanted.removesuffix(" | null")
        found = quoted(given[name], 64)
    return bad_request(
        "invalid_type", f"{place.lstrip('.')}: must be {wanted.replace(' | ', ' or ')}, got {found}", name
    )


@contextlib.contextmanager
def moving(state: ServeState) -> Iterator[None]:
    """What the engine may say of a move, as ApiErrors."""
    state.check_ready()
    try:
        yield
    except WrongStateError as error:
        raise ApiError(409, "wrong_state", str(error)) from None
    except EngineDeadError as error:
        raise not_ready(state.engine.state, error.retry_after) from None
    except ValueError as error:
        if hasattr(error, "field"):  # a ParameterError names its own
            raise
        place = _PLACE.match(str(error))
        raise bad_request("invalid_value", str(error), place and place[0]) from None


def told(answer: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """An answer, with its warnings if there are any."""
    return {**answer, "warnings": warnings} if warnings else answer


async def pause(state: ServeState, exchange: Exchange) -> None:
    """POST /pause: stop generating; answered once no step runs."""
    options, warnings = await read_options(state, exchange, Pause)
    mode = options.mode
    if options.wait_for_inflight_requests is not None:
        mode = "wait" if options.wait_for_inflight_requests else "abort"
    if options.new not in NEW:
        raise bad_request("invalid_value", f"new: must be one of {', '.join(NEW)}", "new")
    with moving(state):
        await state.engine.control.pause(mode, clear_cache=options.clear_cache, new=options.new)
    await exchange.reply_json(told({"status": "paused"}, warnings))


async def resume(state: ServeState, exchange: Exchange) -> None:
    """POST /resume: go on, if generation is paused."""
    _, warnings = await read_options(state, exchange, Nothing)
    with moving(state):
        await state.engine.control.resume()
    await exchange.reply_json(told({"status": "resumed"}, warnings))


async def is_paused(state: ServeState, exchange: Exchange) -> None:
    """GET /is_paused."""
    with moving(state):
        standing = await state.engine.control.standing()
    await exchange.reply_json({"is_paused": standing.paused})


async def pause_generation(state: ServeState, exchange: Exchange) -> None:
    """POST /pause_generation, SGLang's: in_place keeps requests and cache, retract computes what is kept again."""
    options, warnings = await read_options(state, exchange, SglangPause)
    if options.mode not in _SGLANG_MODES:
        raise bad_request("invalid_value", f"mode: must be one of {', '.join(_SGLANG_MODES)}", "mode")
    mode, recompute = _SGLANG_MODES[options.mode]
    with moving(state):
        await state.engine.control.pause(mode, clear_cache=recompute)
    await exchange.reply_json(told({"status": "ok", "message": "Generation paused successfully."}, warnings))


async def continue_generation(state: ServeState, exchange: Exchange) -> None:
    """POST /continue_generation, SGLang's."""
    _, warnings = await read_options(state, exchange, Nothing, frozenset({"torch_empty_cache"}))
    with moving(state):
        await state.engine.control.resume()
    await exchange.reply_json(told({"status": "ok", "message": "Generation continued successfully."}, warnings))


async def abort_requests(state: ServeState, exchange: Exchange) -> None:
    """POST /abort_requests: end requests by the beginning of their ids, all for no ids; they give what they have."""
    options, warnings = await read_options(state, exchange, Abort)
    if options.request_ids is not None and len(options.request_ids) > _MAX_IDS:
        raise bad_request("too_many", f"request_ids: may hold at most {_MAX_IDS} ids", "request_ids")
    state.check_ready()
    aborted = await state.abort_runs(options.request_ids or None)
    await exchange.reply_json(told({"status": "aborted", "aborted": aborted}, warnings))


async def abort_request(state: ServeState, exchange: Exchange) -> None:
    """POST /abort_request, SGLang's."""
    options, warnings = await read_options(state, exchange, SglangAbort, frozenset({"abort_message"}))
    if not options.rid and not options.abort_all:
        raise bad_request("missing_field", "rid: is missing; or set abort_all", "rid")
    state.check_ready()
    aborted = await state.abort_runs(None if options.abort_all else [options.rid])
    await exchange.reply_json(told({"aborted": aborted}, warnings))


async def sleep(state: ServeState, exchange: Exchange) -> None:
    """POST /sleep: give memory back until /wake_up."""
    options, warnings = await read_options(state, exchange, Sleep)
    await _sleep(state, options.level, options.mode, options.tags)
    await exchange.reply_json(told({"status": "asleep", "level": options.level}, warnings))


async def wake_up(state: ServeState, exchange: Exchange) -> None:
    """POST /wake_up: take memory again."""
    options, warnings = await read_options(state, exchange, Tags)
    is_awake = await _wake(state, options.tags)
    await exchange.reply_json(told({"status": "awake" if is_awake else "asleep"}, warnings))


async def is_sleeping(state: ServeState, exchange: Exchange) -> None:
    """GET /is_sleeping."""
    with moving(state):
        standing = await state.engine.control.standing()
    await exchange.reply_json({"is_sleeping": bool(standing.asleep)})


async def release_kv_cache_memory(state: ServeState, exchange: Exchange) -> None:
    """POST /release_kv_cache_memory: what sleep level 1 does, of the cache alone."""
    _, warnings = await read_options(state, exchange, Nothing)
    await _sleep(state, 1, "keep", ["kv_cache"])
    await exchange.reply_json(told({"status": "asleep", "level": 1}, warnings))


async def release_memory_occupation(state: ServeState, exchange: Exchange) -> None:
    """POST /release_memory_occupation, SGLang's: with "weights" among the tags, or none given, their values go."""
    options, warnings = await read_options(state, exchange, Tags)
    tags = _memory_tags(options.tags)
    await _sleep(state, 2 if "weights" in tags else 1, "abort", tags)
    await exchange.reply_json(told({"success": True}, warnings))


async def resume_memory_occupation(state: ServeState, exchange: Exchange) -> None:
    """POST /resume_memory_occupation, SGLang's."""
    options, warnings = await read_options(state, exchange, Tags)
    await _wake(state, None if options.tags is None else _memory_tags(options.tags))
    await exchange.reply_json(told({"success": True}, warnings))


async def reset_prefix_cache(state: ServeState, exchange: Exchange) -> None:
    """POST /reset_prefix_cache: forget every cached prefix; while requests run only if these are computed again."""
    options, warnings = await read_options(state, exchange, Reset)
    with moving(state):
        done = await state.engine.reset_prefix_cache(
            reset_running_requests=options.reset_running_requests,
            reset_connector=options.reset_external or options.reset_connector,
        )
    if not done:
        if options.reset_running_requests or _is_held(state):
            raise ApiError(409, "busy", BLOCKS_HELD)
        hint = "the prefix cache cannot be reset while requests run: set reset_running_requests, or wait"
        raise ApiError(409, "busy", hint)
    await exchange.reply_json(told({"success": True}, warnings))


async def flush_cache(state: ServeState, exchange: Exchange) -> None:
    """GET or POST /flush_cache, SGLang's: 400 while requests run."""
    await read_options(state, exchange, Nothing, frozenset({"timeout"}))
    with moving(state):
        done = await state.engine.reset_prefix_cache()
    if not done:
        why = BLOCKS_HELD if _is_held(state) else "requests run or wait"
        raise bad_request("busy", f"the cache was not flushed: {why}")
    await exchange.reply(200, b"Cache flushed.\n", b"text/plain; charset=utf-8")


def _is_held(state: ServeState) -> bool:
    """Whether it is no request that holds blocks, as the last answer of the engine says."""
    return not state.engine.control.last.num_unfinished


def _memory_tags(tags: list[str] | None) -> list[str]:
    known = ("kv_cache", "weights", "cuda_graph")
    for tag in tags or ():
        if tag not in known:
            raise bad_request("invalid_value", f"tags: must be among {', '.join(known)}", "tags")
    return [tag for tag in tags or known if tag != "cuda_graph"]  # graphs keep no memory of their own


async def _sleep(state: ServeState, level: int, mode: str, tags: list[str] | None = None) -> None:
    with moving(state), state.metrics.sleeping("sleep"):
        await state.engine.control.sleep(level, mode, tags)


async def _wake(state: ServeState, tags: list[str] | None) -> bool:
    with moving(state), state.metrics.sleeping("wake_up"):
        return await state.engine.control.wake_up(tags)

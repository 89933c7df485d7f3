"""The routes that give a running engine new weights, under vLLM's and SGLang's names.

Owns what each takes and answers; the update itself is AsyncEngine's. Invariants: all of it is for administrators, since
it lets the engine connect to an address and read files; nothing that comes is unpickled; without SGLang's begin and end
one call is one update, whole or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.rl.session import WeightConflictError, WeightTransferError, check_version
from octavo.serve.engine.refusals import EngineDeadError
from octavo.serve.errors import ApiError, bad_request
from octavo.serve.http.exchange import Exchange
from octavo.serve.routes.control import Nothing, moving, read_options, told, unreadable
from octavo.serve.state import ServeState

_FLUSHES = frozenset({"flush_cache", "abort_all_requests", "token_step", "torch_empty_cache", "keep_pause", "is_async"})
# SGLang's load_format -> how its clients send: tensor by tensor, or all of a call as one.
_BUFFERS: dict[str | None, dict[str, Any]] = {
    None: {"packed": False},
    "flattened_bucket": {"packed": True, "packed_buffer_size_bytes": 1 << 62},
}
_GROUP = {"packed", "packed_buffer_size_bytes"}  # of both messages
_INIT_INFO = frozenset({"master_address", "master_port", "rank_offset", "world_size", "group_name", *_GROUP})
_UPDATE_INFO = frozenset({"names", "dtype_names", "shapes", "group", "path", "shm_name", "ipc_handle", *_GROUP})
_PICKLED = "carries pickled tensors, and nothing is unpickled here: send weights by gloo, nccl, ipc handles or a folder"


class Init(msgspec.Struct, kw_only=True):
    """POST /init_weight_transfer_engine."""

    init_info: dict[str, Any] = {}
    backend: str | None = None


class Start(msgspec.Struct, kw_only=True):
    """POST /start_weight_update."""

    partial: bool = False
    on_running: str = "recompute"
    is_checkpoint_format: bool = True


class Ending(msgspec.Struct, kw_only=True):
    """How an update is finished."""

    weight_version: str | None = None
    on_running: str | None = None


class Update(msgspec.Struct, kw_only=True):
    """POST /update_weights."""

    update_info: dict[str, Any] | list[dict[str, Any]] = {}  # a list: one for each worker
    session: str | None = None  # the name that the start gave; of an update that begins here, the name that it gets
    start: Start | None = None  # it begins with these tensors: no /start_weight_update went before
    finish: Ending | None = None  # it ends with them: no /finish_weight_update follows


class Finish(Ending, kw_only=True):
    """POST /finish_weight_update."""

    session: str | None = None


class Session(msgspec.Struct, kw_only=True):
    """POST /abort_weight_update."""

    session: str | None = None


class Version(msgspec.Struct, kw_only=True):
    """POST /update_weight_version."""

    new_version: str = ""
    abort_all_requests: bool = False


class SglangGroup(msgspec.Struct, kw_only=True):
    """POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class FromDistributed(msgspec.Struct, kw_only=True):
    """POST /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = ""  # there is one group
    weight_version: str | None = None
    load_format: str | None = None


class FromDisk(msgspec.Struct, kw_only=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    load_format: str | None = None


@contextlib.asynccontextmanager
async def updating(state: ServeState, operation: str) -> AsyncIterator[None]:
    """What may go wrong with an update, as ApiErrors; and how long it took, for the figures, as one of OPERATIONS."""
    with moving(state):
        try:
            with state.metrics.updating(operation):
                yield
        except WeightConflictError as error:
            raise ApiError(409, "weight_update_conflict", str(error)) from None
        except WeightTransferError as error:
            raise ApiError(504, "weight_transfer_failed", str(error)) from None
        except BaseException:  # no answer, which would have told how the engine stands
            with contextlib.suppress(EngineDeadError):
                await state.engine.control.standing()
            raise


async def init(state: ServeState, exchange: Exchange) -> None:
    """POST /init_weight_transfer_engine: meet the sender; answered when all are there."""
    options, warnings = await read_options(state, exchange, Init)
    warnings += _unknown(state, options.init_info, "init_info", _INIT_INFO)
    request = {"init_info": options.init_info, **({"backend": options.backend} if options.backend else {})}
    async with updating(state, "init"):
        met = await state.engine.init_weight_transfer_engine(request)
    await exchange.reply_json(told({"message": "Weight transfer initialized", **met}, warnings))


async def shutdown(state: ServeState, exchange: Exchange) -> None:
    """POST /shutdown_weight_transfer_engine: let go of the sender."""
    _, warnings = await read_options(state, exchange, Nothing, frozenset({"group_name"}))
    async with updating(state, "shutdown"):
        await state.engine.shutdown_weight_transfer_engine()
    await exchange.reply_json(told({"success": True, "message": "Weight transfer shut down"}, warnings))


async def start(state: ServeState, exchange: Exchange) -> None:
    """POST /start_weight_update: until /finish_weight_update the old weights serve."""
    options, warnings = await read_options(state, exchange, Start, _FLUSHES)
    async with updating(state, "start"):
        session = await state.engine.start_weight_update(**msgspec.structs.asdict(options))
    answer = {"success": True, "message": "Weight update started", "session": session}
    await exchange.reply_json(told(answer, warnings))


async def update(state: ServeState, exchange: Exchange) -> None:
    """POST /update_weights: receive tensors; answered when they are there."""
    options, warnings = await read_options(state, exchange, Update)
    _refuse_pickles(options.update_info)
    parts = options.update_info if isinstance(options.update_info, list) else [options.update_info]
    warnings += _unknown(state, {name: None for part in parts for name in part}, "update_info", _UPDATE_INFO)
    async with updating(state, "update"):
        request: dict[str, Any] = {"update_info": options.update_info, "session": options.session}
        for name, end in (("start", options.start), ("finish", options.finish)):
            if end is not None:
                request[name] = msgspec.structs.asdict(end)
        received = await state.engine.update_weights(request)
    await exchange.reply_json(told({"message": "Weights updated", **received}, warnings))


async def finish(state: ServeState, exchange: Exchange) -> None:
    """POST /finish_weight_update: the new weights serve from here on."""
    options, warnings = await read_options(state, exchange, Finish, _FLUSHES)
    async with updating(state, "finish"):
        done = await state.engine.finish_weight_update(
            options.weight_version, on_running=options.on_running, session=options.session
        )
    await exchange.reply_json(told({"success": True, "message": "Weight update finished", **done}, warnings))


async def abort(state: ServeState, exchange: Exchange) -> None:
    """POST /abort_weight_update: the old weights go on."""
    options, warnings = await read_options(state, exchange, Session)
    async with updating(state, "abort"):
        await state.engine.abort_weight_update(session=options.session)
    await exchange.reply_json(told({"message": "Weight update aborted"}, warnings))


async def info(state: ServeState, exchange: Exchange) -> None:
    """GET /weight_info."""
    with moving(state):
        known = await state.engine.weight_state()
    await exchange.reply_json(known)


async def version(state: ServeState, exchange: Exchange) -> None:
    """GET /get_weight_version."""
    with moving(state):
        known = await state.engine.get_weight_version()
    await exchange.reply_json({"weight_version": known})


async def set_version(state: ServeState, exchange: Exchange) -> None:
    """POST /update_weight_version: another label; no request is touched unless that is asked for."""
    options, warnings = await read_options(state, exchange, Version)
    if not options.new_version:
        raise bad_request("missing_field", "new_version: is missing", "new_version")
    async with updating(state, "version"):
        await state.engine.update_weight_version(options.new_version)
    if options.abort_all_requests:
        await state.abort_runs(None)
    await exchange.reply_json(told({"success": True, "new_version": options.new_version}, warnings))


async def init_group(state: ServeState, exchange: Exchange) -> None:
    """POST /init_weights_update_group, SGLang's: torch's own group, of which rank 0 is the trainer's."""
    options, warnings = await read_options(state, exchange, SglangGroup)
    given = msgspec.structs.asdict(options)
    request = {"backend": given.pop("backend"), "init_info": given}
    async with updating(state, "init"):
        await state.engine.init_weight_transfer_engine(request)
    await exchange.reply_json(told({"success": True, "message": "Succeeded to initialize the group."}, warnings))


async def from_distributed(state: ServeState, exchange: Exchange) -> None:
    """POST /update_weights_from_distributed, SGLang's."""
    options, warnings = await read_options(state, exchange, FromDistributed, _FLUSHES)
    if options.load_format not in _BUFFERS:
        known = ", ".join(name for name in _BUFFERS if name)
        raise bad_request("invalid_value", f"load_format: must be left out, or be {known}", "load_format")
    tensors = {"names": options.names, "dtype_names": options.dtypes, "shapes": options.shapes}
    tensors |= _BUFFERS[options.load_format]
    async with updating(state, "update"):
        await _one_call(state, {"update_info": tensors}, options.weight_version, partial=True)
    await exchange.reply_json(told({"success": True, "message": "Succeeded to update parameters."}, warnings))


async def from_disk(state: ServeState, exchange: Exchange) -> None:
    """POST /update_weights_from_disk, SGLang's: a folder of safetensors files on this machine."""
    options, warnings = await read_options(state, exchange, FromDisk, _FLUSHES)
    files = {"update_info": {"path": options.model_path}}
    async with updating(state, "update"):
        await _one_call(state, files, options.weight_version, partial=False)
    answer = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    await exchange.reply_json(told(answer, warnings))


async def from_tensor(state: ServeState, exchange: Exchange) -> None:
    """POST /update_weights_from_tensor, SGLang's: refused, its tensors are pickled."""
    await exchange.json()
    raise bad_request("unsupported_parameter", f"serialized_named_tensors: {_PICKLED}", "serialized_named_tensors")


async def _one_call(state: ServeState, request: Mapping[str, Any], label: str | None, *, partial: bool) -> None:
    """Tensors that come in one call: into the update that is open, or as an update of their own."""
    engine = state.engine
    check_version(label)
    if (await engine.weight_state())["state"] in ("open", "held"):
        await engine.update_weights(request)
        return
    session = await engine.start_weight_update(partial=partial)
    try:
        await engine.update_weights({**request, "session": session})
        done = await engine.finish_weight_update(label, session=session)
    except BaseException:
        with contextlib.suppress(ValueError):  # it is over, if that was what failed
            await engine.abort_weight_update(session=session)
        raise
    if not partial and request["update_info"].get("path") == str(engine.folder):
        engine.weights.came_from_checkpoint(done["weight_version"])


def _unknown(state: ServeState, given: Mapping[str, Any], place: str, known: frozenset[str]) -> list[str]:
    """What is to be said of fields that no transport reads. Raises ApiError under `strict`."""
    shown = [
        f"{place}.{name[:64]}" if name[:64].isidentifier() else f"{place}: a field" for name in given.keys() - known
    ]
    if shown and state.config.strict:
        raise bad_request("unknown_field", f"{shown[0]}: unknown field", shown[0])
    return [f"{name}: unknown field, ignored" for name in sorted(shown)[:16]]


def _refuse_pickles(given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError for a field that vLLM would unpickle, in a message or in one of its parts."""
    for name in given if isinstance(given, Mapping) else (name for part in given for name in part):
        if name.endswith("_pickled"):
            raise bad_request("unsupported_parameter", f"update_info.{name[:64]}: {_PICKLED}", name)


class Rpc(msgspec.Struct, kw_only=True):
    """POST /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


def _named(options: Rpc, *names: str) -> dict[str, Any]:
    """A method's arguments by name. Raises ApiError for more of them."""
    given = {**dict(zip(names, options.args, strict=False)), **options.kwargs}
    if len(options.args) > len(names) or given.keys() - set(names):
        raise bad_request("invalid_value", f"args: {options.method} takes {', '.join(names) or 'none'}", "args")
    return given


async def _join_group(state: ServeState, options: Rpc) -> object:
    """OpenRLHF's: its group is vLLM's communicator, which has no name."""
    names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend", "use_ray")
    given = _named(options, *names)
    if given.pop("use_ray", False):
        raise bad_request("unsupported_parameter", "use_ray: must be false: there is no Ray here", "use_ray")
    given.pop("group_name", None)
    request = {"backend": given.pop("backend", "nccl"), "init_info": given}
    return await state.engine.init_weight_transfer_engine(request)


async def _one_tensor(state: ServeState, options: Rpc) -> object:
    """OpenRLHF's: a tensor a call, the last of which says empty_cache; together they are one update."""
    given = _named(options, "name", "dtype", "shape", "empty_cache")
    dtype = str(given.get("dtype", "")).removeprefix("torch.")
    tensors = {"names": [given.get("name")], "dtype_names": [dtype], "shapes": [given.get("shape")], "packed": False}
    is_last = given.get("empty_cache")
    if is_last is None:
        await _one_call(state, {"update_info": tensors}, None, partial=True)
        return None
    engine = state.engine
    if (await engine.weight_state())["state"] == "ready":
        await engine.start_weight_update()
    await engine.update_weights({"update_info": tensors})
    if is_last:
        await engine.finish_weight_update()
    return None


async def _from_folder(state: ServeState, options: Rpc) -> object:
    """prime-rl's."""
    given = _named(options, "weight_dir")
    await _one_call(state, {"update_info": {"path": given.get("weight_dir")}}, None, partial=False)
    return None


async def _reload(state: ServeState, options: Rpc) -> object:
    """vLLM's, as it follows a sleep of level 2: the folder that the server was started with, or another."""
    path = _named(options, "weights_iterator", "weights_path").get("weights_path") or str(state.engine.folder)
    await _one_call(state, {"update_info": {"path": path}}, None, partial=False)
    return None


async def _start(state: ServeState, options: Rpc) -> object:
    given = _named(options, "is_checkpoint_format")
    await state.engine.start_weight_update(**given)
    return None


async def _update(state: ServeState, options: Rpc) -> object:
    given = _named(options, "update_info")
    try:
        told = msgspec.convert(given, Update).update_info
    except msgspec.ValidationError as error:
        raise unreadable(error, given, Update) from None
    _refuse_pickles(told)
    return await state.engine.update_weights({"update_info": told})


async def _finish(state: ServeState, options: Rpc) -> object:
    return await state.engine.finish_weight_update(_named(options, "weight_version").get("weight_version"))


async def _reset(state: ServeState, options: Rpc) -> object:
    return await state.engine.reset_prefix_cache()


# What clients call by name, and as which of OPERATIONS it is counted. Nothing else can be reached.
METHODS: dict[str, tuple[str, Callable[[ServeState, Rpc], Awaitable[object]]]] = {
    "init_process_group": ("init", _join_group),
    "update_weight": ("update", _one_tensor),
    "update_weights_from_path": ("update", _from_folder),
    "reload_weights": ("update", _reload),
    "start_weight_update": ("start", _start),
    "skyrl_start_weight_update": ("start", _start),
    "update_weights": ("update", _update),
    "update_weights_nccl": ("update", _update),
    "finish_weight_update": ("finish", _finish),
    "skyrl_finish_weight_update": ("finish", _finish),
    "reset_prefix_cache": ("update", _reset),
}


async def collective_rpc(state: ServeState, exchange: Exchange) -> None:
    """POST /collective_rpc: a method that is known by name."""
    options, warnings = await read_options(state, exchange, Rpc)
    if options.method not in METHODS:
        raise ApiError(404, "unknown_method", f"method: known are {', '.join(METHODS)}", "method")
    operation, run = METHODS[options.method]
    async with updating(state, operation):
        result = await run(state, options)
    await exchange.reply_json(told({"results": [result]}, warnings))

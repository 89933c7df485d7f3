"""WeightSource and Sender: a trainer's end of an update.

Owns what a trainer's weights are called and when they are gathered, and the calls of one update in their order. Knows
no engine: a server by its address, or any object with `LLM`'s methods. Invariant: an update that fails here is aborted
there, if anybody answers.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo.ops.copying import copy_alone
from octavo.rl.plan import DTYPES, Incoming, pattern_of
from octavo.rl.session import WeightTransferError, WeightUpdateError, check_version
from octavo.rl.transport import BUFFER_BYTES, TIMEOUT, buffers
from octavo.rl.transport.extent import Rooms
from octavo.rl.transport.gloo import make_gloo
from octavo.rl.transport.group import Group, place_of
from octavo.rl.transport.ipc import handle_of
from octavo.rl.transport.local import Handed
from octavo.rl.transport.nccl import make_nccl
from octavo.rl.transport.server_calls import ServerCalls
from octavo.rl.transport.shm import PREFIX, SharedBuffer

_BACKENDS = ("local", "disk", "shm", "gloo", "nccl", "ipc")
_GLOO_AHEAD = 2  # of them, on their way while the next one is gathered
_IPC_BYTES = 1 << 30  # of a buffer whose mapping, and whose answer, cost more than the copy of four smaller ones
_GLOO_BYTES = 4 << 20  # of a buffer that is gathered, sent and taken in from a processor's cache
_WHY_SECONDS = 10.0  # that an engine which has left a group may take to say why


class WeightSource:
    """A module's weights by their checkpoint's names, each gathered when it is asked for."""

    def __init__(self, module: nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """`dtype`: to round to before sending, half the bytes of float32; the receiver would round to the same bits.

        A tied weight is there once. Of a DTensor the whole is sent: all of its ranks have to ask for it. Raises
        WeightUpdateError for a tensor of whole numbers that is given by its name.
        """
        self._dtype, self._taken = dtype, dict[str, torch.dtype]()
        named = module.state_dict() if isinstance(module, nn.Module) else dict(module)
        seen: dict[tuple[int, torch.Size], str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in named.items():
            if not tensor.is_floating_point():
                if isinstance(module, nn.Module):  # a buffer that counts, say: no checkpoint's weight
                    continue
                raise WeightUpdateError(f"{name}: expected floating-point values, got {tensor.dtype}: leave it out")
            if not tensor.numel():  # of parts that a model does without
                continue
            own = getattr(tensor, "_local_tensor", tensor)
            if seen.setdefault((own.data_ptr(), tensor.shape), name) == name:
                self._tensors[name] = tensor

    def rounded(self, dtypes: Mapping[str, torch.dtype]) -> WeightSource:
        """The same, in the types of `dtypes`, by pattern, where those are narrower: what a receiver would round to."""
        other = copy.copy(self)
        other._taken = {
            name: taken
            for name, tensor in self._tensors.items()
            if (taken := dtypes.get(pattern_of(name))) and taken.itemsize < (self._dtype or tensor.dtype).itemsize
        }
        return other

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._taken.get(name) or self._dtype or self._tensors[name].dtype

    @property
    def incoming(self) -> list[Incoming]:
        """What is told of the tensors, in their order."""
        return [Incoming(name, self._dtype_of(name), tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Each name's, as the module has it."""
        return self._tensors

    def gather(self, name: str) -> torch.Tensor:
        """One tensor, whole and contiguous, where its rank has it."""
        dtype, whole = self._dtype_of(name), self._whole(name)
        if whole.dtype is dtype:
            return whole.contiguous()
        return copy_alone(torch.empty(whole.shape, dtype=dtype, device=whole.device), whole)

    def gather_into(self, name: str, buffer: torch.Tensor) -> None:
        """The same into a part of a buffer [bytes] uint8, on any device, in one pass where it begins as it should."""
        dtype, whole = self._dtype_of(name), self._whole(name)
        if (buffer.data_ptr() | int(buffer.storage_offset())) % dtype.itemsize:
            buffer.copy_(_bytes(whole.to(dtype).contiguous()))
        else:
            copy_alone(buffer.view(dtype).view(whole.shape), whole)

    def _whole(self, name: str) -> torch.Tensor:
        """As it is to be rounded: in the type that was asked for."""
        tensor = self._tensors[name].detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole if self._dtype is None or name not in self._taken else whole.to(self._dtype)


def told(incoming: list[Incoming]) -> dict[str, Any]:
    """What an update says of its tensors."""
    return {
        "names": [each.name for each in incoming],
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in incoming],
        "shapes": [list(each.shape) for each in incoming],
    }


class Sender:
    """Brings weights to one engine, again and again."""

    def __init__(
        self,
        engine: Any,
        backend: str = "gloo",
        *,
        timeout: float = TIMEOUT,
        admin_key: str | None = None,
        address: str = "127.0.0.1",
        num_workers: int = 1,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """`engine`: an LLM, or the address of `octavo serve`. backend: "local" (the LLM's process), "shm", "gloo", ...

        admin_key: of that server; None: OCTAVO_ADMIN_KEY, if it is set. address: of this process, as the engine
        reaches it. num_workers: of the engine. folder: of "disk", where files lie until they are read, for both ends
        under one path; made if its parent is there. Raises WeightUpdateError.
        """
        if backend not in _BACKENDS:
            raise WeightUpdateError(f"unknown backend {backend!r} of a sender: known are {', '.join(_BACKENDS)}")
        self._folder = _folder_of(backend, folder)
        key = admin_key or os.environ.get("OCTAVO_ADMIN_KEY")
        self._engine = ServerCalls(engine, key, timeout) if isinstance(engine, str) else engine
        self._backend, self._timeout = backend, timeout
        self._address, self._size = address, num_workers + 1
        self._group: Group | None = None
        self._shared, self._rooms = SharedBuffer(), Rooms()
        self._told: dict[str, Any] = {}  # of the last tensors of the group
        self._place = ""  # of the group, by which the engine knows whose an update is
        self._has_met = backend == "local"
        self._session: str | None = None  # the name of the update that is open
        self._is_open = self._is_finished = False
        self._begin: dict[str, Any] | None = None  # what the first message says of the update's start, to a server
        self._finish: dict[str, Any] | None = None  # and the last one of its end, if it is known to be that
        self._dtypes: dict[str, torch.dtype] = {}  # what the engine rounds to, by pattern

    def send(
        self,
        source: nn.Module | Mapping[str, torch.Tensor] | WeightSource | Iterable[tuple[str, torch.Tensor]],
        version: str | None = None,
        *,
        on_running: str = "recompute",
    ) -> None:
        """One update, from its start to its finish. Raises what the engine refuses, and WeightTransferError.

        source: a module or its tensors by name, as they are now; or a WeightSource of them, which may round. Names and
        tensors may also come one by one, as a trainer gathers them; the memory of one may be the next one's.
        """
        check_version(version)
        if not self._has_met:
            self._meet()
            self._has_met = True
        self._begin = self._finish = None
        self._is_open = self._is_finished = False
        if isinstance(self._engine, ServerCalls):  # each call costs a millisecond there
            self._session, self._begin = secrets.token_hex(8), {"on_running": on_running}
            if isinstance(source, WeightSource | nn.Module | Mapping):
                self._finish = {"weight_version": version}
        else:
            self._session, self._is_open = self._engine.start_weight_update(on_running=on_running), True
        try:
            for part in _sources(source):
                if part.tensors:
                    getattr(self, f"_send_{self._backend}")(part.rounded(self._dtypes))
            if self._begin is not None:
                raise WeightUpdateError("expected tensors, got none")
            if not self._is_finished:
                self._engine.finish_weight_update(version, session=self._session)
        except BaseException:
            if self._is_open:  # else nothing was sent
                with contextlib.suppress(WeightUpdateError, OSError):  # it is over already where the engine refused
                    self._engine.abort_weight_update(session=self._session)
                self.close()
            raise

    def close(self) -> None:
        """Leave the group, or take away the memory that was shared; the next `send` makes another."""
        self._shared.close()
        group, self._group, self._rooms = self._group, None, Rooms()
        self._has_met = self._backend == "local"
        if group is not None:
            group.close()

    def _meet(self) -> None:
        if self._backend not in ("gloo", "nccl"):
            self._read(self._engine.init_weight_transfer_engine({"backend": self._backend, "init_info": {}}))
            return
        store = TCPStore(self._address, 0, self._size, True, wait_for_workers=False, use_libuv=True, multi_tenant=False)
        make = make_gloo if self._backend == "gloo" else make_nccl
        info = {"master_address": self._address, "master_port": store.port, "rank_offset": 1, "world_size": self._size}
        request = {"backend": self._backend, "init_info": info}
        with _Beside(lambda: self._read(self._engine.init_weight_transfer_engine(request))) as beside:
            place, self._told = (self._address, store.port), {}
            self._group = Group(make, *place, 0, self._size, self._timeout, store=store, check=beside.check)
            self._place = place_of(*place)

    def _read(self, met: Mapping[str, Any]) -> None:
        """What an engine says of itself. All of its workers have one model's types."""
        told_types = met["workers"][0].get("dtypes", {}) if met.get("workers") else {}
        self._dtypes = {pattern: DTYPES[name] for pattern, name in told_types.items() if name in DTYPES}

    def _send_group(self, source: WeightSource) -> None:
        group, incoming = self._group, source.incoming
        assert group is not None, "`send` has met the others"
        device = "cuda" if self._backend == "nccl" else "cpu"
        size = BUFFER_BYTES if self._backend == "nccl" else _gloo_size(incoming)
        form = {"packed": True, "packed_buffer_size_bytes": size, "group": self._place}
        names, parts = told(incoming), list(buffers(incoming, size))
        is_known, self._told = names == self._told, names  # the engine's end of a group remembers the last ones
        message = {"update_info": {**(dict.fromkeys(names, ()) if is_known else names), **form}}
        with _Beside(self._updating(message, incoming, is_last=True)) as beside:
            group.check = beside.check  # what the engine refuses is heard while the group waits
            sent: collections.deque[Callable[[], None]] = collections.deque()
            ahead = _GLOO_AHEAD if self._backend == "gloo" else 0  # on a device one buffer is enough
            for part in parts:
                packed = _packed(source, part, device, self._rooms)
                beside.check()
                sent.append(group.begin_broadcast(packed, part[0].name, self._timeout, len(sent)))
                while len(sent) > (ahead if packed.numel() <= 2 * size else min(ahead, 1)):
                    sent.popleft()()
                del packed
            for each in sent:
                each()

    _send_gloo = _send_nccl = _send_group

    def _updating(self, message: Mapping[str, Any], incoming: list[Incoming], *, is_last: bool) -> Callable[[], object]:
        """Tell of tensors that come, in this update and no other; what waits until they are there.

        is_last: of a source. A server is told by now, and another engine by who waits.
        """
        start, self._begin, finish = self._begin, None, self._finish if is_last else None
        more = {"session": self._session, "start": start, "finish": finish}
        request = {**message, **{key: value for key, value in more.items() if value is not None}}
        self._is_open = True
        if isinstance(self._engine, ServerCalls):
            update = self._engine.begin_update(request, sum(each.num_bytes for each in incoming))
        else:
            update = functools.partial(self._engine.update_weights, request)

        def wait() -> None:
            update()
            self._is_finished = finish is not None

        return wait

    def _send_local(self, source: WeightSource) -> None:
        for part, is_last in _parts(source, BUFFER_BYTES):
            with Handed({each.name: source.gather(each.name) for each in part}) as update_info:
                self._updating({"update_info": update_info}, part, is_last=is_last)()

    def _send_disk(self, source: WeightSource) -> None:
        for part, is_last in _parts(source, BUFFER_BYTES):
            path = self._folder / f"{PREFIX}{secrets.token_hex(16)}"
            path.mkdir()
            try:
                tensors = {each.name: source.gather(each.name).cpu() for each in part}
                save_file(tensors, path / "model.safetensors")
                del tensors
                self._updating({"update_info": {"path": str(path)}}, part, is_last=is_last)()
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def _send_shm(self, source: WeightSource) -> None:
        for part, is_last in _parts(source, BUFFER_BYTES):
            _gather(source, part, self._shared.take(sum(each.num_bytes for each in part)))
            self._updating({"update_info": {**told(part), "shm_name": self._shared.name}}, part, is_last=is_last)()
            self._shared.let_go()

    def _send_ipc(self, source: WeightSource) -> None:
        for part, is_last in _parts(source, _IPC_BYTES):
            buffer = _packed(source, part, "cuda")
            torch.cuda.current_stream().synchronize()
            self._updating({"update_info": {**told(part), "ipc_handle": handle_of(buffer)}}, part, is_last=is_last)()


def _folder_of(backend: str, folder: str | os.PathLike[str] | None) -> Path:
    """Where a sender by files puts them. Raises WeightUpdateError."""
    if backend != "disk" and folder is not None:
        raise WeightUpdateError(f"folder: is for backend 'disk', and this is {backend!r}")
    if backend == "disk" and folder is None:
        raise WeightUpdateError("folder: backend 'disk' needs one that the engine reads under the same path")
    path = Path(folder or ".").absolute()
    try:
        path.mkdir(exist_ok=True)  # the last part alone: a path that is mistyped makes no tree
    except OSError as error:
        raise WeightUpdateError(f"folder: {str(path)[:200]!r} is no folder: {error.strerror}") from None
    return path


def _sources(
    source: nn.Module | Mapping[str, torch.Tensor] | WeightSource | Iterable[tuple[str, torch.Tensor]],
) -> Iterator[WeightSource]:
    """A source, or ones of a buffer's bytes of what comes one by one."""
    if isinstance(source, nn.Module | Mapping):
        source = WeightSource(source)
    if isinstance(source, WeightSource):
        yield source
        return
    part, total, seen = dict[str, torch.Tensor](), 0, set[str]()
    for name, tensor in source:
        if name in seen:
            raise WeightUpdateError(f"{name}: came before in this update: send each weight once")
        seen.add(name)
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        part[name] = whole.detach().clone()
        total += whole.nbytes
        if total > BUFFER_BYTES:
            yield WeightSource(part)
            part, total = {}, 0
    if part:
        yield WeightSource(part)


def _gloo_size(incoming: list[Incoming]) -> int:
    """Of buffers of about _GLOO_BYTES of which none is a small rest: each costs its two ends their time."""
    total = sum(each.num_bytes for each in incoming)
    return total // max(round(total / _GLOO_BYTES), 1)


def _parts(source: WeightSource, num_bytes: int) -> Iterator[tuple[list[Incoming], bool]]:
    """A source's tensors by buffers of about so many bytes; whether one is the last."""
    parts = list(buffers(source.incoming, num_bytes))
    yield from ((part, part is parts[-1]) for part in parts)


def _packed(source: WeightSource, part: list[Incoming], device: str, rooms: Rooms | None = None) -> torch.Tensor:
    """rooms: of a CPU's buffers: new ones would fault at each page."""
    if len(part) == 1:
        return _bytes(source.gather(part[0].name)).to(device)
    size = sum(each.num_bytes for each in part)
    packed = rooms.take(size, 0) if rooms and device == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
    return _gather(source, part, packed)


def _gather(source: WeightSource, part: list[Incoming], packed: torch.Tensor) -> torch.Tensor:
    """Tensors one behind the other into a buffer [bytes] uint8 of their size, which is the result."""
    begin = 0
    for each in part:
        source.gather_into(each.name, packed[begin : begin + each.num_bytes])
        begin += each.num_bytes
    return packed


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class _Beside:
    """A call of the engine that runs while this end sends; what it raises is raised here, before what sending does."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True, name="octavo-weights")

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what the call has raised by now."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> _Beside:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._thread.join(None if error is None else _WHY_SECONDS if isinstance(error, WeightTransferError) else 1.0)
        self.check()

"""WeightReceiver: a worker's end of an update: its model's new weights, received and applied between two steps.

Owns the transport of a worker, the values of an open session, and what of it has overwritten the model. The state
machine is the engine's (`octavo.rl.session`). Invariant: until `apply`, or the first tensor of a transport that
overwrites, no weight of the model has changed.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from octavo.config.engine_config import Resolved
from octavo.models.base import Model
from octavo.ops import captures
from octavo.rl.current_weights import CurrentWeights
from octavo.rl.in_place import InPlace
from octavo.rl.messages import Prepared, Received, Way
from octavo.rl.plan import Incoming, Staged, WeightPlan
from octavo.rl.session import WeightCutError, WeightUpdateError
from octavo.rl.transport import Transport, make_transport

_LOG = logging.getLogger(__name__)
_NO_BACKEND = "disk"  # for engines that were told of none
_UNMET = {"local_key": "local", "path": "disk"}  # what a message has -> the backend that it says enough for


class WeightReceiver:
    """One worker's."""

    def __init__(
        self,
        model: Model,
        resolved: Resolved,
        config: Mapping[str, Any],
        number: int = 0,
        *,
        rescale: Callable[[], bool] = lambda: False,
    ) -> None:
        """`config`: weight_transfer_config; number: this worker's among the engine's.

        rescale: makes what follows from the weights beside the model, and says whether blocks of before can be read no
        more.
        """
        self._rescale = rescale
        self._model, self._resolved, self._config, self._number = model, resolved, config, number
        self._device = torch.device(resolved.device)
        self._made: WeightPlan | None = None
        self._transport: Transport | None = None
        self._backend = ""  # of the transport, once there is one
        self._session: Staged | None = None
        self._left_out = 0  # the session's tensors of modules that draft, and that no update reaches
        self._identity = ""  # of the weights that are there; empty: those of the start
        self._is_watched = False  # the trainer's connection was there when the session began, and is the session's
        self._waits_as = 0  # the number of the wait, for `cut`; 0: it is none
        self._cut_until, self._why = -1, ""  # waits up to this number are cut short

    def init(self, numbered: tuple[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Meet the sender. What there was before is closed then, and no earlier: a meeting that fails changes nothing.

        numbered: of the wait, for `cut`; and what is told.
        Beside the steps, as `update` is: it touches nothing of them.
        """
        self._waits_as, info = numbered
        before = "" if self._transport is None or self._transport.peer_is_gone else self._transport.peer
        inner = info.get("init_info", info)
        default = self._config.get("backend", self._group_backend if "master_address" in inner else _NO_BACKEND)
        backend = str(info.get("backend", default))
        transport = make_transport(backend, self._device, self._config, self._check)
        try:
            facts = transport.open(inner, self._number)
        except BaseException:
            transport.close()
            raise
        self.shutdown()
        transport.displaced = before
        self._transport, self._backend = transport, backend
        return {"backend": backend, "dtypes": self._plan.dtypes_by_pattern(), **facts}

    def shutdown(self) -> None:
        """Let go of the sender."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def start(self, partial: bool) -> None:
        """Begin a session."""
        self._session, self._left_out = Staged(self._plan, partial=partial), 0
        self._is_watched = self._transport is not None and not self._transport.peer_is_gone

    def cut(self, until: tuple[int, str]) -> None:
        """End waits up to a number, and why. From any thread, while they wait."""
        number, self._why = until
        self._cut_until = max(number, self._cut_until)

    def peer_is_gone(self) -> bool:
        """Whether the open session can never be whole: the trainer that was there at its start has gone."""
        transport, session = self._transport, self._session
        if not self._is_watched or session is None or transport is None or not transport.peer_is_gone:
            return False
        try:
            session.check()
        except WeightUpdateError:
            return True
        return False

    def _check(self) -> None:
        if 0 < self._waits_as <= self._cut_until:
            raise WeightCutError(f"it was cut short: {self._why}")

    def expect(self, info: Mapping[str, Any]) -> Way:
        """Be ready for one message's tensors, between two steps."""
        info = self._own(info.get("update_info", info))
        _, transport = self._of(info)
        session = self._session_for(transport)
        overwrites = isinstance(session, InPlace)
        if overwrites:
            self._wait_for_device()  # for steps that read what may be overwritten
        return Way(transport.waits, overwrites)

    def _session_for(self, transport: Transport) -> Staged:
        """The session, as one whose values come by this transport."""
        session = self._session
        assert session is not None, "the engine has begun a session"
        if self._config.get("staging", "none" if transport.overwrites else "host") == "none" and not isinstance(
            session, InPlace
        ):
            if session.arrived:
                raise WeightUpdateError("one update has one backend: some of its tensors were kept until its end")
            session = self._session = InPlace(self._plan, self._resolved.quantization, self._device, of=session)
        return session

    def update(self, numbered: tuple[int, Mapping[str, Any]]) -> Received:
        """Receive one message's tensors; `expect` was told of them. numbered: as of `init`.

        Values of a session that overwrites nothing are kept on the host: steps may run meanwhile.
        """
        began = time.perf_counter()
        self._waits_as, info = numbered
        info = self._own(info.get("update_info", info))
        backend, transport = self._of(info)
        session, given = self._session_for(transport), False

        def read(*names: Any) -> list[Incoming]:
            nonlocal given
            told = self._plan.read(*names)
            given = transport.gives and self._plan.keeps_most_of(told)
            return told

        def put(incoming: Incoming, tensor: torch.Tensor) -> None:
            self._check()
            session.put(incoming, tensor, given=given)

        incoming = transport.receive(info, read, put)
        if isinstance(session, InPlace):
            self._wait_for_device()
        if self._resolved.speculative.method == "mtp":
            self._left_out += sum(self._plan.is_of_module(each.name) for each in incoming)
        num_bytes = sum(each.num_bytes for each in incoming)
        overwrites = isinstance(session, InPlace) and session.has_overwritten
        return Received(len(incoming), num_bytes, time.perf_counter() - began, overwrites, backend)

    def _own(self, told: Any) -> Mapping[str, Any]:
        """What this worker is told, of a message that has a part for each. Raises WeightUpdateError."""
        if isinstance(told, list):
            if self._number >= len(told):
                raise WeightUpdateError(f"update_info: has {len(told)} parts, and none for worker {self._number}")
            told = told[self._number]
        if not isinstance(told, Mapping):
            raise WeightUpdateError(f"update_info: must be an object, got {type(told).__name__}")
        return told

    def prepare(self) -> Prepared:
        """Check that the session's set is whole. Raises WeightUpdateError."""
        assert self._session is not None, "the engine has begun a session"
        self._session.check()
        return Prepared(self._session.identity(self._identity), len(self._session.arrived))

    def apply(self, identity: str) -> bool:
        """Give the model its new values; whether K and V that were stored before cannot be read any more."""
        session, self._session = self._session, None
        assert session is not None, "the engine has begun a session"
        self._wait_for_device()
        session.apply(self._resolved.quantization, self._device)
        rescaled = self._rescale()
        self._wait_for_device()  # steps run on a stream of their own
        self._identity = identity
        if self._left_out:
            _LOG.warning(
                "the update has %d tensors of modules of multi-token prediction, which are not taken: the drafter of "
                "method mtp keeps its weights, and its drafts may be accepted less often; no output depends on it",
                self._left_out,
            )
        return rescaled

    def abort(self) -> bool:
        """Drop the session; whether the old weights are whole."""
        session, self._session, self._is_watched = self._session, None, False
        whole = not (isinstance(session, InPlace) and session.has_overwritten)
        if not whole:
            self._identity = secrets.token_hex(16)
        return whole

    def checksums(self) -> dict[str, Any]:
        """{"checksums": by a checkpoint's names, "own_form": those that are no file's}; see CurrentWeights."""
        found, own = self._current.checksums()
        return {"checksums": found, "own_form": own}

    def values(self, asked: tuple[str, int]) -> list[Any]:
        """The first rows of the tensor of a name, as lists of numbers. Raises WeightUpdateError."""
        rows: list[Any] = self._current.values(*asked).float().cpu().tolist()
        return rows

    @property
    def _current(self) -> CurrentWeights:
        self._wait_for_device()
        return CurrentWeights(self._plan)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            captures.wait_for_device(self._device)

    @property
    def _group_backend(self) -> str:
        """Of senders that broadcast, to engines that were told of no backend."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    @property
    def _plan(self) -> WeightPlan:
        if self._made is None:
            self._made = WeightPlan(self._model, getattr(torch, self._resolved.dtype))
        return self._made

    def _of(self, info: Mapping[str, Any]) -> tuple[str, Transport]:
        """What a message comes by: a folder and this process's tensors need no meeting, whoever was met."""
        for key, backend in _UNMET.items():
            if key in info and backend != self._backend:
                self._is_watched = False  # whoever was met is not who sends
                return backend, make_transport(backend, self._device, self._config, self._check)
        transport = self._receiving()
        return self._backend or _NO_BACKEND, transport

    def _receiving(self) -> Transport:
        if self._transport is None:
            backend = str(self._config.get("backend", _NO_BACKEND))
            if backend != "disk":
                raise WeightUpdateError(f"backend {backend!r} needs init_weight_transfer_engine before an update")
            self._transport = make_transport(backend, self._device, self._config, self._check)
        return self._transport

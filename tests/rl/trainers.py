"""The parts of verl's and NeMo-RL's interfaces, and of Ray's, that examples/rl uses, written down.

`install` puts them where `import verl`, `nemo_rl` and `ray` look, unless the real ones are there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib.util
import sys
import types
from typing import Any

import pytest

ACTORS: dict[str, Any] = {}  # by name


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    async def remote(self, *arguments: Any, **keywords: Any) -> Any:
        """Ray's reference, awaited."""
        return await self._method(*arguments, **keywords)


class _Handle:
    def __init__(self, made: Any) -> None:
        self.made = made

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.made, name))


class _Remote:
    def __init__(self, kind: type[Any], name: str = "") -> None:
        self._kind, self._name = kind, name

    def options(self, *, name: str, **_: Any) -> _Remote:
        """Of an actor."""
        return _Remote(self._kind, name)

    def remote(self, *arguments: Any, **keywords: Any) -> _Handle:
        """Start it."""
        ACTORS[self._name] = _Handle(self._kind(*arguments, **keywords))
        handle: _Handle = ACTORS[self._name]
        return handle


class BaseRollout:
    """verl.workers.rollout.base."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh


class RolloutMode(enum.Enum):
    """verl.workers.rollout.replica."""

    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


@dataclasses.dataclass
class TokenOutput:
    """verl.workers.rollout.replica."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = dataclasses.field(default_factory=dict)


class RolloutReplica:
    """verl.workers.rollout.replica."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.is_reward_model = self.is_teacher_model = False
        self.name_suffix, self.max_concurrency, self.rollout_mode = "", 1000, None
        self.servers: list[Any] = []

    @property
    def server_address(self) -> str:
        """Of OpenAI's routes."""
        address: str = self._server_address  # type: ignore[attr-defined]
        return address

    async def sleep(self) -> None:
        """Each server."""
        await asyncio.gather(*[server.sleep.remote() for server in self.servers])

    async def wake_up(self) -> None:
        """Each server."""
        await asyncio.gather(*[server.wake_up.remote() for server in self.servers])

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Each server."""
        await asyncio.gather(*[each.abort_all_requests.remote(reject_request=reject_request) for each in self.servers])

    async def resume_generation(self) -> None:
        """Each server."""
        await asyncio.gather(*[server.resume_generation.remote() for server in self.servers])

    async def release_kv_cache(self) -> None:
        """Each server."""
        await asyncio.gather(*[server.release_kv_cache.remote() for server in self.servers])


class RolloutReplicaRegistry:
    """verl.workers.rollout.replica."""

    _registry: dict[str, Any] = {}

    @classmethod
    def register(cls, name: str, loader: Any) -> None:
        """A name."""
        cls._registry[name] = loader

    @classmethod
    def get(cls, name: str) -> Any:
        """Its class."""
        return cls._registry[name]()


ROLLOUTS: dict[tuple[str, str], str] = {}
MODULES: dict[str, dict[str, Any]] = {
    "ray": {"remote": _Remote, "get_actor": ACTORS.__getitem__},
    "verl": {},
    "verl.workers": {},
    "verl.workers.rollout": {},
    "verl.workers.rollout.base": {"BaseRollout": BaseRollout, "_ROLLOUT_REGISTRY": ROLLOUTS},
    "verl.workers.rollout.replica": {
        each.__name__: each for each in (RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput)
    },
    "nemo_rl": {},
    "nemo_rl.distributed": {},
    "nemo_rl.distributed.batched_data_dict": {"BatchedDataDict": dict},
    "nemo_rl.models": {},
    "nemo_rl.models.generation": {},
    "nemo_rl.models.generation.interfaces": {
        "GenerationInterface": object,
        "verify_right_padding": lambda data, pad_value: (True, None),
    },
}


REAL = {name for name in ("ray", "verl", "nemo_rl") if importlib.util.find_spec(name) is not None}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test."""
    for name, members in MODULES.items():
        if name.partition(".")[0] not in REAL:
            module = types.ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)

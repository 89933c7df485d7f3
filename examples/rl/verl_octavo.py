"""Octavo as verl's rollout engine: import this module where verl's workers and its driver run, then set

    actor_rollout_ref.rollout.name=octavo

A replica is one `octavo serve`, which a Ray actor of its own starts. Weights come by shared memory of the host, from
the rank that stands beside it. Written for verl 0.9.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
import torch
from octavo_server import OctavoServer, one_by_one
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from octavo import rl

STOP_REASONS = {"abort": "aborted", "stop": "completed", "length": "completed"}


class OctavoHttpServer:
    """The Ray actor: a server and the calls that verl makes of one."""

    def __init__(self, config: Any, model_config: Any, rollout_mode: RolloutMode) -> None:
        """`config`: verl's RolloutConfig; its prompt and response lengths bound a request."""
        self.config, self.mode = config, rollout_mode
        length = config.max_model_len or config.prompt_length + config.response_length
        arguments = [
            "--dtype",
            config.dtype,
            "--max-model-len",
            str(length),
            "--max-num-seqs",
            str(config.max_num_seqs),
        ]
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)] * torch.cuda.is_available()
        self.server, self.length = OctavoServer(model_config.local_path, *arguments, backend="shm"), length

    async def get_server_address(self) -> str:
        """host:port, for OpenAI's routes and for weights."""
        return self.server.url.removeprefix("http://")

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Tokens in, tokens out. An aborted request gives what it has."""
        given = [name for name, value in others.items() if value and name != "priority"]
        if given:
            raise ValueError(f"Octavo's models take tokens alone, got {', '.join(given)}")
        wanted = dict(sampling_params)
        asked = wanted.pop("max_tokens", wanted.pop("max_new_tokens", self.config.response_length))
        has_logprobs = wanted.pop("logprobs", False)
        wanted |= {"max_tokens": max(1, min(asked, self.length - len(prompt_ids)))}
        wanted |= {"logprobs": 0} if has_logprobs else {}
        said = await asyncio.to_thread(self.server.generate, list(prompt_ids), wanted)
        versions = [span["version"] for span in said["weight_versions"]]
        steps = int(versions[-1]) if versions and versions[-1].isdigit() else None
        return TokenOutput(
            token_ids=said["token_ids"],
            log_probs=said["logprobs"] if has_logprobs else None,
            stop_reason=STOP_REASONS.get(said["finish_reason"], said["finish_reason"]),
            extra_fields={"global_steps": steps, "weight_versions": said["weight_versions"]},
        )

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Memory back. A standalone server never slept."""
        if self.mode != RolloutMode.STANDALONE:
            await asyncio.to_thread(self.server.post, "/wake_up?" + "&".join(f"tags={tag}" for tag in tags or ()))

    async def sleep(self) -> None:
        """Give memory back: all of it where weights come again, else the cache's."""
        if self.config.free_cache_engine and self.mode != RolloutMode.STANDALONE:
            await asyncio.to_thread(self.server.post, f"/sleep?level={2 if self.mode == RolloutMode.HYBRID else 1}")

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End what runs with what it has; who comes later waits for `resume_generation`."""
        await asyncio.to_thread(self.server.post, "/pause?mode=abort")
        return {}

    async def resume_generation(self) -> None:
        """Behind `abort_all_requests`."""
        await asyncio.to_thread(self.server.post, "/resume")

    async def clear_kv_cache(self) -> None:
        """Nothing is to be cleared: blocks know the weights that they were made with."""

    release_kv_cache = resume_kv_cache = start_profile = stop_profile = clear_kv_cache


class OctavoReplica(RolloutReplica):
    """One server for each replica, on the node of its first worker."""

    async def launch_servers(self) -> None:
        """Start the actor; it is ready when it has an address."""
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        actor = ray.remote(OctavoHttpServer).options(
            name=f"octavo_server_{kind}{self.replica_rank}{self.name_suffix}", max_concurrency=self.max_concurrency
        )
        self._server_handle = actor.remote(self.config, self.model_config, self.rollout_mode)
        self.servers = [self._server_handle]
        self._server_address = await self._server_handle.get_server_address.remote()


class OctavoRollout(BaseRollout):
    """The trainer's side: a rank that stands beside a server sends it weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        """`device_mesh`: of the rollout, whose first rank of each replica sends."""
        super().__init__(config, model_config, device_mesh)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self._sends, self._handle, self._sender = rank % size == 0, None, None

    async def resume(self, tags: list[str]) -> None:
        """Memory of `tags` back."""
        if self._sends and self.config.free_cache_engine:
            await self._server().wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Give memory back."""
        if self._sends and self.config.free_cache_engine:
            await self._server().sleep.remote()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """One update. Ranks that do not send take part in the gathering."""
        assert wire_format == "named_tensors", f"wire_format must be named_tensors, got {wire_format}"
        named = one_by_one(weights, asyncio.get_running_loop())
        if not self._sends:
            await asyncio.to_thread(list, (None for _ in named))
            return
        if self._sender is None:
            self._sender = rl.Sender("http://" + await self._server().get_server_address.remote(), "shm")
        version = f"at {time.time_ns()}" if global_steps is None else str(global_steps)
        await asyncio.to_thread(self._sender.send, named, version)

    def _server(self) -> Any:
        self._handle = self._handle or ray.get_actor(f"octavo_server_{self.replica_rank}")
        return self._handle


RolloutReplicaRegistry.register("octavo", lambda: OctavoReplica)
_ROLLOUT_REGISTRY["octavo", "async"] = f"{__name__}.OctavoRollout"

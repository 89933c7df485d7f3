"""What OpenRLHF's rollout actor and its trainer's rank 0 do with the package vllm, in one process, over octavo-vllm."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import vllm
from safetensors.torch import load_file
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.inputs import TokensPrompt
from vllm.utils import random_uuid
from vllm.utils.network_utils import get_open_port

from octavo.checkpoint.hub import find_model

WEIGHTS = load_file(find_model("octavo-tiny", None, None) / "model.safetensors")


async def generate(llm: vllm.AsyncLLMEngine, **own: Any) -> vllm.RequestOutput:
    """RolloutRayActor.generate."""
    params = vllm.SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True} | own)
    final = None
    async for output in llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7, 8]), params, request_id=random_uuid()):
        final = output
    assert final is not None
    return final


async def send(llm: vllm.AsyncLLMEngine, group: PyNcclCommunicator, factor: float) -> None:
    """ActorPPOTrainer.broadcast_to_vllm: a tensor a call, each beside its broadcast."""
    for count, (name, weight) in enumerate(WEIGHTS.items(), 1):
        tensor = weight * factor
        sender = threading.Thread(target=lambda tensor=tensor: group.broadcast(tensor, src=0))
        sender.start()
        await llm.collective_rpc(
            "update_weight", args=(name, tensor.dtype, tensor.shape), kwargs={"empty_cache": count == len(WEIGHTS)}
        )
        sender.join()


async def main() -> None:
    """An actor's life."""
    args = vllm.AsyncEngineArgs(
        model="octavo-tiny",
        enforce_eager=True,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        tensor_parallel_size=1,
        seed=3,
        distributed_executor_backend="uni",
        max_model_len=256,
        enable_prefix_caching=True,
        dtype="bfloat16",
        trust_remote_code=True,
        gpu_memory_utilization=0.5,
        enable_sleep_mode=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
    )
    llm = vllm.AsyncLLMEngine.from_engine_args(args)
    assert not await llm.is_sleeping()
    before = (await generate(llm)).outputs[0].token_ids
    port, made = get_open_port(), []
    meet = threading.Thread(
        target=lambda: made.append(PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port, 0, 2), "cpu"))
    )
    meet.start()
    await llm.collective_rpc("init_process_group", args=("127.0.0.1", port, 1, 2, "openrlhf", "gloo", False))
    meet.join()
    for factor, same in ((1.25, False), (1.0, True)):
        running = asyncio.create_task(generate(llm, max_tokens=200))
        await llm.pause_generation(mode="keep")
        reset = asyncio.create_task(llm.reset_prefix_cache())
        await send(llm, made[0], factor)
        await reset
        await llm.resume_generation()
        assert len((await running).outputs[0].token_ids) == 200
        assert ((await generate(llm)).outputs[0].token_ids == before) == same
    assert llm.output_processor.get_num_unfinished_requests() == 0
    await llm.sleep(level=1, tags=["kv_cache"])
    await llm.sleep(level=1)
    for tag in ("weights", "kv_cache"):
        await llm.wake_up(tags=[tag])
    assert (await generate(llm)).outputs[0].token_ids == before
    made[0].destroy()
    await llm.aclose()
    print("an actor lived")


if __name__ == "__main__":
    asyncio.run(main())

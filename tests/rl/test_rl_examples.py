"""RL.A5: examples/rl: Octavo in verl's and NeMo-RL's hands, and in TRL's asynchronous trainer's.

Beside interfaces that `trainers` has written down, or the real ones where they are installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainers
from octavo import LLM
from rl_rig import TINY
from weights_rig import Weights, answers, give, other_weights, prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "rl"
ASKED = prompts(40)
PROMPT: list[int] = ASKED[0]["prompt_token_ids"]
DRAWN: dict[str, Any] = {"max_tokens": 6, "seed": 5, "ignore_eos": True}
Right = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def new() -> Weights:
    return other_weights(1)


@pytest.fixture(scope="module")
def right(new: Weights) -> Right:
    """What the old and the new weights say."""
    with LLM(TINY, dtype="bfloat16", max_model_len=256, weight_transfer_config={"backend": "disk"}) as llm:
        found = answers(llm, ASKED)
        give(llm, new)
        return found + answers(llm, ASKED)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of examples/rl by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    trainers.install(monkeypatch)
    for name in ("octavo_server", "verl_octavo", "nemo_rl_octavo", "trl_async", "grpo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def test_rl_a5_no_example_is_longer_than_150_lines() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 150, path.name


def test_rl_a2_trls_asynchronous_weights(example: Any, new: Weights, right: Right) -> None:
    """TRL's WeightTransferProtocol, over gloo, of an iterator that gathers."""
    body = {"token_ids": PROMPT, "sampling_params": DRAWN}
    with RunningServer("--dtype", "bfloat16", "--weight-transfer-config", '{"backend": "gloo"}') as server:
        server.wait_ready()
        weights = example("trl_async").OctavoWeights(server.url)
        weights.init_weight_transfer()
        for turn in (1, 2):
            weights.pause()
            assert server.get("/is_paused").json()["is_paused"]
            weights.send_weights(iter(new.items()))
            weights.resume()
            (choice,) = server.post("/inference/v1/generate", body).json()["choices"]
            assert choice["token_ids"] == right[1][0]
            assert choice["weight_versions"][0]["version"] == f"update-{turn}"
        weights.destroy()


def test_rl_a7_a_loop_against_a_server_has_ratios_of_one_in_each_first_pass(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """RL.A7: float32 masters, a temperature, n completions of a prompt, microbatches, a second pass.

    Of a checkpoint whose own defaults would cut the draws.
    """
    module = example("grpo")
    monkeypatch.setattr(module, "MICROBATCH", 64)
    policy = shutil.copytree(TINY, tmp_path / "policy")
    (policy / "generation_config.json").write_text('{"do_sample": true, "top_k": 5, "repetition_penalty": 1.5}')
    loop = module.Loop(str(policy), max_tokens=10, lr=1e-3)
    try:
        said = [loop.update(step, [[5, 6, 7], PROMPT[:20]]) for step in range(3)]
        drawn = loop.draw([[5, 6, 7]])
        loop.learn(drawn, torch.ones(module.N))
        stale = drawn.logprobs(loop.model, module.TEMPERATURE) != drawn.old
    finally:
        loop.close()
    assert [each[1:] for each in said] == [(1.0, 1.0)] * 3
    assert stale.any(), "weights that are not the server's are seen"


@pytest.mark.slow
def test_rl_a5_verl_by_its_registry(example: Any, new: Weights, right: Right) -> None:
    module = example("verl_octavo")
    kept = sys.modules["verl.workers.rollout.replica"].RolloutReplicaRegistry.get("octavo")
    path = sys.modules["verl.workers.rollout.base"]._ROLLOUT_REGISTRY["octavo", "async"]
    assert kept is module.OctavoReplica and path == "verl_octavo.OctavoRollout"
    asyncio.run(_use_verl(module, new, right))


async def _use_verl(module: Any, new: Weights, right: Right) -> None:
    config = types.SimpleNamespace(
        max_model_len=256,
        prompt_length=128,
        response_length=128,
        dtype="bfloat16",
        max_num_seqs=64,
        gpu_memory_utilization=0.5,
        free_cache_engine=True,
        tensor_model_parallel_size=1,
        data_parallel_size=1,
    )
    model = types.SimpleNamespace(path="policy", local_path=TINY)
    replica = _made(module.OctavoReplica, 0, config, model)
    replica.rollout_mode = module.RolloutMode.HYBRID
    await replica.launch_servers()
    server = replica._server_handle
    with contextlib.closing(server.made.server):
        assert replica.server_address.startswith("127.0.0.1:")
        rollout = _made(module.OctavoRollout, config, model, None)

        async def gathered() -> AsyncIterator[tuple[str, torch.Tensor]]:
            for name, tensor in new.items():
                yield name, tensor

        async def ask() -> Any:
            return await server.generate.remote(
                prompt_ids=PROMPT, sampling_params=DRAWN | {"logprobs": True}, request_id="a"
            )

        first = await ask()
        assert (first.token_ids, first.log_probs) == right[0] and first.stop_reason == "completed"
        await rollout.release()
        await rollout.resume(["weights"])
        await rollout.update_weights(gathered(), global_steps=7)
        await rollout.resume(["kv_cache"])
        second = await ask()
        assert (second.token_ids, second.log_probs) == right[1]
        assert second.extra_fields["global_steps"] == 7 and second.extra_fields["weight_versions"][0]["version"] == "7"
        await rollout.update_weights(iter(new.items()), global_steps=8)
        await replica.abort_all_requests()
        waiting = asyncio.ensure_future(ask())
        await replica.resume_generation()
        assert (await waiting).token_ids == right[1][0]


def _made(kind: Any, *arguments: Any) -> Any:
    return kind(*arguments)


@pytest.mark.slow
def test_rl_a5_nemo_rl_by_its_interface(example: Any, new: Weights, right: Right) -> None:
    module = example("nemo_rl_octavo")
    config = {
        "model_name": TINY,
        "_pad_token_id": 0,
        "max_new_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "colocated": {"enabled": True},
        "octavo_cfg": {"dtype": "bfloat16", "max_model_len": 256},
    }
    generation = module.OctavoGeneration(config)
    with contextlib.closing(types.SimpleNamespace(close=generation.shutdown)):
        ids = torch.zeros(2, 45, dtype=torch.int64)
        ids[0, :40], ids[1, :3] = torch.tensor(PROMPT), torch.tensor([5, 6, 7])
        data = module.BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([40, 3])})

        def greedy() -> Any:
            return generation.generate(data, greedy=True)

        before = greedy()
        assert before["output_ids"].shape == before["logprobs"].shape == (2, 51)
        for row, length in enumerate((40, 3)):
            end = int(before["unpadded_sequence_lengths"][row])
            assert end == length + int(before["generation_lengths"][row])
            assert torch.equal(before["output_ids"][row, :length], ids[row, :length])
            assert not before["logprobs"][row, :length].any() and (before["logprobs"][row, length:end] < 0).all()
            assert not before["output_ids"][row, end:].any() and bool(before["truncated"][row]) == (end - length == 6)
        assert generation.finish_generation() and generation.prepare_for_generation(tags=["weights"])
        generation.prepare_refit_info({})
        module.send_weights(generation.sender_facts()[0], iter(new.items()), *generation.sender_facts()[1:])
        assert generation.prepare_for_generation(tags=["kv_cache"]) and generation.invalidate_kv_cache()
        after = greedy()
        with LLM(TINY, dtype="bfloat16", max_model_len=256, weight_transfer_config={"backend": "disk"}) as llm:
            give(llm, new)
            (wanted,) = answers(llm, ASKED, temperature=0.0, ignore_eos=False)
        count = int(after["generation_lengths"][0])
        assert after["output_ids"][0, 40 : 40 + count].tolist() == wanted[0]
        assert after["logprobs"][0, 40 : 40 + count].tolist() == wanted[1]
        assert generation.pause_generation(clear_cache=False) and generation.resume_generation()
    assert generation.shutdown()

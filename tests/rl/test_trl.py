"""TRL 1.16 over Octavo, in both of its modes, read off TRL's own log.

These need TRL in an environment of their own, whose interpreter `OCTAVO_TRL_PYTHON` names: see docs/rl.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from patience import patient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "adapters" / "octavo-vllm"
PYTHON = os.environ.get("OCTAVO_TRL_PYTHON", "")
OURS = (ROOT / "src", ADAPTER / "src")
VLLM_PYTHON = os.environ.get("OCTAVO_VLLM_PYTHON", "")
SERVED = (
    "--logprobs-mode",
    "processed_logprobs",
    "--max-model-len",
    "512",
    "--weight-transfer-config",
    '{"backend": "gloo"}',
)


def run(script: Path, *arguments: str, python: str = PYTHON, paths: Sequence[Path] = OURS) -> str:
    """What a script of another environment prints."""
    told = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    environment = os.environ | told
    command = [python, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(300), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_log(printed: str) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    assert len(lines) == 10
    assert [line["sampling/sampling_logp_difference/max"] for line in lines] == [0.0] * 10
    assert {line[f"sampling/importance_sampling_ratio/{end}"] for line in lines for end in ("min", "max")} == {1.0}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="OCTAVO_TRL_PYTHON names no interpreter")
def test_rl_a2_grpo_in_colocate_mode() -> None:
    """RL.A2, RL.N7: ten steps, and TRL's own log says that no log-probability differs."""
    check_log(run(ADAPTER / "trl_grpo.py", "colocate", "10"))


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="OCTAVO_TRL_PYTHON names no interpreter")
def test_rl_a1_grpo_in_server_mode_and_every_method_of_the_client() -> None:
    """RL.A1, RL.N7: against `octavo serve`, weights by gloo; then VLLMClient's methods one by one."""
    with RunningServer(*SERVED) as server:
        server.wait_ready()
        check_log(run(ADAPTER / "trl_grpo.py", "server", "10", server.url))
        assert "every method passed" in run(ROOT / "tests" / "rl" / "trl_client.py", server.url, str(ADAPTER))


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON, reason="OCTAVO_VLLM_PYTHON names no interpreter")
def test_rl_a3_vllms_own_trainer_end_drives_the_routes() -> None:
    """RL.A3: HTTPVLLMWeightSyncClient, ModuleSource and the engine that drives them, as vLLM 0.33 has them."""
    with RunningServer(*SERVED) as server:
        server.wait_ready()
        script = ROOT / "tests" / "rl" / "vllm_trainer.py"
        assert "drove the routes" in run(script, server.url, python=VLLM_PYTHON, paths=[ROOT / "src"])


def test_rl_a2_what_openrlhfs_actor_does() -> None:
    """RL.A2: its engine, its communicator, and tensors one a call while requests are kept."""
    script = ROOT / "tests" / "rl" / "openrlhf_actor.py"
    assert run(script, python=sys.executable) == "an actor lived\n"


def test_rl_a2_what_torchtitans_generator_imports_and_steps() -> None:
    """RL.A2: an engine that its owner steps; a model of the trainer's own is refused by name."""
    code = """
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import AttentionConfig, CompilationConfig, ParallelConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode, PassConfig
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.registry import AttentionBackendEnum
init_logger("x").debug("y")
made = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE, mode=CompilationMode.NONE, pass_config=PassConfig())
attention = AttentionConfig(backend=AttentionBackendEnum.CUSTOM)
common = dict(model="octavo-tiny", trust_remote_code=True, dtype="bfloat16", tensor_parallel_size=1,
              data_parallel_size=1, enable_expert_parallel=False, distributed_executor_backend="external_launcher",
              gpu_memory_utilization=0.5, enforce_eager=True, attention_config=attention, compilation_config=made,
              disable_log_stats=False, max_model_len=128, max_num_seqs=8, scheduling_policy="fcfs", seed=1)
engine = LLMEngine.from_engine_args(EngineArgs(**common))
assert engine.vllm_config.parallel_config.world_size == 1
own = dict(n=1, max_tokens=6, seed=2, logprobs=0, ignore_eos=True)
params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **own)
for number, one in enumerate(engine.renderer.render_cmpl([{"prompt_token_ids": [5, 6, 7]}] * 3)):
    engine.add_request(request_id=str(number), prompt=one, params=params)
engine.abort_request(["2"])
ended = []
while engine.has_unfinished_requests():
    ended += [output for output in engine.step() if output.finished]
assert isinstance(ended[0], RequestOutput) and engine.reset_prefix_cache(reset_running_requests=True)
assert sorted(len(output.outputs[0].token_ids) for output in ended) == [0, 6, 6]
for wrong in ({"worker_cls": "torchtitan.Worker"}, {"config_format": "torchtitan"}, {"data_parallel_size": 2}):
    try:
        EngineArgs(**common | wrong).config()
    except ValueError as error:
        assert next(iter(wrong)) in str(error), error
    else:
        raise AssertionError(wrong)
print("stepped")
"""
    assert printed_by(code) == "stepped\n"


def printed_by(code: str) -> str:
    """By a process that has the adapter."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, OURS)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_adapter_has_the_names_that_trainers_import() -> None:
    """And loads weights by vLLM's path: together, at the engine's next use, and none before."""
    code = """
from octavo.checkpoint.hub import find_model
from safetensors.torch import load_file
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.network_utils import get_ip, get_open_port
assert get_ip().count(".") == 3 and get_open_port() > 0
weights = load_file(find_model("octavo-tiny", None, None) / "model.safetensors")
llm = LLM("octavo-tiny", tensor_parallel_size=1, enable_sleep_mode=True,
          distributed_executor_backend="external_launcher", max_model_len=128, seed=0,
          logprobs_mode="processed_logprobs", quantization=None, trust_remote_code=False)
params = SamplingParams(max_tokens=8, temperature=0.0)
prompts = [{"prompt_token_ids": [5, 6, 7]}]
ask = lambda: llm.generate(prompts, sampling_params=params, use_tqdm=False)[0].outputs[0].token_ids
before = ask()
load = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights
for name, weight in weights.items():
    load([(name, weight * 1.25)])
assert llm.reset_prefix_cache() and ask() != before
llm.sleep(level=2)
llm.wake_up(tags=["weights"])
for name, weight in weights.items():
    load([(name, weight)])
llm.wake_up(tags=["kv_cache"])
assert ask() == before
try:
    LLM("octavo-tiny", tensor_parallel_size=2)
except ValueError as error:
    assert "tensor_parallel_size" in str(error)
print("imported")
"""
    assert printed_by(code) == "imported\n"

"""What a trainer asks about the server before it begins: model, settings, load.

The names are vLLM's and SGLang's. Owns these replies. Invariants: a fact that does not exist here is null, never made
up; no key, no path of a key file and no address of another machine is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import octavo
from octavo.config.speculative import BY_MODEL, read_speculative
from octavo.serve.engine.refusals import EngineDeadError
from octavo.serve.errors import bad_request, not_ready
from octavo.serve.http.exchange import Exchange
from octavo.serve.state import ServeState


async def server_info(state: ServeState, exchange: Exchange) -> None:
    """GET /server_info: as vLLM says it under `vllm_config`, and as SGLang does beside it."""
    wanted = exchange.query().get("config_format", ["text"])[-1]
    if wanted not in ("json", "text"):
        raise bad_request("invalid_value", "config_format: must be json or text", "config_format")
    config: Any = _vllm_config(state)
    await exchange.reply_json(
        {
            "vllm_config": config if wanted == "json" else repr(config),
            "version": octavo.__version__,
            "numerics": dict(state.engine.info.numerics_contract) if state.engine.info else {},
            "system_fingerprint": state.fingerprint,
            **_sglang_info(state),
        }
    )


def _vllm_config(state: ServeState) -> dict[str, Any]:
    engine, info = state.engine, state.engine.info
    config = engine.config
    return {
        "model_config": {
            "model": engine.model_name, "tokenizer": config.tokenizer or engine.model_name,
            "dtype": f"torch.{info.dtype}" if info else None, "logprobs_mode": config.logprobs_mode,
            "max_model_len": engine.limits.max_model_len, "max_logprobs": engine.limits.max_logprobs,
            "seed": config.seed, "quantization": info.quantization if info else None,
            "skip_tokenizer_init": config.skip_tokenizer_init,
            "enable_sleep_mode": config.enable_sleep_mode or bool(info and info.device == "cpu"),
        },
        "weight_transfer_config": config.weight_transfer_config
        or {"backend": "gloo" if info and info.device == "cpu" else "nccl"},
        "lora_config": None,
        "parallel_config": {
            "world_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        },
        "scheduler_config": {
            "max_num_seqs": info.max_num_seqs if info else None,
            "max_num_batched_tokens": info.max_num_batched_tokens if info else None,
        },
        "cache_config": {
            "block_size": info.block_size if info else None, "num_gpu_blocks": info.num_blocks if info else None,
            "enable_prefix_caching": info.enable_prefix_caching if info else None,
        },
        "speculative_config": _speculative(config.speculative_config),
        "device_config": {"device": info.device if info else None},
    }  # fmt: skip


def _speculative(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """All that is set of drafts, but a method's own options; None: there are none. A checkpoint may say the method."""
    speculative = read_speculative(given or {})
    if not speculative.num_speculative_tokens:
        return None
    said = {name: value for name, value in dataclasses.asdict(speculative).items() if name != "options"}
    return said | {"method": None if speculative.method == BY_MODEL else speculative.method}


def _sglang_info(state: ServeState) -> dict[str, Any]:
    engine, info = state.engine, state.engine.info
    return {
        "model_path": engine.model_name,
        "served_model_name": state.model_names[0],
        "tp_size": 1,
        "dp_size": 1,
        "max_total_num_tokens": (info.num_blocks - 1) * info.block_size if info else None,
        "max_req_input_len": engine.limits.max_model_len,
        "device": info.device if info else None,
        "attention_backend": info.attention_backend if info else None,
        "status": engine.state,
    }


async def get_world_size(state: ServeState, exchange: Exchange) -> None:
    """GET /get_world_size: workers of one engine; with include_dp of all, which is the same here."""
    await exchange.reply_json({"world_size": 1})


async def model_info(state: ServeState, exchange: Exchange) -> None:
    """GET /model_info, SGLang's."""
    engine = state.engine
    await exchange.reply_json(
        {
            "model_path": engine.model_name,
            "tokenizer_path": engine.config.tokenizer or engine.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": await state.weight_version(),
            "model_type": engine.arch.name,
        }
    )


async def loads(state: ServeState, exchange: Exchange) -> None:
    """GET /v1/loads, SGLang's: what runs and waits."""
    stats = state.engine.stats
    own = {
        "dp_rank": 0,
        "num_running_reqs": int(stats["num_running"]),
        "num_waiting_reqs": int(stats["num_waiting"]),
        "num_total_reqs": int(stats["num_running"] + stats["num_waiting"]),
        "token_usage": stats["cache_usage"],
        "num_open_reqs": int(stats["num_requests"]),
    }
    await exchange.reply_json({"version": octavo.__version__, "dp_rank_count": 1, "loads": [own]})


async def health_generate(state: ServeState, exchange: Exchange) -> None:
    """GET /health_generate: 200 if the engine's loop answers a call between two steps, and has weights to serve."""
    state.check_ready()
    state.check_weights(whole=False)
    await liveness(state, exchange)


async def liveness(state: ServeState, exchange: Exchange) -> None:
    """GET /liveness: 200 if the engine's loop answers a call between two steps, whatever it lacks."""
    state.check_ready()
    try:
        await state.engine.control.standing()
    except EngineDeadError as error:
        raise not_ready(state.engine.state, error.retry_after) from None
    await exchange.reply(200, b"")

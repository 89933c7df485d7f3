"""Options of other engines' start lines: what each of them means here.

Owns the table OPTIONS: options of vLLM's (and some of SGLang's) that Octavo has no setting of that name for, and their
translation, whichever way they came: command line, YAML file or Python arguments. Knows no engine. Invariants: an
option that means a setting becomes it; one whose value changes nothing here is taken, with one line that says why; one
that asks for what there is not is refused with the reason. Nothing is dropped in silence but what asks for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from octavo.config.kv_transfer import FIELD as TRANSFER
from octavo.config.kv_transfer import offloading
from octavo.config.option import Option, idle, listed, mapping, never, number, only, same, switch
from octavo.config.settings import ConfigError, Setting

_LOG = logging.getLogger("octavo")


def translate(
    values: Mapping[str, Any], known: Collection[str], *, origin: str, server: bool = False
) -> dict[str, Any]:
    """`values` with the options of others read: settings of `known` names and unknown ones stay as they are.

    `server`: those of the server count as well. Raises ConfigError for what is refused.
    """
    found: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: name not in OPTIONS or not OPTIONS[name].gives_way):
        value, option = values[name], None if name in known else OPTIONS.get(name)
        if option is None or (option.server and not server):
            read = {name: value}
        else:
            read = option.read(name, value, origin)
        for setting, meant in read.items():  # several options may each say a part of one mapping
            if setting in _OF_PARTS and setting in found:
                meant = {**mapping(setting, found[setting]), **mapping(setting, meant)}
            if setting == TRANSFER and found.get(setting) and meant:
                raise ConfigError(name, value, f"{setting} is given in two ways", "leave one of them out", origin)
            found[setting] = meant
    return found


_OF_PARTS = ("hf_overrides", "speculative_config")


def said(arguments: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Python's arguments that say something: None stands for the default, as in vLLM's signatures, or is a value."""
    silent = {name for name, fact in settings.items() if not fact.optional} | (OPTIONS.keys() - settings.keys())
    return {name: value for name, value in arguments.items() if value is not None or name not in silent}


def _drafts(key: str) -> Option:
    """A part of speculative_config."""

    def read(name: str, value: Any) -> dict[str, Any]:
        is_count = isinstance(value, str) and value.strip().isdecimal()
        return {"speculative_config": {key: int(value) if is_count else value}}

    return Option(becomes=read)


def _reasoning(name: str, value: Any) -> dict[str, Any]:
    """vLLM's texts around reasoning: how it ends is a setting of ours, how it begins is the parser's."""
    given = mapping(name, value)
    found = {"reasoning_end_text": given["reasoning_end_str"]} if given.get("reasoning_end_str") else {}
    for key in sorted(map(str, given.keys() - {"reasoning_end_str"})):
        _LOG.warning("%s.%s changes nothing: --reasoning-parser knows how reasoning begins", name, key[:40])
    return found


def _state_dtype(name: str, value: Any) -> dict[str, Any]:
    """The type of recurrent states; auto: whatever else says it, else float32."""
    said = value.strip().lower() if isinstance(value, str) else value
    if said in (None, "", "auto", "none", "null"):
        return {}
    if said == "float16":
        limit = "recurrent states are float32 or bfloat16, as --state-dtype says: float16 has no room for their sums"
        raise ConfigError(name, value, limit)
    return {"state_dtype": said}


def _mamba(name: str, value: Any) -> dict[str, Any]:
    """vLLM's mapping of what --mamba-backend and those beside it say."""
    given = mapping(name, value)
    keys = {
        "backend": "mamba_backend",
        "ssu_algorithm": "mamba_ssu_algorithm",
        "enable_stochastic_rounding": "enable_mamba_cache_stochastic_rounding",
        "stochastic_rounding_philox_rounds": "mamba_cache_philox_rounds",
    }
    for key in given:
        if key not in keys:
            raise ConfigError(name, value, f"unknown key {str(key)[:40]!r}: {', '.join(keys)} are known")
        OPTIONS[keys[key]].read(f"{name}.{key}", given[key], "")
    return {}


def _structured(name: str, value: Any) -> dict[str, Any]:
    """vLLM's options of structured outputs: two of them are settings of ours, the others change nothing."""
    given = mapping(name, value)
    found = {key: given[key] for key in ("enable_in_reasoning", "reasoning_parser") if given.get(key) not in (None, "")}
    for key in sorted(map(str, given.keys() - found.keys())):
        reason = _COMPACT if key == "disable_any_whitespace" else _FORMS
        _LOG.warning("%s.%s changes nothing: %s", name, key[:40], reason)
    return found


_ONE = "an engine of Octavo uses one device"
_FORMS = "llguidance compiles every form, without a fallback"
_COMPACT = "forced JSON is compact, but for requests whose structured_outputs say disable_any_whitespace: false"
_GRAPHS = (
    "Octavo chooses its CUDA graphs by itself and compiles nothing with torch.compile (--enforce-eager: no graphs)"
)
_LORA = "there are no LoRA adapters"
_TEXT = "prompts are text or token ids"
_CHECKPOINT = "Octavo runs what the checkpoint's config.json says"
_NO_LOG = "prompts and outputs are never logged; --log-level info logs a line per request"
_LOADING = "Octavo has one way to load weights"
_STATS = "figures are at /metrics; none are logged"
_CHUNKS = "long prompts share a step by --max-num-batched-tokens alone"
_NETWORK = "nothing runs on other machines"
_STATE_KERNELS = "kernels of layers that keep states follow from the device and from the sizes of the layers"
_MAMBA = "states of recurrent layers lie in blocks of the one cache, and advance at fixed positions"
_ROUNDED = "states are rounded to the nearest value (--state-dtype), none is drawn"
_STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")

_MODEL = {
    "model_weights": never("weights are read from --model"),
    "model_class_overrides": never("a new model is a file in src/octavo/models (docs/adding.md)"),
    "quantization_config": never("--quantization says all there is"),
    "allow_deprecated_quantization": idle("no quantization here is deprecated", kind="switch"),
    "qlora_adapter_name_or_path": never("there are no LoRA adapters"),
    "override_neuron_config": never("the devices are CPUs and NVIDIA GPUs"),
    "device_ids": never("set CUDA_VISIBLE_DEVICES instead", kind="values"),
    "tokenizer_pool_size": only("0", "one tokenizer serves all"),
    "tokenizer_pool_type": idle("one tokenizer serves all"),
    "tokenizer_pool_extra_config": idle("one tokenizer serves all"),
    "renderer_num_workers": idle("templates run in processes of their own"),
    "use_fp64_gumbel": never("noise is drawn in 32 bits, keyed by seed, position and token", kind="switch"),
    "enable_trace_replay": never("no requests are recorded", kind="switch"),
    "enable_cumem_allocator": never("an engine keeps its memory until it ends", kind="switch"),
    "safetensors_prefetch_num_threads": idle("Octavo has one way to load weights"),
    "safetensors_prefetch_block_size": idle("Octavo has one way to load weights"),
    "fail_on_environ_validation": idle("an unknown OCTAVO_ variable is told, and no other is read", kind="switch"),
    "diffusion_config": never("Octavo generates text, token by token"),
    "model_path": same("model"),
    "runner": only("auto generate", "Octavo generates text"),
    "task": only("auto generate", "Octavo generates text"),
    "convert": only("auto none", "Octavo generates text"),
    "tokenizer_mode": only("auto hf fast mistral", "a folder has one tokenizer: tokenizer.json, else tekken.json"),
    "trust_remote_code": idle("Octavo never runs code that comes with a checkpoint", kind="switch"),
    "code_revision": idle("Octavo never runs code that comes with a checkpoint"),
    "tokenizer_revision": never("the tokenizer is taken at --revision"),
    "config_format": only("auto hf mistral", "config.json is read"),
    "hf_config_path": never(_CHECKPOINT),
    "rope_scaling": Option(becomes=lambda name, value: {"hf_overrides": {name: dict(mapping(name, value))}}),
    "rope_theta": Option(becomes=lambda name, value: {"hf_overrides": {name: number(name, value)}}),
    "hf_token": never("a token in a command line can be read by others in `ps`: set HF_TOKEN instead"),
    "model_impl": only("auto vllm", "Octavo has its own implementation of every model it runs"),
    "context_length": same("max_model_len"),
    "disable_sliding_window": never(_CHECKPOINT, kind="switch"),
    "disable_cascade_attn": idle("there is no cascade attention", kind="switch"),
    "enable_prompt_embeds": never(_TEXT, kind="switch"),
    "override_attention_dtype": never("attention computes in --dtype"),
    "logits_processors": never("what changes logits is a feature of Octavo's own (docs/adding.md)", kind="values"),
    "logits_processor_pattern": never("what changes logits is a feature of Octavo's own (docs/adding.md)"),
    "pooler_config": never("Octavo generates text"),
    "override_pooler_config": never("Octavo generates text"),
    "io_processor_plugin": never("Octavo generates text"),
    "max_seq_len_to_capture": idle(_GRAPHS),
    "model_loader_extra_config": idle(_LOADING),
    "safetensors_load_strategy": idle(_LOADING),
    "pt_load_map_location": idle(_LOADING),
    "max_parallel_loading_workers": idle(_LOADING),
    "ignore_patterns": idle("only what a model needs is downloaded", kind="values"),
    "use_tqdm_on_load": idle(_LOADING, kind="switch"),
}
_PARALLEL = {
    "data_parallel_multi_port_external_lb": never(_ONE, kind="switch"),
    "data_parallel_supervisor_port": idle(_ONE),
    "dp_supervisor_probe_interval_s": idle(_ONE),
    "dp_supervisor_probe_timeout_s": idle(_ONE),
    "dp_supervisor_probe_failure_threshold": idle(_ONE),
    "dp_sync_interval": idle(_ONE),
    "dcp_comm_backend": idle(_ONE),
    "dcp_q_replicate": idle(_ONE, kind="switch"),
    "dcp_kv_cache_interleave_size": idle(_ONE),
    "cp_kv_cache_interleave_size": idle(_ONE),
    "enable_batch_sharded_sampling": idle(_ONE, kind="switch"),
    "ubatch_size": only("0", _ONE),
    "dbo_decode_token_threshold": idle(_ONE),
    "dbo_prefill_token_threshold": idle(_ONE),
    "disable_nccl_for_dp_synchronization": idle(_ONE, kind="switch"),
    "enable_nccl_comm_suspend": idle(_ONE, kind="switch"),
    "distributed_timeout_seconds": idle(_NETWORK),
    "cpu_distributed_timeout_seconds": idle(_NETWORK),
    "enable_ep_weight_filter": idle("all experts are on the one device", kind="switch"),
    "enable_elastic_ep": never("all experts are on the one device", kind="switch"),
    "num_redundant_experts": only("0", "all experts are on the one device"),
    "eplb_window_size": idle("all experts are on the one device"),
    "eplb_step_interval": idle("all experts are on the one device"),
    "eplb_log_balancedness": idle("all experts are on the one device", kind="switch"),
    "enable_fault_tolerance": idle("the server always starts a new engine where one died", kind="switch"),
    "fault_tolerance_config": idle("the server always starts a new engine where one died"),
    "numa_bind": never("run the command under numactl instead", kind="switch"),
    "numa_bind_nodes": never("run the command under numactl instead", kind="values"),
    "numa_bind_cpus": never("run the command under numactl instead", kind="values"),
    "tensor_parallel_size": only("1", _ONE, short=("-tp", "--tp-size", "--tp")),
    "pipeline_parallel_size": only("1", _ONE, short=("-pp", "--pp-size")),
    "data_parallel_size": only("1", _ONE + "; start one server per device", short=("-dp", "--dp-size")),
    "data_parallel_size_local": only("1", _ONE, short=("-dpl",)),
    "data_parallel_rank": only("0", _ONE, short=("-dpn",)),
    "data_parallel_start_rank": only("0", _ONE, short=("-dpr",)),
    "data_parallel_address": idle(_NETWORK, short=("-dpa",)),
    "data_parallel_rpc_port": idle(_NETWORK, short=("-dpp",)),
    "data_parallel_backend": only("mp", _NETWORK, short=("-dpb",)),
    "data_parallel_hybrid_lb": never(_ONE, kind="switch", short=("-dph",)),
    "data_parallel_external_lb": never(_ONE, kind="switch", short=("-dpe",)),
    "decode_context_parallel_size": only("1", _ONE, short=("-dcp",)),
    "prefill_context_parallel_size": only("1", _ONE, short=("-pcp",)),
    "enable_expert_parallel": idle("all experts are on the one device", kind="switch", short=("-ep",)),
    "enable_eplb": idle("all experts are on the one device", kind="switch"),
    "eplb_config": idle("all experts are on the one device"),
    "expert_placement_strategy": idle("all experts are on the one device"),
    "all2all_backend": idle("all experts are on the one device"),
    "distributed_executor_backend": only("mp uni", _NETWORK),
    "disable_custom_all_reduce": idle(_ONE, kind="switch"),
    "ray_workers_use_nsight": never(_NETWORK, kind="switch"),
    "nnodes": only("1", _NETWORK, short=("-n",)),
    "node_rank": only("0", _NETWORK, short=("-r",)),
    "master_addr": idle(_NETWORK),
    "master_port": idle(_NETWORK),
    "worker_cls": only("auto", "the worker is Octavo's own"),
    "worker_extension_cls": never("the worker is Octavo's own"),
    "enable_dbo": never(_ONE, kind="switch"),
}
_CACHE = {
    "offload_backend": idle("weights stay on the device"),
    "cpu_offload_params": idle("weights stay on the device"),
    "offload_group_size": only("0", "weights stay on the device"),
    "offload_num_in_group": idle("weights stay on the device"),
    "offload_prefetch_step": idle("weights stay on the device"),
    "offload_params": idle("weights stay on the device"),
    "kv_cache_dtype_skip_layers": never("the cache has one type", kind="values"),
    "prefix_cache_retention_interval": idle("the oldest unused blocks go first"),
    "prefix_match_unit": idle("whole blocks are found again"),
    "mamba_cache_mode": idle(_MAMBA, known=("align", "all", "none")),
    "mamba_config": Option(becomes=_mamba),
    "mamba_backend": idle(_STATE_KERNELS, known=("triton", "flashinfer")),
    "mamba_ssu_algorithm": idle(_STATE_KERNELS),
    "enable_mamba_cache_stochastic_rounding": never(_ROUNDED, kind="switch"),
    "mamba_cache_philox_rounds": idle(_ROUNDED, least=0),
    "use_replayssm": idle(_MAMBA, kind="switch"),
    "replayssm_buffer_len": idle(_MAMBA, least=1),
    "gdn_prefill_backend": idle(_STATE_KERNELS),
    "kda_prefill_backend": idle(_STATE_KERNELS),
    "ec_manager_config": idle(_TEXT),
    "swap_space": idle("a preempted request is computed again, to the same bits; no memory is set aside"),
    "mem_fraction_static": same("gpu_memory_utilization"),
    "enable_memory_saver": switch("enable_sleep_mode", when_on=True),
    "prefix_caching_hash_algo": idle("blocks are named by one hash"),
    "cpu_offload_gb": only("0 0.0", "weights stay on the device"),
    "kv_offloading_size": Option(becomes=offloading),
    "kv_offloading_backend": only("native", "blocks are kept by the connector `host`"),
    "calculate_kv_scales": never("scales of the cache are the checkpoint's", kind="switch"),
    "kv_sharing_fast_prefill": idle("no model of Octavo's shares its cache between layers", kind="switch"),
    "mamba_cache_dtype": Option(becomes=_state_dtype, known=_STATE_DTYPES, gives_way=True),
    "mamba_ssm_cache_dtype": Option(becomes=_state_dtype, known=_STATE_DTYPES),
    "mamba_block_size": idle(_MAMBA, least=1),
    "kv_events_config": never("the cache tells of no events"),
    "ec_transfer_config": never(_TEXT),
    "use_v2_block_manager": idle("there is one block manager", kind="switch"),
    "disable_hybrid_kv_cache_manager": idle("layers with windows have groups of their own", kind="switch"),
}
_SCHEDULER = {
    "max_num_scheduled_tokens": never(_CHUNKS),
    "scheduler_reserve_full_isl": idle("a request that finds no block is computed again later", kind="switch"),
    "prefill_schedule_interval": only("1", "a request that fits runs at once"),
    "watermark": only("0 0.0", "a request that fits runs at once"),
    "spec_method": _drafts("method"),
    "spec_model": _drafts("model"),
    "spec_tokens": _drafts("num_speculative_tokens"),
    "ngram_prompt_lookup_max": _drafts("prompt_lookup_max"),
    "ngram_prompt_lookup_min": _drafts("prompt_lookup_min"),
    "per_request_spec_decode_metrics": only("none", "drafts are counted for all requests together"),
    "max_running_requests": same("max_num_seqs"),
    "chunked_prefill_size": same("max_num_batched_tokens"),
    "max_num_partial_prefills": only("1", _CHUNKS),
    "max_long_partial_prefills": only("1", _CHUNKS),
    "long_prefill_token_threshold": idle(_CHUNKS),
    "num_scheduler_steps": idle("a step is planned while another one runs (--async-scheduling)"),
    "multi_step_stream_outputs": idle("outputs come with their step", kind="switch"),
    "num_lookahead_slots": only("0", "blocks for drafts are counted by the scheduler"),
    "scheduler_delay_factor": only("0 0.0", "a request that fits runs at once"),
    "preemption_mode": only("recompute", "a preempted request is computed again"),
    "scheduler_cls": never("the scheduler is Octavo's own"),
    "disable_chunked_mm_input": idle(_TEXT, kind="switch"),
    "disable_async_output_proc": idle("outputs are made while the next step runs", kind="switch"),
    "speculative_model": never("set model in --speculative-config"),
    "num_speculative_tokens": never("set num_speculative_tokens in --speculative-config"),
    "speculative_algorithm": never("set method in --speculative-config"),
}
_COMPILE = {
    "kernel_config": idle(_GRAPHS),
    "ir_op_priority": idle(_GRAPHS),
    "enable_flashinfer_autotune": idle(_GRAPHS, kind="switch"),
    "enable_bf16x3_router_gemm": never("products run on Octavo's own kernels", kind="switch"),
    "jit_monitor_mode": idle(_GRAPHS),
    "jit_monitor_verbose": idle(_GRAPHS, kind="switch"),
    "compilation_config": idle(_GRAPHS, short=("-cc", "-O")),
    "optimization_level": idle(_GRAPHS),
    "cuda_graph_sizes": idle(_GRAPHS, kind="values"),
    "cudagraph_capture_sizes": idle(_GRAPHS, kind="values"),
    "max_cudagraph_capture_size": idle(_GRAPHS),
    "performance_mode": idle("one way of running is fast and reproducible; --numerics fast is the yardstick"),
    "moe_backend": only("auto triton", "experts run on Octavo's own kernels"),
    "linear_backend": only("auto", "products run on Octavo's own kernels"),
    "enable_deterministic_inference": idle("that is the normal mode", kind="switch"),
    "additional_config": never("it would not be read"),
    "profiler_config": never("`octavo bench` and `octavo doctor` measure"),
}
_EXTRAS = {
    "reasoning_config": Option(becomes=_reasoning),
    "enable_lora_bias": idle(_LORA, kind="switch"),
    "long_lora_scaling_factors": idle(_LORA, kind="values"),
    "default_mm_loras": never(_LORA),
    "lora_target_modules": idle(_LORA, kind="values"),
    "specialize_active_lora": idle(_LORA, kind="switch"),
    "enable_tower_connector_lora": idle(_LORA, kind="switch"),
    "enable_mixed_moe_lora_format": idle(_LORA, kind="switch"),
    "enable_moe_shared_loras": idle(_LORA, kind="switch"),
    "enable_prompt_adapter": never("there are no prompt adapters", kind="switch"),
    "max_prompt_adapters": idle("there are no prompt adapters"),
    "max_prompt_adapter_token": idle("there are no prompt adapters"),
    "enable_mm_embeds": never(_TEXT, kind="switch"),
    "mm_hasher_algorithm": idle(_TEXT),
    "mm_shm_cache_max_object_size_mb": idle(_TEXT),
    "mm_encoder_only": never(_TEXT, kind="switch"),
    "mm_encoder_attn_dtype": idle(_TEXT),
    "mm_encoder_fp8_scale_path": idle(_TEXT),
    "mm_encoder_fp8_scale_save_path": idle(_TEXT),
    "mm_encoder_fp8_scale_save_margin": idle(_TEXT),
    "mm_tensor_ipc": idle(_TEXT),
    "mm_processor_device": idle(_TEXT),
    "mm_ipc_gpu_memory_gb": idle(_TEXT),
    "mm_device_do_normalize": idle(_TEXT, kind="switch"),
    "video_pruning_method": idle(_TEXT),
    "enable_mm_processor_stats": idle(_TEXT, kind="switch"),
    "kv_cache_metrics_sample": idle(_STATS),
    "enable_logging_iteration_details": idle(_STATS, kind="switch"),
    "structured_outputs_config": Option(becomes=_structured),
    "guided_decoding_backend": idle(_FORMS),
    "guided_decoding_disable_fallback": idle(_FORMS, kind="switch"),
    "enable_reasoning": idle("reasoning is looked for where --reasoning-parser finds it", kind="switch"),
    "reasoning_parser_plugin": never("give --reasoning-parser package.module:Class"),
    "enable_lora": never(_LORA, kind="switch"),
    "max_loras": idle(_LORA),
    "max_lora_rank": idle(_LORA),
    "max_cpu_loras": idle(_LORA),
    "lora_dtype": idle(_LORA),
    "lora_extra_vocab_size": idle(_LORA),
    "fully_sharded_loras": idle(_LORA, kind="switch"),
    "limit_mm_per_prompt": idle(_TEXT),
    "media_io_kwargs": idle(_TEXT),
    "mm_processor_kwargs": idle(_TEXT),
    "mm_processor_cache_gb": idle(_TEXT),
    "mm_processor_cache_type": idle(_TEXT),
    "mm_encoder_tp_mode": idle(_TEXT),
    "mm_encoder_attn_backend": idle(_TEXT),
    "disable_mm_preprocessor_cache": idle(_TEXT, kind="switch"),
    "interleave_mm_strings": idle(_TEXT, kind="switch"),
    "skip_mm_profiling": idle(_TEXT, kind="switch"),
    "language_model_only": idle(_TEXT, kind="switch"),
    "video_pruning_rate": idle(_TEXT),
    "allowed_local_media_path": idle(_TEXT),
    "allowed_media_domains": idle(_TEXT, kind="values"),
    "disable_log_stats": idle(_STATS, kind="switch"),
    "show_hidden_metrics_for_version": idle("no metric is hidden"),
    "otlp_traces_endpoint": never("there are no traces"),
    "collect_detailed_traces": never("there are no traces"),
    "kv_cache_metrics": idle(_STATS, kind="switch"),
    "cudagraph_metrics": idle(_STATS, kind="switch"),
    "enable_mfu_metrics": never("`octavo bench engine` tells a step's times", kind="switch"),
    "enable_layerwise_nvtx_tracing": never("`octavo bench engine` tells a step's times", kind="switch"),
}
_SERVER = {
    "enable_per_request_metrics": never("times of requests are at /metrics, all together", kind="switch"),
    "fingerprint_mode": never("system_fingerprint is Octavo's own"),
    "fingerprint_value": never("system_fingerprint is Octavo's own"),
    "cohere_is_reasoning_model": idle("there is no route of Cohere's API", kind="switch"),
    "cohere_format": idle("there is no route of Cohere's API"),
    "enable_flash_late_interaction": idle("Octavo generates text", kind="switch"),
    "allowed_origins": Option(becomes=lambda name, value: {"cors_origins": listed(name, value)}),
    "allowed_methods": idle("origins that may call may use every method there is"),
    "allowed_headers": idle("origins that may call may send every header"),
    "allow_credentials": idle("keys come in headers; no cookie is read", kind="switch"),
    "disable_uvicorn_access_log": switch("access_log", when_on=False),
    "uvicorn_log_level": idle("--log-level says what is logged"),
    "log_config_file": never("--log-level and --log-format say what is logged"),
    "shutdown_timeout": same("drain_seconds"),
    "enable_auto_tool_choice": idle("calls are looked for wherever --tool-call-parser finds a parser", kind="switch"),
    "tool_parser_plugin": never("give --tool-call-parser package.module:Class"),
    "tool_server": never("tools are called by the client"),
    "trust_request_chat_template": never(
        "templates are the server's: a request's own could run for long", kind="switch"
    ),
    "response_role": only("assistant", "an answer is the assistant's"),
    "enable_prompt_tokens_details": idle("usage always has prompt_tokens_details", kind="switch"),
    "enable_server_load_tracking": idle("/load always tells", kind="switch"),
    "enable_request_id_headers": idle("every reply has x-request-id", kind="switch"),
    "enable_tokenizer_info_endpoint": idle("/tokenizer_info is always there", kind="switch"),
    "enable_log_requests": idle(_NO_LOG, kind="switch"),
    "disable_log_requests": idle(_NO_LOG, kind="switch"),
    "enable_log_outputs": idle(_NO_LOG, kind="switch"),
    "enable_log_deltas": idle(_NO_LOG, kind="switch"),
    "max_log_len": idle(_NO_LOG),
    "aggregate_engine_logging": idle(_STATS, kind="switch"),
    "log_error_stack": idle("an internal error is always logged with its traceback", kind="switch"),
    "disable_fastapi_docs": idle("there are none", kind="switch"),
    "enable_offline_docs": never("there is no page of the API", kind="switch"),
    "disable_frontend_multiprocessing": idle("front end and engine are two processes", kind="switch"),
    "api_server_count": only("1", "one process answers", short=("-asc",)),
    "headless": never("a server answers over HTTP", kind="switch"),
    "tokens_only": never("/v1/completions takes and gives token ids beside text", kind="switch"),
    "middleware": never("no foreign code runs around requests", kind="values"),
    "lora_modules": never(_LORA, kind="values"),
    "prompt_adapters": never("there are no prompt adapters", kind="values"),
    "enable_ssl_refresh": never("a new certificate needs a new start", kind="switch"),
    "ssl_ciphers": never("Python's own choice of ciphers is used"),
    "h11_max_incomplete_event_size": idle("requests are read by httptools, within limits of Octavo's own"),
    "h11_max_header_count": idle("requests are read by httptools, within limits of Octavo's own"),
}

OPTIONS: Mapping[str, Option] = {
    **_MODEL,
    **_PARALLEL,
    **_CACHE,
    **_SCHEDULER,
    **_COMPILE,
    **_EXTRAS,
    **{name: msgspec.structs.replace(option, server=True) for name, option in _SERVER.items()},
}

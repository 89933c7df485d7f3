"""Options of other engines' start lines: what each of them means here.

Owns the table OPTIONS: options of vLLM's (and some of SGLang's) that Octavo has no setting of that name for, and their
translation, whichever way they came: command line, YAML file or Python arguments. Knows no engine. Invariants: an
option that means a setting becomes it; one whose value changes nothing here is taken, with one line that says why; one
that asks for what there is not is refused with the reason. Nothing is dropped in silence but what asks for nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from octavo.config.kv_transfer import offloading
from octavo.config.settings import ConfigError

_LOG = logging.getLogger("octavo")
_OFF = ("", "none", "null", "false", "{}", "[]")  # values that ask for nothing
Translation = Callable[[str, Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What one option means. Exactly one of `becomes` and `reason` is given."""

    becomes: Translation | None = None  # the settings that it means
    reason: str = ""  # why it changes nothing, or is refused
    harmless: Collection[str] | None = ()  # values that change nothing, in lower case; None: all
    kind: str = "value"  # of its flag: value, values or switch
    short: tuple[str, ...] = ()  # other flags of it, with their dashes
    server: bool = False  # it is the server's

    def read(self, name: str, value: Any, origin: str) -> dict[str, Any]:
        """The settings that it becomes. Raises ConfigError."""
        if self.becomes is not None:
            return self.becomes(name, value)
        text = _text(value)
        if value is None or (text in _OFF and not self.harmless):
            return {}
        if self.harmless is not None and text not in self.harmless and text not in _OFF:
            change = "leave it out" + (f", or give {' or '.join(self.harmless)}" if self.harmless else "")
            raise ConfigError(name, value, self.reason, change, origin)
        _LOG.warning("%s=%s changes nothing: %s", name, text[:40], self.reason)
        return {}


def translate(
    values: Mapping[str, Any], known: Collection[str], *, origin: str, server: bool = False
) -> dict[str, Any]:
    """`values` with the options of others read: settings of `known` names and unknown ones stay as they are.

    `server`: those of the server count as well. Raises ConfigError for what is refused.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        option = None if name in known else OPTIONS.get(name)
        if option is None or (option.server and not server):
            read = {name: value}
        else:
            read = option.read(name, value, origin)
        for setting, meant in read.items():  # several options may each say a part of one mapping
            if setting == "hf_overrides" and setting in found:
                meant = {**_mapping(setting, found[setting]), **_mapping(setting, meant)}
            found[setting] = meant
    return found


def _text(value: Any) -> str:
    if isinstance(value, str):
        return " ".join(value.split()).lower()
    try:
        return json.dumps(value).lower()
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"


def _is_on(name: str, value: Any) -> bool:
    text = _text(value)
    if text not in ("true", "false"):
        raise ConfigError(name, value, "expected true or false")
    return text == "true"


def _same(to: str, **facts: Any) -> Option:
    """Another name of a setting."""
    return Option(becomes=lambda name, value: {to: value}, **facts)


def _switch(to: str, *, when_on: bool, **facts: Any) -> Option:
    """A switch that sets one of ours to `when_on`, and to the opposite where it is negated."""
    return Option(becomes=lambda name, value: {to: _is_on(name, value) is when_on}, kind="switch", **facts)


def _idle(reason: str, **facts: Any) -> Option:
    """It changes nothing here, whatever its value."""
    return Option(reason=reason, harmless=None, **facts)


def _only(values: str, reason: str, **facts: Any) -> Option:
    """It changes nothing with these values (words with spaces), and is refused with others."""
    return Option(reason=reason, harmless=tuple(values.split()), **facts)


def _never(reason: str, **facts: Any) -> Option:
    """It is refused unless it asks for nothing."""
    return Option(reason=reason, **facts)


def _listed(name: str, value: Any) -> str:
    """A list, as JSON, as a list, or with commas, as a text with commas."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(name, value, "expected a list in JSON, or values with commas") from None
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _reasoning(name: str, value: Any) -> dict[str, Any]:
    """vLLM's texts around reasoning: how it ends is a setting of ours, how it begins is the parser's."""
    given = _mapping(name, value)
    found = {"reasoning_end_text": given["reasoning_end_str"]} if given.get("reasoning_end_str") else {}
    for key in sorted(map(str, given.keys() - {"reasoning_end_str"})):
        _LOG.warning("%s.%s changes nothing: --reasoning-parser knows how reasoning begins", name, key[:40])
    return found


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, Mapping):
        raise ConfigError(name, value, "expected a mapping (JSON on the command line)")
    return given


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(name, value, "expected a number") from None


def _structured(name: str, value: Any) -> dict[str, Any]:
    """vLLM's options of structured outputs: two of them are settings of ours, the others change nothing."""
    given = _mapping(name, value)
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
_MAMBA = "states of recurrent layers lie in blocks of the one cache, and advance at fixed positions"

_MODEL = {
    "model_weights": _never("weights are read from --model"),
    "model_class_overrides": _never("a new model is a file in src/octavo/models (docs/adding.md)"),
    "quantization_config": _never("--quantization says all there is"),
    "allow_deprecated_quantization": _idle("no quantization here is deprecated", kind="switch"),
    "qlora_adapter_name_or_path": _never("there are no LoRA adapters"),
    "override_neuron_config": _never("the devices are CPUs and NVIDIA GPUs"),
    "device_ids": _never("set CUDA_VISIBLE_DEVICES instead", kind="values"),
    "tokenizer_pool_size": _only("0", "one tokenizer serves all"),
    "tokenizer_pool_type": _idle("one tokenizer serves all"),
    "tokenizer_pool_extra_config": _idle("one tokenizer serves all"),
    "renderer_num_workers": _idle("templates run in processes of their own"),
    "use_fp64_gumbel": _never("noise is drawn in 32 bits, keyed by seed, position and token", kind="switch"),
    "enable_trace_replay": _never("no requests are recorded", kind="switch"),
    "enable_cumem_allocator": _never("an engine keeps its memory until it ends", kind="switch"),
    "safetensors_prefetch_num_threads": _idle("Octavo has one way to load weights"),
    "safetensors_prefetch_block_size": _idle("Octavo has one way to load weights"),
    "fail_on_environ_validation": _idle("an unknown OCTAVO_ variable is told, and no other is read", kind="switch"),
    "diffusion_config": _never("Octavo generates text, token by token"),
    "model_path": _same("model"),
    "runner": _only("auto generate", "Octavo generates text"),
    "task": _only("auto generate", "Octavo generates text"),
    "convert": _only("auto none", "Octavo generates text"),
    "tokenizer_mode": _only("auto hf fast mistral", "a folder has one tokenizer: tokenizer.json, else tekken.json"),
    "trust_remote_code": _idle("Octavo never runs code that comes with a checkpoint", kind="switch"),
    "code_revision": _idle("Octavo never runs code that comes with a checkpoint"),
    "tokenizer_revision": _never("the tokenizer is taken at --revision"),
    "config_format": _only("auto hf mistral", "config.json is read"),
    "hf_config_path": _never(_CHECKPOINT),
    "rope_scaling": Option(becomes=lambda name, value: {"hf_overrides": {name: dict(_mapping(name, value))}}),
    "rope_theta": Option(becomes=lambda name, value: {"hf_overrides": {name: _number(name, value)}}),
    "hf_token": _never("a token in a command line can be read by others in `ps`: set HF_TOKEN instead"),
    "model_impl": _only("auto vllm", "Octavo has its own implementation of every model it runs"),
    "context_length": _same("max_model_len"),
    "disable_sliding_window": _never(_CHECKPOINT, kind="switch"),
    "disable_cascade_attn": _idle("there is no cascade attention", kind="switch"),
    "enable_prompt_embeds": _never(_TEXT, kind="switch"),
    "override_attention_dtype": _never("attention computes in --dtype"),
    "logits_processors": _never("what changes logits is a feature of Octavo's own (docs/adding.md)", kind="values"),
    "logits_processor_pattern": _never("what changes logits is a feature of Octavo's own (docs/adding.md)"),
    "pooler_config": _never("Octavo generates text"),
    "override_pooler_config": _never("Octavo generates text"),
    "io_processor_plugin": _never("Octavo generates text"),
    "max_seq_len_to_capture": _idle(_GRAPHS),
    "model_loader_extra_config": _idle(_LOADING),
    "safetensors_load_strategy": _idle(_LOADING),
    "pt_load_map_location": _idle(_LOADING),
    "max_parallel_loading_workers": _idle(_LOADING),
    "ignore_patterns": _idle("only what a model needs is downloaded", kind="values"),
    "use_tqdm_on_load": _idle(_LOADING, kind="switch"),
}
_PARALLEL = {
    "data_parallel_multi_port_external_lb": _never(_ONE, kind="switch"),
    "data_parallel_supervisor_port": _idle(_ONE),
    "dp_supervisor_probe_interval_s": _idle(_ONE),
    "dp_supervisor_probe_timeout_s": _idle(_ONE),
    "dp_supervisor_probe_failure_threshold": _idle(_ONE),
    "dp_sync_interval": _idle(_ONE),
    "dcp_comm_backend": _idle(_ONE),
    "dcp_q_replicate": _idle(_ONE, kind="switch"),
    "dcp_kv_cache_interleave_size": _idle(_ONE),
    "cp_kv_cache_interleave_size": _idle(_ONE),
    "enable_batch_sharded_sampling": _idle(_ONE, kind="switch"),
    "ubatch_size": _only("0", _ONE),
    "dbo_decode_token_threshold": _idle(_ONE),
    "dbo_prefill_token_threshold": _idle(_ONE),
    "disable_nccl_for_dp_synchronization": _idle(_ONE, kind="switch"),
    "enable_nccl_comm_suspend": _idle(_ONE, kind="switch"),
    "distributed_timeout_seconds": _idle(_NETWORK),
    "cpu_distributed_timeout_seconds": _idle(_NETWORK),
    "enable_ep_weight_filter": _idle("all experts are on the one device", kind="switch"),
    "enable_elastic_ep": _never("all experts are on the one device", kind="switch"),
    "num_redundant_experts": _only("0", "all experts are on the one device"),
    "eplb_window_size": _idle("all experts are on the one device"),
    "eplb_step_interval": _idle("all experts are on the one device"),
    "eplb_log_balancedness": _idle("all experts are on the one device", kind="switch"),
    "enable_fault_tolerance": _idle("the server always starts a new engine where one died", kind="switch"),
    "fault_tolerance_config": _idle("the server always starts a new engine where one died"),
    "numa_bind": _never("run the command under numactl instead", kind="switch"),
    "numa_bind_nodes": _never("run the command under numactl instead", kind="values"),
    "numa_bind_cpus": _never("run the command under numactl instead", kind="values"),
    "tensor_parallel_size": _only("1", _ONE, short=("-tp", "--tp-size", "--tp")),
    "pipeline_parallel_size": _only("1", _ONE, short=("-pp", "--pp-size")),
    "data_parallel_size": _only("1", _ONE + "; start one server per device", short=("-dp", "--dp-size")),
    "data_parallel_size_local": _only("1", _ONE, short=("-dpl",)),
    "data_parallel_rank": _only("0", _ONE, short=("-dpn",)),
    "data_parallel_start_rank": _only("0", _ONE, short=("-dpr",)),
    "data_parallel_address": _idle(_NETWORK, short=("-dpa",)),
    "data_parallel_rpc_port": _idle(_NETWORK, short=("-dpp",)),
    "data_parallel_backend": _only("mp", _NETWORK, short=("-dpb",)),
    "data_parallel_hybrid_lb": _never(_ONE, kind="switch", short=("-dph",)),
    "data_parallel_external_lb": _never(_ONE, kind="switch", short=("-dpe",)),
    "decode_context_parallel_size": _only("1", _ONE, short=("-dcp",)),
    "prefill_context_parallel_size": _only("1", _ONE, short=("-pcp",)),
    "enable_expert_parallel": _idle("all experts are on the one device", kind="switch", short=("-ep",)),
    "enable_eplb": _idle("all experts are on the one device", kind="switch"),
    "eplb_config": _idle("all experts are on the one device"),
    "expert_placement_strategy": _idle("all experts are on the one device"),
    "all2all_backend": _idle("all experts are on the one device"),
    "distributed_executor_backend": _only("mp uni", _NETWORK),
    "disable_custom_all_reduce": _idle(_ONE, kind="switch"),
    "ray_workers_use_nsight": _never(_NETWORK, kind="switch"),
    "nnodes": _only("1", _NETWORK, short=("-n",)),
    "node_rank": _only("0", _NETWORK, short=("-r",)),
    "master_addr": _idle(_NETWORK),
    "master_port": _idle(_NETWORK),
    "worker_cls": _only("auto", "the worker is Octavo's own"),
    "worker_extension_cls": _never("the worker is Octavo's own"),
    "enable_dbo": _never(_ONE, kind="switch"),
}
_CACHE = {
    "offload_backend": _idle("weights stay on the device"),
    "cpu_offload_params": _idle("weights stay on the device"),
    "offload_group_size": _only("0", "weights stay on the device"),
    "offload_num_in_group": _idle("weights stay on the device"),
    "offload_prefetch_step": _idle("weights stay on the device"),
    "offload_params": _idle("weights stay on the device"),
    "kv_cache_dtype_skip_layers": _never("the cache has one type", kind="values"),
    "prefix_cache_retention_interval": _idle("the oldest unused blocks go first"),
    "prefix_match_unit": _idle("whole blocks are found again"),
    "mamba_cache_mode": _idle(_MAMBA),
    "mamba_config": _idle(_MAMBA),
    "mamba_backend": _idle(_MAMBA),
    "mamba_ssu_algorithm": _idle(_MAMBA),
    "enable_mamba_cache_stochastic_rounding": _idle(_MAMBA, kind="switch"),
    "mamba_cache_philox_rounds": _idle(_MAMBA),
    "use_replayssm": _idle(_MAMBA, kind="switch"),
    "replayssm_buffer_len": _idle(_MAMBA),
    "gdn_prefill_backend": _idle(_MAMBA),
    "kda_prefill_backend": _idle(_MAMBA),
    "ec_manager_config": _idle(_TEXT),
    "swap_space": _idle("a preempted request is computed again, to the same bits; no memory is set aside"),
    "mem_fraction_static": _same("gpu_memory_utilization"),
    "prefix_caching_hash_algo": _idle("blocks are named by one hash"),
    "cpu_offload_gb": _only("0 0.0", "weights stay on the device"),
    "kv_offloading_size": Option(becomes=offloading),
    "kv_offloading_backend": _only("native", "blocks are kept by the connector `host`"),
    "calculate_kv_scales": _never("scales of the cache are the checkpoint's", kind="switch"),
    "kv_sharing_fast_prefill": _idle("no model of Octavo's shares its cache between layers", kind="switch"),
    "mamba_cache_dtype": _idle(_MAMBA),
    "mamba_ssm_cache_dtype": Option(
        becomes=lambda name, value: {"state_dtype": "float32" if value == "auto" else value}
    ),
    "mamba_block_size": _idle(_MAMBA),
    "kv_events_config": _never("the cache tells of no events"),
    "ec_transfer_config": _never(_TEXT),
    "use_v2_block_manager": _idle("there is one block manager", kind="switch"),
    "disable_hybrid_kv_cache_manager": _idle("layers with windows have groups of their own", kind="switch"),
}
_SCHEDULER = {
    "max_num_scheduled_tokens": _never(_CHUNKS),
    "scheduler_reserve_full_isl": _idle("a request that finds no block is computed again later", kind="switch"),
    "prefill_schedule_interval": _only("1", "a request that fits runs at once"),
    "watermark": _only("0 0.0", "a request that fits runs at once"),
    "spec_method": _never("there are no drafts"),
    "spec_model": _never("there are no drafts"),
    "spec_tokens": _never("there are no drafts"),
    "ngram_prompt_lookup_max": _never("there are no drafts"),
    "ngram_prompt_lookup_min": _never("there are no drafts"),
    "per_request_spec_decode_metrics": _only("none", "there are no drafts"),
    "max_running_requests": _same("max_num_seqs"),
    "chunked_prefill_size": _same("max_num_batched_tokens"),
    "max_num_partial_prefills": _only("1", _CHUNKS),
    "max_long_partial_prefills": _only("1", _CHUNKS),
    "long_prefill_token_threshold": _idle(_CHUNKS),
    "num_scheduler_steps": _idle("a step is planned while another one runs (--async-scheduling)"),
    "multi_step_stream_outputs": _idle("outputs come with their step", kind="switch"),
    "num_lookahead_slots": _only("0", "blocks for drafts are counted by the scheduler"),
    "scheduler_delay_factor": _only("0 0.0", "a request that fits runs at once"),
    "preemption_mode": _only("recompute", "a preempted request is computed again"),
    "scheduler_cls": _never("the scheduler is Octavo's own"),
    "disable_chunked_mm_input": _idle(_TEXT, kind="switch"),
    "disable_async_output_proc": _idle("outputs are made while the next step runs", kind="switch"),
    "speculative_model": _never("set model in --speculative-config"),
    "num_speculative_tokens": _never("set num_speculative_tokens in --speculative-config"),
    "speculative_algorithm": _never("set method in --speculative-config"),
}
_COMPILE = {
    "kernel_config": _idle(_GRAPHS),
    "ir_op_priority": _idle(_GRAPHS),
    "enable_flashinfer_autotune": _idle(_GRAPHS, kind="switch"),
    "enable_bf16x3_router_gemm": _never("products run on Octavo's own kernels", kind="switch"),
    "jit_monitor_mode": _idle(_GRAPHS),
    "jit_monitor_verbose": _idle(_GRAPHS, kind="switch"),
    "compilation_config": _idle(_GRAPHS, short=("-cc", "-O")),
    "optimization_level": _idle(_GRAPHS),
    "cuda_graph_sizes": _idle(_GRAPHS, kind="values"),
    "cudagraph_capture_sizes": _idle(_GRAPHS, kind="values"),
    "max_cudagraph_capture_size": _idle(_GRAPHS),
    "performance_mode": _idle("one way of running is fast and reproducible; --numerics fast is the yardstick"),
    "moe_backend": _only("auto triton", "experts run on Octavo's own kernels"),
    "linear_backend": _only("auto", "products run on Octavo's own kernels"),
    "enable_deterministic_inference": _idle("that is the normal mode", kind="switch"),
    "additional_config": _never("it would not be read"),
    "profiler_config": _never("`octavo bench` and `octavo doctor` measure"),
}
_EXTRAS = {
    "reasoning_config": Option(becomes=_reasoning),
    "enable_lora_bias": _idle(_LORA, kind="switch"),
    "long_lora_scaling_factors": _idle(_LORA, kind="values"),
    "default_mm_loras": _never(_LORA),
    "lora_target_modules": _idle(_LORA, kind="values"),
    "specialize_active_lora": _idle(_LORA, kind="switch"),
    "enable_tower_connector_lora": _idle(_LORA, kind="switch"),
    "enable_mixed_moe_lora_format": _idle(_LORA, kind="switch"),
    "enable_moe_shared_loras": _idle(_LORA, kind="switch"),
    "enable_prompt_adapter": _never("there are no prompt adapters", kind="switch"),
    "max_prompt_adapters": _idle("there are no prompt adapters"),
    "max_prompt_adapter_token": _idle("there are no prompt adapters"),
    "enable_mm_embeds": _never(_TEXT, kind="switch"),
    "mm_hasher_algorithm": _idle(_TEXT),
    "mm_shm_cache_max_object_size_mb": _idle(_TEXT),
    "mm_encoder_only": _never(_TEXT, kind="switch"),
    "mm_encoder_attn_dtype": _idle(_TEXT),
    "mm_encoder_fp8_scale_path": _idle(_TEXT),
    "mm_encoder_fp8_scale_save_path": _idle(_TEXT),
    "mm_encoder_fp8_scale_save_margin": _idle(_TEXT),
    "mm_tensor_ipc": _idle(_TEXT),
    "mm_processor_device": _idle(_TEXT),
    "mm_ipc_gpu_memory_gb": _idle(_TEXT),
    "mm_device_do_normalize": _idle(_TEXT, kind="switch"),
    "video_pruning_method": _idle(_TEXT),
    "enable_mm_processor_stats": _idle(_TEXT, kind="switch"),
    "kv_cache_metrics_sample": _idle(_STATS),
    "enable_logging_iteration_details": _idle(_STATS, kind="switch"),
    "structured_outputs_config": Option(becomes=_structured),
    "guided_decoding_backend": _idle(_FORMS),
    "guided_decoding_disable_fallback": _idle(_FORMS, kind="switch"),
    "enable_reasoning": _idle("reasoning is looked for where --reasoning-parser finds it", kind="switch"),
    "reasoning_parser_plugin": _never("give --reasoning-parser package.module:Class"),
    "enable_lora": _never(_LORA, kind="switch"),
    "max_loras": _idle(_LORA),
    "max_lora_rank": _idle(_LORA),
    "max_cpu_loras": _idle(_LORA),
    "lora_dtype": _idle(_LORA),
    "lora_extra_vocab_size": _idle(_LORA),
    "fully_sharded_loras": _idle(_LORA, kind="switch"),
    "limit_mm_per_prompt": _idle(_TEXT),
    "media_io_kwargs": _idle(_TEXT),
    "mm_processor_kwargs": _idle(_TEXT),
    "mm_processor_cache_gb": _idle(_TEXT),
    "mm_processor_cache_type": _idle(_TEXT),
    "mm_encoder_tp_mode": _idle(_TEXT),
    "mm_encoder_attn_backend": _idle(_TEXT),
    "disable_mm_preprocessor_cache": _idle(_TEXT, kind="switch"),
    "interleave_mm_strings": _idle(_TEXT, kind="switch"),
    "skip_mm_profiling": _idle(_TEXT, kind="switch"),
    "language_model_only": _idle(_TEXT, kind="switch"),
    "video_pruning_rate": _idle(_TEXT),
    "allowed_local_media_path": _idle(_TEXT),
    "allowed_media_domains": _idle(_TEXT, kind="values"),
    "disable_log_stats": _idle(_STATS, kind="switch"),
    "show_hidden_metrics_for_version": _idle("no metric is hidden"),
    "otlp_traces_endpoint": _never("there are no traces"),
    "collect_detailed_traces": _never("there are no traces"),
    "kv_cache_metrics": _idle(_STATS, kind="switch"),
    "cudagraph_metrics": _idle(_STATS, kind="switch"),
    "enable_mfu_metrics": _never("`octavo bench engine` tells a step's times", kind="switch"),
    "enable_layerwise_nvtx_tracing": _never("`octavo bench engine` tells a step's times", kind="switch"),
}
_SERVER = {
    "enable_per_request_metrics": _never("times of requests are at /metrics, all together", kind="switch"),
    "fingerprint_mode": _never("system_fingerprint is Octavo's own"),
    "fingerprint_value": _never("system_fingerprint is Octavo's own"),
    "cohere_is_reasoning_model": _idle("there is no route of Cohere's API", kind="switch"),
    "cohere_format": _idle("there is no route of Cohere's API"),
    "enable_flash_late_interaction": _idle("Octavo generates text", kind="switch"),
    "allowed_origins": Option(becomes=lambda name, value: {"cors_origins": _listed(name, value)}),
    "allowed_methods": _idle("origins that may call may use every method there is"),
    "allowed_headers": _idle("origins that may call may send every header"),
    "allow_credentials": _idle("keys come in headers; no cookie is read", kind="switch"),
    "disable_uvicorn_access_log": _switch("access_log", when_on=False),
    "uvicorn_log_level": _idle("--log-level says what is logged"),
    "log_config_file": _never("--log-level and --log-format say what is logged"),
    "shutdown_timeout": _same("drain_seconds"),
    "enable_auto_tool_choice": _idle("calls are looked for wherever --tool-call-parser finds a parser", kind="switch"),
    "exclude_tools_when_tool_choice_none": _idle("that is what happens", kind="switch"),
    "tool_parser_plugin": _never("give --tool-call-parser package.module:Class"),
    "tool_server": _never("tools are called by the client"),
    "trust_request_chat_template": _never(
        "templates are the server's: a request's own could run for long", kind="switch"
    ),
    "response_role": _only("assistant", "an answer is the assistant's"),
    "enable_prompt_tokens_details": _idle("usage always has prompt_tokens_details", kind="switch"),
    "enable_server_load_tracking": _idle("/load always tells", kind="switch"),
    "enable_request_id_headers": _idle("every reply has x-request-id", kind="switch"),
    "enable_tokenizer_info_endpoint": _idle("/tokenizer_info is always there", kind="switch"),
    "enable_log_requests": _idle(_NO_LOG, kind="switch"),
    "disable_log_requests": _idle(_NO_LOG, kind="switch"),
    "enable_log_outputs": _idle(_NO_LOG, kind="switch"),
    "enable_log_deltas": _idle(_NO_LOG, kind="switch"),
    "max_log_len": _idle(_NO_LOG),
    "aggregate_engine_logging": _idle(_STATS, kind="switch"),
    "log_error_stack": _idle("an internal error is always logged with its traceback", kind="switch"),
    "disable_fastapi_docs": _idle("there are none", kind="switch"),
    "enable_offline_docs": _never("there is no page of the API", kind="switch"),
    "disable_frontend_multiprocessing": _idle("front end and engine are two processes", kind="switch"),
    "api_server_count": _only("1", "one process answers", short=("-asc",)),
    "headless": _never("a server answers over HTTP", kind="switch"),
    "tokens_only": _never("/v1/completions takes and gives token ids beside text", kind="switch"),
    "middleware": _never("no foreign code runs around requests", kind="values"),
    "lora_modules": _never(_LORA, kind="values"),
    "prompt_adapters": _never("there are no prompt adapters", kind="values"),
    "enable_ssl_refresh": _never("a new certificate needs a new start", kind="switch"),
    "ssl_ciphers": _never("Python's own choice of ciphers is used"),
    "h11_max_incomplete_event_size": _idle("requests are read by httptools, within limits of Octavo's own"),
    "h11_max_header_count": _idle("requests are read by httptools, within limits of Octavo's own"),
}

OPTIONS: Mapping[str, Option] = {
    **_MODEL,
    **_PARALLEL,
    **_CACHE,
    **_SCHEDULER,
    **_COMPILE,
    **_EXTRAS,
    **{name: dataclasses.replace(option, server=True) for name, option in _SERVER.items()},
}

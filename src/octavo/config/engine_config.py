"""EngineConfig: every option of an engine, once; and `resolve`, which turns it into numbers.

Owns the fields (CLI flags, Python keyword arguments, YAML keys and defaults are these same fields), the layers that
fill them, and all defaults and cross-checks. Imports nothing heavy and asks no
device anything. Invariant: an EngineConfig holds only values that its settings accept; a Resolved holds only values
that fit the checkpoint, the device and each other, and none of them is None by omission.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.checkpoint.arch import Arch
from octavo.config.attention_options import FOREIGN_BACKENDS, read_kernel_block_size, read_layer_backends
from octavo.config.device_facts import DeviceFacts
from octavo.config.environment import read_environment
from octavo.config.experts import resolve_experts
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.settings import (
    ConfigError,
    did_you_mean,
    fill,
    flag_name,
    read_value,
    read_yaml,
    setting,
    settings_of,
)
from octavo.config.speculative import SpeculativeConfig, read_speculative
from octavo.config.vllm_options import said, translate
from octavo.request.sampling_params import MAX_N

DEFAULT_MODEL = "octavo-tiny"
DTYPES = ("float32", "bfloat16", "float16")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
KV_CACHE_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
FLEX_BLOCK_KEYS = ("flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size", "flex_attn_kv_block_size")
_ATTENTION_KEYS = ("backend", "layer_backends", "kernel_block_size", "flashinfer_kernels", *FLEX_BLOCK_KEYS)
_GENERATION_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
)
MAX_THREADS = 1024
MULTIPLIES_PAIRS = "x86_64_v4_bf16"  # the instruction set with vdpbf16ps
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What a user asks for. None means "resolved from the checkpoint and the device". Raises ConfigError."""

    model: str = setting(DEFAULT_MODEL, "a bundled model's name, a folder, or a name on the Hugging Face hub", "str")
    tokenizer: str | None = setting(None, "folder or name of the tokenizer (default: the model's)", "str")
    skip_tokenizer_init: bool = setting(
        False, "load no tokenizer: prompts and answers are token ids, texts are empty", "bool"
    )
    revision: str | None = setting(None, "branch, tag or commit of a model from the hub", "str")
    model_packages: str | None = setting(
        None, "installed packages, with commas, in which a config.json may name its model's class; their code runs",
        "str", several=True,
    )  # fmt: skip
    download_dir: str | None = setting(None, "folder of the hub's cache (default: HF_HOME's)", "str")
    hf_overrides: dict[str, Any] = setting(
        {}, 'fields that win over those of config.json, e.g. {"max_position_embeddings": 4096}', "dict"
    )
    load_format: str = setting(
        "auto", "dummy: random weights, for speed measurements only", "str", choices=("auto", "safetensors", "dummy"),
        aliases={"hf": "auto", "mistral": "auto"},
    )  # fmt: skip
    device: str = setting("auto", "where the model runs", "str", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto", "type of weights, activations and cache (auto: the checkpoint's)", "str",
        choices=("auto", *DTYPES), aliases={"float": "float32", "half": "float16"},
    )  # fmt: skip
    quantization: str | None = setting(
        None, "int8: weights in 8 bits with a scale per row, CPU only", "str", choices=("int8",), short="q"
    )
    numerics: str = setting(
        "reproducible", "reproducible: a request's bits do not depend on its batch; fast: the yardstick", "str",
        choices=("reproducible", "fast"),
    )  # fmt: skip
    native: str = setting(
        "auto", "compiled CPU operators: the best that run here, one instruction set's, or off (reference)", "str",
        choices=("auto", "off", "base", "x86_64_v3", "x86_64_v4", MULTIPLIES_PAIRS), aliases={"1": "auto", "0": "off"},
    )  # fmt: skip
    bfloat16_chain: str = setting(
        "auto", "order of bfloat16's sums on a CPU: pairs as vdpbf16ps adds them (auto: where the processor has it), "
        "or single, alike everywhere", "str", choices=("auto", "pairs", "single"),
    )  # fmt: skip
    num_threads: int | None = setting(
        None, "CPU threads (default: OMP_NUM_THREADS, else the cores)", "int", low=1, high=MAX_THREADS
    )
    enforce_eager: bool = setting(False, "never replay CUDA graphs", "bool")
    attention_backend: str | None = setting(None, "shorthand for --attention-config.backend", "str")
    attention_config: dict[str, Any] = setting({}, 'attention options, e.g. {"backend": "reference"}', "dict")
    attention_mods: Any = setting(
        None, "octavo.AttentionMods: a mask and score changes of your own, as module:name or file.py:name", "mods"
    )

    max_model_len: int | None = setting(
        None, "most tokens of a request, prompt and output: 4096, 16k, 16K, or auto (what fits); default: the "
        "checkpoint's, or what fits, with a warning", "length", low=2, high=_INT32_MAX, has_auto=True,
    )  # fmt: skip
    max_num_seqs: int | None = setting(None, "most requests that run at once", "int", low=1, high=65536)
    max_num_batched_tokens: int | None = setting(
        None, "most tokens computed in one step", "length", low=1, high=1 << 24
    )
    enable_chunked_prefill: bool = setting(True, "compute a long prompt in pieces, over several steps", "bool")
    enable_prefix_caching: bool = setting(True, "reuse the cache of equal prompt beginnings", "bool")
    prefix_cache_secret_file: str | None = setting(
        None, "file with 32 bytes or more: engines with one secret give equal prefixes one name (default: drawn)", "str"
    )
    snapshot_interval: int = setting(1, "keep recurrent states every so many chunks; 0: only last ones", "int", low=0)
    scheduling_policy: str = setting(
        "fcfs", "who runs first: first come, or the lowest priority number", "str", choices=("fcfs", "priority")
    )
    priority_aging: int = setting(
        1024, "with priorities: a request is overtaken by at most so many later ones per step of priority; 0: by any",
        "int", low=0, high=1 << 31,
    )  # fmt: skip
    async_scheduling: bool | None = setting(None, "plan a step while the one before it runs", "bool")

    block_size: int | None = setting(
        None, "tokens of a cache block: 8 or a multiple of 16 (default: 16 on CPU, 64 on GPU)", "int", low=8, high=1024
    )
    state_dtype: str = setting("float32", "type of recurrent states", "str", choices=("float32", "bfloat16"))
    kv_cache_dtype: str = setting(
        "auto", "type of the cache (auto: dtype's): fp8 is float8 e4m3", "str",
        choices=("auto", *DTYPES, "fp8", "int8"), aliases={"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8"},
    )  # fmt: skip
    kv_cache_layout: str | None = setting(
        None, "order of layers, blocks, heads, tokens and channels in the cache (default: the backend's)", "str",
        choices=KV_CACHE_LAYOUTS, aliases={"HND": "LBHNC", "NHD": "LBNHC"},
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = setting(None, "bytes of the cache: 512M, 4G", "bytes", low=1, high=1 << 50)
    num_gpu_blocks_override: int | None = setting(
        None, "blocks of the cache on any device, the null block included", "int", low=2, high=_INT32_MAX
    )
    gpu_memory_utilization: float = setting(0.92, "share of a GPU's memory to use", "float", above=0.0, high=1.0)

    kv_transfer_config: dict[str, Any] = setting(
        {}, 'who moves blocks of the cache: {"kv_connector": "host", "kv_role": "kv_both", ...}', "dict"
    )
    speculative_config: dict[str, Any] = setting(
        {}, 'who proposes drafts: {"method": "ngram", "num_speculative_tokens": 4}; see docs/speculation.md', "dict",
        short="sc",
    )  # fmt: skip

    weight_transfer_config: dict[str, Any] = setting(
        {}, 'how new weights come: {"backend": "disk", "shm", "gloo", "nccl" or "ipc"}', "dict"
    )

    enable_sleep_mode: bool = setting(
        False, "let sleep levels 1 and 2 give a GPU's memory of weights and cache back; a CPU's always goes", "bool"
    )
    enable_return_routed_experts: bool = setting(False, "let requests ask which experts tokens went to", "bool")
    seed: int = setting(0, "seeds what requests without a seed sample", "int", low=0, high=_INT64_MAX)
    max_logprobs: int = setting(
        20, "most log-probabilities of a token that may be asked for", "int", low=-1, high=1 << 20
    )
    max_n: int = setting(1024, "most completions of one request (n)", "int", low=1, high=MAX_N)
    max_total_tokens: int = setting(
        1 << 20, "most output tokens of one request: n x max_tokens", "int", low=1, high=1 << 40
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "log-probabilities or logits, before or after penalties and filters",
        "str",
        choices=LOGPROBS_MODES,
    )
    generation_config: str = setting(
        "auto", "auto: sampling defaults of the checkpoint; vllm: plain ones; or a folder with others", "str"
    )
    override_generation_config: dict[str, Any] = setting({}, "sampling defaults that win over the checkpoint's", "dict")

    reasoning_parser: str = setting(
        "auto", "how reasoning is told from the answer (auto: by the chat template); none: not at all", "str"
    )
    reasoning_end_text: str | None = setting(
        None, "what is written to end reasoning whose budget is spent; its end is the closing mark", "str"
    )
    enable_in_reasoning: bool = setting(False, "an output's form holds for its reasoning too", "bool")

    log_level: str = setting(
        "warning", "what is logged to stderr", "str", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        """Check each field by itself."""
        for name, fact in SETTINGS.items():
            value = getattr(self, name)
            if read_value(name, fact, value) != value:
                raise ConfigError(name, value, f"is text for {fact.kind}", "use load_config, which reads text")
        if self.block_size not in (None, 8) and self.block_size % 16:
            raise ConfigError("block_size", self.block_size, "must be 8 or a multiple of 16, up to 1024")
        for name, known in (("attention_config", _ATTENTION_KEYS), ("override_generation_config", _GENERATION_KEYS)):
            for key in getattr(self, name):
                if key not in known:
                    hint = did_you_mean(str(key), known) or f"known keys: {', '.join(known)}"
                    raise ConfigError(name, key, "unknown key", hint)
        for key in ("timeout", "session_timeout"):
            seconds = self.weight_transfer_config.get(key, 1.0)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
                raise ConfigError("weight_transfer_config", seconds, f"{key} must be a number of seconds above 0")
        read_speculative(self.speculative_config)
        read_kv_transfer(self.kv_transfer_config)
        named = self.attention_config.get("backend")
        if named is not None and self.attention_backend not in (None, named):
            raise ConfigError(
                "attention_backend", self.attention_backend, f"attention_config says {named!r}", "keep one"
            )


SETTINGS = settings_of(EngineConfig)


def load_config(
    argv_values: Mapping[str, Any] | None = None,
    python_kwargs: Mapping[str, Any] | None = None,
    yaml_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    yaml_values: Mapping[str, Any] | None = None,
) -> tuple[EngineConfig, dict[str, str]]:
    """Fill the fields: defaults, then the YAML file, the environment, Python arguments, the command line; last wins.

    Returns the config and, per field, where its value came from. `environ` defaults to the process's. An unknown name
    is a ConfigError with a suggestion; an unknown OCTAVO_ variable is logged as a warning. Options of others, and
    Python's None, are read by `octavo.config.vllm_options`. `yaml_values`: the file, less what somebody else takes.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if yaml_path is not None:
        layers.append((f"file {yaml_path}", read_yaml(yaml_path) if yaml_values is None else yaml_values))
    layers.append(("environment", read_environment(os.environ if environ is None else environ)))
    layers.append(("Python argument", said(python_kwargs or {}, SETTINGS)))
    layers.append(("command line", argv_values or {}))
    return fill(EngineConfig, [(origin, translate(values, SETTINGS, origin=origin)) for origin, values in layers])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What an engine runs with. `why` explains each value that the user did not set."""

    model: str
    load_format: str
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16 | float16
    quantization: str | None
    numerics: str
    native: str  # instruction set of the compiled operators in use, or "none"
    bfloat16_chain: str  # pairs | single
    num_threads: int
    enforce_eager: bool
    attention_backend: str
    max_model_len: int
    max_model_len_is_auto: bool  # the memory plan may shorten it
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    snapshot_interval: int
    state_dtype: str  # float32 | bfloat16
    looks_ahead: bool  # a query may see later keys of the prompt: prompts are computed whole
    scheduling_policy: str
    priority_aging: int
    async_scheduling: bool
    block_size: int
    layer_backends: Mapping[str, Sequence[int]]  # layers with another attention backend, by its name
    kernel_block_size: int | None  # None: the attention backends decide
    kv_cache_dtype: str  # float32 | bfloat16 | float16 | fp8 | int8
    attention_options: Mapping[str, Any]  # attention_config as it was given, for the backend
    kv_cache_layout: str | None  # None: the attention backend decides
    kv_cache_memory_bytes: int | None  # None: the memory plan decides
    num_gpu_blocks_override: int | None
    gpu_memory_utilization: float
    weight_transfer_config: Mapping[str, Any]
    enable_sleep_mode: bool  # a GPU's memory can go while addresses stay
    speculative: SpeculativeConfig
    kept_experts: tuple[int, int]  # layers, and experts of a token in each, where steps record them; else zeros
    seed: int
    max_logprobs: int
    logprobs_mode: str
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)


# Fields that a Resolved takes over as they are.
_UNCHANGED = (
    "model", "load_format", "quantization", "numerics", "enforce_eager", "enable_chunked_prefill",
    "enable_prefix_caching", "state_dtype", "scheduling_policy", "priority_aging", "kv_cache_layout",
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization", "weight_transfer_config",
    "enable_sleep_mode", "seed", "logprobs_mode",
)  # fmt: skip
DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}  # kernels for a GPU read tiles of 64 tokens
_FP8_CAPABILITY = (8, 9)
_DEFAULT_SEQS = {"cpu": 64, "cuda": 256}
_DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


def resolve(config: EngineConfig, arch: Arch, facts: DeviceFacts) -> Resolved:
    """All defaults and cross-checks. Raises ConfigError with both numbers of a conflict."""
    why: dict[str, str] = {}
    device = _resolve_device(config, facts, why)
    native = _resolve_native(config, facts, device)
    dtype = _resolve_dtype(config, arch, device, why)
    length, seqs, batched_tokens = _resolve_sizes(config, arch, device, why)
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[device]
    if config.block_size is None:
        why["block_size"] = f"the default on {device}"
    if config.async_scheduling is None:
        why["async_scheduling"] = "on where a device computes beside the host"
    finds_states = config.enable_prefix_caching or bool(config.kv_transfer_config)
    if not finds_states:
        why["snapshot_interval"] = "nobody looks for states: no prefix caching, no connector"
    return Resolved(
        **{name: getattr(config, name) for name in _UNCHANGED},
        device=device,
        dtype=dtype,
        native=native,
        bfloat16_chain=_resolve_bfloat16_chain(config, native, dtype, why),
        num_threads=_resolve_num_threads(config, facts, why),
        attention_backend=_resolve_attention(config, arch, device, native != "none", why),
        layer_backends=read_layer_backends(config.attention_config),
        block_size=block_size,
        snapshot_interval=config.snapshot_interval if finds_states else 0,
        looks_ahead=False,  # until the mods are known
        kernel_block_size=read_kernel_block_size(config.attention_config, block_size),
        kv_cache_dtype=_resolve_cache_dtype(config, facts, device, dtype, why),
        attention_options=dict(config.attention_config),
        max_model_len=length,
        max_model_len_is_auto=config.max_model_len in (None, -1),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched_tokens,
        async_scheduling=device == "cuda" if config.async_scheduling is None else config.async_scheduling,
        max_logprobs=resolve_max_logprobs(config, arch),
        speculative=read_speculative(config.speculative_config),
        kept_experts=resolve_experts(config.enable_return_routed_experts, arch),
        why=why,
    )


def _resolve_num_threads(config: EngineConfig, facts: DeviceFacts, why: dict[str, str]) -> int:
    if config.num_threads is not None:
        return config.num_threads
    if facts.omp_num_threads:
        why["num_threads"] = "OMP_NUM_THREADS"
        return min(facts.omp_num_threads, MAX_THREADS)
    why["num_threads"] = "the cores this process may use"
    return min(facts.num_cores, MAX_THREADS)


def resolve_max_logprobs(config: EngineConfig, arch: Arch) -> int:
    """The setting, where the vocabulary has as many tokens: -1 and what lies above it mean all of them."""
    return min(config.max_logprobs, arch.vocab_size) if config.max_logprobs >= 0 else arch.vocab_size


def _resolve_device(config: EngineConfig, facts: DeviceFacts, why: dict[str, str]) -> str:
    if config.device == "cuda" and not facts.cuda:
        raise ConfigError("device", "cuda", "there is no CUDA device that this version can use", "set --device cpu")
    device = config.device
    if device == "auto":
        device = "cuda" if facts.cuda else "cpu"
        why["device"] = facts.cuda or "no GPU that this version can use"
    if config.numerics == "fast" and device == "cpu":
        raise ConfigError(
            "numerics", "fast", "CPU operators have one arithmetic, and it is reproducible", "leave it out"
        )
    if config.quantization and device != "cpu":
        raise ConfigError("quantization", config.quantization, f"runs on CPU only, the device is {device}")
    return device


def _resolve_native(config: EngineConfig, facts: DeviceFacts, device: str) -> str:
    if device != "cpu" or config.native == "off":
        return "none"
    if config.native == "auto":
        return facts.native_isas[0] if facts.native_isas else "none"
    if config.native not in facts.native_isas:
        known = ", ".join(facts.native_isas) or "none"
        raise ConfigError("native", config.native, f"not built, or not for this processor; there are: {known}")
    return config.native


def _resolve_bfloat16_chain(config: EngineConfig, native: str, dtype: str, why: dict[str, str]) -> str:
    """Pairs only where products are of bfloat16 by bfloat16: float32 rows and widened weights know the other alone."""
    asked = config.bfloat16_chain
    if asked == "pairs" and (native == "none" or config.quantization):
        reason = "weights in int8 are widened" if config.quantization else "the compiled CPU operators are not in use"
        raise ConfigError("bfloat16_chain", "pairs", reason, "set auto or single")
    if dtype != "bfloat16" or config.quantization:
        return "single"
    if asked == "auto" and native == MULTIPLIES_PAIRS:
        why["bfloat16_chain"] = "the processor multiplies pairs"
        return "pairs"
    return "single" if asked == "auto" else asked


def _resolve_dtype(config: EngineConfig, arch: Arch, device: str, why: dict[str, str]) -> str:
    """On CPU, float16 checkpoints run in float32: widening keeps every weight, bfloat16 would drop 3 bits of each.

    On a GPU, float32 checkpoints run in bfloat16 unless float32 is asked for.
    """
    if config.dtype == "auto":
        if device == "cpu" and arch.dtype == "float16":
            why["dtype"] = "the checkpoint's float16, widened: CPU operators take float32 and bfloat16"
            return "float32"
        if device == "cuda" and arch.dtype == "float32":
            why["dtype"] = "the default on cuda for a float32 checkpoint, at half the bytes"
            return "bfloat16"
        why["dtype"] = "the checkpoint's"
        return arch.dtype
    if device == "cpu" and config.dtype == "float16":
        raise ConfigError("dtype", "float16", "CPU operators take float32 and bfloat16")
    return config.dtype


def _resolve_cache_dtype(config: EngineConfig, facts: DeviceFacts, device: str, dtype: str, why: dict[str, str]) -> str:
    """A cache may be narrower than what is computed with, never wider."""
    if config.kv_cache_dtype == "auto":
        why["kv_cache_dtype"] = "dtype's"
        return dtype
    if config.kv_cache_dtype in DTYPES and config.kv_cache_dtype != dtype and dtype != "float32":
        raise ConfigError(
            "kv_cache_dtype", config.kv_cache_dtype, f"K and V are computed in {dtype}", f"set auto, {dtype} or fp8"
        )
    if config.kv_cache_dtype == "fp8" and device == "cuda" and facts.cuda_capability < _FP8_CAPABILITY:
        own, least = (".".join(map(str, capability)) for capability in (facts.cuda_capability, _FP8_CAPABILITY))
        limit = f"{facts.cuda} has compute capability {own}, kernels for float8 e4m3 need {least}"
        raise ConfigError("kv_cache_dtype", "fp8", limit, "set auto or int8")
    return config.kv_cache_dtype


def asked_backend(config: EngineConfig) -> Any:
    """The attention backend as the settings name it, or "auto"; vLLM's names mean Octavo's."""
    name = config.attention_backend or config.attention_config.get("backend", "auto")
    return FOREIGN_BACKENDS.get(name, name) if isinstance(name, str) else name


def _resolve_attention(config: EngineConfig, arch: Arch, device: str, native: bool, why: dict[str, str]) -> str:
    backend = asked_backend(config)
    if not isinstance(backend, str) or not backend:
        raise ConfigError("attention_config", backend, "backend must be a name", 'e.g. {"backend": "reference"}')
    if ":" not in backend:
        backend = backend.lower()
    if backend == "auto" and device == "cuda" and arch.latent is not None:
        why["attention_backend"] = "the model's attention is latent"
        return "mla"
    if backend == "auto" and device == "cuda":
        why["attention_backend"] = "Octavo's own kernels: every mask, one order of sums at any batch"
        return "paged"
    if backend == "auto":
        why["attention_backend"] = "compiled CPU operators are there" if native else "no compiled CPU operators in use"
        return "cpu" if native else "reference"
    if backend == "cpu" and not native:
        reason = f"the device is {device}" if device != "cpu" else "the compiled CPU operators are not in use"
        raise ConfigError(
            "attention_backend", backend, reason, "set --attention-backend reference, or see `octavo doctor`"
        )
    return backend


def _resolve_sizes(config: EngineConfig, arch: Arch, device: str, why: dict[str, str]) -> tuple[int, int, int]:
    """max_model_len, max_num_seqs, max_num_batched_tokens."""
    length, seqs, tokens = config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens
    chunked = config.enable_chunked_prefill
    if length is None or length == -1:
        length = arch.default_length or arch.max_position
        more = f"; up to {arch.max_position} by stretching all" if arch.default_length else ""
        why["max_model_len"] = f"the checkpoint's {length} positions{more}"
        if not chunked and tokens is not None and tokens < length:
            length = max(tokens, 2)
            why["max_model_len"] = "max_num_batched_tokens, since a prompt is computed in one step"
    elif length > arch.max_position:
        limit = f"the checkpoint has {arch.max_position} positions"
        raise ConfigError("max_model_len", length, limit, f"set --max-model-len to at most {arch.max_position}")
    if tokens is None:
        tokens = max(_DEFAULT_BATCHED_TOKENS[device], seqs or 0, 0 if chunked else length)
        why["max_num_batched_tokens"] = f"the default on {device}, or what max_num_seqs and max_model_len need"
    if seqs is None:
        seqs = min(_DEFAULT_SEQS[device], tokens)
        why["max_num_seqs"] = f"the default on {device}, at most max_num_batched_tokens"
    if tokens < seqs:
        limit = f"every running request needs a token per step, and max_num_seqs is {seqs}"
        raise ConfigError("max_num_batched_tokens", tokens, limit, f"raise it, or lower {flag_name('max_num_seqs')}")
    if not chunked and tokens < length:
        limit = f"without chunked prefill a prompt of max_model_len={length} must fit in one step"
        raise ConfigError("max_num_batched_tokens", tokens, limit, "raise it, or drop --no-enable-chunked-prefill")
    return length, seqs, tokens

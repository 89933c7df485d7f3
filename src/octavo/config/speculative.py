"""speculative_config: what a user says of drafts, in vLLM's names, read once.

Owns the keys, which methods take them, and the reasons for what is refused. Knows no method's code. Invariant: a key is
met, or refused by name with the reason; none is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.config.settings import ConfigError, did_you_mean

FIELD = "speculative_config"
MAX_DRAFTS = 16
BY_MODEL = "by_model"  # no method was named: the checkpoint of the drafter says it
# Tokens of a step that cost little, by device: as long as weights take longer to read than to multiply.
_CHEAP_TOKENS = {"cpu": 48, "cuda": 256}
# Keys beside `method` and `num_speculative_tokens` that each method takes.
_OF_MODELS = ("model", "revision", "draft_sample_method", "draft_noise", "draft_tensor_parallel_size")
METHODS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": _OF_MODELS,
    "eagle": _OF_MODELS,
    "eagle3": _OF_MODELS,
    "mtp": _OF_MODELS,
    "dflash": _OF_MODELS,
}
_NEED_MODEL = ("draft_model", "eagle", "eagle3", "dflash")  # modules of mtp may lie in the target's own checkpoint
_NUM_DRAFTS = {"mtp": 1}  # where nothing is said: vLLM's is as many as there are modules, which is one in most models
_ALIASES = {"ngram_gpu": "ngram"}  # another name of vLLM's
_MODULES = "_mtp"  # how vLLM's names of one family's modules end: qwen3_next_mtp
_NGRAM_MODELS = ("ngram", "[ngram]")  # what vLLM's configs say as a model where there is none
_REFUSED_METHODS = {
    "medusa": "its heads draft without a cache, each by itself: EAGLE heads have taken their place",
    "mlp_speculator": "its heads draft without a cache: EAGLE heads have taken their place",
    "suffix": "it looks drafts up on the host, between steps: ngram does on the device",
    "custom_class": "a class of your own is the method itself: package.module:Class",
    "extract_hidden_states": "it drafts nothing, and hidden states are told to nobody",
    "dspark": "its drafters are not read: dflash is the method whose drafters propose a block at once",
}
_COMMON = ("method", "num_speculative_tokens", "adaptive_depth")
_ALL = (*_COMMON, *_OF_MODELS, "prompt_lookup_min", "prompt_lookup_max", "options")
_EQUAL = "drafts are verified by equality with the token that plain decoding draws, so that no bit changes"
_BY_BATCH = "depth follows the batch's size by itself: set adaptive_depth"
_SUFFIX = "there is no method suffix: ngram looks drafts up on the device"
_ONE_DEVICE = "an engine runs on one device"
# Keys of vLLM's that ask for what there is not. A null asks for nothing, nor does what _IDLE names.
_REFUSED = {
    "rejection_sample_method": _EQUAL,
    "disable_by_batch_size": _BY_BATCH,
    "speculative_disable_by_batch_size": _BY_BATCH,
    "num_speculative_tokens_per_batch_size": _BY_BATCH,
    "enable_adaptive_verification": "set adaptive_depth, which is on by default",
    "synthetic_acceptance_rate": _EQUAL,
    "synthetic_acceptance_rates": _EQUAL,
    "synthetic_acceptance_length": _EQUAL,
    "posterior_threshold": _EQUAL,
    "posterior_alpha": _EQUAL,
    "speculative_token_tree": "drafts are a line, not a tree",
    "quantization": "a drafter has the target's kind of weights",
    "max_model_len": "a drafter has the target's max_model_len",
    "disable_padded_drafter_batch": "a drafter's batch is padded on a GPU alone, and no bit depends on it",
    "disable_eagle_block_drop": "a hit loses no block to a drafter",
    "enforce_eager": "set --enforce-eager, which holds for drafts as well",
    "parallel_drafting": "dflash is the method whose drafters propose a block at once",
    "attention_backend": "a drafter's layers run on the target's: set --attention-backend",
    "moe_backend": "a drafter's experts run on the target's operators",
    "kv_cache_dtype": "a drafter's layers lie in the target's cache: set --kv-cache-dtype",
    "draft_load_config": "a drafter is loaded as its target: set --load-format",
    "code_revision": "no code of a checkpoint is run",
    "use_local_argmax_reduction": _ONE_DEVICE,
    "tensor_parallel_size": _ONE_DEVICE,
    "use_heterogeneous_vocab": "a drafter has the target's vocabulary",
    "disable_logprobs": "log-probabilities are told with drafts as without, and no bit of them differs",
    "index_share_for_mtp_iteration": "no model here has sparse attention",
    "dspark_draft_topk": _REFUSED_METHODS["dspark"],
    "suffix_decoding_max_tree_depth": _SUFFIX,
    "suffix_decoding_max_cached_requests": _SUFFIX,
    "suffix_decoding_max_spec_factor": _SUFFIX,
    "suffix_decoding_min_token_prob": _SUFFIX,
}
_IDLE: dict[str, tuple[object, ...]] = {
    "rejection_sample_method": ("standard", "equality"),  # the target's distribution, which equality keeps
    "draft_tensor_parallel_size": (1,),
    "tensor_parallel_size": (1,),
    "enforce_eager": (False,),
    "disable_padded_drafter_batch": (False,),
    "disable_eagle_block_drop": (False,),
    "enable_adaptive_verification": (False,),
    "parallel_drafting": (False,),
    "use_local_argmax_reduction": (False,),
    "use_heterogeneous_vocab": (False,),
    "disable_logprobs": (False,),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Who proposes drafts, and how many. Without a method nobody does."""

    method: str = ""  # a name of `octavo.speculate.SPECULATORS`, "package.module:Class" or BY_MODEL
    num_speculative_tokens: int = 0  # K
    model: str | None = None  # folder or name of the drafter's checkpoint
    revision: str | None = None
    draft_sample_method: str = "probabilistic"  # drawn, with the target's noise; greedy: the likeliest token
    draft_noise: float = 0.8  # how much of the target's noise a drawn draft has: 1 is all, 0 the likeliest token
    prompt_lookup_min: int = 1  # tokens of the shortest and longest run that is looked up
    prompt_lookup_max: int = 4
    adaptive_depth: bool = True  # fewer drafts for rows that accept few, and where many rows run
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a method out of tree


NO_SPECULATION = SpeculativeConfig(adaptive_depth=False)  # a drafter that is given by hand proposes as it says


def cheap_tokens(config: SpeculativeConfig, device: str) -> int:
    """Tokens of a step that cost little on a device; 0: as many drafts as the settings say, whatever they cost."""
    return _CHEAP_TOKENS[device] if config.adaptive_depth else 0


def batch_depth(most: int, cheap: int, num_rows: int) -> int:
    """The most drafts of any row in a step of so many rows, of which `cheap_tokens` tokens cost little."""
    return min(most, max(cheap // num_rows - 1, 0)) if cheap and num_rows else most


def read_speculative(given: Mapping[str, Any]) -> SpeculativeConfig:
    """`speculative_config` as it was given. Raises ConfigError, naming key and value."""
    given = {key: value for key, value in given.items() if not _asks_nothing(key, value)}
    if not given:
        return NO_SPECULATION
    method, is_open = _method(given)
    if method == "ngram" and given.get("model") in _NGRAM_MODELS:
        del given["model"]
    _check_keys(given, method, is_open=is_open)
    _check_method(given, method, is_open=is_open)
    drafts = given.get("draft_sample_method", "greedy")
    if drafts not in ("greedy", "probabilistic"):
        raise _refuse("draft_sample_method", drafts, "must be greedy or probabilistic")
    _check_bool(given, "adaptive_depth")
    for key in ("model", "revision"):
        if key in given and (not isinstance(given[key], str) or not given[key]):
            raise _refuse(key, given[key], "expected text")
    lowest = _whole(given, "prompt_lookup_min", 1, 1, 64)
    highest = _whole(given, "prompt_lookup_max", max(lowest, 4), 1, 64)
    if lowest > highest:
        raise _refuse("prompt_lookup_min", lowest, f"prompt_lookup_max is {highest}", "lower it")
    return SpeculativeConfig(
        method=str(method),
        num_speculative_tokens=_whole(given, "num_speculative_tokens", _NUM_DRAFTS.get(str(method)), 1, MAX_DRAFTS),
        model=given.get("model"),
        revision=given.get("revision"),
        draft_sample_method=given.get("draft_sample_method", "probabilistic"),
        draft_noise=_share(given, "draft_noise", 0.8),
        prompt_lookup_min=lowest,
        prompt_lookup_max=highest,
        adaptive_depth=given.get("adaptive_depth", True),
        options=_mapping(given, "options"),
    )


def _asks_nothing(key: str, value: object) -> bool:
    """Whether a key that is known says what holds without it."""
    is_idle = any(type(value) is type(idle) and value == idle for idle in _IDLE.get(key, ()))
    return is_idle or (value is None and (key in _ALL or key in _REFUSED))


def _method(given: Mapping[str, Any]) -> tuple[object, bool]:
    """The method by our name, or what stands in its place; and whether the drafter's checkpoint is to say it."""
    if "method" not in given:
        by_model = given.get("model")
        return ("ngram", False) if by_model in _NGRAM_MODELS else (BY_MODEL, by_model is not None)
    method = given["method"]
    if isinstance(method, str):
        is_family = method.endswith(_MODULES) and ":" not in method
        method = "mtp" if is_family else _ALIASES.get(method, method)
    return method, False


def _check_keys(given: Mapping[str, Any], method: object, *, is_open: bool) -> None:
    """Raises ConfigError for a key that is not known, that is refused, or that the method has no use for."""
    own = _OF_MODELS if is_open else METHODS.get(method) if isinstance(method, str) else None
    taken = _ALL if own is None else (*_COMMON, *own)
    for key, value in given.items():
        if key in _REFUSED:
            raise _refuse(key, value, _REFUSED[key], "leave it out")
        if key not in _ALL:
            hint = did_you_mean(str(key), _ALL) or f"known keys: {', '.join(taken)}"
            raise _refuse(str(key), value, "unknown key", hint)
        if key not in taken:
            who = "a drafter" if is_open else f"method {method}"
            raise _refuse(key, value, f"{who} has no use for it", f"it takes {', '.join(taken)}")
    if "draft_tensor_parallel_size" in given:
        key = "draft_tensor_parallel_size"
        raise _refuse(key, given[key], _ONE_DEVICE, "set 1, or leave it out")


def _check_method(given: Mapping[str, Any], method: object, *, is_open: bool) -> None:
    """Raises ConfigError for a method that there is not, and for one without the model that it needs."""
    known = f"{', '.join(METHODS)}, or package.module:Class"
    if method == BY_MODEL and not is_open:
        how = f"add it: one of {known}; or a model, whose checkpoint says it"
        raise ConfigError(FIELD, dict(given), "method is missing", how)
    if not isinstance(method, str) or not method:
        raise _refuse("method", method, f"must be one of {known}")
    if method in _REFUSED_METHODS:
        raise _refuse("method", method, _REFUSED_METHODS[method], f"known: {', '.join(METHODS)}")
    if ":" not in method and not is_open and method not in METHODS:
        raise _refuse("method", method, "unknown method", did_you_mean(method, METHODS) or f"known: {known}")
    if method in _NEED_MODEL and "model" not in given:
        raise _refuse("method", method, f"{method} needs a model, the folder or name of its checkpoint", "set model")


def _whole(given: Mapping[str, Any], key: str, default: int | None, low: int, high: int) -> int:
    value = given.get(key, default)
    if value is None:
        raise ConfigError(FIELD, dict(given), f"{key} is missing", f"add it: a whole number from {low} to {high}")
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refuse(key, value, f"must be a whole number from {low} to {high}")
    return value


def _share(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise _refuse(key, value, "must be a number from 0 to 1")
    return float(value)


def _check_bool(given: Mapping[str, Any], key: str) -> None:
    if not isinstance(given.get(key, True), bool):
        raise _refuse(key, given[key], "expected true or false")


def _mapping(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = given.get(key, {})
    if not isinstance(value, Mapping):
        raise _refuse(key, value, "expected a mapping")
    return dict(value)


def _refuse(key: str, value: object, limit: str, change: str = "") -> ConfigError:
    return ConfigError(FIELD, {key: value}, f"{key}: {limit}", change or f"change {key} in --speculative-config")

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
_ALIASES = {  # other names of vLLM's
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "ngram_gpu": "ngram",
}
_REFUSED_METHODS = {
    "medusa": "its heads draft without a cache, each by itself: EAGLE heads have taken their place",
    "mlp_speculator": "its heads draft without a cache: EAGLE heads have taken their place",
    "suffix": "it looks drafts up on the host, between steps: ngram does on the device",
}
_IDLE = "rejection_sample_method"  # with one value
_COMMON = ("method", "num_speculative_tokens", _IDLE, "adaptive_depth")
_ALL = (*_COMMON, *_OF_MODELS, "prompt_lookup_min", "prompt_lookup_max", "options")
_EQUAL = "drafts are verified by equality with the token that plain decoding draws, so that no bit changes"
_REFUSED = {
    "disable_by_batch_size": "depth follows the batch's size by itself: set adaptive_depth",
    "speculative_disable_by_batch_size": "depth follows the batch's size by itself: set adaptive_depth",
    "num_speculative_tokens_per_batch_size": "depth follows the batch's size by itself: set adaptive_depth",
    "synthetic_acceptance_rate": _EQUAL,
    "synthetic_acceptance_rates": _EQUAL,
    "posterior_threshold": _EQUAL,
    "posterior_alpha": _EQUAL,
    "speculative_token_tree": "drafts are a line, not a tree",
    "quantization": "a drafter has the target's kind of weights",
    "max_model_len": "a drafter has the target's max_model_len",
    "disable_padded_drafter_batch": "a drafter's batch is padded on a GPU alone, and no bit depends on it",
    "enforce_eager": "set --enforce-eager, which holds for drafts as well",
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
    if not given:
        return NO_SPECULATION
    method = given.get("method", BY_MODEL if "model" in given else None)
    if not isinstance(method, str) or not method:
        raise _refuse("method", method, f"must be one of {', '.join(METHODS)}, or package.module:Class")
    outside, method = ":" in method, _ALIASES.get(method, method)
    if method in _REFUSED_METHODS:
        raise _refuse("method", method, _REFUSED_METHODS[method], f"known: {', '.join(METHODS)}")
    is_open = method == BY_MODEL and "method" not in given
    if not outside and not is_open and method not in METHODS:
        hint = did_you_mean(method, METHODS) or f"known: {', '.join(METHODS)}, or package.module:Class"
        raise _refuse("method", method, "unknown method", hint)
    taken = _ALL if outside else (*_COMMON, *(_OF_MODELS if is_open else METHODS[method]))
    for key, value in given.items():
        if key in _REFUSED:
            raise _refuse(key, value, _REFUSED[key], "leave it out")
        if key not in _ALL:
            hint = did_you_mean(str(key), _ALL) or f"known keys: {', '.join(taken).replace(_IDLE + ', ', '')}"
            raise _refuse(str(key), value, "unknown key", hint)
        if key not in taken:
            who = "a drafter" if is_open else f"method {method}"
            raise _refuse(key, value, f"{who} has no use for it", f"it takes {', '.join(taken)}")
    if method in _NEED_MODEL and "model" not in given:
        raise _refuse("method", method, f"{method} needs a model, the folder or name of its checkpoint", "set model")
    _check_samplers(given)
    _check_bool(given, "adaptive_depth")
    for key in ("model", "revision"):
        if key in given and (not isinstance(given[key], str) or not given[key]):
            raise _refuse(key, given[key], "expected text")
    lowest = _whole(given, "prompt_lookup_min", 1, 1, 64)
    highest = _whole(given, "prompt_lookup_max", max(lowest, 4), 1, 64)
    if lowest > highest:
        raise _refuse("prompt_lookup_min", lowest, f"prompt_lookup_max is {highest}", "lower it")
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=_whole(given, "num_speculative_tokens", None, 1, MAX_DRAFTS),
        model=given.get("model"),
        revision=given.get("revision"),
        draft_sample_method=given.get("draft_sample_method", "probabilistic"),
        draft_noise=_share(given, "draft_noise", 0.8),
        prompt_lookup_min=lowest,
        prompt_lookup_max=highest,
        adaptive_depth=given.get("adaptive_depth", True),
        options=_mapping(given, "options"),
    )


def _check_samplers(given: Mapping[str, Any]) -> None:
    rejection = given.get("rejection_sample_method", "equality")
    if rejection != "equality":
        known = rejection in ("standard", "block", "synthetic", "strict", "probabilistic")
        raise _refuse("rejection_sample_method", rejection, _EQUAL if known else "unknown", "leave it out")
    drafts = given.get("draft_sample_method", "greedy")
    if drafts not in ("greedy", "probabilistic"):
        raise _refuse("draft_sample_method", drafts, "must be greedy or probabilistic")
    parallel = given.get("draft_tensor_parallel_size", 1)
    if parallel != 1 or isinstance(parallel, bool):
        raise _refuse("draft_tensor_parallel_size", parallel, "an engine runs on one device", "set 1, or leave it out")


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
    return ConfigError(FIELD, {key: value}, f"{key}: {limit}", change or f"change {key} of it")

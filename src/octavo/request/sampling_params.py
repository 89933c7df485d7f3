"""What a user asks of sampling, and the one place that says whether the question is sound.

Owns SamplingParams (vLLM's names, defaults and meaning), and the checks of parameters and prompts against a
model's Limits. Every ingress (LLM, CLI, server) comes through here; nothing downstream
checks again. It knows no tokenizer, scheduler or tensor. Invariant: a SamplingParams that was just constructed or
cloned holds plain ints, floats, strings and lists in the documented ranges, so it survives msgpack; no error repeats
content.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import enum
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec.structs import force_setattr

from octavo.request.fields import FieldSpec, check_fields, check_plain
from octavo.request.repetition import RepetitionDetectionParams as RepetitionDetectionParams
from octavo.request.repetition import read_repetition_detection
from octavo.request.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
from octavo.request.structured_outputs import read_structured_outputs
from octavo.request.thinking import Thinking
from octavo.request.validation import (
    INT32_MAX,
    as_float,
    as_ids,
    as_int,
    as_list,
    as_strings,
    plain_int,
    shown,
    type_error,
)
from octavo.request.validation import ParameterError as ParameterError
from octavo.request.validation import check_unicode as check_unicode

GREEDY_BELOW = 1e-5  # a lower temperature (a denormal, say) means 0, that is greedy
MAX_TEMPERATURE = 1e30  # float32 holds its quotients
MAX_N = 16_384  # whatever Limits.max_n says
MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 256
MAX_ALL_STOP_CHARS = 16_384  # of a request's stop strings together
MAX_LOGPROB_IDS = 128
MOST_BIAS = 100.0  # a larger logit_bias is cut to it
MAX_LOGIT_BIAS = 100_000
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024  # all of a request's bad words together
MAX_CACHE_SALT_BYTES = 1024


class RequestOutputKind(enum.IntEnum):
    """What each RequestOutput holds."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has ended


class _Checking(type(msgspec.Struct)):  # type: ignore[misc]
    """Makes SamplingParams whose unknown names are a user's mistake like any other."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """As the constructor. Raises ParameterError for a name that is no field."""
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            _refuse_unknown(fields)
            raise


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=_Checking):
    """How to sample from a model for one prompt. Raises ParameterError (a ValueError) on a bad value.

    After construction `stop`, `stop_token_ids` and `bad_words` are always lists, empty by default. Whether
    ids and lengths suit a model is for `check`. A field may be changed: the new value is checked when the parameters
    are used. An engine takes a clone, so a later change touches no request that is there already.
    """

    n: int = 1  # completions per prompt, 1 to the engine's max_n
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # [0.01, 100]; above 1 discourages what prompt or output hold already
    temperature: float = 1.0  # 0 to 1e30; below 1e-5 is 0, that is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # [0, 1], relative to the likeliest token's probability
    seed: int | None = (
        None  # -2**63 to 2**64-1; None or -1: drawn anew for each request; of samples: octavo.request.seeds
    )
    stop: str | list[str] | None = None  # at most 256 strings of 1 to 256 characters
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False  # EOS ends nothing; below min_tokens it is still not drawn
    max_tokens: int | None = 16  # None: fill the context
    min_tokens: int = 0  # no EOS (ignored ones too), stop token or stop string before so many tokens
    logprobs: int | None = None  # the sampled token's, and those of so many likeliest tokens; -1: of all
    prompt_logprobs: int | None = None
    prompt_logprobs_temperature: float = 1.0  # 1e-5 to 1e30; they are of logits / this
    return_sampling_mask: bool = False  # say of each token which ones could be drawn in its place
    return_routed_experts: bool = False  # say which experts each token was sent to
    routed_experts_prompt_start: int = 0  # leave out so many first tokens of the prompt there
    logprob_token_ids: list[int] | None = None  # the sampled token's, and those of these, at most 128
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int = 1  # tokens between two outputs of a stream; the first and the last always come
    logit_bias: dict[int, float] | None = None  # token id -> a number, cut to [-100, 100]
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None  # word sequences that are never completed
    bad_words_token_ids: list[list[int]] | None = None  # set by the text layer from `bad_words`, not by users
    scored_token_id: int | None = None  # scored behind the prompt's last token: see octavo.request.scores, not by users
    extra_args: dict[str, Any] | None = None  # request fields of attention mods, and plug-ins'; plain data
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning after which it is ended; None or -1: no limit
    thinking: Thinking | None = None  # set by the text layer from the prompt, not by users
    truncate_prompt_tokens: int | None = None  # only so many last tokens of the prompt; -1: as many as fit
    flat_logprobs: bool = False  # log-probabilities come as outputs.FlatLogprobs, which take a tenth of the memory
    skip_reading_prefix_cache: bool | None = None  # True: the whole prompt is computed, whatever is cached

    def __post_init__(self) -> None:
        """Check and normalise; runs on construction, decoding and `msgspec.structs.replace` alike."""
        for name, low, high in _FLOATS:  # nearly all values are as they should be: what is quick is asked first
            value = getattr(self, name)
            if type(value) is not float or not low <= value <= high or (value == low and name == "top_p"):
                force_setattr(self, name, as_float(name, value, low, high, above=name == "top_p"))
        if (num := plain_int(self.n)) is not None and not 1 <= num <= MAX_N:  # the rest of them is the engine's max_n
            raise ParameterError("n", f"must be {'at least 1' if num < 1 else '<= max_n (--max-n)'}, got {shown(num)}")
        for name, low, high, optional in _INTS:
            value = getattr(self, name)
            if (type(value) is not int or not low <= value <= high) and not (value is None and optional):
                force_setattr(self, name, as_int(name, value, low, high))
        for name in _BOOLS:
            if type(getattr(self, name)) is not bool:
                raise type_error(name, "true or false", getattr(self, name))
        if type(self.skip_reading_prefix_cache) is not bool and self.skip_reading_prefix_cache is not None:
            raise type_error("skip_reading_prefix_cache", "true, false or null", self.skip_reading_prefix_cache)
        if self.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        if self.temperature < GREEDY_BELOW:
            force_setattr(self, "temperature", 0.0)
        if self.thinking_token_budget == -1:
            force_setattr(self, "thinking_token_budget", None)
        if self.seed == -1:
            force_setattr(self, "seed", None)
        _normalise_strings(self)
        _normalise_ids(self)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise type_error("output_kind", "a RequestOutputKind", self.output_kind)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"must be <= max_tokens {self.max_tokens}, got {self.min_tokens}")
        if self.repetition_detection is not None:
            force_setattr(self, "repetition_detection", read_repetition_detection(self.repetition_detection))
        if self.structured_outputs is not None:
            force_setattr(self, "structured_outputs", read_structured_outputs(self.structured_outputs))
        if self.thinking is not None and not isinstance(self.thinking, Thinking):
            raise type_error("thinking", "set by the text layer", self.thinking)

    @staticmethod
    def from_optional(**fields: Any) -> SamplingParams:
        """Like the constructor, but None means the default, and JSON's shapes are taken.

        That is: `logit_bias` keys may be decimal strings. None stays None where it has a meaning of its own
        (`max_tokens`, `seed`, `logprobs`). Unknown names raise ParameterError.
        """
        _refuse_unknown(fields, *_NOT_USERS)
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = {_bias_key(key): value for key, value in given["logit_bias"].items()}
        return SamplingParams(**given)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing, with all its values checked. Raises ParameterError."""
        return msgspec.structs.replace(self, extra_args=copy.deepcopy(self.extra_args))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, always."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> list[str]:
        """`stop` with its normalised type."""
        return self.stop if isinstance(self.stop, list) else []


# names of others for what is asked for in another way
_ELSEWHERE = {
    "guided_decoding": "is structured_outputs here: octavo.StructuredOutputsParams(json=...), regex, choice or grammar",
    "best_of": "is not supported: ask for n completions, and take the best by their cumulative_logprob",
    "use_beam_search": "is not supported: there is no beam search",
    "logits_processors": "is not supported: see docs/adding.md for what changes logits",
}
_NOT_USERS = ("bad_words_token_ids", "scored_token_id", "thinking")  # fields that are set here


def _refuse_unknown(fields: Iterable[str], *unknown: str) -> None:
    """Raise ParameterError for the first name that is no field, or among `unknown`."""
    known = [name for name in SamplingParams.__struct_fields__ if name not in unknown]
    for name in fields:
        if name not in known:
            if name in _ELSEWHERE and name not in unknown:
                raise ParameterError(name, _ELSEWHERE[name], "unknown_field")
            near = difflib.get_close_matches(str(name)[:64], known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ParameterError(str(name)[:64], f"unknown sampling parameter{hint}", "unknown_field")


# name, lowest, highest (both allowed, but for a top_p of 0)
_FLOATS = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("prompt_logprobs_temperature", GREEDY_BELOW, MAX_TEMPERATURE),
)
# name, lowest, highest, whether None has a meaning
_INTS = (
    ("n", 1, MAX_N, False),
    ("top_k", -1, INT32_MAX, False),
    ("seed", -(2**63), 2**64 - 1, True),
    ("max_tokens", 1, INT32_MAX, True),
    ("min_tokens", 0, INT32_MAX, False),
    ("logprobs", -1, INT32_MAX, True),
    ("prompt_logprobs", -1, INT32_MAX, True),
    ("truncate_prompt_tokens", -1, INT32_MAX, True),
    ("routed_experts_prompt_start", 0, INT32_MAX, False),
    ("stream_interval", 1, INT32_MAX, False),
    ("thinking_token_budget", -1, INT32_MAX, True),
    ("scored_token_id", 0, INT32_MAX, True),
)
FLOAT_FIELDS, INT_FIELDS = (frozenset(name for name, *_ in table) for table in (_FLOATS, _INTS))
_BOOLS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
    "return_sampling_mask",
    "return_routed_experts",
)
BOOL_FIELDS = frozenset(_BOOLS)


def _normalise_strings(params: SamplingParams) -> None:
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    force_setattr(params, "stop", as_strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_CHARS))
    num_chars = sum(map(len, params.stop)) if params.stop else 0
    if num_chars > MAX_ALL_STOP_CHARS:
        raise ParameterError("stop", f"may have {MAX_ALL_STOP_CHARS} characters together, got {num_chars}")
    words = as_strings("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    force_setattr(params, "bad_words", words)
    if params.stop and not params.detokenize:
        raise ParameterError("stop", "stop strings need detokenize=True", "unsupported_parameter")
    check_plain(params.extra_args)


def _normalise_ids(params: SamplingParams) -> None:
    force_setattr(params, "stop_token_ids", as_ids("stop_token_ids", params.stop_token_ids, INT32_MAX))
    if params.logprob_token_ids is not None:
        ids = as_ids("logprob_token_ids", params.logprob_token_ids, MAX_LOGPROB_IDS)
        force_setattr(params, "logprob_token_ids", ids)
    if params.allowed_token_ids is not None:
        allowed = as_ids("allowed_token_ids", params.allowed_token_ids, INT32_MAX)
        if not allowed:
            raise ParameterError("allowed_token_ids", "must not be empty: no token could be sampled")
        force_setattr(params, "allowed_token_ids", allowed)
    if params.bad_words_token_ids is not None:
        lists = as_list("bad_words_token_ids", params.bad_words_token_ids, INT32_MAX, "a list of token lists")
        words = [as_ids(f"bad_words_token_ids[{i}]", ids, INT32_MAX) for i, ids in enumerate(lists)]
        force_setattr(params, "bad_words_token_ids", [ids for ids in words if ids])
        num = sum(map(len, words))
        if num > MAX_BAD_WORD_TOKENS:
            raise ParameterError("bad_words", f"may have {MAX_BAD_WORD_TOKENS} tokens together, got {num}")
    bias = params.logit_bias
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise type_error("logit_bias", "an object of token id to number", bias)
    if len(bias) > MAX_LOGIT_BIAS:
        raise ParameterError("logit_bias", f"may hold at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    force_setattr(
        params,
        "logit_bias",
        {as_int("logit_bias token id", key, 0, INT32_MAX): _cut_bias(value) for key, value in bias.items()},
    )


def _cut_bias(value: object) -> float:
    """A finite number, cut to what a bias may be: 100 decides already."""
    return max(min(as_float("logit_bias value", value, -MAX_TEMPERATURE, MAX_TEMPERATURE), MOST_BIAS), -MOST_BIAS)


def _bias_key(key: object) -> object:
    """JSON's object keys are strings: a decimal one is a token id."""
    if isinstance(key, str):
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ParameterError("logit_bias", "keys must be token ids in decimal", "invalid_type")
        return int(key)
    return key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a model and the engine's configuration allow."""

    vocab_size: int  # the logits' width: what sampling indexes
    max_model_len: int  # tokens of prompt and output together
    num_token_ids: int = 0  # ids that the tokenizer knows; prompts may hold only these; 0: vocab_size
    max_token_bytes: int = 0  # UTF-8 bytes that one token can stand for at most; 0: unknown
    max_logprobs: int = 20
    max_n: int = 1024  # completions of one request
    max_total_tokens: int = 1 << 20  # n * max_tokens of one request
    experts: tuple[int, int] = (0, 0)  # layers, and experts of a token in each, where these are kept
    request_fields: tuple[FieldSpec, ...] = ()  # what attention mods read of `extra_args`


def check(params: SamplingParams, limits: Limits, num_prompt_tokens: int) -> int:
    """Check what depends on the model and the prompt's length.

    Returns:
        max_tokens of this request, at least 1: what was asked, cut to the room that the prompt leaves.

    Raises:
        ParameterError: names the field, the value and the limit.

    """
    check_length(num_prompt_tokens, limits)
    if params.return_routed_experts and not limits.experts[0]:
        message = "the experts of tokens are not kept: it needs a model with experts and enable_return_routed_experts"
        raise ParameterError("return_routed_experts", message, "unsupported_parameter")
    if params.routed_experts_prompt_start > num_prompt_tokens:
        message = f"must be <= the prompt's {num_prompt_tokens} tokens, got {params.routed_experts_prompt_start}"
        raise ParameterError("routed_experts_prompt_start", message)
    check_fields(limits.request_fields, params.extra_args, limits.max_model_len)
    room = limits.max_model_len - num_prompt_tokens
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        message = f"{params.min_tokens} is more than the {room} tokens that the prompt leaves"
        raise ParameterError("min_tokens", f"{message} of max_model_len {limits.max_model_len}")
    if params.n > limits.max_n:
        raise ParameterError("n", f"must be <= max_n {limits.max_n}, got {params.n}")
    total = params.n * max_tokens
    if total > limits.max_total_tokens:
        message = f"n {params.n} x max_tokens {max_tokens} = {total} exceeds {limits.max_total_tokens}"
        raise ParameterError("n", f"{message} (max_total_tokens)")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > limits.max_logprobs:
            raise ParameterError(name, f"must be <= max_logprobs {limits.max_logprobs}, got {value}")
        if value == -1 and limits.max_logprobs < limits.vocab_size:
            raise ParameterError(name, f"-1 means all: it needs max_logprobs -1, which is {limits.max_logprobs}")
    words, scored = params.bad_words_token_ids, params.scored_token_id
    lists: tuple[tuple[str, Collection[int] | None], ...] = (
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
        ("bad_words", [max(ids) for ids in words] if words else None),
        ("scored_token_id", None if scored is None else [scored]),
    )
    for name, ids in lists:
        if ids and max(ids) >= limits.vocab_size:
            message = f"token ids must be below {limits.vocab_size}, got {max(ids)}"
            raise ParameterError(name, message, "invalid_token_id")
    return max_tokens


def check_length(num_tokens: int, limits: Limits, *, name: str = "prompt", is_answered: bool = True) -> None:
    """Check a prompt's length: at least one token, and room for one more if it is answered. Raises ParameterError."""
    if num_tokens < 1:
        raise ParameterError(name, "must not be empty", "empty_prompt")
    if num_tokens >= limits.max_model_len + (not is_answered):
        message = f"{num_tokens} tokens leave no room for an answer within max_model_len {limits.max_model_len}"
        if not is_answered:
            message = f"{num_tokens} tokens exceed max_model_len {limits.max_model_len}"
        raise ParameterError(name, message, "context_length_exceeded")


def num_kept(params: SamplingParams, limits: Limits, *, is_answered: bool = True) -> int | None:
    """How many last tokens of a prompt `truncate_prompt_tokens` keeps; None: all. Raises ParameterError.

    is_answered: tokens are wanted behind them. Where none are, a prompt may fill the context.
    """
    most, context = params.truncate_prompt_tokens, limits.max_model_len
    if most == -1:
        return max(context - (params.max_tokens or 1), 1) if is_answered else context
    if most is None or most < context + (not is_answered):
        return most
    bound = "below" if is_answered else "at most"
    raise ParameterError("truncate_prompt_tokens", f"must be {bound} max_model_len {context}, got {most}")


def text_limits(limits: Limits, kept: int | None) -> Limits:
    """The limits of a text of which the last `kept` tokens count (None: all): what is cut off may be any length."""
    return limits if kept is None else dataclasses.replace(limits, max_token_bytes=0)


def check_token_ids(
    token_ids: object, limits: Limits, kept: int | None = None, *, name: str = "prompt", is_answered: bool = True
) -> list[int]:
    """Check a prompt given as token ids: their number first, then each one. kept: only so many last ones count.

    Returns:
        The ids as a list of plain ints.

    Raises:
        ParameterError: empty_prompt, context_length_exceeded, or invalid_token_id with the first bad index.

    """
    if isinstance(token_ids, str | bytes | dict) or not isinstance(token_ids, Sequence):
        if not hasattr(token_ids, "tolist"):  # arrays are welcome
            raise type_error(name, "text or a list of token ids", token_ids)
        token_ids = token_ids.tolist()
        if not isinstance(token_ids, list):
            raise type_error(name, "text or a list of token ids", token_ids)
    if kept is not None:
        token_ids = token_ids[-kept:]
    check_length(len(token_ids), limits, name=name, is_answered=is_answered)
    high = limits.num_token_ids or limits.vocab_size
    # the loop says what is wrong, or takes other integers; msgspec tells of half a character as of UTF-8
    with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
        converted: list[int] = msgspec.convert(token_ids, _ids_below(high))
        return converted
    ids = []
    for i, token in enumerate(token_ids):
        found = plain_int(token)
        if found is None:
            message = f"token id at index {i} must be an integer, got {shown(token)}"
            raise ParameterError(name, message, "invalid_token_id")
        if not 0 <= found < high:
            message = f"token id at index {i} must be in [0, {high}), got {shown(found)}"
            raise ParameterError(name, message, "invalid_token_id")
        ids.append(found)
    return ids


@functools.cache
def _ids_below(high: int) -> Any:
    """The type of a list of plain ints in [0, high), which msgspec checks four times as fast as Python's passes do."""
    entry: Any = Annotated[int, msgspec.Meta(ge=0, lt=high)]
    return list[entry]


def check_text(text: object, limits: Limits, name: str = "prompt") -> str:
    """Check a text prompt before it is tokenized. `name`: the field that it came from.

    It must not be empty, be real Unicode, and not be so long that it cannot fit whatever its tokens are.
    Raises ParameterError: empty_prompt, invalid_unicode, invalid_type or context_length_exceeded.
    """
    if not isinstance(text, str):
        raise type_error(name, "text or a list of token ids", text)
    if not text:
        raise ParameterError(name, "must not be empty", "empty_prompt")
    most = limits.max_model_len * limits.max_token_bytes
    if most and len(text) > most:  # a character has at least one byte: refuse before encoding
        num_bytes = len(text)
    else:
        check_unicode(name, text)
        num_bytes = len(text.encode())
    if most and num_bytes > most:
        message = f"{num_bytes} bytes cannot fit in {limits.max_model_len} tokens (max_model_len) of at most "
        raise ParameterError(name, f"{message}{limits.max_token_bytes} bytes", "context_length_exceeded")
    return text


def check_request_options(cache_salt: object = "", priority: object = 0) -> None:
    """Check what a request carries beside its prompt and its parameters. Raises ParameterError."""
    if not isinstance(cache_salt, str):
        raise type_error("cache_salt", "a string", cache_salt)
    check_unicode("cache_salt", cache_salt)
    if len(cache_salt.encode()) > MAX_CACHE_SALT_BYTES or not cache_salt.isprintable():
        wanted = f"at most {MAX_CACHE_SALT_BYTES} bytes without control characters"
        raise ParameterError("cache_salt", f"must be {wanted}, got {shown(cache_salt)}")
    as_int("priority", priority, -INT32_MAX - 1, INT32_MAX)

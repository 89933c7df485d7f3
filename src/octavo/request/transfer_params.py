"""`kv_transfer_params`: what a request says to its engine's connector, and is answered, as in vLLM.

Owns the kinds of its fields, and what each prompt of a list has of them. Knows no connector. Invariants: a transfer id
is of one prompt's blocks; a field that is named here has its kind, or the request is refused by that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from octavo.request.fields import MAX_EXTRA_BYTES
from octavo.request.sampling_params import ParameterError, SamplingParams

NAME = "kv_transfer_params"
EACH = "prompts"  # of a request with several prompts: what is said of each, beside what is said of all
_MAX_TEXT = 512  # characters
_MAX_COUNT = (1 << 31) - 1
_MAX_ADDRESSES = 64
MAX_BLOCKS = 2048  # that are named, of all cache groups together
_MEANT = ("do_remote_prefill", "do_remote_decode")
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Block = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_KINDS: dict[str, tuple[type, str]] = {
    "max_load_tokens": (int, "a whole number of at least 0"),
    "max_offload_tokens": (int, "a whole number of at least 0"),
    "remote_num_tokens": (int, "a whole number of at least 0"),
    "remote_port": (int, "a port, from 1 to 65535"),
    "do_remote_decode": (bool, "true or false"),
    "do_remote_prefill": (bool, "true or false"),
    "transfer_id": (str, f"a text of 1 to {_MAX_TEXT} characters"),
    "remote_engine_id": (str, f"a text of 1 to {_MAX_TEXT} characters"),
    "remote_request_id": (str, f"a text of 1 to {_MAX_TEXT} characters"),
    "remote_host": (str, f"a text of 1 to {_MAX_TEXT} characters"),
    "remote_offer": (str, f"a text of 1 to {_MAX_TEXT} characters"),
}
FIELDS = frozenset((*_KINDS, "remote_addresses", "remote_block_ids", EACH))
REMOTE = ("remote_host", "remote_port", "transfer_id", "remote_num_tokens")  # where blocks are on offer


def check(said: object, max_tokens: int = _MAX_COUNT) -> dict[str, Any]:
    """The params, whose named fields have their kinds. `max_tokens`: what the context holds. Raises ParameterError."""
    if not isinstance(said, Mapping):
        raise ParameterError(NAME, "must be an object", "invalid_type")
    found = dict(said)
    each = found.get(EACH)
    if each is not None and not (isinstance(each, list) and all(isinstance(own, Mapping) for own in each)):
        raise ParameterError(f"{NAME}.{EACH}", "must be a list of objects, one for each prompt", "invalid_type")
    for index, own in enumerate([found, *(each or ())]):
        _check_one(own, f"{NAME}.{EACH}[{index - 1}]" if index else NAME, max_tokens)
    return found


def _check_one(said: Mapping[str, Any], label: str, max_tokens: int) -> None:
    for name, (kind, wanted) in _KINDS.items():
        value = said.get(name)
        if value is not None and (type(value) is not kind or not _in_range(name, value)):
            raise ParameterError(f"{label}.{name}", f"must be {wanted}", "invalid_type")
    count = said.get("remote_num_tokens") or 0
    if count > max_tokens:
        raise ParameterError(f"{label}.remote_num_tokens", f"must be at most {max_tokens} (max_model_len), got {count}")
    try:
        addresses = msgspec.convert(said.get("remote_addresses") or [], list[tuple[str, _Port]])
        if len(addresses) > _MAX_ADDRESSES:
            raise ValueError
    except ValueError:
        wanted = f"must be a list of at most {_MAX_ADDRESSES} pairs of a host and a port"
        raise ParameterError(f"{label}.remote_addresses", wanted, "invalid_type") from None
    try:
        tables = msgspec.convert(said.get("remote_block_ids") or [], list[list[Block]])
        if sum(map(len, tables)) > MAX_BLOCKS:
            raise ValueError
    except ValueError:
        wanted = f"must be lists, one for each cache group, of at most {MAX_BLOCKS} numbers of blocks"
        raise ParameterError(f"{label}.remote_block_ids", wanted, "invalid_type") from None
    size = len(msgspec.msgpack.encode({name: value for name, value in said.items() if name != EACH}))
    if size > MAX_EXTRA_BYTES:
        raise ParameterError(label, f"must encode to at most {MAX_EXTRA_BYTES} bytes, got {size}")


def hosts(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each host that the params name, with the field that does. said: as checked."""
    for index, own in enumerate([said, *(said.get(EACH) or ())]):
        label = f"{NAME}.{EACH}[{index - 1}]" if index else NAME
        if own.get("remote_host"):
            yield f"{label}.remote_host", own["remote_host"]
        yield from ((f"{label}.remote_addresses", host) for host, _ in own.get("remote_addresses") or ())


def _in_range(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return 1 <= len(value) <= _MAX_TEXT
    return isinstance(value, bool) or (1 <= value <= 65535 if name == "remote_port" else 0 <= value <= _MAX_COUNT)


def split(said: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """What is said of each of `count` prompts that come together.

    A transfer id that is said of all gets the place of each prompt behind the first. Raises ParameterError.
    """
    shared = {name: value for name, value in said.items() if name != EACH}
    each = said.get(EACH)
    if each is not None:
        if not isinstance(each, Sequence) or len(each) != count:
            num = len(each) if isinstance(each, Sequence) else 0
            raise ParameterError(f"{NAME}.{EACH}", f"must hold an object for each of {count} prompts, got {num}")
        return [{**shared, **own} for own in each]
    if count > 1 and shared.get("do_remote_prefill") and shared.get("remote_num_tokens"):
        limit = f"is missing: blocks of one prompt are on offer, and there are {count} prompts"
        raise ParameterError(f"{NAME}.{EACH}", limit, "missing_field")
    whole = shared.get("transfer_id")
    if not whole:
        return [shared] * count
    return [{**shared, "transfer_id": f"{whole}-{index}" if index else whole} for index in range(count)]


def join(told: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What is answered to prompts that came together, in the form that `split` takes; None: nothing."""
    known = [dict(own) for own in told if own is not None]
    if len(told) == 1 or not known:
        return known[0] if known else None
    shared = {name: value for name, value in known[0].items() if all(own.get(name) == value for own in known)}
    rest = [
        {name: value for name, value in own.items() if name not in shared} if own is not None else None for own in told
    ]
    return {**shared, EACH: [own if own is not None else dict.fromkeys(_MEANT, False) for own in rest]}


def of_sibling(params: SamplingParams) -> SamplingParams:
    """Of a second completion of the same prompt: its blocks are on offer once, and are fetched once."""
    said = (params.extra_args or {}).get(NAME)
    if not isinstance(said, Mapping) or not any(said.get(name) for name in _MEANT):
        return params
    extra = {**(params.extra_args or {}), NAME: {**said, **dict.fromkeys(_MEANT, False)}}
    return msgspec.structs.replace(params, extra_args=extra)


def with_own(params: SamplingParams, said: Mapping[str, Any]) -> SamplingParams:
    """The same parameters, with what is said of one prompt."""
    return msgspec.structs.replace(params, extra_args={**(params.extra_args or {}), NAME: dict(said)})

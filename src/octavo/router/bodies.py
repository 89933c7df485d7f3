"""Bodies: what the router reads and writes in the bodies of the routes that generate.

Owns where each route has its prompts, its sampling parameters and what it answers of blocks. Knows no server.
Invariant: a body that it does not understand is nobody's but the decode server's, which says what is wrong with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.request import transfer_params

TRANSFER = transfer_params.NAME
_OWN = ("max_load_tokens", "max_offload_tokens", transfer_params.EACH)  # of kv_transfer_params: a client's to say
_AFFINITY_CHARS = 512  # of a prompt: what begins alike so far goes to one prefill server
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
_LEFT_OUT = (*_LIMITS, "n", "best_of", "stream_options", "min_tokens", "min_new_tokens")  # of a request for one token
_WHOLE = ("prompt_logprobs", "return_routed_experts", "skip_reading_prefix_cache")  # all of the prompt is computed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The bodies of one route."""

    prompts: tuple[str, ...]  # fields, one of which is given
    limit: str = "max_tokens"  # the field that says how many tokens are wanted
    is_nested: bool = False  # sampling parameters lie in `sampling_params`
    may_be_many: bool = False  # a prompt may be a list of prompts

    def understands(self, body: Mapping[str, Any]) -> bool:
        """Whether its sampling parameters are where they belong."""
        given = body.get("sampling_params") if self.is_nested else None
        return given is None or isinstance(given, dict) or (_is_list_of(given, dict) and self.may_be_many)

    def _sampling(self, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Where sampling parameters may stand."""
        given = (body.get("sampling_params") or {}) if self.is_nested else {}
        return [body, *(given if isinstance(given, list) else [given])]

    def foreign(self, body: Mapping[str, Any]) -> list[str]:
        """What a client says of blocks itself, but for how many are loaded and kept."""
        given = [own.get(TRANSFER) for own in self._sampling(body)]
        extra = [_mapping(own.get("extra_args")).get(TRANSFER) for own in self._sampling(body)]
        said = [each for each in (*given, *extra) if each is not None]
        each = [own for one in said for own in (one, *_list(_mapping(one).get(transfer_params.EACH)))]
        pairs = [pair for one in each for pair in (one if isinstance(one, dict) else {str(one): True}).items()]
        return [name for name, value in pairs if value and name not in _OWN]

    def computes_whole(self, body: Mapping[str, Any]) -> bool:
        """Whether a decode server computes the whole prompt whatever is on offer, or asks its engine for nothing."""
        places = self._sampling(body)
        echoes = body.get("echo") and body.get("logprobs") is not None and body.get("logprobs") is not False
        start = body.get("logprob_start_len")
        scores = body.get("return_logprob") and type(start) is int and start >= 0
        asked = [own.get(name) for own in places for name in _WHOLE]
        asks = any(value is not None and value is not False for value in asked)
        cuts = any(own.get("truncate_prompt_tokens") == -1 for own in places)  # by how many tokens are wanted
        return bool(echoes or scores) or asks or cuts or any(own.get(self.limit) == 0 for own in places)

    def first(self, body: Mapping[str, Any], transfer_id: str) -> dict[str, Any]:
        """The body that asks a prefill server for one token of it, and to offer its blocks under an id."""
        made = _without(body, _LEFT_OUT) | {"stream": False}
        made[TRANSFER] = {"do_remote_decode": True, "transfer_id": transfer_id}
        if not self.is_nested:
            return made | {self.limit: 1}
        given = body.get("sampling_params") or {}
        if isinstance(given, list):  # all alike
            given = given[0]
        return made | {"sampling_params": _without(given, _LEFT_OUT) | {self.limit: 1}}

    def transfer_ids(self, body: Mapping[str, Any], transfer_id: str) -> list[str]:
        """Those under which a prefill server offers what `first` asks for."""
        prompt = self._prompt(body)
        is_list = self.may_be_many and isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        split = transfer_params.split({"transfer_id": transfer_id}, len(prompt) if is_list and prompt else 1)
        return [str(own["transfer_id"]) for own in split]

    def told(self, answer: Any) -> dict[str, Any] | None:
        """What a prefill server answers of the blocks; None: nothing."""
        if self.is_nested and self.may_be_many:  # each prompt's answer has its own
            parts = answer if isinstance(answer, list) else [answer]
            said = [_mapping(_mapping(part).get("meta_info")).get(TRANSFER) for part in parts]
            return transfer_params.join([own if isinstance(own, dict) else None for own in said])
        told = _mapping(answer).get(TRANSFER)
        return told if isinstance(told, dict) else None

    def affinity(self, body: Mapping[str, Any]) -> bytes:
        """What requests that begin alike share."""
        return json.dumps(self._prompt(body), sort_keys=True)[:_AFFINITY_CHARS].encode()

    def _prompt(self, body: Mapping[str, Any]) -> Any:
        return next((body[name] for name in self.prompts if body.get(name) is not None), None)


FORMS = {
    "/v1/completions": Form(prompts=("prompt",), may_be_many=True),
    "/v1/chat/completions": Form(prompts=("messages",)),
    "/v1/responses": Form(prompts=("input",), limit="max_output_tokens"),
    "/inference/v1/generate": Form(prompts=("token_ids",), is_nested=True),
    "/generate": Form(prompts=("input_ids", "text"), limit="max_new_tokens", is_nested=True, may_be_many=True),
}


def read(body: bytes) -> dict[str, Any] | None:
    """The object that a body holds, if a server would read it alike; None: the server says what is wrong with it."""
    try:
        found = json.loads(body, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def ids_of(told: Mapping[str, Any]) -> list[str]:
    """The transfer ids in what an answer says of blocks."""
    each = told.get(transfer_params.EACH)
    told_of = [told, *(own for own in each if isinstance(own, dict))] if isinstance(each, list) else [told]
    return [str(own["transfer_id"]) for own in told_of if own.get("transfer_id")]


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _is_list_of(given: Any, kind: type) -> bool:
    return isinstance(given, list) and all(isinstance(each, kind) for each in given)


def _mapping(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, dict) else {}


def _without(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}

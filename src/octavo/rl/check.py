"""assert_same: whether a converted model and a sampler give the same bits, told before a run starts.

Owns the comparison and its words. A sampler is a function, or an Octavo server's address. Imports no engine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from octavo.rl.pack import Pack
from octavo.rl.scoring import logprobs

Sampler: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Sequences of token ids -> of each the log-probabilities of its tokens from the second on."""
_TIMEOUT = 60.0  # seconds for one answer of a server
_NOT_YET = 503  # while a server loads its model, or has no room: asked again
_PAUSE = 0.2  # seconds
_SHOWN = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One log-probability that is not the same."""

    sequence: int
    position: int  # of the token whose log-probability it is
    token: int
    trainer: float
    sampler: float


class DifferenceError(AssertionError):
    """Trainer and sampler differ. `differences`: all of them, in order."""

    def __init__(self, differences: Sequence[Difference], num_compared: int) -> None:
        """The message names the first few."""
        self.differences, self.num_compared = tuple(differences), num_compared
        worst = max(abs(each.trainer - each.sampler) for each in differences)
        places = "; ".join(
            f"sequence {each.sequence}, position {each.position}, token {each.token}: trainer {each.trainer!r}, "
            f"sampler {each.sampler!r}"
            for each in differences[:_SHOWN]
        )
        super().__init__(
            f"{len(differences)} of {num_compared} log-probabilities differ, by at most {worst:.3g}: {places}. "
            "Compare weights, dtype, bfloat16_chain, attention backend and machine: the same bits need the same of each"
        )


class Scores(Protocol):
    """What an LLM has."""

    def score(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """As a Sampler."""


def assert_same(
    model: nn.Module,
    sampler: Sampler | Scores | str,
    sequences: Sequence[Sequence[int]] | None = None,
    *,
    api_key: str | None = None,
) -> int:
    """Raise DifferenceError unless model and sampler agree in every bit; returns how many log-probabilities agreed.

    model: of `convert`. sampler: an LLM, a function of sequences of ids, or the address of `octavo serve`, such as
    "http://127.0.0.1:8000". sequences: ids, each at least 2; None: 32 tokens of a fixed rule. api_key: of that server;
    None: OCTAVO_API_KEY, if it is set. Raises ValueError for a sampler that answers with something else,
    ConnectionError where there is no server.
    """
    vocab_size = next(int(each.config.vocab_size) for each in model.modules() if hasattr(each, "config"))  # type: ignore[union-attr,arg-type]
    asked = sequences or [[(7 * i * i + 3 * i + 5) % vocab_size for i in range(33)]]
    if any(len(sequence) < 2 for sequence in asked):
        raise ValueError("sequences must hold at least 2 tokens each: the first one has no log-probability")
    if isinstance(sampler, str):
        theirs: Sequence[Sequence[float]] = _of_server(sampler, asked, api_key or os.environ.get("OCTAVO_API_KEY"))
    else:
        theirs = sampler(asked) if callable(sampler) else sampler.score(asked)
    pack = Pack.of(asked, device=next(model.parameters()).device)
    with torch.no_grad():
        ours = pack.split(logprobs(model, pack).logprobs)
    differences, count = [], 0
    for index, (ids, own, other) in enumerate(zip(asked, ours, theirs, strict=True)):
        if len(other) != len(ids) - 1:
            raise ValueError(f"the sampler gave {len(other)} log-probabilities for {len(ids)} tokens, not one less")
        for position, (mine, their) in enumerate(zip(own.tolist(), other, strict=False), 1):
            count += 1
            if mine != their and struct.pack("f", mine) != struct.pack("f", their):
                differences.append(Difference(index, position, ids[position], mine, float(their)))
    if differences:
        raise DifferenceError(differences, count)
    return count


def _of_server(url: str, sequences: Sequence[Sequence[int]], key: str | None) -> list[list[float]]:
    """What a server says of prompts: the log-probabilities that it echoes."""
    model = _call(f"{url.rstrip('/')}/v1/models", key)["data"][0]["id"]
    found = []
    for ids in sequences:
        body = {"model": model, "prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = _call(f"{url.rstrip('/')}/v1/completions", key, body)["choices"][0]
        found.append([float(value) for value in choice["logprobs"]["token_logprobs"][1:]])
    return found


def _call(url: str, key: str | None, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(url, data, headers)
    until = time.monotonic() + _TIMEOUT
    while True:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != _NOT_YET or time.monotonic() > until:
                raise ValueError(f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}") from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"no server answers at {url}: {error.reason}") from None
        time.sleep(_PAUSE)

"""Completion: what a sampler said of one sequence that it drew, read from outputs, from answers over HTTP, or from ids.

Owns the forms in which samplers tell token ids, log-probabilities, sampling masks and experts. Knows outputs by their
fields alone, which are vLLM's, and imports no engine. Invariant: a completion has one log-probability for each of its
tokens, or it is refused with what to ask the sampler for.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Mask = Sequence[Sequence[int] | None]
_ASK = "SamplingParams(logprobs=0)"
_ASK_HTTP = '"logprobs": 0 ("return_logprob": true of /generate)'
_IDS = '"return_token_ids": true'
_SLACK = 1e-3  # of a sum of log-probabilities that was made in another order


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One drawn sequence. `token_ids` may be empty: a request that was aborted before its first token, say."""

    prompt: Sequence[int]  # its ids, at least one
    token_ids: Sequence[int]  # that were drawn behind it
    logprobs: Sequence[float]  # the sampler's, one for each of token_ids
    sampling_mask: Mask | None = None  # per token of token_ids the ids that could be drawn; None: all
    routed_experts: Any = None  # [tokens - 1, layers, ranks] of whole numbers, the prompt's tokens among them
    where: str = ""  # what errors call it

    def __post_init__(self) -> None:
        """Raises ValueError for parts that do not fit each other."""
        if not self.prompt:
            raise ValueError(f"{self.where} has an empty prompt: its first token follows from nothing")
        given: tuple[object, object] = self.prompt, self.prompt[0]
        if any(isinstance(each, str) for each in given):
            raise ValueError(f"{self.where} has a prompt of text, expected its token ids")
        for name, values in (("log-probabilities", self.logprobs), ("sampling masks", self.sampling_mask)):
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(f"{self.where} has {len(self.token_ids)} tokens and {len(values)} {name}")
        wrong = next((place for place, value in enumerate(self.logprobs) if not math.isfinite(value)), None)
        if wrong is not None:
            raise ValueError(f"{self.where} has the log-probability {self.logprobs[wrong]} at its token {wrong}")


def of_outputs(outputs: Sequence[Any]) -> Iterator[Completion]:
    """Of the RequestOutputs of `LLM.generate`: all completions of the first, then those of the second."""
    if not isinstance(outputs, Sequence):
        raise ValueError(f"outputs must be a list of what generate gives, got one {type(outputs).__name__}")
    for number, output in enumerate(outputs):
        for index, said in enumerate(output.outputs):
            where = f"outputs[{number}].outputs[{index}]"
            if not output.finished:
                raise ValueError(f"{where} goes on: give outputs whose requests have finished")
            ids = list(said.token_ids)
            logprobs = _of_entries(ids, said.logprobs, where)
            _check_whole(said, logprobs, where)
            mask, experts = getattr(said, "sampling_mask", None), getattr(said, "routed_experts", None)
            yield Completion(output.prompt_token_ids, ids, logprobs, mask, experts, where)


def of_answers(answers: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]] | None) -> Iterator[Completion]:
    """Of the bodies of /inference/v1/generate, /v1/completions and SGLang's /generate, each read from JSON."""
    if isinstance(answers, Mapping):
        raise ValueError("answers must be a list of bodies, got one")
    if prompts is not None and len(prompts) != len(answers):
        raise ValueError(f"prompts must be {len(answers)} lists of ids, one for each answer, got {len(prompts)}")
    for number, answer in enumerate(answers):
        prompt = None if prompts is None else prompts[number]
        if "output_ids" in answer:
            yield _of_sglang(answer, prompt, f"answers[{number}]")
            continue
        if "choices" not in answer:
            raise ValueError(f"answers[{number}] has no choices: a completion was expected, got {str(answer)[:200]}")
        for index, choice in enumerate(answer["choices"]):
            yield _of_choice(choice, prompt, f"answers[{number}].choices[{index}]")


def of_ids(
    prompts: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    sampling_masks: Sequence[Mask | None] | None,
) -> Iterator[Completion]:
    """Of lists that run side by side, one entry for each completion."""
    masks = [None] * len(token_ids) if sampling_masks is None else sampling_masks
    counts = {"prompts": len(prompts), "logprobs": len(logprobs), "sampling_masks": len(masks)}
    for name, count in counts.items():
        if count != len(token_ids):
            raise ValueError(f"{name} must be {len(token_ids)}, one for each list of token_ids, got {count}")
    for number, own in enumerate(zip(prompts, token_ids, logprobs, masks, strict=True)):
        prompt, drawn, values, mask = own
        yield Completion(_listed(prompt), _listed(drawn), _listed(values), mask, where=f"token_ids[{number}]")


def _listed(values: Any) -> list[Any]:
    """Tensors and arrays as lists."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _of_entries(ids: Sequence[int], entries: Any, where: str) -> list[float]:
    """An output's log-probabilities: a dict per token, or vLLM's flat form, whose first entry is the token's."""
    if entries is None:
        if ids:
            raise ValueError(f"{where} has no log-probabilities: ask for them with {_ASK}")
        return []
    if len(entries) != len(ids):
        raise ValueError(f"{where} has {len(ids)} tokens and {len(entries)} log-probabilities")
    if hasattr(entries, "start_indices"):
        starts = entries.start_indices
        found = {place: entries.logprobs[start] for place, start in enumerate(starts)}
        wrong = [place for place, start in enumerate(starts) if entries.token_ids[start] != ids[place]]
    else:
        both = enumerate(zip(entries, ids, strict=True))
        found = {place: own[token].logprob for place, (own, token) in both if token in own}
        wrong = [place for place in range(len(ids)) if place not in found]
    if wrong:
        raise ValueError(f"{where} has no log-probability of its token {wrong[0]}, id {ids[wrong[0]]}")
    return list(found.values())


def _check_whole(said: Any, logprobs: Sequence[float], where: str) -> None:
    """Raises ValueError for the last part of a stream: it would be read as if it stood behind the prompt."""
    whole = getattr(said, "cumulative_logprob", None)
    if whole is not None and abs(whole - math.fsum(logprobs)) > _SLACK * (1 + abs(whole)):
        raise ValueError(f"{where} is a part of a completion, as RequestOutputKind.DELTA gives them: join them before")


def _of_choice(choice: Mapping[str, Any], prompt: Sequence[int] | None, where: str) -> Completion:
    ids, told = choice.get("token_ids"), choice.get("prompt_token_ids")
    if ids is None:
        raise ValueError(f"{where} has no token_ids: ask for them with {_IDS}")
    known = told if prompt is None else prompt
    if known is None:
        raise ValueError(f"{where} does not tell its prompt: give prompts, or ask for it with {_IDS}")
    if told is not None and list(told) != list(known):
        raise ValueError(f"{where} is of another prompt than the one given for it")
    scores = choice.get("logprobs")
    if scores is None and ids:
        raise ValueError(f"{where} has no log-probabilities: ask for them with {_ASK_HTTP}")
    scores = scores or {"content": []}
    values = scores["token_logprobs"] if "token_logprobs" in scores else [each["logprob"] for each in scores["content"]]
    experts = choice.get("routed_experts")
    array = None if experts is None else np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False)
    return Completion(known, ids, values, choice.get("sampling_mask"), array, where)


def _of_sglang(answer: Mapping[str, Any], prompt: Sequence[int] | None, where: str) -> Completion:
    meta = answer.get("meta_info", {})
    if prompt is None:
        raise ValueError(f"{where} does not tell its prompt: give prompts, one list of ids for each answer")
    lines = meta.get("output_token_logprobs")
    if lines is None and answer["output_ids"]:
        raise ValueError(f"{where} has no log-probabilities: ask for them with {_ASK_HTTP}")
    values = [line[0] for line in lines or []]
    return Completion(prompt, answer["output_ids"], values, meta.get("output_token_sampling_mask"), where=where)

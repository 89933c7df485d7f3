"""The seeded cases of `fuzz_engines.py`: an engine's settings, requests that come and go, and what happens between.

A case is data: it is drawn without an engine, and the same of the same seed, model, device and number of drafts.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Sequence
from importlib import resources
from typing import Any

from tokenizers import Tokenizer

from fuzz_models import HYBRIDS, MODULES, VOCAB_SIZE
from octavo import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

Fields = dict[str, Any]
EVENTS = ("reset", "recompute", "pause", "sleep", "weights, recomputed", "weights, kept", "weights in part")
SHORT = ("jamba-h", "lfm2-h")  # whose states allow seven drafts a row
MAX_BLOCK_DRAFTS = 4  # of the block drafter, one less than its block
TEXTS = (
    "def read_lines(path):\n    for line in open(path):\n        yield line\n\n" * 30,
    "1, 2, 1, 2, 1, 2, 1, 2, " * 60,
    "class Stack:\n    def __init__(self):\n        self.items = []\n" * 30,
)
STOPS = ("def ", "self", "return", "import os", "\n", "(", ")", "the", ".", "x", " = ", "None", "    ", "if", "e", "in")
BAD_WORDS = ("def", "self", "a", "the x", "return", " ", "\n\n", "import os")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3}},
    "required": ["a"],
}
FORMS: tuple[Fields, ...] = (
    {"choice": ["yes", "no", "maybe later", "maybe"]},
    {"regex": r"[a-c]{3,12}"},
    {"regex": r"(ab|cd)*e"},
    {"regex": r"\d{2}:\d{2}"},
    {"regex": r"(.|\n)*"},
    {"json": SCHEMA},
    {"json": {"type": "string", "maxLength": 9}},
    {"json_object": True},
    {"grammar": 'root ::= "a" root "b" | "c"'},
    {"grammar": 'start: /[0-9]+/ ("+" /[0-9]+/)*'},
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, the fields of its SamplingParams, and the steps at which it is queued."""

    prompt: tuple[int, ...]
    params: Fields
    arrivals: tuple[int, ...]
    aborted_after: int | None  # steps, of the first arrival; None: never
    priority: int
    cache_salt: str


@dataclasses.dataclass(frozen=True)
class Event:
    """One of EVENTS, behind so many steps. seed: of what it draws."""

    step: int
    name: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Case:
    """What an engine is asked. Folders are not named yet: models, heads and files are by their own names."""

    seed: int
    model: str
    numerics: Fields  # settings that the results depend on, which the plain engine has too
    settings: Fields
    drafts: Fields  # a speculative_config, whose model is a name of `Checkpoints.head`
    store: Fields  # "host": bytes, "files": bytes at most
    pool: float  # blocks, in those that the longest request takes; 0: many
    requests: tuple[Request, ...]
    events: tuple[Event, ...]


def draw(seed: int, models: Sequence[str], device: str, num_drafts: int | None = None) -> Case:
    """The case of a seed. num_drafts: of each row, as far as the drafter and the model allow; then none is without."""
    model = random.Random(f"model of {seed}").choice(models)
    rng = random.Random(seed)
    numerics = _numerics(rng, model, device)
    settings = _settings(rng, model, numerics["max_model_len"])
    drafts = _drafts(rng, model, num_drafts)
    if rng.random() >= 0.8 and not num_drafts:
        drafts = {}
    if drafts.get("method", "ngram") != "ngram":
        numerics.pop("kv_cache_dtype", None)  # a drafter's layers have no scales
    store: Fields = {}
    if settings["enable_prefix_caching"] and rng.random() < 0.3:
        sizes = {"host": [2_000_000, 5_000_000, 20_000_000], "files": [1_000_000, 5_000_000, 50_000_000]}
        store = {name: rng.choice(sizes[name]) for name in rng.choice([("host",), ("files",), ("host", "files")])}
    starts = _starts(rng, model)
    requests = tuple(_request(rng, starts, numerics) for _ in range(rng.choice([5, 10, 20, 40])))
    events = [
        Event(rng.randint(0, 80), rng.choice(EVENTS), rng.randrange(1 << 30))
        for _ in range(rng.choice([0, 0, 1, 2, 4]))
    ]
    pool = rng.choice([0.0, 1.0, 1.1, 1.4, 2.0])
    in_order = tuple(sorted(events, key=lambda event: event.step))
    return Case(seed, model, numerics, settings, drafts, store, pool, requests, in_order)


def _numerics(rng: random.Random, model: str, device: str) -> Fields:
    found: Fields = {
        "dtype": rng.choice(["float32", "bfloat16", "bfloat16", "bfloat16"]),
        "max_model_len": rng.choice([150, 320]),
        "max_logprobs": VOCAB_SIZE,
    }
    narrow = rng.random() < 0.1 and model in HYBRIDS
    if narrow and (device == "cpu" or found["dtype"] == "bfloat16"):  # a GPU has no such states beside float32
        found["state_dtype"] = "bfloat16"
    if rng.random() < 0.08:
        found["kv_cache_dtype"] = rng.choice(["fp8", "int8"])
    if rng.random() < 0.1:
        found["reasoning_parser"] = "qwen3"
        if rng.random() < 0.3:
            found["reasoning_end_text"] = "Enough, the answer:</think>"
    return found


def _settings(rng: random.Random, model: str, max_model_len: int) -> Fields:
    tokens = rng.choice([16, 33, 65, 200, 512, 1024])
    sizes = [None, None, 16, 32, 64, 128] if model in HYBRIDS else [None, 16, 32, 48, 64]
    found: Fields = {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": min(tokens, rng.choice([2, 5, 16, 33, 48])),
        "enforce_eager": rng.random() < 0.2,
        "enable_prefix_caching": rng.random() < 0.85,
        "snapshot_interval": rng.choice([1, 1, 0, 3]),
        "block_size": rng.choice(sizes),
        "async_scheduling": rng.random() < 0.85,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }
    if rng.random() < 0.12:
        found |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_model_len, tokens)}
    if rng.random() < 0.2:
        uniform = [] if model in HYBRIDS else ["LBHNC", "LBNHC"]  # pages of one size
        found["kv_cache_layout"] = rng.choice(["BLHNC", "BLNHC", *uniform])
    return {name: value for name, value in found.items() if value is not None}


def _drafts(rng: random.Random, model: str, num_drafts: int | None) -> Fields:
    kinds = ["ngram"] * 4 + ["draft_model"]
    if model != "deepseek3":  # of another size
        kinds += ["eagle"] + ["dflash"] * (model != "granite-h")
    if model == "octavo-tiny":
        kinds += ["octavo-tiny-eagle3", "octavo-tiny-mtp"] * 3
    if model in MODULES:
        kinds += [f"mtp-{model}"] * 5
    kind = rng.choice(kinds)
    drawn = rng.choice([1, 2, 4, 7, 11, 16])
    count = num_drafts or drawn
    count = min(count, MAX_BLOCK_DRAFTS if kind == "dflash" else count, 7 if model in SHORT else count)
    found: Fields = {"num_speculative_tokens": count, "adaptive_depth": rng.random() < 0.35}
    if kind == "ngram":
        shortest, longest = rng.choice([1, 2]), rng.choice([2, 5])
        return {**found, "method": kind, "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    found["draft_sample_method"] = rng.choice(["greedy", "probabilistic"])
    if kind == "draft_model":
        return {**found, "method": kind, "model": "octavo-tiny", "draft_noise": rng.choice([0, 0.8, 1])}
    method = next(method for method in ("eagle3", "eagle", "mtp", "dflash") if method in kind)
    return {**found, "method": method, "model": kind}


@functools.cache
def _tokenizer() -> Tokenizer:
    text = resources.files("octavo").joinpath("assets/octavo-tiny/tokenizer.json").read_text(encoding="utf-8")
    return Tokenizer.from_str(text)


def _ids(text: str) -> list[int]:
    return list(_tokenizer().encode(text, add_special_tokens=False).ids)


def _starts(rng: random.Random, model: str) -> list[list[int]]:
    """Long prompts, whose beginnings are those of requests: text where the model knows some, else random tokens."""
    if model == "octavo-tiny":
        return [_ids(text)[:400] for text in TEXTS]
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(400)] for _ in TEXTS]


def _request(rng: random.Random, starts: list[list[int]], numerics: Fields) -> Request:
    longest, thinks = numerics["max_model_len"], "reasoning_parser" in numerics
    prompt = _prompt(rng, starts, longest)
    opening = _ids("<think>")
    if thinks and rng.random() < 0.7 and len(prompt) > 8:
        prompt[-len(opening) :] = opening
    params = _sampling(rng, longest)
    params |= _limits(rng, params["max_tokens"])
    params |= _wishes(rng)
    if thinks and rng.random() < 0.3 and "allowed_token_ids" not in params:
        params |= {
            "thinking_token_budget": rng.choice([0, 1, 5, 12]),
            "max_tokens": max(params["max_tokens"] or 30, 30),
        }
    first = rng.choice([0, 0, 0, rng.randint(0, 30), rng.randint(0, 100)])
    again = (first + rng.randint(1, 120),) if rng.random() < 0.3 else ()
    aborted_after = rng.randint(0, 60) if rng.random() < 0.15 else None
    salt = rng.choice(["", "", "", "salt"])
    return Request(tuple(prompt), params, (first, *again), aborted_after, rng.randint(-2, 3), salt)


def _prompt(rng: random.Random, starts: list[list[int]], longest: int) -> list[int]:
    """Of a length at which blocks, states and chunks end, or any other; often the beginning of another one."""
    borders = [border + beside for border in (16, 32, 48, 64, 80, 128) for beside in (-1, 0, 1)]
    any_length = [rng.randint(1, longest - 1) for _ in range(2)]
    count = rng.choice([1, 2, *borders, longest // 2, longest - 3, longest - 2, longest - 1, *any_length])
    shared = rng.randint(0, count) if rng.random() < 0.3 else count
    found = rng.choice(starts)[:shared]
    found += [rng.randrange(1, VOCAB_SIZE) for _ in range(count - len(found))]
    return [] if rng.random() < 0.03 else found  # an empty one is refused


def _sampling(rng: random.Random, longest: int) -> Fields:
    """What decides on tokens, and how many there are."""
    found: Fields = {
        "temperature": 0.0 if rng.random() < 0.5 else rng.choice([0.3, 0.7, 1.0, 1.3]),
        "seed": rng.randrange(1 << 30),
        "max_tokens": rng.choice([1, 1, 2, 3, 8, 17, 30, 45, None if longest <= 200 else 64, 64]),
        "ignore_eos": rng.random() < 0.5,
    }
    choices: tuple[tuple[str, float, tuple[float, ...]], ...] = (
        ("top_p", 0.3, (0.5, 0.9, 0.97)),
        ("top_k", 0.3, (1, 2, 5, 50, 4000)),
        ("min_p", 0.15, (0.02, 0.2, 1.0)),
        ("n", 0.25, (2, 2, 3, 5)),
        ("repetition_penalty", 0.2, (1.1, 0.8, 2.0)),
        ("presence_penalty", 0.2, (0.5, -0.7, 2.0)),
        ("frequency_penalty", 0.2, (0.5, -1.0)),
    )
    return found | {name: rng.choice(values) for name, share, values in choices if rng.random() < share}


def _limits(rng: random.Random, max_tokens: int | None) -> Fields:
    """What ends a request, or bars tokens."""
    found: Fields = {}
    if rng.random() < 0.2:
        found = {"stop": rng.sample(STOPS, rng.randint(1, 3)), "include_stop_str_in_output": rng.random() < 0.5}
    if rng.random() < 0.15:
        found["stop_token_ids"] = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 400))]
    if rng.random() < 0.2 and max_tokens:
        found["min_tokens"] = rng.randint(0, max_tokens)
    if rng.random() < 0.12:
        found["bad_words"] = rng.sample(BAD_WORDS, 2)
    if rng.random() < 0.1:
        found["allowed_token_ids"] = sorted(rng.sample(range(VOCAB_SIZE), rng.choice([1, 3, 100, 2000])))
    if rng.random() < 0.1:
        biased = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 5, 300]))]
        found["logit_bias"] = {token: rng.choice([-100, 100, 5.5, -3]) for token in biased}
    if rng.random() < 0.15 and not {"allowed_token_ids", "bad_words"} & found.keys():
        found["structured_outputs"] = StructuredOutputsParams(**copy.deepcopy(rng.choice(FORMS)))
    if rng.random() < 0.1:
        size, least = rng.choice([1, 3, 6]), rng.choice([2, 3, 4])
        found["repetition_detection"] = RepetitionDetectionParams(max_pattern_size=size, min_count=least)
    return found


def _wishes(rng: random.Random) -> Fields:
    """What a request wants to be told, and when."""
    kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
    found: Fields = {"output_kind": rng.choice(kinds)}
    if rng.random() < 0.6:
        found["logprobs"] = rng.choice([0, 1, 3, 20])
    if rng.random() < 0.2:
        found["prompt_logprobs"] = rng.choice([0, 2])
        if rng.random() < 0.4:
            found["prompt_logprobs_temperature"] = rng.choice([0.5, 2.0])
    if rng.random() < 0.1:
        found["logprob_token_ids"] = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 7]))]
    if rng.random() < 0.2:
        found["stream_interval"] = rng.choice([1, 3, 50])
    for name in ("return_sampling_mask", "skip_reading_prefix_cache", "flat_logprobs"):
        if rng.random() < 0.1:
            found[name] = True
    if rng.random() < 0.1:
        found["skip_special_tokens"] = False
    return found

"""What `octavo bench serve` asks: prompts by the names and options of vLLM's data sets.

Owns the making of random, shared-prefix and file prompts. Sends nothing. Invariant: the same options and seed give the
same prompts in the same order.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom")
_CHARACTERS_PER_TOKEN = 4  # where a file does not say how long its answers are


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One request: a text or token ids, their number (0: the server will tell), and how much to generate."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the data sets."""
    group = parser.add_argument_group("data sets")
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument("--dataset-path", help="sharegpt: a JSON file; custom: lines of {prompt, output_tokens}")
    group.add_argument("--num-prompts", type=int, default=1000)
    group.add_argument("--input-len", type=int, help="for every data set that makes prompts")
    group.add_argument("--output-len", type=int, help="for every data set")
    group.add_argument("--sharegpt-output-len", type=int, help="instead of the length of the file's answers")
    group.add_argument("--custom-output-len", type=int, help="instead of what the file says; -1: what it says")
    group.add_argument("--random-input-len", type=int, default=1024)
    group.add_argument("--random-output-len", type=int, default=128)
    group.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts share, on top")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share both ways")
    group.add_argument("--random-vocab-size", type=int, default=1000, help="random token ids are below this")
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    group.add_argument("--prefix-repetition-output-len", type=int, default=128)


def make_samples(options: argparse.Namespace) -> list[Sample]:
    """The samples. Raises ValueError for options or files that give none."""
    if options.num_prompts < 1:
        raise ValueError(f"--num-prompts {options.num_prompts}: must be at least 1")
    if not 0.0 <= options.random_range_ratio < 1.0:
        raise ValueError(f"--random-range-ratio {options.random_range_ratio}: must be at least 0 and less than 1")
    if options.random_vocab_size < 2:
        raise ValueError(f"--random-vocab-size {options.random_vocab_size}: must be at least 2")
    rng = random.Random(options.seed)
    match options.dataset_name:
        case "random":
            return list(_random(options, rng))
        case "prefix_repetition":
            return _prefix_repetition(options, rng)
    if not options.dataset_path:
        raise ValueError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    samples = list(_from_file(options, rng))
    if not samples:
        raise ValueError(f"--dataset-path {options.dataset_path}: no prompt in it")
    return samples


def _ids(count: int, rng: random.Random, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def _random(options: argparse.Namespace, rng: random.Random) -> Iterator[Sample]:
    vocab, ratio = options.random_vocab_size, options.random_range_ratio
    prefix = _ids(options.random_prefix_len, rng, vocab)
    input_len = options.input_len or options.random_input_len
    output_len = options.output_len or options.random_output_len
    for _ in range(options.num_prompts):
        prompt = prefix + _ids(_around(input_len, ratio, rng), rng, vocab)
        yield Sample(prompt, len(prompt), _around(output_len, ratio, rng))


def _around(length: int, ratio: float, rng: random.Random) -> int:
    return max(rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))), 1)


def _prefix_repetition(options: argparse.Namespace, rng: random.Random) -> list[Sample]:
    vocab, num_prefixes = options.random_vocab_size, min(options.prefix_repetition_num_prefixes, options.num_prompts)
    prefixes = [_ids(options.prefix_repetition_prefix_len, rng, vocab) for _ in range(num_prefixes)]
    samples = []
    for index in range(options.num_prompts):
        prompt = prefixes[index % num_prefixes] + _ids(options.prefix_repetition_suffix_len, rng, vocab)
        samples.append(Sample(prompt, len(prompt), options.output_len or options.prefix_repetition_output_len))
    rng.shuffle(samples)
    return samples


def _from_file(options: argparse.Namespace, rng: random.Random) -> Iterator[Sample]:
    path = Path(options.dataset_path)
    try:
        text = path.read_text(encoding="utf-8")
        if options.dataset_name == "custom":
            pairs = [_custom(json.loads(line)) for line in text.splitlines() if line.strip()]
        else:
            pairs = [_sharegpt(entry) for entry in json.loads(text)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--dataset-path {path}: {type(error).__name__}: {error}") from None
    found = [(prompt, output_len) for prompt, output_len in pairs if prompt]
    rng.shuffle(found)
    own = options.custom_output_len if options.dataset_name == "custom" else options.sharegpt_output_len
    wanted = options.output_len or (own if own != -1 else None)
    for prompt, output_len in found[: options.num_prompts]:
        yield Sample(prompt, 0, wanted or output_len)


def _custom(entry: dict[str, object]) -> tuple[str, int]:
    return str(entry["prompt"]), int(str(entry.get("output_tokens") or 128))


def _sharegpt(entry: dict[str, list[dict[str, str]]]) -> tuple[str, int]:
    """The first two turns: a question, and an answer whose length is asked for."""
    turns = entry.get("conversations") or entry.get("conversation") or []
    if len(turns) < 2:
        return "", 0
    return turns[0]["value"], max(len(turns[1]["value"]) // _CHARACTERS_PER_TOKEN, 4)

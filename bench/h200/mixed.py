"""A prompt that comes while others decode: `python bench/h200/mixed.py 0.6b 8b moe mamba2 gdn [--rows 64 256]`.

For each shape and number of rows: milliseconds of a step in which all of them decode, of the same step with a prompt
of 512 tokens in it, of that prompt alone, and how much of the prompt's time the step with both does not hide or adds.
A mixed step that takes much more than both has a kernel that is not made for it. A table comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.shapes import SHAPES

_PROMPT, _ROUNDS = 512, 7
_MOE = SHAPES["8b"] | {  # Qwen3-30B-A3B's, of a third of its layers
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@contextlib.contextmanager
def engine(facts: dict[str, Any], rows: int) -> Iterator[LLM]:
    """On random weights."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(facts))
        with LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=min(4096, facts["max_position_embeddings"]),
            max_num_seqs=rows + 1,
            enable_prefix_caching=False,
        ) as llm:
            yield llm


def _greedy(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False, temperature=0.0)


def _steps(llm: LLM, count: int) -> float:
    """Milliseconds of so many; a step may be in flight on either side."""
    started = time.perf_counter()
    for _ in range(count):
        llm.engine.step()
    return 1e3 * (time.perf_counter() - started)


def measure(facts: dict[str, Any], rows: int, length: int) -> list[str]:
    """A row of the table."""
    rng, vocab = random.Random(rows), facts["vocab_size"]

    def prompt(size: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(size)]

    window = 6
    with engine(facts, rows) as llm:
        alone = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            llm.generate([prompt(length)], _greedy(1), use_tqdm=False)
            alone.append(1e3 * (time.perf_counter() - started))
        for index in range(rows):
            llm.engine.add(f"row {index}", prompt(100), _greedy(16 + 2 * window * (_ROUNDS + 4)))
        for _ in range(rows * 100 // 2048 + 8):  # until nothing but decoding is left
            llm.engine.step()
        plain, mixed = [], []
        for turn in range(_ROUNDS):
            plain.append(_steps(llm, window))
            llm.engine.add(f"prompt {turn}", prompt(length), _greedy(1))
            mixed.append(_steps(llm, window))
        while llm.engine.has_unfinished:
            llm.engine.step()
    decode, prompts = statistics.median(plain) / window, statistics.median(alone)
    both = statistics.median(mixed) - (window - 1) * decode
    figures = (decode, both, prompts, (both - decode) / prompts)
    return [str(rows), *(f"{figure:.2f}" for figure in figures)]


def main() -> None:
    """A table of all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", choices=[*sorted(SHAPES), "moe", []], default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--length", type=int, default=_PROMPT)
    options = parser.parse_args()
    table = []
    for shape in options.shapes or ["0.6b", "8b", "moe", "mamba2", "gdn"]:
        for rows in options.rows:
            try:
                figures = measure(_MOE if shape == "moe" else SHAPES[shape], rows, options.length)
            except Exception as error:
                figures = [str(rows), f"{type(error).__name__}: {error}"[:100]]
            table.append([shape, *figures])
            print(*table[-1], flush=True)
    print(f"shape, rows; ms: a decode step, with a prompt of {options.length}, the prompt alone; what it adds of that")
    for row in table:
        print("  ".join(f"{cell:>8}" for cell in row))


if __name__ == "__main__":
    main()

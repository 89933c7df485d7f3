"""Benchmark of drawing, cuts and log-probabilities on a CUDA device: `python bench/kernel.py sampling`.

Counts one read of the logits, against a copy's bytes read and written per second, measured in the same run: what a
single pass needs. TruncationRows and the likeliest tokens take several. Launches are timed in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from cuda_attention import measure_copy, seconds
from octavo.ops.sampling import draw, token_logprobs, top_logprobs
from octavo.ops.sampling.truncation import TruncationRows

VOCAB = 151936
ROWS = (1, 16, 64, 256, 512)
TOP = 20


def cases(rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) on logits of `rows` rows."""
    logits = 2 * torch.randn(rows, VOCAB, device="cuda")
    place, position = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") + 100
    ones, zeros = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
    yield "argmax", lambda: draw(logits, place, zeros, position, position)
    yield "draw, temperature 0.6", lambda: draw(logits, place, 0.6 * ones, position, position)
    yield "log-probability and rank", lambda: token_logprobs(logits, place)
    yield f"{TOP} likeliest", lambda: top_logprobs(logits, TOP)
    for name, divisor, top_k, top_p in (
        ("top-k 20, top-p 0.95, 0.6", 0.6, 20, 0.95),
        ("top-k 50", 1.0, 50, 1.0),
        ("top-p 0.9", 1.0, 0, 0.9),
        ("top-p 0.95, 0.7", 0.7, 0, 0.95),
    ):
        truncation = TruncationRows(
            divisors=divisor * ones,
            top_k=torch.full_like(place, top_k),
            top_p=top_p * ones,
            min_p=zeros,
            few=top_k > 0,
            many=top_k == 0,
        )
        yield f"draw, {name}", functools.partial(draw, logits, place, ones, position, position, truncation)


def run(rounds: int, quick: bool) -> dict[str, object]:
    """Print the table; the JSON record. quick: three row counts only."""
    copy, device = measure_copy(rounds), torch.cuda.get_device_name()
    print(f"{device}: copy {copy / 1e12:.3f} TB/s (read + written), vocabulary {VOCAB}")
    print("operator                        rows        us  one read us  share")
    records = []
    for rows in ROWS[::2] if quick else ROWS:
        for name, call in cases(rows):
            time, limit = seconds(call, rounds), 4 * rows * VOCAB / copy
            print(f"{name:<31} {rows:>4} {time * 1e6:>9.1f} {limit * 1e6:>12.1f} {limit / time:>6.1%}", flush=True)
            records.append({"operator": name, "rows": rows, "us": time * 1e6, "share": limit / time})
    return {"bench": "sampling", "device": device, "copy_tb_s": copy / 1e12, "rows": records}

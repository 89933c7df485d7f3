"""Tokens a step of octavo-tiny's drafters on held-out prompts: greedily, and at T = 1 by ways to draft and to verify.

The target's text is drawn with noise that is kept, argmax(logits + noise), as the engine draws it. A draft that shares
the noise is argmax(draft logits / share + noise), and counts where it is the token; so does the likeliest token, which
needs no noise. Rejection sampling accepts a draft x of q with probability min(1, p(x) / q(x)); what it gives is
distributed as p, and of a token x of its text the draft was accepted with probability min(1, q(x) / p(x)): so all are
counted along the same text, with the same drafter.

Example: python tools/measure_drafts.py --drafter src/octavo/assets/octavo-tiny-eagle3
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tiny_drafters import Drafter, Eagle3Head, MtpModule, watch
from tiny_model import Shape, TinyQwen3
from train_drafter import BUNDLED, gumbel_like, write_on
from train_tiny import load_exported

SHARES = (1.0, 0.9, 0.8, 0.7)  # of the noise: `draft_noise`
DRAWS = 8  # of rejection sampling, along each text


def load_drafter(folder: Path, target: TinyQwen3) -> Drafter:
    """An exported drafter, in float32, where the target is."""
    weights = load_file(folder / "model.safetensors")
    drafter: Eagle3Head | MtpModule
    if "d2t" in weights:
        drafter = Eagle3Head(target, weights["d2t"] + torch.arange(len(weights["d2t"])))
    else:
        drafter = MtpModule(target)
    with torch.no_grad():
        for name, parameter in drafter.checkpoint().items():
            parameter.copy_(weights[name])
    return drafter.to(target.embed_tokens.weight.device).eval()


class Tally:
    """Tokens and steps, by way."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}

    def add(self, way: str, right: list[Tensor], start: int) -> None:
        """Of texts whose drafts number j behind place p are right where right[j][text, p] says so."""
        own = self._found.setdefault(way, [0, 0])
        for counts in torch.stack(right).long().cumprod(0).sum(0).tolist():
            place = start - 1  # the first token behind the prompt is drawn; its drafts begin there
            while place < len(counts):
                own[0], own[1], place = own[0] + 1 + counts[place], own[1] + 1, place + 1 + counts[place]

    def tokens_per_step(self) -> dict[str, float]:
        return {way: tokens / max(steps, 1) for way, (tokens, steps) in self._found.items()}


@torch.no_grad()
def measure(
    drafter: Drafter, target: TinyQwen3, texts: Tensor, start: int, noise: Tensor | None, k: int, tally: Tally
) -> None:
    """Counts tokens and steps by each way. texts [N, T], drawn with `noise`; None: greedily."""
    taps, hidden, logits = watch(target, texts)
    last = texts.shape[1] - k - 1
    ids = getattr(drafter, "draft_ids", None)
    right: dict[str, list[Tensor]] = {}
    chances: dict[str, list[Tensor]] = {}
    for step, drafted in enumerate(drafter.unroll(texts, taps, hidden, k)):
        every = drafted[:, :last].float()
        if ids is not None:
            full = torch.full((*every.shape[:2], target.shape.vocab), -torch.inf, device=every.device)
            every = full.index_copy_(2, ids, every)
        truth = texts[:, 2 + step : 2 + step + last]
        right.setdefault("the likeliest token", []).append(every.argmax(-1) == truth)
        if noise is None:
            continue
        own = noise[:, 2 + step : 2 + step + last]
        for share in SHARES:
            right.setdefault(f"{share:g} of the noise", []).append((every / share + own).argmax(-1) == truth)
        p = functional.softmax(logits[:, 1 + step : 1 + step + last].float(), -1).gather(2, truth[..., None])[..., 0]
        for share in SHARES:
            q = functional.softmax(every / share, -1).gather(2, truth[..., None])[..., 0]
            way = "rejection sampling" if share == 1 else f"rejection sampling, drafts at T = {share:g}"
            chances.setdefault(way, []).append(q / p)
    for way, found in right.items():
        tally.add(way, found, start)
    generator = torch.Generator(texts.device).manual_seed(1)
    for way, odds in chances.items():
        for _ in range(DRAWS):
            drawn = [torch.rand(each.shape, generator=generator, device=each.device) < each for each in odds]
            tally.add(way, drawn, start)


def report(drafter: Drafter, target: TinyQwen3, ids: Tensor, length: int, k: int, seeds: int) -> dict[str, float]:
    """Tokens a step behind prompts `ids` [N, start], whose texts are continued to `length` tokens: greedily, and by
    each way at T = 1, of so many texts of each prompt."""
    start, zeros = ids.shape[1], torch.zeros(len(ids), device=ids.device)
    greedy, drawn = Tally(), Tally()
    texts = write_on(target, ids, length, zeros, torch.Generator(ids.device))
    measure(drafter, target, texts, start, None, k, greedy)
    for seed in range(seeds):
        generator = torch.Generator(ids.device).manual_seed(seed)
        noise = gumbel_like(zeros.new_empty(len(ids), length, target.shape.vocab), generator)
        texts = write_on(target, ids, length, zeros + 1, noise)
        measure(drafter, target, texts, start, noise, k, drawn)
    return {"greedy": greedy.tokens_per_step()["the likeliest token"], **drawn.tokens_per_step()}


def held_out_ids(folder: Path, count: int | None = None) -> Tensor:
    """The target's held-out prompts [count, tokens], all as long as the shortest."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = json.loads((folder / "held_out_prompts.json").read_text("utf-8"))[:count]
    begun = [tokenizer.encode(prompt).ids for prompt in prompts]
    return torch.tensor([each[: min(map(len, begun))] for each in begun])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure octavo-tiny's drafters.")
    parser.add_argument("--drafter", type=Path, action="append", required=True, help="a folder of train_drafter.py")
    parser.add_argument("--target", type=Path, default=BUNDLED)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=96, help="drawn behind each prompt")
    parser.add_argument("--texts", type=int, default=4, help="texts of each prompt at T = 1")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("-k", type=int, default=4, help="drafts a step")
    args = parser.parse_args(argv)
    target = load_exported(Shape(), args.target, torch.device(args.device)).requires_grad_(False).eval()
    ids = held_out_ids(args.target, args.prompts).to(args.device)
    for folder in args.drafter:
        drafter, length = load_drafter(folder, target), ids.shape[1] + args.tokens + args.k
        print(f"{folder.name}, {args.k} drafts, {len(ids)} held-out prompts, tokens a step:")
        for way, found in report(drafter, target, ids, length, args.k, args.texts).items():
            print(f"  {way if way == 'greedy' else 'T = 1, ' + way:<46}{found:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tokens a step of octavo-tiny's drafters on held-out prompts: greedily, and at T = 1 by three ways to verify.

The target's text is drawn with noise that is kept, argmax(logits + noise), as the engine draws it. A draft that shares
the noise is argmax(draft logits + noise), and counts where it is the token; so does the likeliest token, which needs no
noise. Rejection sampling accepts a draft x of q with probability min(1, p(x) / q(x)); what it gives is distributed as
p, and of a token x of its text the draft was accepted with probability min(1, q(x) / p(x)): so all three are counted
along the same text, with the same drafter.

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
from train_drafter import BUNDLED
from train_tiny import load_exported


def load_drafter(folder: Path, target: TinyQwen3) -> Drafter:
    """An exported drafter, in float32."""
    weights = load_file(folder / "model.safetensors")
    drafter: Eagle3Head | MtpModule
    if "d2t" in weights:
        drafter = Eagle3Head(target, weights["d2t"] + torch.arange(len(weights["d2t"])))
    else:
        drafter = MtpModule(target)
    with torch.no_grad():
        for name, parameter in drafter.checkpoint().items():
            parameter.copy_(weights[name])
    return drafter.eval()


@torch.no_grad()
def draw_on(target: TinyQwen3, ids: Tensor, length: int, noise: Tensor) -> Tensor:
    """ids [N, T] continued to `length` tokens; noise [N, length, vocabulary]: of the token at each place."""
    while ids.shape[1] < length:
        _, _, logits = watch(target, ids)
        ids = torch.cat([ids, (logits[:, -1] + noise[:, ids.shape[1]]).argmax(-1, keepdim=True)], dim=1)
    return ids


def count(accepted: list[list[int]], start: int) -> float:
    """Tokens a step, where drafts behind place p of a text are accepted up to number accepted[text][p]."""
    tokens = steps = 0
    for counts in accepted:
        place = start - 1
        while place < len(counts):
            tokens, steps, place = tokens + 1 + counts[place], steps + 1, place + 1 + counts[place]
    return tokens / max(steps, 1)


@torch.no_grad()
def measure(drafter: Drafter, target: TinyQwen3, texts: Tensor, start: int, noise: Tensor, k: int) -> dict[str, float]:
    """Tokens a step by each way. texts [N, T], drawn with `noise`."""
    taps, hidden, logits = watch(target, texts)
    last = texts.shape[1] - k - 1
    ids = getattr(drafter, "draft_ids", None)
    right: dict[str, list[Tensor]] = {"shared noise": [], "likeliest token": [], "rejection sampling": []}
    generator = torch.Generator().manual_seed(1)
    for step, drafted in enumerate(drafter.unroll(texts, taps, hidden, k)):
        every = drafted[:, :last]
        if ids is not None:
            every = torch.full((*every.shape[:2], target.shape.vocab), -torch.inf).index_copy_(2, ids, every)
        truth = texts[:, 2 + step : 2 + step + last]
        own = noise[:, 2 + step : 2 + step + last]
        right["shared noise"].append((every + own).argmax(-1) == truth)
        right["likeliest token"].append(every.argmax(-1) == truth)
        q = functional.softmax(every, -1).gather(2, truth[..., None])[..., 0]
        p = functional.softmax(logits[:, 1 + step : 1 + step + last], -1).gather(2, truth[..., None])[..., 0]
        right["rejection sampling"].append(torch.rand(q.shape, generator=generator) < q / p)
    return {name: count(torch.stack(each).long().cumprod(0).sum(0).tolist(), start) for name, each in right.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure octavo-tiny's drafters.")
    parser.add_argument("--drafter", type=Path, action="append", required=True, help="a folder of train_drafter.py")
    parser.add_argument("--target", type=Path, default=BUNDLED)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=96, help="drawn behind each prompt")
    parser.add_argument("-k", type=int, default=4, help="drafts a step")
    args = parser.parse_args(argv)
    target = load_exported(Shape(), args.target, torch.device("cpu")).requires_grad_(False).eval()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    prompts = json.loads((args.target / "held_out_prompts.json").read_text("utf-8"))[: args.prompts]
    begun = [tokenizer.encode(prompt).ids for prompt in prompts]
    start = min(map(len, begun))
    length = start + args.tokens + args.k
    noise = torch.empty(len(begun), length, target.shape.vocab).exponential_(generator=torch.Generator().manual_seed(0))
    noise = -noise.log()
    ids = torch.tensor([each[:start] for each in begun])
    texts = {"greedy": draw_on(target, ids, length, 0 * noise), "T = 1": draw_on(target, ids, length, noise)}
    for folder in args.drafter:
        drafter = load_drafter(folder, target)
        greedy = measure(drafter, target, texts["greedy"], start, noise, args.k)["likeliest token"]
        print(f"{folder.name}, {args.k} drafts, {len(begun)} held-out prompts, tokens a step:")
        print(f"  greedy                  {greedy:.3f}")
        for name, found in measure(drafter, target, texts["T = 1"], start, noise, args.k).items():
            print(f"  T = 1, {name:<17}{found:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

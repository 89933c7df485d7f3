"""Which aim of a drafter's training gives the most tokens a step when drafts share the target's noise?

Goes on with the bundled drafters, on one text, for some seconds by each recipe; prints tokens a step on held-out
prompts, greedily and at T = 1. With --out the drafters are written there, by recipe.

  PYTHONPATH=src python bench/h200/drafter_aims.py --seconds 9
With --tokens FILE (of `tools/train_drafter.py --write-tokens`) the text is that one, else this Python's library.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from tokenizers import Tokenizer  # noqa: E402

from measure_drafts import held_out_ids, load_drafter, report  # noqa: E402
from tiny_model import Shape  # noqa: E402
from train_drafter import BUNDLED, SMOKE, Recipe, export, own_text, read_tokens, rounded, train  # noqa: E402
from train_tiny import load_exported  # noqa: E402

HALF = 0.5
AIMS: dict[str, tuple[tuple[tuple[str, float], ...], float]] = {
    "distribution+likeliest": ((("distribution", HALF), ("likeliest", HALF)), 2.0),
    "distribution": ((("distribution", 1.0),), 2.0),
    "overlap+likeliest": ((("overlap", HALF), ("likeliest", HALF)), 2.0),
    "draw1+likeliest": ((("draw", HALF), ("likeliest", HALF)), 1.0),
    "draw2+likeliest": ((("draw", HALF), ("likeliest", HALF)), 2.0),
    "draw4+likeliest": ((("draw", HALF), ("likeliest", HALF)), 4.0),
    "draw2": ((("draw", 1.0),), 2.0),
}


def main() -> int:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kind", choices=["eagle3", "mtp"], action="append", help="default: eagle3")
    parser.add_argument("--aims", choices=list(AIMS), action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=9.0, help="of training, by each recipe")
    parser.add_argument("--rate", type=float, default=0.5, help="the learning rate's factor")
    parser.add_argument("--writers", type=int, default=1024, help="texts of the target's own a round, of four")
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--texts", type=int, default=2, help="of each prompt at T = 1")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device, began = torch.device(args.device), time.perf_counter()
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    tokens = args.tokens if args.tokens and args.tokens.exists() else None
    data = read_tokens(argparse.Namespace(tokens=tokens, stdlib=None, smoke=args.smoke), tokenizer, device)
    base = SMOKE if args.smoke else Recipe(rounds=4, writers=args.writers, corpus=(64, 512))
    base = dataclasses.replace(
        base, seconds=args.seconds, muon_lr=base.muon_lr * args.rate, adam_lr=base.adam_lr * args.rate
    )
    target = load_exported(Shape(), BUNDLED, device).requires_grad_(False).eval()
    own = own_text(target, data, base, torch.Generator(device).manual_seed(1))
    print(
        f"[{time.perf_counter() - began:.0f}s] {len(data.ids):,} tokens, {own.numel():,} of the target's own",
        flush=True,
    )
    prompts, lines = held_out_ids(BUNDLED, 4 if args.smoke else None).to(device), []
    length = prompts.shape[1] + (8 if args.smoke else 100)
    for kind in args.kind or ["eagle3"]:
        for name in ["bundled", *(args.aims or AIMS)]:
            drafter, note = load_drafter(BUNDLED.parent / f"octavo-tiny-{kind}", target), ""
            if name != "bundled":
                aims, sharpness = AIMS[name]
                recipe = dataclasses.replace(base, aims=aims, sharpness=sharpness)
                generator = torch.Generator(device).manual_seed(2)
                run = train(drafter.train(), target, data, own, recipe, generator)
                note = f"{run['steps']} steps, {run['tokens']:,} tokens"
                if args.out:
                    export(drafter, kind, args.out / name / f"octavo-tiny-{kind}")
                drafter = rounded(drafter).eval()
            found = report(drafter, target, prompts, length, 4, args.texts)
            line = f"{kind} {name}: {note}\n    " + ", ".join(f"{way} {value:.3f}" for way, value in found.items())
            lines.append(line)
            print(f"[{time.perf_counter() - began:.0f}s] {line}", flush=True)
    print("\n".join(["", "tokens a step", *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

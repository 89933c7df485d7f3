"""Draw the KL between trainer and sampler over the updates of a loop: `python tools/draw_kl.py docs/images/kl.svg`.

Runs GRPO on octavo-tiny in bfloat16 twice, from the same weights, with the same prompts and seeds: with the forward of
`octavo.rl`, and with transformers' own. The sampler is an LLM that takes each update's weights. Of every update the
mean of the k3 estimate over its tokens is drawn, before its step: where both programs compute alike it is 0.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams, rl
from octavo.checkpoint.hub import find_model

TINY = str(find_model("octavo-tiny", None, None))
GROUP, NUM_TOKENS = 8, 32  # samples of a prompt, and tokens of each
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 78, 20, 46, 62
COLORS = {"octavo.rl": "#1b7f5c", "transformers": "#c0392b"}
Sequences = list[list[int]]
Forward = Callable[[Any, Sequences], list[Tensor]]


def exact(model: Any, sequences: Sequences) -> list[Tensor]:
    """Log-probabilities of each sequence's tokens from the second on, by `octavo.rl`."""
    pack = rl.Pack.of(sequences)
    return [own[:-1] for own in pack.split(rl.logprobs(model, pack).logprobs)]


def plain(model: Any, sequences: Sequences) -> list[Tensor]:
    """The same by transformers' forward, in one padded batch."""
    width = max(map(len, sequences))
    ids = torch.tensor([[*each, *[0] * (width - len(each))] for each in sequences])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in sequences])
    logs = model(ids, attention_mask=mask).logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return [own[: len(each) - 1] for own, each in zip(logs, sequences, strict=True)]


def run(llm: LLM, forward: Forward, num_updates: int) -> list[float]:
    """The mean KL of each update."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    if forward is exact:
        rl.convert(model)
    optimizer, sender, found = torch.optim.AdamW(model.parameters(), 1e-4), rl.Sender(llm, "local"), []
    sender.send(rl.WeightSource(model))
    for update in range(num_updates):
        rng = random.Random(update)
        prompts = [[rng.randrange(4096) for _ in range(length)] for length in (5, 17)]
        params = SamplingParams(
            n=GROUP, max_tokens=NUM_TOKENS, temperature=1.0, seed=update, logprobs=0, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        drawn = [(output.prompt_token_ids, each) for output in outputs for each in output.outputs]
        sequences = [[*prompt, *each.token_ids] for prompt, each in drawn]
        rewards = torch.tensor(
            [len(set(each.token_ids)) / NUM_TOKENS for _, each in drawn]
        )  # no policy gets sure of it
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        loss, divergences = torch.zeros(()), []
        for own, (prompt, each), advantage in zip(forward(model, sequences), drawn, advantages, strict=True):
            given = [entry[token].logprob for entry, token in zip(each.logprobs, each.token_ids, strict=True)]
            difference = own[len(prompt) - 1 :] - torch.tensor(given)
            divergences.append((-difference.detach()).expm1() + difference.detach())
            loss = loss - (difference.exp() * advantage).mean() / len(drawn)
        found.append(float(torch.cat(divergences).double().mean()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sender.send(rl.WeightSource(model))
    return found


def picture(series: dict[str, list[float]]) -> str:
    """An SVG: a logarithmic axis, with a line for 0 below it."""
    values = [value for each in series.values() for value in each if value > 0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    count, inner = max(map(len, series.values())), HEIGHT - TOP - BOTTOM
    step = inner / (high - low + 1)  # the last one is the way down to 0

    def x(update: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * update / (count - 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM if value == 0 else TOP + step * (high - math.log10(value))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="13">',
        "<title>KL between trainer and sampler over the updates of a loop</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">KL between trainer and sampler, before each update (bfloat16)</text>',
    ]
    for name, height in [("0", y(0.0)), *((f"1e{power}", y(10.0**power)) for power in range(low, high + 1))]:
        lines.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{name}</text>')
    for update in range(0, count + 1, max(1, count // 5)):
        at = x(min(update, count - 1))
        lines.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{update}</text>')
    lines.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">update</text>')
    for name, each in series.items():
        points = " ".join(f"{x(update):.1f},{y(value):.1f}" for update, value in enumerate(each))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>')
        told = "exactly 0 in every update" if not any(each) else f"mean {sum(each) / len(each):.1e}"
        place = y(each[-1]) - 10 if not any(each) else y(max(each)) - 8
        lines.append(
            f'<text x="{WIDTH - RIGHT}" y="{place:.1f}" text-anchor="end" fill="{COLORS[name]}">{name}: {told}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Run both loops, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--updates", type=int, default=100)
    args = parser.parse_args()
    with LLM(TINY, dtype="bfloat16", skip_tokenizer_init=True) as llm:
        series = {"transformers": run(llm, plain, args.updates), "octavo.rl": run(llm, exact, args.updates)}
    args.picture.write_text(picture(series), encoding="utf-8")
    facts = {name: {"mean": sum(each) / len(each), "largest": max(each)} for name, each in series.items()}
    print(json.dumps({"updates": args.updates, "kl": facts}))


if __name__ == "__main__":
    main()

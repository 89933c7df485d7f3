"""GRPO against an `octavo serve` of its own, exact: `python grpo.py policy 100`, of a checkpoint's folder `policy`.

What the ten lines of docs/rl.md leave out: float32 masters of a bfloat16 sampler, requests side by side, a baseline for
each prompt, a clipped ratio, microbatches, two passes over the same samples. In the first pass every ratio is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from octavo_server import OctavoServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import rl

N, TEMPERATURE, CLIP, MAX_NORM = 8, 0.9, 0.2, 1.0  # completions of a prompt; of the draw; of a ratio; of a gradient
MICROBATCH = 4096  # tokens, prompts among them
PASSES = 2  # over the same samples
PROMPTS = ["def fib(n):", "class Stack:", "import os\n", "for i in range(10):"]

Reward = Callable[[Sequence[int]], float]
"""Ids that were drawn -> how good they are."""


def variety(ids: Sequence[int]) -> float:
    """The share of different tokens: a reward that anything learns."""
    return len(set(ids)) / max(len(ids), 1)


class Loop:
    """A trainer and its server."""

    def __init__(self, folder: str, reward: Reward = variety, max_tokens: int = 64, lr: float = 1e-5) -> None:
        """Starts the server: a float32 folder is rounded to bfloat16 there, as the trainer's matrices are here."""
        masters = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = rl.convert(masters, dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr)
        self.reward, self.max_tokens = reward, max_tokens
        self.server = OctavoServer(folder, "--dtype", "bfloat16")
        self.pool = ThreadPoolExecutor(64)

    def draw(self, prompts: Sequence[list[int]]) -> rl.Drawn:
        """N completions of each prompt, all of them in one batch of the server."""
        params = {"n": N, "temperature": TEMPERATURE, "max_tokens": self.max_tokens, "logprobs": 0}
        bodies = [{"token_ids": prompt, "sampling_params": params} for prompt in prompts]
        answers = self.pool.map(lambda body: self.server.post("/inference/v1/generate", body), bodies)
        return rl.Drawn.of_answers(list(answers), prompts)

    def update(self, step: int, prompts: Sequence[list[int]]) -> tuple[float, float, float]:
        """Draw, learn, and send the weights; the mean reward, and the least and largest ratio of the first pass."""
        drawn = self.draw(prompts)
        reward = torch.tensor([self.reward(ids) for ids in drawn.token_ids]).view(-1, N)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1)
        first, *_ = [self.learn(drawn, advantage) for _ in range(PASSES)]
        self.server.send(self.model, f"step-{step}")
        return float(reward.mean()), float(first.min()), float(first.max())

    def learn(self, drawn: rl.Drawn, advantage: torch.Tensor) -> torch.Tensor:
        """One step of the optimizer; the ratios before it."""
        ratios = []
        for numbers in microbatches(drawn):
            part = drawn.part(numbers)
            ratio = (part.logprobs(self.model, TEMPERATURE) - part.old).exp()
            own = part.spread(advantage[numbers])
            gain = torch.minimum(ratio * own, ratio.clamp(1 - CLIP, 1 + CLIP) * own)
            (-gain.sum() / len(drawn.old)).backward()
            ratios.append(ratio.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.cat(ratios)

    def close(self) -> None:
        """Stop the server."""
        self.pool.shutdown()
        self.server.close()


def microbatches(drawn: rl.Drawn) -> Iterator[list[int]]:
    """Numbers of completions that hold tokens, of at most MICROBATCH tokens together, or one."""
    numbers, total = list[int](), 0
    for number, each in enumerate(drawn.completions):
        length = len(each.prompt) + len(each.token_ids)
        if numbers and total + length > MICROBATCH:
            yield numbers
            numbers, total = [], 0
        if each.token_ids:
            numbers.append(number)
            total += length
    if numbers:
        yield numbers


def main(folder: str, num_steps: int) -> None:
    """Print each step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    loop = Loop(folder)
    try:
        for step in range(num_steps):
            reward, least, most = loop.update(step, prompts)
            sys.stdout.write(f"step {step}: reward {reward:.3f}, ratio {least} to {most}\n")
    finally:
        loop.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

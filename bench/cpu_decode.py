"""A decode step of two models on a CPU, in turn in one process: `OMP_NUM_THREADS=1 python bench/cpu_decode.py`.

Each request has a prompt of 96 tokens and draws 64. A step counts as its least processor time of several runs, which
other work on the machine spoils least. A row tells the mean of the steps that only decode, in microseconds, and the
second model's speed over the first one's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import time

import torch

from octavo import LLM, SamplingParams

PROMPT, OUTPUT = 96, 64


def steps_of(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Processor time of each step that only decodes, in microseconds."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        llm.engine.add(str(number), prompt, params)
    spent = []
    while llm.engine.has_unfinished:
        decodes = all(request.num_computed >= PROMPT for request in llm.engine.scheduler.running)
        decodes &= not llm.engine.scheduler.waiting
        began = time.process_time()
        llm.engine.step()
        if decodes:
            spent.append((time.process_time() - began) * 1e6)
    return spent


def main() -> None:
    """Measure each dtype at each number of requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs=2, default=["octavo-tiny", "octavo-tiny-hybrid"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--runs", type=int, default=6)
    arguments = parser.parse_args()
    draw, results = random.Random(0), {}
    torch.set_num_threads(1)
    gc.disable()
    for dtype, count in itertools.product(arguments.dtypes, arguments.requests):
        prompts = [[draw.randrange(3, 4000) for _ in range(PROMPT)] for _ in range(count)]
        fields = {"dtype": dtype, "max_model_len": 256, "max_num_seqs": count, "enable_prefix_caching": False}
        models = [LLM(name, **fields) for name in arguments.models]
        least: list[list[float]] = [[], []]
        for _ in range(arguments.runs):
            for place, llm in enumerate(models):
                spent = steps_of(llm, prompts)
                least[place] = [min(pair) for pair in zip(least[place] or spent, spent, strict=False)]
        for llm in models:
            llm.close()
        first, second = (sum(steps) / len(steps) for steps in least)
        results[f"{dtype} {count}"] = {arguments.models[0]: first, arguments.models[1]: second, "speed": first / second}
        print(f"{dtype:>9} {count:>4} requests  {first:8.0f}  {second:8.0f} us  speed {first / second:.2f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()

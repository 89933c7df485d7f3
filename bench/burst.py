"""Host time of many requests that begin together and end together: `python bench/burst.py [--requests 512]`.

What stands before the first launch of a batch, and behind its last result, no GPU hides. 16 tokens each, one step for
all prompts, 130 tokens of output. Microseconds per request, the least and the median of the rounds: "check" reads and
checks parameters and prompts, "queue" hands them to the core, "schedule" and "issue" are the first step's, "border" is
the step in which all rows leave their block of 64 tokens, "update" takes in the result with which all end, "output"
makes what their callers get, "leave" are the steps behind. "attention" has one group of full attention, "states" those
of Nemotron-H-8B, whose rows have 169 blocks. The device does nothing, see null_device. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from null_device import NullRunner
from octavo.bench.shapes import SHAPES
from octavo.cache.groups import CacheGroup, make_groups
from octavo.cache.specs import AttentionSpec, LayerSpec, NoCache
from octavo.engine import EngineCore
from octavo.frontend.frontend import Frontend, Prompt
from octavo.frontend.in_process import InProcessClient
from octavo.layers.recurrent import Mamba2Scan, ShortConvolution, state_spec
from octavo.plan import StepLimits
from octavo.request.sampling_params import Limits, RequestOutputKind, SamplingParams, check_token_ids
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from octavo.startup import gc_control
from octavo.text.no_tokenizer import NoTokenizer
from octavo.worker.executor import InlineExecutor

BLOCK_SIZE, NUM_BLOCKS = 64, 210
NUM_PROMPT, NUM_OUTPUT = 16, 130
BORDER = BLOCK_SIZE - NUM_PROMPT + 1  # the step that computes the first token of the second block
LIMITS = Limits(vocab_size=4096, max_model_len=4096)


def nemotron_groups(facts: dict[str, Any], block_size: int) -> tuple[CacheGroup, ...]:
    """The cache groups of a shape of Nemotron-H's in bfloat16, states in float32."""
    heads, size, shared = facts["mamba_num_heads"], facts["mamba_head_dim"], facts["n_groups"] * facts["ssm_state_size"]
    conv = ShortConvolution(0, heads * size + 2 * shared, facts["conv_kernel"], torch.bfloat16)
    scan = Mamba2Scan(0, heads, size, facts["n_groups"], facts["ssm_state_size"], torch.bfloat16)
    attention = AttentionSpec(
        num_heads=facts["num_attention_heads"],
        num_kv_heads=facts["num_key_value_heads"],
        head_size=facts["head_dim"],
        scale=facts["head_dim"] ** -0.5,
    )
    specs: dict[str, LayerSpec] = {"M": state_spec(conv, scan), "*": attention, "-": NoCache()}
    return make_groups([specs[letter] for letter in facts["hybrid_override_pattern"]], block_size, 2)


class Engine:
    """A front end and a core without a model."""

    def __init__(self, groups: Sequence[CacheGroup], num_requests: int, *, caching: bool) -> None:
        """With room for so many at once."""
        limits = StepLimits(
            max_num_rows=num_requests, max_num_tokens=NUM_PROMPT * num_requests, max_model_len=LIMITS.max_model_len
        )
        kv = KVManager(groups, NUM_BLOCKS * max(num_requests, 16), enable_prefix_caching=caching, advances=True)
        runner = NullRunner(groups, limits, torch.arange(num_requests) + 50)
        self._core = EngineCore(Scheduler(kv, limits), InlineExecutor(runner), async_scheduling=True)
        self._frontend = Frontend(InProcessClient(self._core), NoTokenizer(), LIMITS, coalesces=True)
        self._random, self._num, self._round = random.Random(0), num_requests, 0

    def round(self) -> dict[str, float]:
        """Seconds of each part."""
        prompts = [self._random.choices(range(50, 4000), k=NUM_PROMPT) for _ in range(self._num)]
        params = [
            SamplingParams(max_tokens=NUM_OUTPUT, detokenize=False, temperature=0.6, seed=index)
            for index in range(self._num)
        ]
        self._round += 1
        started = time.perf_counter()
        checked = []
        for token_ids, own in zip(prompts, params, strict=True):
            own = own.clone()
            own.output_kind = RequestOutputKind.FINAL_ONLY
            checked.append(self._frontend.check(Prompt(check_token_ids(token_ids, LIMITS)), own))
        seconds = {"check": time.perf_counter() - started}
        started = time.perf_counter()
        for index, request in enumerate(checked):
            self._frontend.queue(f"{self._round}-{index}", request)
        seconds["queue"] = time.perf_counter() - started
        return seconds | self._steps()

    def _steps(self) -> dict[str, float]:
        """Run all to their ends; the seconds of the steps that count."""
        seconds, place, times, num_ended = dict[str, float](), 0, self._core.times, 0
        while self._core.has_unfinished:
            before, started = times.copy(), time.perf_counter()
            updates = self._core.step()
            stepped = time.perf_counter()
            outputs = self._frontend.take(updates)
            own = times.since(before)
            if place == 0:
                seconds |= {"schedule": own.schedule, "issue": own.issue}
            elif place == BORDER:
                seconds["border"] = own.schedule + own.issue
            elif outputs:
                seconds |= {"update": own.update, "output": time.perf_counter() - stepped, "leave": 0.0}
                num_ended = len(outputs)
            elif num_ended:
                seconds["leave"] += stepped - started
            place += 1
        assert num_ended == self._num, "all end in one step"
        return seconds


def main() -> None:
    """Measure both kinds of cache at every size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prefix-caching", action="store_true", help="blocks have names")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, Sequence[CacheGroup]] = {
        "attention": [CacheGroup(kind="full", window=0, block_size=BLOCK_SIZE, layers=(0,))],
        "states": nemotron_groups(SHAPES["mamba2"], BLOCK_SIZE),
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind, groups in kinds.items():
        for count in arguments.requests:
            engine = Engine(groups, count, caching=arguments.prefix_caching)
            engine.round()
            gc.collect()
            gc.freeze()
            with gc_control.relaxed():  # as LLM.generate is
                rounds = [engine.round() for _ in range(arguments.rounds)]
            row = results[f"{kind} {count}"] = {}
            for name, pick in (("least", min), ("median", statistics.median)):
                row[name] = {part: pick([one[part] for one in rounds]) / count * 1e6 for part in rounds[0]}
                row[name]["all"] = sum(row[name].values())
                parts = "".join(f"  {part} {value:5.1f}" for part, value in row[name].items())
                print(f"{kind:>9} {count:>5} {name:>6}{parts}", flush=True)
    print(json.dumps({"rounds": arguments.rounds, "microseconds_per_request": results}))


if __name__ == "__main__":
    main()

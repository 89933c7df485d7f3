"""Host time of a step, without a device: `python bench/host.py [--requests 1 256] [--drafts 4 [--fixed-depth]]`.

What the engine's thread does for a step: schedule, issue, update and outputs, with one step in flight. The runner's
device does nothing, at once: see null_device for what of issuing is not counted. "steady" requests decode
inside their block; "growing" ones cross a block every 16 steps, each at another step; "aligned" ones all in the same;
"streamed" ones hand out every token as text; "churning" ones end after 32 to 96 tokens, and others take their place.
Microseconds: the median of each part, then the total's mean, median and worst of a hundred, by the clock; "cpu" is the
thread's own time per step, which a busy machine spoils less. With `--drafts`, of which half are accepted, plain steps
and steps with drafts run in turn, twenty each: "of plain" is the time of a step by that of a plain one, and "per token"
the same for a token, medians over turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from null_device import NullRunner
from octavo.cache.groups import CacheGroup
from octavo.config.engine_config import EngineConfig
from octavo.engine import EngineCore
from octavo.frontend.frontend import Frontend, Prompt
from octavo.frontend.in_process import InProcessClient
from octavo.plan import StepLimits
from octavo.request.sampling_params import Limits, RequestOutputKind, SamplingParams
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from octavo.startup.frontend import find_and_read, load_text
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.worker.executor import InlineExecutor

MAX_LEN = 8192
NUM_BLOCKS = 1 << 17
TURN = 20  # steps
RATIOS = ("of plain", "per token")
SCENARIOS = ("steady", "growing", "aligned", "streamed", "churning")
LIMITS = {1: 150.0, 256: 350.0, 512: 600.0}  # microseconds per step that a GPU hides


class Drafts(NamedTuple):
    """What rows verify, and whether their number follows the batch's."""

    count: int = 0
    adapts: bool = False


class Load:
    """An engine without a model, and the requests that keep it busy."""

    def __init__(
        self,
        scenario: str,
        num_requests: int,
        tokenizer: Tokenizer,
        *,
        caching: bool = True,
        drafts: Drafts,
    ) -> None:
        """With `num_requests` in the queue."""
        block_size = 16 if scenario != "steady" else MAX_LEN
        group = CacheGroup(kind="full", window=0, block_size=block_size, layers=(0,))
        limits = StepLimits(
            max_num_rows=max(num_requests, 16), max_num_tokens=8192, max_model_len=MAX_LEN, max_num_drafts=drafts.count
        )
        kv = KVManager([group], NUM_BLOCKS, enable_prefix_caching=caching)
        scheduler = Scheduler(kv, limits, cheap_tokens=256 * drafts.adapts)
        runner = NullRunner([group], limits, torch.arange(limits.max_num_rows) * 7919 % 4000 + 50)
        self.core = EngineCore(scheduler, InlineExecutor(runner), eos_token_ids=[2], async_scheduling=True)
        of_model = Limits(vocab_size=4096, max_model_len=MAX_LEN)
        self._frontend = Frontend(InProcessClient(self.core), tokenizer, of_model, coalesces=True)
        self._scenario, self._random, self._ids = scenario, random.Random(0), itertools.count()
        self._num_sampled = 0  # one of each row and step
        self._add(num_requests)

    def _add(self, count: int) -> None:
        for index in (next(self._ids) for _ in range(count)):
            num_prompt = 16 + (0 if self._scenario == "aligned" else index * 7 % 64)
            prompt = self._random.choices(range(50, 4000), k=num_prompt)
            streamed = self._scenario == "streamed"
            params = SamplingParams(
                max_tokens=self._random.randint(32, 96) if self._scenario == "churning" else MAX_LEN - num_prompt,
                output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
                detokenize=streamed,
            )
            self._frontend.queue(str(index), self._frontend.check(Prompt(prompt), params))

    @property
    def num_tokens(self) -> int:
        """Tokens that steps have given to requests, prompts' steps among them."""
        return self._num_sampled + self.core.scheduler.drafting.stats.num_accepted_tokens

    def step(self) -> tuple[float, float, float, float]:
        """One step. Returns the seconds of schedule, issue, update and outputs."""
        times = self.core.times
        schedule, issue, update = times.schedule, times.issue, times.update
        updates = self.core.step()
        self._num_sampled += len(self.core.scheduler.running)
        started = time.perf_counter()
        outputs = self._frontend.take(updates)
        seconds = time.perf_counter() - started
        if self._scenario == "churning":
            self._add(sum(output.finished for output in outputs))
        return times.schedule - schedule, times.issue - issue, times.update - update, seconds


class Measured:
    """What the steps of one load take. `turns` has of each turn the microseconds of a step, and of a token."""

    def __init__(self, load: Load) -> None:
        """A hundred steps have run, unmeasured."""
        self._load, self._cpu = load, 0.0
        self._parts: list[list[float]] = []  # of each step
        self.turns: list[tuple[float, float]] = []
        for _ in range(100):
            load.step()

    def run(self, num_steps: int) -> None:
        """Measure a turn."""
        started, num_tokens = time.thread_time(), self._load.num_tokens
        parts = [[seconds * 1e6 for seconds in self._load.step()] for _ in range(num_steps)]
        self._cpu += time.thread_time() - started
        total = sum(map(sum, parts))
        self._parts += parts
        self.turns.append((total / num_steps, total / max(self._load.num_tokens - num_tokens, 1)))

    def row(self) -> dict[str, float]:
        """Microseconds per step."""
        totals = sorted(map(sum, self._parts))
        schedule, issue, update, output = (statistics.median(part) for part in zip(*self._parts, strict=True))
        return {
            "schedule": schedule,
            "issue": issue,
            "update": update,
            "output": output,
            "mean": statistics.mean(totals),
            "median": statistics.median(totals),
            "p99": totals[int(len(totals) * 0.99)],
            "cpu": self._cpu / len(totals) * 1e6,
        }


def measure(loads: Sequence[Load], num_steps: int) -> list[dict[str, float]]:
    """Microseconds per step of each, in turn. What the others take by the first is told of them."""
    measured = [Measured(load) for load in loads]
    for done in range(0, num_steps, TURN):
        for one in measured:
            one.run(min(TURN, num_steps - done))
    rows = [one.row() for one in measured]
    for row, one in zip(rows[1:], measured[1:], strict=True):
        for place, name in enumerate(RATIOS):
            pairs = zip(one.turns, measured[0].turns, strict=True)
            row[name] = statistics.median(own[place] / plain[place] for own, plain in pairs)
    return rows


def main() -> None:
    """Measure every scenario at every size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-prefix-caching", action="store_true", help="blocks have no names, as in bench/engine.py")
    parser.add_argument("--drafts", type=int, default=0, help="that rows verify, of which half are accepted")
    parser.add_argument("--fixed-depth", action="store_true", help="as many in every row of every step")
    arguments = parser.parse_args()
    drafts = Drafts(arguments.drafts, not arguments.fixed_depth)
    folder, arch = find_and_read(EngineConfig())
    tokenizer = load_text(EngineConfig(), folder, arch)
    assert not isinstance(tokenizer, NoTokenizer), "the bundled model has a tokenizer"
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    results: dict[str, dict[str, float]] = {}
    kinds = {"": Drafts()} | ({f" {drafts.count} drafts": drafts} if drafts.count else {})
    for scenario, count in itertools.product(SCENARIOS, arguments.requests):
        caching = not arguments.no_prefix_caching
        loads = [Load(scenario, count, tokenizer, caching=caching, drafts=kind) for kind in kinds.values()]
        for kind, row in zip(kinds, measure(loads, arguments.steps), strict=True):
            results[f"{scenario} {count}{kind}"] = row
            limit = f"{row['cpu'] / LIMITS[count]:>5.0%} of {LIMITS[count]:.0f}" if count in LIMITS else ""
            parts = (f"  {name} {value:{'.2f' if name in RATIOS else '7.1f'}}" for name, value in row.items())
            print(f"{scenario:>9} {count:>5}{kind}{''.join(parts)}", limit)
    print(json.dumps({"steps": arguments.steps, "limits_us": LIMITS, "microseconds": results}))


if __name__ == "__main__":
    main()

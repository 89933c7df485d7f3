"""Speculation beside plain decoding: the same requests without drafts, then with an oracle's or a method's.

Owns the comparison. Invariant: tokens with drafts are those without, or the measurement fails.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from octavo.bench import gpu_profile
from octavo.bench.gpu_engine import Workload
from octavo.llm import LLM
from octavo.request.sampling_params import SamplingParams

_SHOWN_KERNELS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Drafts:
    """What is compared with plain decoding."""

    num_drafts: int
    probability: float | None  # an oracle's, per draft; None: `config` proposes
    config: dict[str, Any]  # a method's; of an oracle, one that runs for its cost
    adapts: bool

    def settings(self, answers: Path) -> dict[str, Any]:
        """`speculative_config`."""
        common = {"num_speculative_tokens": self.num_drafts, "adaptive_depth": self.adapts}
        if self.probability is None:
            return {**common, **self.config}
        options = {"answers": str(answers), "probability": self.probability, "cost": self.config}
        return {"method": "octavo.bench.oracle:Oracle", "options": options, **common}


def compare(
    engine: Callable[..., AbstractContextManager[LLM]],
    work: Workload,
    drafts: Drafts,
    num_rounds: int = 3,
    *,
    profile: bool = False,
) -> dict[str, float]:
    """Tokens per second without and with drafts, the best of some rounds, and what a step cost beside a plain one.

    profile: print kernels too, on a GPU. Raises RuntimeError where a token differs.
    """
    with engine() as llm:
        plain, steps, expected = _measure(llm, work, num_rounds)
        if profile:
            _profile(llm, work, "without drafts")
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        answers = Path(folder, "answers.json")
        whole = [prompt + tokens for prompt, tokens in zip(work.prompts, expected, strict=True)]
        answers.write_text(json.dumps(whole))
        with engine(speculative_config=drafts.settings(answers)) as llm:
            before = llm.engine.scheduler.stats()
            seconds, drafted_steps, found = _measure(llm, work, num_rounds)
            after = llm.engine.scheduler.stats()
            if profile:
                _profile(llm, work, "with drafts")
    if found != expected:
        raise RuntimeError("tokens with drafts differ from those without")
    num_tokens, num_drafted = sum(work.num_outputs), after.num_draft_tokens - before.num_draft_tokens
    return {
        "plain_tok_s": num_tokens / plain,
        "drafted_tok_s": num_tokens / seconds,
        "speedup": plain / seconds,
        "tokens_per_step": steps / drafted_steps,
        "accepted": (after.num_accepted_tokens - before.num_accepted_tokens) / max(num_drafted, 1),
        "step_cost": (seconds / drafted_steps) / (plain / steps),
        "plain_step_us": plain / steps * 1e6,
        "drafted_step_us": seconds / drafted_steps * 1e6,
    }


def _measure(llm: LLM, work: Workload, num_rounds: int) -> tuple[float, int, list[list[int]]]:
    """Seconds and steps of the quickest round, and what every round says."""
    params = _params(work)
    llm.engine.capture_rest()
    llm.generate(work.prompts, params, use_tqdm=False)
    found: list[tuple[float, int]] = []
    tokens: list[list[int]] = []
    for _ in range(num_rounds):
        before, started = llm.engine.times.num_steps, time.perf_counter()
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        found.append((time.perf_counter() - started, llm.engine.times.num_steps - before))
        said = [output.outputs[0].token_ids for output in outputs]
        if tokens and said != tokens:
            raise RuntimeError("two rounds differ")
        tokens = said
    return (*min(found), [list(line) for line in tokens])


def _params(work: Workload) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, temperature=work.temperature, seed=index)
        for index, count in enumerate(work.num_outputs)
    ]


def _profile(llm: LLM, work: Workload, name: str) -> None:
    """Print the kernels of one more round, prompts included, by their time in a step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    before = llm.engine.times.num_steps
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        llm.generate(work.prompts, _params(work), use_tqdm=False)
        torch.cuda.synchronize()
    rows = gpu_profile.kernels(gpu_profile.launches(profiler), llm.engine.times.num_steps - before)
    print(f"kernels {name}: {sum(row['us'] for row in rows):.0f} us a step")
    print(
        "\n".join(f"  {row['us']:9.1f} us {row['calls']:7.1f} calls  {row['kernel']}" for row in rows[:_SHOWN_KERNELS])
    )


def table(shape: str, name: str, row: dict[str, float]) -> str:
    """One line for people."""
    return (
        f"{shape:>8} {name:<10} plain {row['plain_tok_s']:8.1f} tok/s ({row['plain_step_us']:7.0f} us a step), drafts "
        f"{row['drafted_tok_s']:8.1f} tok/s ({row['drafted_step_us']:7.0f} us): {row['speedup']:.2f} times, "
        f"{row['tokens_per_step']:.2f} tokens a step, {row['accepted']:.0%} accepted, a step costs "
        f"{row['step_cost']:.2f}"
    )


def run(
    engine: Callable[..., AbstractContextManager[LLM]],
    shape: str,
    works: Sequence[tuple[str, Workload]],
    drafts: Drafts,
    document: dict[str, Any],
    *,
    profile: bool = False,
) -> int:
    """Compare each; print a line each, then one JSON document. profile: see `compare`."""
    rows = {}
    for name, work in works:
        rows[name] = compare(engine, work, drafts, profile=profile)
        print(table(shape, name, rows[name]), flush=True)
    print(json.dumps(document | {"drafts": dataclasses.asdict(drafts), "results": rows}))
    return 0

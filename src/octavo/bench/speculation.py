"""Speculation beside plain decoding: the same requests without drafts, then with an oracle's or a method's.

Owns the comparison. Invariant: tokens with drafts are those without, or the measurement fails.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from octavo.bench import gpu_profile
from octavo.bench.gpu_engine import Workload
from octavo.config.speculative import read_speculative
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
    works: Mapping[str, Workload],
    drafts: Drafts,
    num_rounds: int = 3,
    *,
    profile: bool = False,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each workload the tokens per second without and with drafts, the best of some rounds, and what a step cost.

    All run on one engine without drafts, then on one with them. An oracle is told all answers: prompts that begin alike
    belong together only if one continues the other. profile: print kernels too, on a GPU. Raises RuntimeError where a
    token differs.
    """
    plain: dict[str, _Measured] = {}
    with engine() as llm:
        for name, work in works.items():
            plain[name] = _measure(llm, work, num_rounds)
            if profile:
                _profile(llm, work, f"without drafts, {name}")
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        answers = Path(folder, "answers.json")
        answers.write_text(json.dumps(_answers(works, plain)))
        with engine(speculative_config=drafts.settings(answers)) as llm:
            for name, work in works.items():
                drafted = _measure(llm, work, num_rounds)
                if drafted.tokens != plain[name].tokens:
                    raise RuntimeError(f"tokens of {name} with drafts differ from those without")
                if profile:
                    _profile(llm, work, f"with drafts, {name}")
                yield name, _row(sum(work.num_outputs), plain[name], drafted)


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    """The quickest round of a workload, what every round says, and the drafts of all rounds."""

    seconds: float
    num_steps: int
    tokens: list[list[int]]
    num_drafted: int
    num_accepted: int


def _answers(works: Mapping[str, Workload], plain: Mapping[str, _Measured]) -> list[list[int]]:
    """Prompts and outputs, each once: workloads of a sweep begin alike."""
    whole = [
        (*prompt, *tokens)
        for name, work in works.items()
        for prompt, tokens in zip(work.prompts, plain[name].tokens, strict=True)
    ]
    return [list(line) for line in dict.fromkeys(whole)]


def _row(num_tokens: int, plain: _Measured, drafted: _Measured) -> dict[str, float]:
    plain_step, drafted_step = plain.seconds / plain.num_steps, drafted.seconds / drafted.num_steps
    return {
        "plain_tok_s": num_tokens / plain.seconds,
        "drafted_tok_s": num_tokens / drafted.seconds,
        "speedup": plain.seconds / drafted.seconds,
        "tokens_per_step": plain.num_steps / drafted.num_steps,
        "accepted": drafted.num_accepted / max(drafted.num_drafted, 1),
        "step_cost": drafted_step / plain_step,
        "plain_step_us": plain_step * 1e6,
        "drafted_step_us": drafted_step * 1e6,
    }


def _measure(llm: LLM, work: Workload, num_rounds: int) -> _Measured:
    """Raises RuntimeError where two rounds differ."""
    params, scheduler = _params(work), llm.engine.scheduler
    llm.engine.capture_rest()
    llm.generate(work.prompts, params, use_tqdm=False)
    earlier = scheduler.stats()
    found: list[tuple[float, int]] = []
    tokens: list[list[int]] = []
    for _ in range(num_rounds):
        before, started = llm.engine.times.num_steps, time.perf_counter()
        outputs = llm.generate(work.prompts, params, use_tqdm=False)
        found.append((time.perf_counter() - started, llm.engine.times.num_steps - before))
        said = [list(output.outputs[0].token_ids) for output in outputs]
        if tokens and said != tokens:
            raise RuntimeError("two rounds differ")
        tokens = said
    later = scheduler.stats()
    return _Measured(
        *min(found),
        tokens,
        num_drafted=later.num_draft_tokens - earlier.num_draft_tokens,
        num_accepted=later.num_accepted_tokens - earlier.num_accepted_tokens,
    )


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
    groups: Sequence[Mapping[str, Workload]],
    drafts: Drafts,
    document: dict[str, Any],
    *,
    profile: bool = False,
) -> int:
    """Compare each, those of a group on the same two engines; print a line each, then one JSON document.

    Behind a group of several a line says where drafts gained least. profile: see `compare`. Raises ConfigError for
    settings of drafts that an engine refuses, before one without them runs.
    """
    for given in (drafts.settings(Path()), drafts.config):
        read_speculative(given)
    rows: dict[str, dict[str, float]] = {}
    for works in groups:
        for name, row in compare(engine, works, drafts, profile=profile):
            rows[name] = row
            print(table(shape, name, row), flush=True)
        if len(works) > 1:
            least = min(works, key=lambda name: rows[name]["speedup"])
            print(f"least: {rows[least]['speedup']:.3f} times, {least}", flush=True)
    print(json.dumps(document | {"drafts": dataclasses.asdict(drafts), "results": rows}))
    return 0

"""Requests that come, go and are aborted while blocks go to host memory, to files and back all the time (O.7).

The whole soak, 10,000 requests in some minutes, with a line of figures for each part:

    OMP_NUM_THREADS=1 python -m pytest -m slow -s tests/e2e/test_offload_soak.py

`make test` has 200 of them.
"""

from __future__ import annotations

import collections
import functools
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo import LLM, SamplingParams
from octavo.kv_connector.orders import Report
from octavo.kv_connector.worker.host_memory import HostHandler
from octavo.kv_connector.worker.mover import Job
from octavo.sched.work import SchedulerStats
from patience import patient
from test_connectors import host, settle

NUM_DISTINCT = 250
NUM_WAITING = 12  # requests that are there at a time
NUM_TENTHS = 10
RESIDENT = 12  # MiB that may be more resident at the end than behind the third tenth
SCAN_EVERY = 20  # steps
SHARE_LATE, MAX_LATE = 0.3, 0.2  # of the copies; seconds, where no step passes
TINY = {"max_num_batched_tokens": 48, "max_model_len": 160, "num_gpu_blocks_override": 13}
HYBRID = {
    "model": "octavo-tiny-hybrid",
    "max_num_batched_tokens": 90,
    "max_model_len": 256,
    "num_gpu_blocks_override": 400,
    "enable_prefix_caching": False,
}
Make = Callable[..., LLM]


class Kind(NamedTuple):
    """A model under pressure: so few blocks that requests are preempted, and so little memory that blocks give way."""

    fields: dict[str, Any]
    max_prompt: int  # tokens
    outputs: tuple[int, ...]  # tokens
    memory: int  # MiB
    files: int  # MiB
    preempted: float = 0.0  # share of the steps behind which a request is, where its peak is kept free for it


KINDS = {
    "tiny": Kind(TINY, 120, (1, 3, 6, 40), 2, 6),
    "hybrid": Kind(HYBRID, 170, (1, 3, 6, 40), 3, 16, 0.1),
}


class Wish(NamedTuple):
    """One of the requests that are asked for again and again."""

    prompt: list[int]
    params: SamplingParams


@functools.cache
def wishes(kind: str) -> list[Wish]:
    """Prompts of which many begin alike, and parameters of several kinds."""
    draw = random.Random(kind)
    most = KINDS[kind].max_prompt
    heads = [[draw.randrange(3, 300) for _ in range(most)] for _ in range(12)]
    found = []
    for _ in range(NUM_DISTINCT):
        count = draw.randrange(8, most - 8)
        prompt = draw.choice(heads)[:count] + [draw.randrange(3, 300) for _ in range(draw.choice([0, 1, 8]))]
        temperature, num_tokens = draw.choice([0.0, 0.9]), draw.choice(KINDS[kind].outputs)
        params = SamplingParams(
            temperature=temperature,
            seed=draw.randrange(1 << 32),
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        found.append(Wish(prompt, params))
    return found


@pytest.fixture(scope="module")
def expected() -> Callable[[str], list[list[int]]]:
    """What an engine says that moves nothing, once for each kind."""

    @functools.cache
    def tokens(kind: str) -> list[list[int]]:
        model = {key: value for key, value in KINDS[kind].fields.items() if key in ("model", "max_model_len")}
        with LLM(dtype="float32", **model) as llm:
            prompts = [{"prompt_token_ids": wish.prompt} for wish in wishes(kind)]
            outputs = llm.generate(prompts, [wish.params for wish in wishes(kind)], use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

    return tokens


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A part of the copies waits until a step has passed, or some, so that others come between."""
    passed, draw, handle = threading.Event(), random.Random(3), HostHandler.handle

    def lately(self: HostHandler, job: Job) -> Report:
        if draw.random() < SHARE_LATE:
            passed.clear()
            passed.wait(MAX_LATE)
        return handle(self, job)

    monkeypatch.setattr(HostHandler, "handle", lately)
    return passed


class Soak:
    """One engine, and what has been seen of it."""

    def __init__(
        self,
        llm: LLM,
        kind: str,
        expected: list[list[int]],
        folder: Path | None,
        draw: random.Random,
        late: threading.Event,
    ) -> None:
        """`folder`: of its files; None: it has none. late: lets a copy that waits go on."""
        self.llm, self._kind, self._expected, self._folder, self._draw = llm, kind, expected, folder, draw
        self.late = late
        self._num_steps, self._preempted = 0, KINDS[kind].preempted
        self.most_kept = self.most_in_files = self.num_aborted = self.num_ended = 0
        self.differing: list[str] = []

    def run(self, num_requests: int) -> None:
        """Ask for so many, and let all end."""
        engine, draw, started = self.llm.engine, self._draw, 0
        asked: dict[str, int] = {}
        doomed = collections.defaultdict[int, list[str]](list)  # step -> who is aborted
        aborted: set[str] = set()
        while started < num_requests or engine.has_unfinished:
            while started < num_requests and len(asked) < NUM_WAITING and draw.random() < 0.8:
                which = min(draw.randrange(NUM_DISTINCT), draw.randrange(NUM_DISTINCT))  # some more often than others
                name = f"r{self.num_ended + len(asked)}-{which}"
                engine.add(name, *wishes(self._kind)[which])
                asked[name], started = which, started + 1
                if draw.random() < 0.15:
                    doomed[self._num_steps + draw.choice([0, 1, 2, 3, 5, 9])].append(name)
            going = [name for name in doomed.pop(self._num_steps, ()) if name in asked]
            aborted.update(going)
            engine.abort(going)
            if draw.random() < 0.4:
                self.late.set()
            for output in engine.step():
                if output.finished:
                    self._check(output, asked.pop(output.request_id), output.request_id in aborted)
            running = engine.scheduler.running
            if self._preempted and draw.random() < self._preempted and running:
                engine.scheduler._preempt(running[-1])
            self._num_steps += 1
            if self._num_steps % SCAN_EVERY == 0:
                self._scan()
        assert not asked, "each request ends once"
        settle(self.llm)

    def _check(self, output: Any, which: int, was_aborted: bool) -> None:
        (completion,) = output.outputs
        tokens, wanted = list(completion.token_ids), self._expected[which]
        self.num_ended += 1
        if was_aborted and completion.finish_reason == "abort":
            self.num_aborted += 1
            wanted = wanted[: len(tokens)]
        if tokens != wanted:
            self.differing.append(f"{output.request_id}: {tokens}, not {wanted} ({completion.finish_reason})")

    def _scan(self) -> None:
        self.most_kept = max(self.most_kept, self.llm.engine.scheduler.loads.connector.index.stored_bytes)
        if self._folder is None:
            return
        num_bytes = 0
        for path in self._folder.glob("??/*"):
            try:
                num_bytes += path.stat().st_size  # those that are being written, too
            except FileNotFoundError:
                continue
        self.most_in_files = max(self.most_in_files, num_bytes)


def resident() -> float:
    """MiB of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def run_soak(
    kind: str,
    policy: str,
    folder: Path | None,
    num_requests: int,
    make_llm: Make,
    expected: Any,
    late: Any,
    *,
    is_async: bool,
) -> tuple[SchedulerStats, list[float]]:
    """Ask, check what holds of all of them, and print the figures; gives MiB resident behind each tenth, too."""
    own, wanted = KINDS[kind], expected(kind)
    extra = {"storage_path": str(folder), "storage_bytes": f"{own.files}M"} if folder else {}
    config = {**host(f"{own.memory}M", eviction_policy=policy, **extra), "kv_transfer_timeout": 600}
    threads, num_files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    llm = make_llm(**own.fields, max_num_seqs=6, async_scheduling=is_async, kv_transfer_config=config)
    soak = Soak(llm, kind, wanted, folder, random.Random(f"{kind} {policy} {folder is None}"), late)
    held = []
    for _ in range(NUM_TENTHS):
        soak.run(num_requests // NUM_TENTHS)
        assert llm.reset_prefix_cache(), "all blocks are back"
        held.append(resident())
    stats, moved = settle(llm)
    llm.close()
    print(
        f"\n{kind}, {policy}, {'files' if folder else 'memory'}, {'async' if is_async else 'sync'}: "
        f"{soak.num_ended} requests, {soak.num_aborted} aborted, {len(soak.differing)} differ; "
        f"{stats.num_preemptions} preemptions; tokens: {stats.num_prefix_hits} found here, "
        f"{stats.num_loaded_tokens} loaded of {stats.num_matched_tokens}; "
        f"blocks: {moved.num_saved_blocks} saved, {moved.num_loaded_blocks} loaded, {moved.num_evicted_blocks} gave "
        f"way; loads: {stats.num_load_misses} missed, {stats.num_load_failures} failed; "
        f"{stats.num_expired_holds} late; "
        f"most bytes: {soak.most_kept} in memory, {soak.most_in_files} in files; "
        f"MiB resident: {' '.join(f'{each:.1f}' for each in held)}"
    )
    assert not soak.differing, soak.differing[:5]
    assert soak.num_ended == num_requests // NUM_TENTHS * NUM_TENTHS and soak.num_aborted
    assert moved.num_evicted_blocks and stats.num_loaded_tokens and moved.num_loaded_blocks
    assert not stats.num_load_failures and not stats.num_expired_holds
    assert soak.most_kept <= own.memory << 20 and soak.most_in_files <= own.files << 20
    if folder is not None:
        assert soak.most_in_files
        assert not list(folder.glob("??/.*")), "nothing half-written is left"
    until = time.monotonic() + patient(30)
    while not set(threading.enumerate()) <= threads and time.monotonic() < until:
        time.sleep(0.01)  # those that read files end by themselves
    assert set(threading.enumerate()) <= threads and len(os.listdir("/proc/self/fd")) <= num_files
    return stats, held


@pytest.mark.parametrize(("policy", "has_files", "is_async"), [("lru", True, True), ("arc", True, False)])
def test_O_7_soak_in_small(
    policy: str, has_files: bool, is_async: bool, make_llm: Make, expected: Any, late: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "kv" if has_files else None
    run_soak("tiny", policy, folder, 100, make_llm, expected, late, is_async=is_async)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "policy", "has_files", "num_requests", "is_async"),
    [
        ("tiny", "lru", False, 2250, True),
        ("tiny", "lru", True, 2250, True),
        ("tiny", "arc", False, 2250, False),
        ("tiny", "arc", True, 2250, True),
        ("hybrid", "lru", True, 500, True),
        ("hybrid", "arc", False, 500, True),
    ],
)
def test_O_7_soak(
    kind: str,
    policy: str,
    has_files: bool,
    num_requests: int,
    is_async: bool,
    make_llm: Make,
    expected: Any,
    late: Any,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kv" if has_files else None
    stats, held = run_soak(kind, policy, folder, num_requests, make_llm, expected, late, is_async=is_async)
    assert stats.num_preemptions
    assert held[-1] - held[2] < RESIDENT

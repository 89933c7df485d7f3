"""RL.P2: pauses, resumes, updates, sleeps and aborts from eight threads in any order: all end, and no state is illegal.

Each thread makes sequences of moves at random. A move that the engine's state forbids names the move and the state; a
request's tokens are those of the weights whose label they carry, or are refused by name; behind it all a whole update
leaves an engine that answers as a new one does.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.frontend.control import WrongStateError
from octavo.request.outputs import RequestOutput
from octavo.rl.session import WeightConflictError, WeightUpdateError
from octavo.sched.pause import MODES, TAGS
from patience import patient
from sleep_rig import move_memory
from weights_rig import Weights, give, params, small_weights

from pages_double import PagesDouble  # isort: skip, its folder is known through sleep_rig

NUM_THREADS = 8
NUM_WAITING = 24  # requests at most
PROMPTS = [[5 + branch, 6, 7, *range(20, 20 + 17 * branch)] for branch in range(4)]
REFUSED = re.compile(
    r"(sleep|resume|generate|stream): the engine sleeps (at|\()"
    r"|sleep: an update of the weights is open"
    r"|pause: generation was resumed before the requests had ended"
    r"|(generate|stream): weights were discarded at sleep level 2"
    r"|(generate|stream): an update had overwritten some weights"
    r"|(start_weight_update|update_weight_version|init_weight_transfer_engine) is not possible while an update is open"
    r"|(update_weights|finish_weight_update|abort_weight_update) needs an open update, and there is none"
    r"|(update_weights|finish_weight_update|abort_weight_update): session '[0-9a-f]+' is not open: "
    r"|the memory of the weights sleeps"
    r"|partial=True needs whole weights"
)


class Crowd:
    """One engine, and what eight threads do with it."""

    def __init__(self, folder: Path, staging: str, **more: Any) -> None:
        self.weights: list[Weights] = small_weights(folder, 3)
        fields = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True, **more}
        self.llm = LLM(str(folder), **fields, weight_transfer_config={"backend": "disk", "staging": staging})
        self.right: dict[tuple[str, int], list[int]] = {}
        for label, weights in enumerate(self.weights):
            give(self.llm, weights, str(label))
            for index, prompt in enumerate(PROMPTS):
                output = self.llm.generate({"prompt_token_ids": prompt}, self.drawn, use_tqdm=False)[0]
                self.right[str(label), index] = list(output.outputs[0].token_ids)
        self.updating = threading.Lock()  # a session has no owner: two that load at once would fill one
        self.refused: set[str] = set()
        self.waiting: list[Future[None]] = []
        self.requests = ThreadPoolExecutor(NUM_WAITING)

    drawn = params(max_tokens=5, seed=2)

    def sequence(self, rng: random.Random) -> None:
        """A few moves of one thread."""
        for _ in range(rng.randrange(2, 6)):
            move: Callable[[random.Random], None] = getattr(self, rng.choice(MOVES))
            try:
                move(rng)
            except (WrongStateError, WeightConflictError) as error:
                assert REFUSED.search(str(error)), error
                self.refused.add(str(error).split(":")[0].split(" while")[0][:40])

    def pause(self, rng: random.Random) -> None:
        self.llm.pause_generation(rng.choice(MODES), clear_cache=rng.random() < 0.2)

    def resume(self, rng: random.Random) -> None:
        self.llm.resume_generation()

    def sleep(self, rng: random.Random) -> None:
        self.llm.sleep(rng.choice([0, 1, 1, 2]), mode=rng.choice(MODES))

    def wake(self, rng: random.Random) -> None:
        self.llm.wake_up(rng.choice([None, None, *([tag] for tag in TAGS)]))

    def reset(self, rng: random.Random) -> None:
        self.llm.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)

    def relabel(self, rng: random.Random) -> None:
        with self.updating:  # else it could give new weights an old label
            self.llm.update_weight_version(self.llm.get_weight_version())

    def abort_update(self, rng: random.Random) -> None:
        self.llm.abort_weight_update()

    def begin_update(self, rng: random.Random) -> None:
        """One that its thread leaves open."""
        with self.updating:
            self.llm.start_weight_update(partial=rng.random() < 0.5)

    def update(self, rng: random.Random) -> None:
        label = rng.randrange(3)
        with self.updating:
            try:
                give(
                    self.llm, self.weights[label], str(label), on_running=rng.choice(["recompute", "keep_kv", "abort"])
                )
            except WeightUpdateError as error:
                assert isinstance(error, WeightConflictError) or "is not whole" in str(error), error
                if isinstance(error, WeightConflictError):
                    raise

    def ask(self, rng: random.Random) -> None:
        """A request in a thread of its own, which ends by itself, by an abort, or with the reason why it cannot."""
        self.waiting = [each for each in self.waiting if not each.done() or each.result() is not None]
        if len(self.waiting) < NUM_WAITING:
            self.waiting.append(self.requests.submit(self.answer, rng.randrange(len(PROMPTS)), rng.random() < 0.3))

    def answer(self, index: int, drops: bool) -> None:
        prompt = {"prompt_token_ids": PROMPTS[index]}
        try:
            if drops:
                for _ in self.llm.stream(prompt, self.drawn):
                    break
                return
            (output,) = self.llm.generate(prompt, self.drawn, use_tqdm=False)
        except WrongStateError as error:
            assert REFUSED.search(str(error)), error
            return
        self.check(index, output)

    def check(self, index: int, output: RequestOutput) -> None:
        told = output.outputs[0]
        assert told.finish_reason in ("length", "abort", "error"), told
        assert told.finish_reason != "error" or told.stop_reason == "weights_broken"
        labels = {span.version for span in told.weight_versions}
        if len(labels) == 1 and not any(span.mixed for span in told.weight_versions):
            right = self.right[labels.pop(), index]
            assert list(told.token_ids) == right[: len(told.token_ids)]

    def end(self) -> None:
        """Whatever it stood at, an engine of these weights."""
        if self.llm.weight_state()["state"] != "ready":
            self.llm.abort_weight_update()
        self.llm.wake_up()
        self.llm.resume_generation()
        give(self.llm, self.weights[1], "1")
        for each in self.waiting:
            each.result(patient(60))
        self.requests.shutdown()
        standing = self.llm.engine.core.standing()
        assert (standing.num_unfinished, standing.settled, standing.lost, standing.asleep) == (0, True, False, [])
        for index, prompt in enumerate(PROMPTS):
            (output,) = self.llm.generate({"prompt_token_ids": prompt}, self.drawn, use_tqdm=False)
            assert output.outputs[0].weight_versions[0].version == "1"
            assert list(output.outputs[0].token_ids) == self.right["1", index]


MOVES = (
    "pause",
    "resume",
    "resume",
    "sleep",
    "wake",
    "wake",
    "reset",
    "relabel",
    "update",
    "update",
    "begin_update",
    "abort_update",
    "abort_update",
    "ask",
    "ask",
    "ask",
)


@pytest.fixture(params=["host", "none", "memory that moves"])
def crowd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    if request.param == "memory that moves":  # who touches what has none ends by a signal
        pages = PagesDouble()
        move_memory(monkeypatch, pages)
        made = Crowd(tmp_path, "none", native="off", num_gpu_blocks_override=400)
    else:
        made = Crowd(tmp_path, request.param)
    with made.llm:
        yield made
    if request.param == "memory that moves":
        pages.check()
        assert pages.calls["unmap"] > 4, "it has slept"


@pytest.mark.parametrize("num_sequences", [120, pytest.param(10_000, marks=pytest.mark.slow)])
def test_rl_p2_any_sequences_of_moves_from_any_threads_end(crowd: Crowd, num_sequences: int) -> None:
    """Of values that wait for the whole, and of ones that overwrite the old as they come."""

    def run(seed: int) -> Any:
        rng = random.Random(seed)
        for _ in range(num_sequences // NUM_THREADS):
            crowd.sequence(rng)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for done in [pool.submit(run, seed) for seed in range(NUM_THREADS)]:
            done.result(patient(600))
    crowd.end()
    assert len(crowd.refused) > 3, crowd.refused

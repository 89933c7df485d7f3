"""Random engines, each beside a plain one: every request has the bits that it has alone.

`python3 tests/gpu/fuzz_engines.py [--device cuda] [--first 0] [--count N] [--seconds S] [--models A,B] [--drafts K]`
runs the cases of seeds FIRST, FIRST + 1, ...: an engine of random settings, with requests that come, are aborted and
end between resets, pauses, sleep and new weights. A finished request must be what it is alone in an eager engine of the
same numerics without prefix cache and drafts, an aborted one a beginning of it; at the end nobody holds a block, and
tensors that lie between a step's own are as they were. It prints a line for each case that differs, with its first
difference, and counts last; ends with 1 if any differed.

A case whose settings an engine refuses is counted as refused. `--first SEED --count 1 --models MODEL` with the same
device and drafts is the same case again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import logging
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from engine_checks import num_missing_blocks
from fuzz_cases import Case, Event, Fields, Request, draw
from fuzz_models import MODELS, Checkpoints
from octavo import LLM, RequestOutput, RequestOutputKind, SamplingParams
from octavo.frontend.control import PauseOrder, SleepOrder, WakeOrder, WrongStateError
from octavo.request.sampling_params import ParameterError
from octavo.text.thinking import ThinkingRule

MAX_IDLE_STEPS = 20_000  # in a row, in which no token is computed though somebody waits
MAX_SETTLING_STEPS = 5_000  # behind the last request, until blocks are free that transfers hold
MAX_BYSTANDERS, STEPS_BETWEEN_LOOKS = 400, 4
MAX_PLAIN_ENGINES = 4  # that are kept
POOL_BYTES = 192 << 20
PLAIN: Fields = {
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "async_scheduling": False,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": POOL_BYTES,
}
_UNTOUCHED = 0x5A
Facts = dict[str, Any]  # name -> what a request's outputs say of it together


def _plain_logprobs(found: Any) -> list[Any] | None:
    """Entries by token id, of a list of dicts as of FlatLogprobs."""
    if found is None:
        return None
    return [
        None
        if each is None
        else sorted((token, one.logprob, one.rank, one.decoded_token) for token, one in each.items())
        for each in found
    ]


class Answer:
    """What a request's outputs say together, whatever their kind."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._adds = kind == RequestOutputKind.DELTA
        self.facts: Facts = {}

    def take(self, output: RequestOutput) -> None:
        """The next output. The text that an abort flushes is left out: alone, another token may end it."""
        if output.prompt_logprobs is not None:
            self.facts["prompt log-probabilities"] = _plain_logprobs(output.prompt_logprobs)
        for one in output.outputs:
            lists = {"tokens": one.token_ids, "log-probabilities": _plain_logprobs(one.logprobs)}
            for name, found in {**lists, "sampling mask": one.sampling_mask}.items():
                self._put(f"{name} of {one.index}", None if found is None else list(found))
            if one.finish_reason != "abort":
                self._put(f"text of {one.index}", one.text)
            self.facts[f"end of {one.index}"] = (one.finish_reason, one.stop_reason)
            self.facts[f"sum of {one.index}"] = one.cumulative_logprob

    def _put(self, name: str, found: Any) -> None:
        if found is not None:
            self.facts[name] = self.facts[name] + found if self._adds and name in self.facts else found


def difference(found: Facts, expected: Facts, *, is_part: bool = False) -> str:
    """The first one; "" where there is none. is_part: of a request that was aborted, a beginning of all."""
    for name in expected:
        one, other = found.get(name), expected[name]
        if is_part and (one is None or name.startswith(("end", "sum"))):
            continue
        if is_part and isinstance(one, list | str) and isinstance(other, list | str):
            other = other[: len(one)]
        if one == other:
            continue
        if isinstance(one, list) and isinstance(other, list):
            at = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
            name = f"{name} at {at}, {len(one)} and {len(other)} of them"
            one, other = one[at : at + 1], other[at : at + 1]
        return f"{name}: {str(one)[:200]}, not {str(other)[:200]}"
    return f"{sorted(found.keys() - expected.keys())} alone has not" if found.keys() - expected.keys() else ""


class Bystanders:
    """Tensors that no step has to do with, in memory that steps have used: one that changes was written by a kernel
    that left its own tensors.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.kept: collections.deque[torch.Tensor] = collections.deque(maxlen=MAX_BYSTANDERS)
        self._num_steps, self.found = 0, list[str]()

    def step(self) -> None:
        """A few more each step, of which the last ones are kept; all are looked at now and then."""
        self._num_steps += 1
        sizes = (512, 512, 512, 1024, 4096, 32768)  # bytes: what small steps take
        self.kept += [torch.full((size,), _UNTOUCHED, dtype=torch.uint8, device=self._device) for size in sizes]
        if self._num_steps % STEPS_BETWEEN_LOOKS == 0:
            self.look()

    def look(self) -> None:
        """Note what has changed."""
        if not self.kept or bool((torch.cat([*self.kept]) == _UNTOUCHED).all()):
            return
        for tensor in self.kept:
            wrong = tensor[tensor != _UNTOUCHED]
            if len(wrong):
                told = bytes(wrong[:16].tolist()).hex()
                self.found.append(f"step {self._num_steps}: {len(wrong)} bytes of others' memory are {told}")
                tensor.fill_(_UNTOUCHED)


class Driver:
    """An engine whose requests are told by name, stepped until they end."""

    def __init__(self, llm: LLM, bystanders: Bystanders | None = None) -> None:
        self.llm, self.engine = llm, llm.engine
        self._bystanders = bystanders
        self.answers: dict[str, Answer] = {}
        self.unfinished: set[str] = set()
        self.aborted: set[str] = set()
        self._rule = ThinkingRule.of(llm.engine.tokenizer, llm.config)
        self._idle = 0

    def add(self, name: str, request: Request, **fields: Any) -> str:
        """Queue it. Why it is refused, else ""."""
        try:
            params, prompt = SamplingParams(**{**request.params, **fields}), list(request.prompt)
            told = self._rule.apply(params, None, prompt, may_open=False)
            self.engine.add(name, prompt, told, priority=request.priority, cache_salt=request.cache_salt)
        except ParameterError as error:
            return str(error)
        self.answers[name] = Answer(params.output_kind)
        self.unfinished.add(name)
        return ""

    def abort(self, name: str) -> None:
        if name in self.unfinished:
            self.engine.abort([name])
            self.aborted.add(name)

    def step(self) -> None:
        """Raises RuntimeError where nothing goes on."""
        if self._bystanders is not None:
            self._bystanders.step()
        before = self.engine.scheduler.num_scheduled_tokens
        for output in self.engine.step():
            self.answers[output.request_id].take(output)
            if output.finished:
                self.unfinished.remove(output.request_id)
        self._idle = self._idle + 1 if self.engine.scheduler.num_scheduled_tokens == before else 0
        if self._idle > MAX_IDLE_STEPS:
            raise RuntimeError(f"{MAX_IDLE_STEPS} steps computed no token, and {sorted(self.unfinished)} wait")
        if self._idle > 100:  # for blocks that threads bring or take
            time.sleep(0.001)

    def end(self) -> Iterator[str]:
        """Step until nobody holds a block. What is wrong with the cache then."""
        while self.unfinished or self.engine.has_unfinished:
            self.step()
        for _ in range(MAX_SETTLING_STEPS):
            if num_missing_blocks(self.llm):
                self.step()
        if missing := num_missing_blocks(self.llm):
            yield f"{missing} blocks are held by nobody"
        try:
            self.engine.scheduler.kv.check()
        except AssertionError as error:
            yield f"the cache's own check: {error!r}"


class PlainEngines:
    """Engines that requests are alone in, one for each set of numerics."""

    def __init__(self, make: Callable[[Fields], LLM]) -> None:
        self._make = make
        self._made: dict[str, LLM] = {}

    def driver(self, numerics: Fields) -> Driver:
        """Raises ValueError where these settings are refused."""
        key = repr(sorted(numerics.items()))
        if key not in self._made:
            if len(self._made) >= MAX_PLAIN_ENGINES:
                self._made.pop(next(iter(self._made))).close()
            self._made[key] = self._make({**numerics, **PLAIN})
        return Driver(self._made[key])

    def close(self) -> None:
        """Release all; others are made where they are asked for again."""
        while self._made:
            self._made.popitem()[1].close()


def answers_alone(driver: Driver, requests: Iterable[Request]) -> list[Facts | str]:
    """Of each request its facts, or why it is refused."""
    found = list[Facts | str]()
    for index, request in enumerate(requests):
        refused = driver.add(str(index), request, output_kind=RequestOutputKind.FINAL_ONLY)
        while driver.unfinished:
            driver.step()
        found.append(refused or driver.answers[str(index)].facts)
    return found


@dataclasses.dataclass
class Counts:
    """Of all cases so far."""

    engines: int = 0
    refused: int = 0
    different: int = 0
    requests: int = 0
    aborted: int = 0
    events: int = 0
    drafts_accepted: int = 0
    preemptions: int = 0
    hits: int = 0  # tokens

    def __str__(self) -> str:
        named = {name.replace("_", " "): value for name, value in dataclasses.asdict(self).items()}
        return ", ".join(f"{name} {value:,}" for name, value in named.items())


class RefusedError(Exception):
    """No engine has these settings."""


class Fuzzer:
    """Runs cases on one device; its models lie in `folder`."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._checkpoints = Checkpoints(folder)
        self._plain = PlainEngines(lambda fields: LLM(**fields, device=device))
        self.counts = Counts()

    def run(self, case: Case) -> list[str]:
        """What differs. Raises RefusedError where its settings are, and what an engine raises."""
        numerics = {"model": self._checkpoints.model(case.model), **case.numerics}
        with tempfile.TemporaryDirectory(dir=self._folder) as files:
            try:
                plain = self._plain.driver(numerics)
                llm = self._engine(case, {**numerics, **self._settings(case, files)})
            except ValueError as error:
                raise RefusedError(str(error)) from None
            with contextlib.closing(llm):
                self.counts.engines += 1
                bystanders = Bystanders(self._device)
                driver, expected = Driver(llm, bystanders), answers_alone(plain, case.requests)
                refusals = list(self._drive(driver, case, expected))
                found = [*refusals, *differences(driver, case.requests, expected), *driver.end()]
                bystanders.look()
                self._count(driver)
        return [*bystanders.found, *found]

    def close(self) -> None:
        """Release the plain engines."""
        self._plain.close()

    def _settings(self, case: Case, files: str) -> Fields:
        found = dict(case.settings)
        if case.drafts:
            model = case.drafts.get("model")
            named = {"model": self._checkpoints.head(model)} if model else {}
            found["speculative_config"] = {**case.drafts, **named}
        if case.store:
            found["kv_transfer_config"] = _transfer(case.store, files)
        return found

    def _engine(self, case: Case, settings: Fields) -> LLM:
        """With a pool of many blocks, or of about as many as its longest request takes."""
        large: Fields = {"kv_cache_memory_bytes": POOL_BYTES, "device": self._device}
        if not case.pool:
            return LLM(**settings, **large)
        with LLM(**{**settings, "enforce_eager": True}, **large) as llm:
            blocks = 1 + int(llm.engine.memory.blocks_per_request * case.pool)
        return LLM(**settings, num_gpu_blocks_override=blocks, device=self._device)

    def _drive(self, driver: Driver, case: Case, expected: list[Facts | str]) -> Iterator[str]:
        """Step while requests come and events happen. What is refused otherwise than alone."""
        arrivals = sorted(
            (step, index, turn) for index, each in enumerate(case.requests) for turn, step in enumerate(each.arrivals)
        )
        events, aborts, step = list(case.events), list[tuple[int, str]](), 0
        while arrivals or driver.unfinished:
            if not driver.unfinished:
                step = max(step, arrivals[0][0])
            while events and events[0].step <= step:
                self._happen(driver, case.model, events.pop(0))
            while arrivals and arrivals[0][0] <= step:
                _, index, turn = arrivals.pop(0)
                name, request = f"{index}.{turn}", case.requests[index]
                self.counts.requests += 1
                refused, alone = driver.add(name, request), expected[index]
                if refused != (alone if isinstance(alone, str) else ""):
                    yield f"request {name} is refused: {refused!r}, alone: {alone!r}"
                if request.aborted_after is not None and turn == 0:
                    aborts.append((step + request.aborted_after, name))
            for name in [name for at, name in aborts if at == step]:
                driver.abort(name)
            driver.step()
            step += 1

    def _happen(self, driver: Driver, model: str, event: Event) -> None:
        rng, llm = random.Random(event.seed), driver.llm
        self.counts.events += 1
        if event.name == "reset":
            llm.reset_prefix_cache(reset_connector=rng.random() < 0.3)
        elif event.name == "recompute":
            llm.reset_prefix_cache(reset_running_requests=True)
        elif event.name == "pause":
            _pause(driver, clear_cache=rng.random() < 0.5)
            driver.engine.ask("resume")
        elif event.name == "sleep":
            with contextlib.suppress(WrongStateError):  # a transfer holds blocks
                driver.engine.ask("check_sleep", SleepOrder(level=0))
                _pause(driver, clear_cache=False)
                driver.engine.ask("sleep", SleepOrder(level=0, ends_pause=True))
                driver.engine.ask("wake_up", WakeOrder())
        else:
            weights = self._checkpoints.weights(model)
            is_part = event.name == "weights in part"
            running = "keep_kv" if event.name == "weights, kept" else "recompute"
            with llm.weights(rng.choice(["v1", "v2", None]), running, partial=is_part) as load:
                for name in _of_a_layer(weights, rng) if is_part else weights:
                    load(name, weights[name])

    def _count(self, driver: Driver) -> None:
        stats = driver.engine.stats
        self.counts.aborted += len(driver.aborted)
        self.counts.drafts_accepted += stats.num_accepted_tokens
        self.counts.preemptions += stats.num_preemptions
        self.counts.hits += stats.num_prefix_hits


def _of_a_layer(names: Iterable[str], rng: random.Random) -> list[str]:
    """Those of any one layer: what is fused in one comes as a whole."""
    layers = [(name, found[1]) for name in names if (found := re.search(r"layers\.(\d+)\.", name))]
    _, layer = rng.choice(layers)
    return [name for name, own in layers if own == layer]


def _pause(driver: Driver, *, clear_cache: bool) -> None:
    """As LLM.pause_generation has it; the next step gives what was on its way."""
    driver.engine.ask("pause", PauseOrder(clear_cache=clear_cache))
    driver.engine.settle(abort=False)


def _transfer(store: Fields, files: str) -> Fields:
    """The setting kv_transfer_config."""
    own = {
        "host": ("host", {"cpu_bytes_to_use": store.get("host")}),
        "files": ("shared_storage", {"shared_storage_path": files, "max_bytes": store.get("files")}),
    }
    found: list[Fields] = [
        {"kv_connector": own[name][0], "kv_role": "kv_both", "kv_connector_extra_config": own[name][1]}
        for name in store
    ]
    shared: Fields = {"kv_load_failure_policy": "recompute", "kv_lookup_timeout": 3600}  # a late block is no miss
    if len(found) == 1:
        return {**found[0], **shared}
    extra = {"connectors": found}
    return {"kv_connector": "multi", "kv_role": "kv_both", "kv_connector_extra_config": extra, **shared}


def differences(driver: Driver, requests: Sequence[Request], expected: list[Facts | str]) -> Iterator[str]:
    """Of each request beside itself alone."""
    for name, answer in driver.answers.items():
        index, is_part = int(name.partition(".")[0]), name in driver.aborted
        alone = expected[index]
        if isinstance(alone, dict) and (found := difference(answer.facts, alone, is_part=is_part)):
            asked = f"a prompt of {len(requests[index].prompt)} tokens, {requests[index].params}"
            yield f"request {name}{' (aborted)' if is_part else ''}: {found}; {asked}"


def main(argv: list[str]) -> int:
    """1 where a case differed."""
    parser = argparse.ArgumentParser(description="Random engines beside plain ones.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=20, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins later")
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between")
    parser.add_argument("--drafts", type=int, help="of each row, in every case")
    given = parser.parse_args(argv)
    models, began = given.models.split(","), time.monotonic()
    if unknown := set(models) - set(MODELS):
        parser.error(f"--models {','.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Fuzzer(Path(folder), given.device)) as fuzzer:
        for seed in itertools.islice(itertools.count(given.first), given.count):
            if time.monotonic() - began > given.seconds:
                break
            case = draw(seed, models, given.device, given.drafts)
            try:
                found = fuzzer.run(case)
            except RefusedError as error:
                fuzzer.counts.refused += 1
                print(f"refused: seed {seed} of {case.model}: {str(error)[:150]}", flush=True)
                continue
            except Exception:
                found = [traceback.format_exc(limit=-4).strip().replace("\n", " | ")]
                with contextlib.suppress(Exception):  # whichever engine it was, it works no more
                    fuzzer.close()
            if found:
                fuzzer.counts.different += 1
                print(
                    f"different: seed {seed} of {case.model}: {found[0]}; {len(found) - 1} more; {_told(case)}",
                    flush=True,
                )
        print(fuzzer.counts, flush=True)
    return int(fuzzer.counts.different > 0)


def _told(case: Case) -> str:
    """What a line says of a case: all but its requests."""
    shown = {**dataclasses.asdict(case), "requests": len(case.requests)}
    return ", ".join(f"{name}={value}" for name, value in shown.items() if name not in ("seed", "model"))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))

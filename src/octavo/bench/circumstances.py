"""What a request may meet that must change no bit: the requests of a reproducibility run, and the circumstances.

Owns the requests and what happens to them in one engine; which settings the engine has is the axis's. Judges nothing.
Invariant: what is drawn at random follows from the seed that is given.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from octavo.cache.plan import CachePlan
from octavo.llm import LLM
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import SamplingParams
from octavo.request.seeds import sample_seed

MAX_LEN = 640
NUM_OUTPUT = 64
HOST_BYTES = 1 << 30  # of host memory that a connector has at least
NUM_SIBLINGS = 4
_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 400, 511, 512, 513)
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 33, 48, 64, 65, 96, 127, 129, 160)
CHUNK = 64  # tokens from one state that a recurrent layer keeps to the next, in most
_NUM_RESETS = 5
_ANY_GROUPS = 6  # batches of any of these sizes; the rest are of the larger half
_BORDER_TURNS = 2  # by which NUM_SIBLINGS siblings ask each border of the longest prompt
_ALONE = 24  # requests beside which there is no other when they are asked again; the rest are asked in groups


class Answer(msgspec.Struct, frozen=True):
    """What one request was given."""

    tokens: list[int]
    logprobs: list[float]  # of each token; empty if nobody asked
    folds: list[int]  # of the logits that chose each token


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request. Those of a family differ in nothing but their seeds, which are those of one request's samples."""

    prompt: list[int]
    params: SamplingParams


def make_jobs(num_tokens: int, vocab_size: int, seed: int) -> list[Job]:
    """Requests for at least `num_tokens` output tokens, family by family, of every kind of sampling."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 40},
        {"temperature": 0.9, "min_p": 0.02, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    ]
    shared = [rng.randrange(vocab_size) for _ in range(MAX_LEN)]
    jobs = []
    for family in range(-(-num_tokens // (NUM_OUTPUT * NUM_SIBLINGS))):
        length = rng.choice(_LENGTHS) if family else 129  # at least one fills blocks
        num_shared = rng.randrange(length) if family % 3 == 0 else 0
        prompt = shared[:num_shared] + [rng.randrange(vocab_size) for _ in range(length - num_shared)]
        for sibling in range(NUM_SIBLINGS):
            params = SamplingParams(
                max_tokens=NUM_OUTPUT,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=sample_seed(family, sibling),
                **kinds[family % len(kinds)],
            )
            jobs.append(Job(prompt, params))
    return jobs


def unheard(num_done: int, num_all: int) -> None:
    """Nobody is told how far a run is."""


class Run:
    """One engine that answers jobs under circumstances."""

    def __init__(self, llm: LLM, rng: random.Random, tell: Callable[[int, int], None] = unheard) -> None:
        """The engine's logits are observed from now on. tell: hears how many of how many requests are answered."""
        self._llm, self.engine, self._tell = llm, llm.engine, tell
        self._rng = rng
        self.engine.core.ask_workers("digest_logits", type(None))
        self._num_noise = 0
        self.hits: list[int] = []  # tokens of each of the last answers' prompts that were found in the cache
        self.num_cut = 0  # requests that lost their blocks, of which the last chunk of states was not whole

    def forget(self) -> None:
        """Empty the prefix cache. Nothing runs."""
        assert self._llm.reset_prefix_cache(), "what runs keeps its blocks"

    def answers(
        self,
        jobs: Sequence[Job],
        *,
        arrivals: Sequence[int] = (),
        num_noise: int = 0,
        siblings: bool = False,
        resets: Collection[int] = (),
    ) -> list[Answer]:
        """Answer `jobs` together, in their order.

        arrivals: the step at which each comes (default: all at once). num_noise: other requests beside them, some of
        which are aborted. siblings: each family is one request. resets: steps before which whoever runs loses all its
        blocks, wherever it stands.
        """
        engine, steps = self.engine, list(arrivals) or [0] * len(jobs)
        count = NUM_SIBLINGS if siblings else 1
        due = sorted(range(0, len(jobs), count), key=lambda index: steps[index])
        finished: dict[str, RequestOutput] = {}
        step = 0
        self._take_digests()
        while due or engine.has_unfinished:
            while due and steps[due[0]] <= step:
                job = jobs[due[0]]
                engine.add(str(due.pop(0)), job.prompt, msgspec.structs.replace(job.params, n=count))
            if step in resets:
                self.num_cut += sum(one.num_computed % CHUNK > 0 for one in engine.scheduler.running)
                self._llm.reset_prefix_cache(reset_running_requests=True)
            if num_noise and step % 3 == 0:
                num_noise -= 1
                self._disturb()
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            step += 1
            self._tell(sum(name.isdecimal() for name in finished), len(jobs) // count)
        folds = self._take_digests()
        self.hits = [output.num_cached_tokens or 0 for _, output in sorted(finished.items())]
        return [self._answer(jobs, index, count, finished, folds) for index in range(len(jobs))]

    def _take_digests(self) -> dict[str, dict[int, int]]:
        """Of the logits since the last call: sequence id -> position -> digest."""
        return self.engine.core.ask_workers("take_digests", dict[str, dict[int, int]])[0]

    def _answer(
        self,
        jobs: Sequence[Job],
        index: int,
        count: int,
        finished: dict[str, RequestOutput],
        folds: dict[str, dict[int, int]],
    ) -> Answer:
        request_id, sibling = str(index - index % count), index % count
        completion = finished[request_id].outputs[sibling]
        own = folds[request_id if count == 1 else f"{sibling}_{request_id}"]
        tokens, start = list(completion.token_ids), len(jobs[index].prompt)
        logprobs = completion.logprobs or []
        return Answer(
            tokens,
            [entry[token].logprob for entry, token in zip(logprobs, tokens, strict=bool(logprobs))],
            [own[start + place] for place in range(len(tokens))],
        )

    def _disturb(self) -> None:
        """Add a request that nobody asked for, or abort the one before it."""
        self._num_noise += 1
        if self._num_noise % 3 == 0:
            self.engine.abort([f"noise{self._num_noise - 1}"])
            return
        rng, vocab = self._rng, self.engine.limits.vocab_size
        params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            detokenize=False,
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(99),
            presence_penalty=rng.choice([0.0, 0.5]),
            logit_bias={rng.randrange(vocab): 5.0},
            top_k=rng.choice([0, 7]),
            logprobs=rng.choice([None, 3]),
            prompt_logprobs=rng.choice([None, None, 2]),
        )
        prompt = [rng.randrange(vocab) for _ in range(rng.choice(_LENGTHS))]
        self.engine.add(f"noise{self._num_noise}", prompt, params)


Circumstance = Callable[[Run, Sequence[Job], random.Random], "tuple[list[Answer], str]"]


def in_groups(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Batches of 1, 2 and random sizes, one after the other; once there were several, of large ones."""
    found: list[Answer] = []
    sizes = [1, 2]
    while sum(sizes) < len(jobs):
        some = _GROUPS if len(sizes) < _ANY_GROUPS else _GROUPS[len(_GROUPS) // 2 :]
        sizes.append(min(rng.choice(some), len(jobs) - sum(sizes)))
    for size in sizes:
        found += run.answers(jobs[len(found) : len(found) + size])
    return found, f"groups of {min(sizes)} to {max(sizes)}"


def in_another_order(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """All at once, shuffled."""
    order = list(range(len(jobs)))
    rng.shuffle(order)
    found = dict(zip(order, run.answers([jobs[index] for index in order]), strict=True))
    return [found[index] for index in range(len(jobs))], ""


def beside_others(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """With requests of other kinds, some aborted."""
    return run.answers(jobs, num_noise=len(jobs)), f"{len(jobs)} neighbours or aborts"


def one_by_one(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Arriving over time: prompts are computed beside decodes."""
    return run.answers(jobs, arrivals=[rng.randrange(3 * NUM_OUTPUT) for _ in jobs]), ""


def as_siblings(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Each family as one request."""
    return run.answers(jobs, siblings=True), f"n={NUM_SIBLINGS}"


def with_other_logprobs(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Without log-probabilities, with more of them, and with those of the prompt."""
    wishes: list[dict[str, Any]] = [{"logprobs": None}, {"logprobs": 5}, {"logprobs": 0, "prompt_logprobs": 1}]
    changed = [Job(job.prompt, msgspec.structs.replace(job.params, **rng.choice(wishes))) for job in jobs]
    return run.answers(changed), ""


def all_at_once(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """As the reference, in an engine with other settings."""
    return run.answers(jobs), ""


def twice(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """The second time prompts are found in the prefix cache."""
    run.answers(jobs)
    before = run.engine.scheduler.stats().num_prefix_hits
    found = run.answers(jobs)
    return found, met(run.engine.scheduler.stats().num_prefix_hits - before, "tokens found in the cache")


def bytes_left(plan: CachePlan, num_tokens: int) -> int:
    """What a connector keeps of a request of so many tokens: K and V, and where layers keep states one a border.

    One state more stands behind the last token, or behind the prompt.
    """
    blocks = 0
    for group in plan.groups:
        if group.kind == "state":
            blocks += (num_tokens // group.block_size + 1) * group.parts.blocks
        elif group.is_attention and group.kind != "encoder_only":
            blocks += -(-num_tokens // group.block_size)
    return blocks * plan.bytes_per_block


def from_elsewhere(
    run: Run, jobs: Sequence[Job], rng: random.Random, *, num_bytes: int = HOST_BYTES
) -> tuple[list[Answer], str]:
    """The second time prompts are brought back by the connector. As many requests at once as `num_bytes` of it keep."""
    found, num_groups, before = list[Answer](), 0, run.engine.scheduler.stats().num_loaded_tokens
    while len(found) < len(jobs):
        group, left = list[Job](), num_bytes * 3 // 4
        for job in jobs[len(found) :]:
            left -= bytes_left(run.engine.memory, len(job.prompt) + NUM_OUTPUT)
            if group and left < 0:
                break
            group.append(job)
        run.answers(group)
        found += run.answers(group)
        num_groups += 1
    loaded = run.engine.scheduler.stats().num_loaded_tokens - before
    return found, met(loaded, "tokens loaded") + (f", of {num_groups} groups one by one" if num_groups > 1 else "")


def from_elsewhere_alone(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """The second time the first prompt of each family is brought back for a request beside which there is no other."""
    found, num_loaded = list[Answer](), 0
    for start in range(0, len(jobs), NUM_SIBLINGS):
        first, *others = jobs[start : start + NUM_SIBLINGS]
        run.answers([first])
        before = run.engine.scheduler.stats().num_loaded_tokens
        found += run.answers([first])
        num_loaded += run.engine.scheduler.stats().num_loaded_tokens - before
        found += run.answers(others)
    return found, met(num_loaded, "tokens loaded")


def at_borders(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Each behind a request that shares its prompt up to a border of states, and that alone is in the cache.

    Every border of every prompt, those of the first siblings in a step of one row. The answers are several rounds.
    """
    rounds, found_at = list[Answer](), set[int]()
    for turn in range(_BORDER_TURNS):
        found: dict[int, Answer] = {}
        for sibling in range(NUM_SIBLINGS):
            members = range(sibling, len(jobs), NUM_SIBLINGS)
            for group in [members] if sibling else [[index] for index in members]:
                run.forget()
                shared = [_up_to_a_border(run, jobs[index], sibling + NUM_SIBLINGS * turn, rng) for index in group]
                run.answers([job for job in shared if job])
                found |= zip(group, run.answers([jobs[index] for index in group]), strict=True)
                found_at |= {*run.hits} - {0}
        rounds += [found[index] for index in range(len(jobs))]
    return rounds, met(len(found_at), f"lengths of hits, {min(found_at, default=0)} to {max(found_at, default=0)}")


def _up_to_a_border(run: Run, job: Job, number: int, rng: random.Random) -> Job | None:
    """A request that leaves `job`'s states up to its border of that number, by turns; None: `job` reaches none."""
    borders = (len(job.prompt) - 1) // CHUNK
    if not borders:
        return None
    cut = job.prompt[: CHUNK * (1 + number % borders)]
    others = [rng.randrange(run.engine.limits.vocab_size) for _ in range(rng.randint(1, 3))]
    return Job(cut + others, msgspec.structs.replace(job.params, max_tokens=rng.randint(1, 2)))


def behind_another(run: Run, jobs: Sequence[Job], rng: random.Random, *, times: int = 0) -> tuple[list[Answer], str]:
    """A request, a disturbing one, the first again: the second answer counts, some of whose tokens must be found.

    times: how often at least, in rounds of all requests (default: one). The first few are alone, others in groups.
    """
    found, before = list[Answer](), run.engine.scheduler.stats().num_prefix_hits
    num_rounds = max(1, -(-times // len(jobs)))
    for start in range(0, num_rounds * len(jobs), len(jobs)):
        while len(found) < start + len(jobs):
            size = 1 if len(found) < _ALONE else rng.choice(_GROUPS)
            group = jobs[len(found) - start :][:size]
            run.answers([_cut_short(job, rng) for job in group])
            run.answers([_disturbing(job, jobs, rng) for job in group])
            found += run.answers(group)
    hits = run.engine.scheduler.stats().num_prefix_hits - before
    return found, f"{len(found)} times A, B, A, " + met(hits, "tokens found in the cache")


def _cut_short(job: Job, rng: random.Random) -> Job:
    """The same, which ends anywhere."""
    return Job(job.prompt, msgspec.structs.replace(job.params, max_tokens=rng.randint(1, NUM_OUTPUT)))


def _disturbing(job: Job, jobs: Sequence[Job], rng: random.Random) -> Job:
    """A request that begins like `job`, up to anywhere, and goes on like another."""
    other = jobs[rng.randrange(len(jobs))]
    shared = job.prompt[: rng.randrange(len(job.prompt) + 1)]
    prompt = [*shared, *other.prompt[: rng.randint(1, len(other.prompt))]]
    return _cut_short(Job(prompt[: MAX_LEN - NUM_OUTPUT], other.params), rng)


def crowded(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """In a pool that is too small: short prompts first, so that many start, and few requests several times.

    And all that run are preempted now and then: a pool that states nearly fill is seldom short of a block.
    """
    order = sorted(list(range(len(jobs))) * -(-64 // len(jobs)), key=lambda index: len(jobs[index].prompt))
    resets = rng.sample(range(1, NUM_OUTPUT), _NUM_RESETS)
    found = dict(zip(order, run.answers([jobs[index] for index in order], resets=resets), strict=True))
    num_all = run.engine.scheduler.num_preemptions
    remark = met(num_all, f"preemptions, {_NUM_RESETS} times of all, ")
    return [found[index] for index in range(len(jobs))], remark + met(run.num_cut, "in the middle of a chunk")


def whatever(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """Order, arrivals and neighbours at random; and now and then all that run are preempted, as in `crowded`."""
    order = list(range(len(jobs)))
    rng.shuffle(order)
    arrivals = [rng.randrange(2 * NUM_OUTPUT) for _ in jobs]
    resets = rng.sample(range(NUM_OUTPUT, 2 * NUM_OUTPUT), _NUM_RESETS // 2)
    answers = run.answers([jobs[index] for index in order], arrivals=arrivals, num_noise=len(jobs) // 2, resets=resets)
    found = dict(zip(order, answers, strict=True))
    return [found[index] for index in range(len(jobs))], met(run.engine.scheduler.num_preemptions, "preemptions")


def with_drafts(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """All at once, several tokens of a row in a step. Random weights may reject all that a method guesses."""
    answers = run.answers(jobs)
    stats = run.engine.scheduler.stats()
    return answers, met(stats.num_draft_tokens, f"drafts, {stats.num_accepted_tokens} accepted")


def with_right_drafts(run: Run, jobs: Sequence[Job], rng: random.Random) -> tuple[list[Answer], str]:
    """The same, of whose drafts some must be accepted and some must not."""
    answers = run.answers(jobs)
    stats = run.engine.scheduler.stats()
    met(stats.num_draft_tokens - stats.num_accepted_tokens, "drafts rejected")
    return answers, met(stats.num_accepted_tokens, f"of {stats.num_draft_tokens} drafts accepted")


class NotMetError(RuntimeError):
    """A run did not meet the circumstance that it is for, so it proves nothing."""


def met(count: int, what: str) -> str:
    """A remark that counts what was met. Raises NotMetError where that is nothing."""
    if not count:
        raise NotMetError(f"no {what}")
    return f"{count} {what}"

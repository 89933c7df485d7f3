"""Blocks of one engine's cache in another's: names that both give alike, and the same bits as computed (C.13)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_checks import GOOD_PROMPT, assert_idle
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.cache.pool import KVCachePool
from octavo.config.settings import ConfigError
from octavo.kv_connector import Later, SilentConnector, Transfer, TransferResults
from octavo.plan import StepLimits
from octavo.request.request import Request
from octavo.sched.scheduler import Scheduler

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=2)
SECRET = "0123456789abcdef" * 2
ASK = """
import sys
from octavo import LLM
with LLM(dtype="float32", max_model_len=512, prefix_cache_secret_file=sys.argv[1]) as llm:
    kv = llm.engine.scheduler.kv
    print(kv.identity.encode().hex(), kv._chain.root("").hex())
"""


def pool_of(llm: LLM) -> KVCachePool:
    return runner_of(llm.engine)._pool


@dataclasses.dataclass
class Copies(SilentConnector):
    """Copies blocks of engine `source` that are found there by their names; the failing ones arrive as garbage."""

    source: LLM
    target: LLM
    num_bad: int = 0
    delay: int = 0  # how often the engine is told that nothing has ended
    offered: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.loads: list[Transfer] = []
        self.num_looks = 0

    def match(self, request: Request, num_local: int) -> int | Later:
        size = self.source.engine.scheduler.kv.block_size
        cached = self.source.engine.scheduler.kv._pool.cached(0)
        count = num_local // size
        while count < len(request.block_hashes) and request.block_hashes[count] in cached:
            count += 1
        return count * size - num_local

    def allocated(self, load: Transfer) -> None:
        self.offered.append(load.end - load.start)
        kv = self.source.engine.scheduler.kv
        places = range(load.start // kv.block_size, load.end // kv.block_size)
        blocks = [kv._pool.cached(0)[load.request.block_hashes[place]] for place in places]
        bytes_of = pool_of(self.source).extract(blocks)
        if self.num_bad:
            bytes_of[-self.num_bad :] = 0xFF  # NaN, had anybody read it
        pool_of(self.target).inject([load.blocks[0][place] for place in places], bytes_of)
        self.loads.append(load)

    def finished(self, save: Transfer) -> bool:
        return False

    def cancel(self, number: int, *, force: bool) -> bool:
        self.loads = [load for load in self.loads if load.number != number]
        return True

    def take_results(self) -> TransferResults:
        self.num_looks += 1
        if not self.loads or self.num_looks <= self.delay:
            return TransferResults()
        loads, self.loads = self.loads, []
        if not self.num_bad:
            return TransferResults(done=[load.number for load in loads])
        return TransferResults(failed={load.number: frozenset(load.blocks[0][-self.num_bad :]) for load in loads})

    def wait(self, seconds: float) -> None:
        assert seconds < 1.0


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "key"
    path.write_text(SECRET + "\n")
    return path


@pytest.fixture(scope="module")
def pair(secret_file: Path) -> Iterator[tuple[LLM, LLM]]:
    fields = {"dtype": "float32", "max_model_len": 512, "prefix_cache_secret_file": str(secret_file)}
    with LLM(**fields) as first, LLM(**fields) as second:
        yield first, second


def connect(pair: tuple[LLM, LLM], **options: int) -> Copies:
    first, second = pair
    assert second.reset_prefix_cache()
    connector, kv = Copies(first, second, **options), second.engine.scheduler.kv
    limits = StepLimits(max_num_rows=8, max_num_tokens=512, max_model_len=512)
    second.engine.core.scheduler = Scheduler(kv, limits, connector=connector)
    return connector


def bits(outputs: list) -> list:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("options", [{}, {"delay": 3}, {"num_bad": 1}], ids=["hit", "late", "failed"])
def test_C_13_what_was_loaded_gives_the_bits_of_what_was_computed(pair, options) -> None:
    prompts = [GOOD_PROMPT * 9, GOOD_PROMPT * 3 + "x = 1", "nothing that was said before"]
    expected = bits(pair[0].generate(prompts, PARAMS))
    connector = connect(pair, **options)
    stats = pair[1].engine.scheduler.stats
    outputs = pair[1].generate(prompts, PARAMS)
    assert bits(outputs) == expected and len(connector.offered) == 2 and min(connector.offered) >= 16
    size = pair[1].engine.scheduler.kv.block_size
    assert stats().num_loaded_tokens == sum(connector.offered) - 2 * size * options.get("num_bad", 0)
    assert stats().num_load_failures == 2 * options.get("num_bad", 0)
    assert_idle(pair[1])
    assert bits(pair[1].generate(prompts, PARAMS)) == expected and len(connector.offered) == 2  # found here now


def test_another_process_with_the_secret_gives_the_same_names(pair, secret_file) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ASK, str(secret_file)], check=True, capture_output=True, text=True, env=dict(os.environ)
    )
    kv = pair[0].engine.scheduler.kv
    assert run.stdout.split() == [kv.identity.encode().hex(), kv._chain.root("").hex()]
    assert kv.identity == pair[1].engine.scheduler.kv.identity and SECRET not in run.stdout + run.stderr


def test_other_settings_give_other_names(pair, secret_file, make_llm: Callable[..., LLM]) -> None:
    identity = pair[0].engine.scheduler.kv.identity
    common = {"max_model_len": 512, "prefix_cache_secret_file": str(secret_file)}
    other = make_llm(**common, kv_cache_dtype="int8", load_format="dummy").engine.scheduler.kv.identity
    assert not {other.model, other.cache_dtype, other.numerics_id} & set(dataclasses.astuple(identity))
    assert make_llm(max_model_len=512).engine.scheduler.kv.identity == type(identity)()


@pytest.mark.parametrize(
    ("content", "message"), [(b"short", "32 to 4096 bytes, it has 5"), (b"x" * 5000, "it has more")]
)
def test_a_bad_secret_is_refused_by_its_file_and_not_told(tmp_path, content, message, make_llm) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        make_llm(prefix_cache_secret_file=str(path))
    assert "prefix_cache_secret_file" in str(caught.value) and "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_llm(prefix_cache_secret_file=str(tmp_path / "none"))

"""What a connector keeps of a hybrid under a name is, byte by byte, what is computed under it (C.8 for states).

Blocks are filled with NaN when they are handed out, so that what nobody writes has the same bytes everywhere, too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import random_models
import recurrent_rig as rig
from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.kv_connector.worker.host_memory import HostHandler
from test_connectors import host, settle
from test_recurrent import chosen, engine_of

LONG = random_models.token_prompts(200)[0]["prompt_token_ids"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Settings for a model of a window, full attention and states; engines that name blocks alike."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "secret").write_text("0" * 32)
    with rig.packages():
        yield {**rig.write_mixed(folder), "block_size": 16, "prefix_cache_secret_file": str(folder / "secret")}


class Gate:
    """Lets the connector read the cache for a save when a permit is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits, self.handlers = threading.Semaphore(0), set[HostHandler]()
        handle = HostHandler.handle

        def slowly(handler: HostHandler, job: Any) -> Any:
            self.handlers.add(handler)
            if not job.order.is_load:
                assert self.permits.acquire(timeout=60), "somebody lets every save through"
            return handle(handler, job)

        monkeypatch.setattr(HostHandler, "handle", slowly)


def storm(llm: LLM, gate: Gate, rng: random.Random, requests: dict[str, Any]) -> dict[str, Any]:
    """Run requests, (tokens, parameters) by name, while some are preempted or aborted and saves take their time.

    What they say, some not to the end.
    """
    left, outputs = list(requests), {}
    scheduler = llm.engine.scheduler
    while left or llm.engine.has_unfinished:
        if left and rng.random() < 0.3:
            name = left.pop()
            llm.engine.add(name, *requests[name])
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
        if rng.random() < 0.15 and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        if rng.random() < 0.02 and scheduler.running:
            llm.engine.abort([scheduler.running[0].request_id])
        if rng.random() < 0.5:
            gate.permits.release()
        if rng.random() < 0.1:
            scheduler.kv.check()
    return outputs


@pytest.mark.parametrize("seed", range(3))
def test_C_8_what_is_stored_under_a_name_is_what_is_computed(seed: int, mixed: dict[str, Any], monkeypatch):
    rng, gate = random.Random(seed), Gate(monkeypatch)
    requests = {}
    for number in range(20):
        own = [rng.randrange(3, 300) for _ in range(rng.randrange(4))]
        prompt = [3 + rng.randrange(3), *LONG[: rng.choice([20, 63, 100, 140, 180])], *own]
        params = SamplingParams(
            temperature=0.9, seed=number, max_tokens=rng.randint(1, 40), ignore_eos=True, logprobs=0, detokenize=False
        )
        requests[str(number)] = prompt, params
    with engine_of(mixed) as llm:
        pool = llm.engine.memory.blocks_per_request + 20
        expected = {}
        for name, (prompt, params) in requests.items():
            expected[name] = chosen(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0])
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 90, "num_gpu_blocks_override": pool}
    config = host("320K", eviction_policy=("lru", "arc")[seed % 2])
    own = {**mixed, **fields, "snapshot_interval": seed, "enable_prefix_caching": seed != 2}
    with engine_of(own, kv_transfer_config=config) as llm:
        outputs = storm(llm, gate, rng, requests)
        gate.permits.release(1000)
        stats, moved = settle(llm)
        assert stats.num_preemptions >= 3 and moved.num_saved_blocks and stats.num_loaded_tokens
        assert not stats.num_load_failures
        for name, output in outputs.items():
            tokens, logprobs = chosen(output)
            count = len(tokens) if output.outputs[0].finish_reason == "abort" else len(expected[name][0])
            assert (tokens, logprobs) == tuple(part[:count] for part in expected[name])
        slots = dict(llm.engine.scheduler.loads.connector.index._slots)
        (handler,) = gate.handlers
        stored = {key: handler._row(slot).numpy().tobytes() for key, slot in slots.items()}
    computed: dict[bytes, bytes] = {}
    with engine_of(mixed) as llm:
        params = SamplingParams(max_tokens=1, detokenize=False)
        prompts = [[*requests[name][0], *expected[name][0]] for name in requests]
        blocks, data = llm.engine.scheduler.kv._pool, runner_of(llm.engine)._pool.data
        for prompt in prompts:
            llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            for column, cached in enumerate(blocks._cached):
                for name, block in cached.items():
                    computed[name + bytes([column])] = data[:, block].numpy().tobytes()
        first = sum(group.parts.blocks for group in llm.engine.memory.groups if group.kind != "state")
    assert stored.keys() <= computed.keys()
    assert all(computed[key] == data for key, data in stored.items())
    assert sum(key[16] >= first for key in stored) > 10 and sum(key[16] < first for key in stored) > 10

"""Blocks from GPU to GPU: by NCCL (P.4, O.2), and between sides that differ (T): the same bits, and deadlines.

And blocks over the bus (O.1): each byte where it belongs, whichever way they are copied.
"""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM
from octavo.kv_connector.orders import Order
from octavo.kv_connector.worker import cache_bytes
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Mover
from octavo.ops.arrivals import make_gates
from octavo.ops.cache_write import copy_blocks_bulk, copy_blocks_gpu
from octavo.ops.copying import BlockCopy, can_copy_pieces
from peer_engine import peer
from test_p2p import LONG, PARAMS, PROMPTS, WAYS, bits, need_library, p2p, until_idle, with_transfer

pytestmark = pytest.mark.gpu
FIELDS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
LAYOUTS = ["LBNHC", "BLHNC"]


def config(role: str, backend: str = "nccl", **more: object) -> dict[str, Any]:
    extra = {"backend": backend}
    return {**p2p(role), "kv_connector_extra_config": extra, "kv_transfer_timeout": 60, **more}


@functools.cache
def computed_alone(layout: str, *, long: bool = False) -> list[Any]:
    """By one engine."""
    with LLM(**FIELDS, kv_cache_layout=layout) as alone:
        return bits(alone.generate(LONG if long else PROMPTS, PARAMS))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_P_4_D_2_blocks_of_another_gpu_give_one_engines_bits(backend: str, layout: str) -> None:
    fields = {**FIELDS, "kv_cache_layout": layout}
    expected = computed_alone(layout)
    with (
        peer({**fields, "kv_transfer_config": config("kv_producer", backend)}, CUDA_VISIBLE_DEVICES="1,0") as other,
        LLM(**fields, kv_transfer_config=config("kv_consumer", backend)) as llm,
    ):
        for _ in range(3):  # from the second time on over the same group
            told = other.prefill(PROMPTS)
            assert bits(llm.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
            until_idle(llm)
            assert llm.reset_prefix_cache()
        stats = llm.engine.scheduler.stats()
        assert stats.num_loaded_tokens and not stats.num_load_failures


@pytest.mark.parametrize(("theirs", "ours", "how"), [("LBNHC", "LBNHC", "bulk copies"), ("LBNHC", "BLNHC", "Triton")])
def test_P_4_D_2_memory_of_another_process_is_mapped_and_copied_from(
    theirs: str, ours: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one GPU, as between two; and by rows, into blocks of another size."""
    kernel = copy_blocks_bulk if how == "bulk copies" else copy_blocks_gpu
    if kernel is copy_blocks_gpu:
        monkeypatch.setattr(copy_blocks_bulk, "serves", lambda *args: False)
    copied, copy = list[int](), kernel.copy_blocks

    def noted(told: BlockCopy, **options: Any) -> None:
        copy(told, **options)  # who fails here is not noted
        copied.append(told.blocks.shape[1])

    monkeypatch.setattr(kernel, "copy_blocks", noted)
    expected = computed_alone("LBNHC", long=True)
    sizes = (16, 32) if (theirs, ours) == ("LBNHC", "LBNHC") else (16,)
    with peer(
        {**FIELDS, "block_size": 16, "kv_cache_layout": theirs, "kv_transfer_config": config("kv_producer", "ipc")}
    ) as other:
        for size in sizes:
            fields = {**FIELDS, "block_size": size, "kv_cache_layout": ours}
            with LLM(**fields, kv_transfer_config=config("kv_consumer", "ipc")) as llm:
                copied.clear()
                for _ in range(2):
                    told = other.prefill(LONG)
                    assert bits(llm.generate(LONG, [with_transfer(PARAMS, each) for each in told])) == expected
                    until_idle(llm)
                    assert llm.reset_prefix_cache()
                stats = llm.engine.scheduler.stats()
                assert stats.num_loaded_tokens and not stats.num_load_failures
                assert copied or (how == "bulk copies" and torch.cuda.get_device_capability()[0] != 9)


def test_P_3_one_gpu_for_both_sides_is_a_failed_load_and_is_recomputed() -> None:
    """NCCL refuses two ranks on one GPU."""
    with LLM(**FIELDS) as alone:
        expected = bits(alone.generate(PROMPTS, PARAMS))
    own = config("kv_consumer", kv_load_failure_policy="recompute")
    with (
        peer({**FIELDS, "kv_transfer_config": config("kv_producer")}, CUDA_VISIBLE_DEVICES="0") as other,
        LLM(**FIELDS, kv_transfer_config=own) as llm,
    ):
        told = other.prefill(PROMPTS)
        assert bits(llm.generate(PROMPTS, [with_transfer(PARAMS, each) for each in told])) == expected
        until_idle(llm)
        assert llm.engine.scheduler.stats().num_load_failures == len(PROMPTS)
        other.process.kill()


@pytest.mark.parametrize(
    ("name", "sizes"), [("p2p", (16, 64)), ("nixl", (64, 16)), ("nixl", (16, 16)), ("push", (16, 64))]
)
def test_T_2_T_3_N_5_one_gpus_blocks_pass_into_blocks_of_another_size(name: str, sizes: tuple[int, int]) -> None:
    """Of other sizes through host memory; of one size, in layouts that keep a block together or apart, as they are."""
    need_library(WAYS[name]["kv_connector"])
    theirs = {**FIELDS, "block_size": sizes[0], "kv_cache_layout": "LBNHC"}
    ours = {**FIELDS, "block_size": sizes[1], "kv_cache_layout": "BLNHC"}
    with LLM(**ours) as alone:
        expected = bits(alone.generate(LONG, PARAMS))
    config = {**WAYS[name], "kv_transfer_timeout": 60}
    with (
        peer({**theirs, "kv_transfer_config": p2p("kv_producer", **config)}) as other,
        LLM(**ours, kv_transfer_config=p2p("kv_consumer", **config)) as llm,
    ):
        for _ in range(2):
            told = other.prefill(LONG)
            assert bits(llm.generate(LONG, [with_transfer(PARAMS, each) for each in told])) == expected
            until_idle(llm)
            assert llm.reset_prefix_cache()
        assert not llm.engine.scheduler.stats().num_load_failures


@pytest.mark.parametrize("pages", [1, 5])
@pytest.mark.parametrize("way", ["pieces", "staged"])
def test_O_1_blocks_cross_the_bus_whole(way: str, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are under way, or staged, at once, by two threads' turns; no other byte changes."""
    if way == "pieces" and not can_copy_pieces(torch.device("cuda")):
        pytest.skip("the driver takes no copies in batches")
    monkeypatch.setattr(cache_bytes, "_LEAST_PIECE", 1 if way == "pieces" else 1 << 40)
    data = torch.randint(256, (pages, 300, 4096), dtype=torch.uint8, device="cuda")
    monkeypatch.setattr(cache_bytes, "_STAGING_BYTES", 32 * pages * 4096)
    monkeypatch.setattr(cache_bytes, "_WINDOW_BYTES", 50 * 4096)
    cache, before = CacheBytes(data, 1 << 30, computes=lambda: True), data.clone()
    memory = cache.host_memory(200, cache.block_bytes)
    blocks, places = (np.random.default_rng(1).permutation(n)[:180].tolist() for n in (300, 200))
    rows = [memory[place] for place in places]
    torch.cuda.synchronize()
    cache.read(blocks, rows)
    assert torch.equal(torch.stack(rows), before[:, blocks].transpose(0, 1).reshape(180, -1).cpu())
    data[:, blocks] = 255
    torch.cuda.synchronize()
    thread = threading.Thread(target=cache.write, args=(blocks, rows))  # in which nobody has asked CUDA for anything
    thread.start()
    thread.join()
    assert torch.equal(data, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_O_1_C_13_blocks_from_host_memory_give_the_bits_of_computing(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_bytes, "_LEAST_PIECE", 1)  # a tiny model's pages are small
    fields = {**FIELDS, "kv_cache_layout": layout}
    with LLM(**fields) as alone:
        expected = bits(alone.generate(LONG, PARAMS))
    extra = {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "64M"}}
    with LLM(**fields, kv_transfer_config=extra) as llm:
        for _ in range(3):
            assert bits(llm.generate(LONG, PARAMS)) == expected
            until_idle(llm)
            assert llm.reset_prefix_cache()
        assert llm.engine.scheduler.stats().num_loaded_tokens


@pytest.mark.parametrize("pages", [1, 5, 9])
def test_O_2_layers_of_a_graph_wait_for_their_pages(pages: int) -> None:
    """And for all pages before them: what the graph does behind a gate reads them, though no thread waits.

    Before the first load, and between two, the gates are open.
    """
    if not can_copy_pieces(torch.device("cuda")):
        pytest.skip("the driver takes no copies in batches")
    data = torch.randint(256, (pages, 300, 1 << 18), dtype=torch.uint8, device="cuda")
    gates = make_gates(pages, data.device)
    assert gates, "torch and driver have them"
    cache, before, found = CacheBytes(data, 1 << 30, list(data), gates=gates), data.clone(), torch.zeros_like(data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(pages):
            gates.before(layer)
            found[layer].copy_(data[layer])
    memory = cache.host_memory(200, cache.block_bytes)
    blocks, places = (np.random.default_rng(1).permutation(n)[:180].tolist() for n in (300, 200))
    rows, early = [memory[place] for place in places], list[bool]()
    torch.cuda.synchronize()
    cache.read(blocks, rows)
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, data)
        data[:, blocks] = 255
        found.zero_()
        torch.cuda.synchronize()
        arrivals = cache.bring(blocks, rows)
        assert arrivals
        graph.replay()
        early.append(not arrivals.have_come())
        arrivals.before_all()
        assert torch.equal(found, before) and torch.equal(data, before)
        torch.cuda.synchronize()
        assert arrivals.have_come() and arrivals.seconds > 0
    assert pages < 9 or any(early), "a graph was launched before all was there"


@pytest.mark.parametrize(("layout", "drafts"), [("LBNHC", False), ("BLHNC", False), ("LBNHC", True)])
def test_C_13_a_request_alone_is_computed_behind_its_load(
    layout: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_bytes, "_LEAST_PIECE", 1)
    began, begin_now = list[bool](), Mover.begin_now

    def noted(mover: Mover, order: Order) -> bool:
        began.append(begin_now(mover, order))
        return began[-1]

    monkeypatch.setattr(Mover, "begin_now", noted)
    fields = {**FIELDS, "kv_cache_layout": layout}
    if drafts:
        fields["speculative_config"] = {"method": "eagle3", "model": "octavo-tiny-eagle3", "num_speculative_tokens": 3}
    prompts = [*LONG, list(range(100, 356))]  # the last one is whole blocks
    with LLM(**fields) as alone:
        expected = [bits(alone.generate([prompt], PARAMS)) for prompt in prompts]
    extra = {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "64M"}}
    with LLM(**fields, kv_transfer_config=extra) as llm:
        for turn in range(3):
            for prompt, own in zip(prompts, expected, strict=True):
                assert bits(llm.generate([prompt], PARAMS)) == own, turn
                until_idle(llm)
            assert llm.reset_prefix_cache()
        assert len(began) >= 4 and all(began), "of the two prompts that have a whole block, twice"
        assert not llm.engine.scheduler.stats().num_load_failures

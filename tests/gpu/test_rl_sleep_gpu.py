"""Sleep on a GPU: memory goes and comes behind addresses that stay, and graphs that were captured replay in their bits.

Run it alone: free memory is the whole device's. No `assert` names a tensor whose memory may be away: what an assertion
names is shown, which reads it, and an illegal access ends the process's device.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from octavo import LLM
from octavo.bench.engine import dummy_model
from octavo.device.cuda_pages import CudaPages
from octavo.device.virtual_memory import VirtualMemory
from octavo.frontend.control import WrongStateError
from octavo.rl import Sender, WeightSource
from trainer_model import make_model
from weights_rig import answers, prompts

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
CACHE = 2 << 30
FIELDS: dict[str, Any] = {
    "kv_cache_memory_bytes": CACHE,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "enable_sleep_mode": True,
    "weight_transfer_config": {"staging": "none"},
}
ASKED = prompts(5, 40, 90, 300)
SLACK = 64 << 20  # bytes by which the device's own books may differ from turn to turn


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def new_memory() -> VirtualMemory:
    return VirtualMemory(CudaPages(torch.device("cuda")))


def test_RL_S1_addresses_and_graphs_outlive_their_memory() -> None:
    memory = new_memory()
    large, small = memory.empty((4096, 40000), BF16), memory.empty((1536, 1024), BF16)
    tiny = memory.empty((16,), torch.float32)
    for tensor in (large, small, tiny):
        tensor.normal_()
    x, out = torch.randn(8, 4096, dtype=BF16, device="cuda"), torch.empty(8, 40000, dtype=BF16, device="cuda")
    torch.mm(x, large, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(x, large, out=out)
    graph.replay()
    expected, values = out.clone(), [large.clone(), small.clone(), tiny.clone()]
    places, mine = [tensor.data_ptr() for tensor in (large, small, tiny)], memory.num_bytes
    gained = []
    for turn in range(20):
        before = free_bytes()
        memory.save()
        given, again = memory.give_back(), memory.give_back()
        gained.append(free_bytes() - before)
        memory.take_again()
        memory.restore()
        out.zero_()
        graph.replay()
        same = torch.equal(out, expected)
        same_values = [torch.equal(a, b) for a, b in zip((large, small, tiny), values, strict=True)]
        assert (given, again, same, all(same_values)) == (mine, 0, True, True), turn
    print(f"{mine} bytes given back; the device gained {sorted(set(gained))}")
    assert min(gained) >= 0.95 * mine and [tensor.data_ptr() for tensor in (large, small, tiny)] == places


def test_a_range_ends_with_its_last_tensor() -> None:
    before = free_bytes()
    memory = new_memory()
    tensor = memory.empty((1 << 28,), torch.uint8)
    tensor.fill_(3)
    part = tensor[1000:]
    del memory, tensor
    assert before - free_bytes() >= (1 << 28) - SLACK
    assert int(part.max()) == 3
    del part
    gc.collect()
    assert before - free_bytes() <= SLACK  # a kernel's code is loaded when it is first launched


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """With graphs, and weights that can be sent again."""
    with dummy_model("0.6b", **FIELDS) as made:
        bring(made, 1)
        yield made


def bring(llm: LLM, seed: int) -> None:
    Sender(llm, "local").send(WeightSource(make_model("0.6b", seed)), f"seed-{seed}")
    gc.collect()


def parts(llm: LLM) -> dict[str, int]:
    """Bytes of each tag."""
    found = llm.engine.core._executor._worker._memory._parts  # type: ignore[attr-defined]
    return {tag: memory.num_bytes for (tag, kept), memory in found.items() if not kept}


def test_RL_S1_and_S4_each_tag_gives_its_memory_back(llm: LLM) -> None:
    expected, graphs = answers(llm, ASKED), llm.engine.core._executor._worker._runner._graphs  # type: ignore[attr-defined]
    assert graphs.first_keys(), "decoding runs by graphs"
    size, awake = parts(llm), free_bytes()
    assert size["kv_cache"] >= 0.95 * CACHE and size["weights"] >= 0.95 * llm.engine.memory.weight_bytes
    for level in (1, 1):
        llm.sleep(level)
        asleep = free_bytes()
        llm.wake_up(["weights"])
        with_weights = free_bytes()
        assert llm.wake_up(["kv_cache"])
        rows = {"both": asleep - awake, "weights": asleep - with_weights, "kv_cache": with_weights - free_bytes()}
        print({name: f"{found / 2**20:.0f} MiB" for name, found in rows.items()}, size)
        assert rows["both"] >= 0.95 * sum(size.values())
        assert rows["weights"] >= 0.95 * size["weights"] and rows["kv_cache"] >= 0.95 * size["kv_cache"]
        found = answers(llm, ASKED)
        assert found == expected


def test_bits_do_not_depend_on_whose_memory_it_is(llm: LLM) -> None:
    """Nor does a kernel or a library choose otherwise by where weights and cache lie."""
    expected = answers(llm, ASKED)
    with dummy_model("0.6b", **FIELDS | {"enable_sleep_mode": False}) as other:
        bring(other, 1)
        found = answers(other, ASKED)
    assert found == expected


def test_RL_S2_level_2_and_a_session(llm: LLM) -> None:
    """The weights that are sent to where nothing was are those that were sent before, in bits."""
    bring(llm, 2)
    other = answers(llm, ASKED)
    bring(llm, 1)
    expected = answers(llm, ASKED)
    assert other != expected
    for seed, right in ((1, expected), (2, other), (1, expected)):
        llm.sleep(2)
        assert not llm.wake_up(["weights"])
        with pytest.raises(WrongStateError, match="discarded"):
            llm.generate([[1]])
        bring(llm, seed)
        assert llm.wake_up(["kv_cache"])
        found = answers(llm, ASKED)
        assert found == right


def test_RL_S3_no_room_to_wake_is_said_and_passes(llm: LLM) -> None:
    expected = answers(llm, ASKED)
    llm.sleep(1)
    others = torch.empty(free_bytes() - (300 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(WrongStateError, match="are needed for weights, kv_cache"):
            llm.wake_up()
        assert llm.is_sleeping()
    finally:
        del others  # what fails here would keep it, and fail the tests behind this one
    torch.cuda.empty_cache()
    assert llm.wake_up()
    found = answers(llm, ASKED)
    assert found == expected


def test_RL_S3_a_hundred_sleeps_are_flat(llm: LLM) -> None:
    expected, held = answers(llm, ASKED), list[tuple[int, int]]()
    for turn in range(100):
        llm.sleep(1, ("keep", "wait", "abort")[turn % 3])
        asleep = free_bytes()
        llm.wake_up()
        held.append((asleep, free_bytes()))
    found = answers(llm, ASKED)
    assert found == expected
    for each in zip(*held[10:], strict=True):
        assert max(each) - min(each) <= SLACK, (min(each), max(each))


def test_an_engine_that_was_not_told_says_so() -> None:
    with dummy_model("tiny", **FIELDS | {"enable_sleep_mode": False, "kv_cache_memory_bytes": 1 << 28}) as made:
        with pytest.raises(ValueError, match="--enable-sleep-mode"):
            made.sleep(1)
        made.sleep(0)
        assert made.wake_up()

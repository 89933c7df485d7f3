"""The host's part of a load from a peer's cache: `python bench/fetch_host.py [ipc nixl] [--block-size 16]`.

An engine without a model fetches the blocks of prompts of 4,000 tokens of 8b from a worker's half in another process,
over loopback: both halves of the connector, the scheduler and the threads are what engines have. Nothing is copied: a
copy is a moment at which it has ended, so many milliseconds behind its launch; of the driver's calls the one that
launches does nothing, and those that torch makes are left out. Told are the medians and the least of microseconds:
from the step that sees the request to the load's order, from there to the launch, from the end of the copy (or of the
launch, whichever is later) to the load's own, and from there to the step that computes the rest; `around` is the second
and the third, which are what a load's rate counts beside its copy. `cpu`: of the engine's thread, in steps with a load.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from null_device import NullRunner
from octavo.cache.groups import CacheGroup
from octavo.config.kv_transfer import read_kv_transfer
from octavo.engine import EngineCore
from octavo.kv_connector import p2p
from octavo.kv_connector.orders import EngineSide, Order
from octavo.kv_connector.p2p import P2P
from octavo.kv_connector.peers.description import CacheDescription, GroupDescription
from octavo.kv_connector.peers.offers import Wanted
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.ways import ipc, ipc_memory, nixl, nixl_agent
from octavo.ops.cache_write import copy_blocks_bulk
from octavo.ops.compile import driver, nvrtc
from octavo.plan import StepLimits
from octavo.request.sampling_params import SamplingParams
from octavo.sched.kv_manager import KVManager
from octavo.sched.scheduler import Scheduler
from octavo.worker.executor import InlineExecutor

LAYERS, LENGTH = 36, 4000
TOKEN_BYTES = 16  # of a layer; 4,096 of 8b


_FASTEST = 0.8  # of a copy's time has passed by the earliest moment at which it may have ended


class Copies:
    """When they were launched, and end."""

    seconds = 0.0
    launched = ended = 0.0

    def begin(self) -> None:
        """One is launched."""
        self.launched = time.perf_counter()
        self.ended = self.launched + self.seconds

    def query(self) -> bool:
        """Whether the last one has ended, as an event's."""
        return time.perf_counter() >= self.ended

    def synchronize(self) -> None:
        """As an event's."""
        time.sleep(max(self.ended - time.perf_counter(), 0))


COPIES = Copies()


class TimedMemory:
    """See octavo.kv_connector.worker.ways.ipc_memory.Memory."""

    def __init__(self, device: torch.device) -> None:
        """It maps nothing."""
        self._stream = SimpleNamespace(cuda_stream=0)

    def share(self, tensor: torch.Tensor) -> ipc_memory.Shared:
        """See Memory."""
        return ipc_memory.Shared(host=ipc_memory.host_name(), handle=bytes(64), offset=0)

    def open(self, shared: ipc_memory.Shared) -> tuple[int, int]:
        """See Memory: anywhere."""
        return 1 << 40, 0

    def close(self, address: int) -> None:
        """Nothing was mapped."""

    def order(self, own: torch.Tensor, target: Any, source: Any) -> Callable[..., object]:
        """See Memory: all that is done for a launch, and none."""
        ipc_memory.DeviceMemory._order(self, own, target, source)  # type: ignore[arg-type]
        earliest = time.monotonic() + _FASTEST * COPIES.seconds
        return functools.partial(ipc_memory._wait, COPIES, earliest)  # type: ignore[arg-type]


class Library:
    """NIXL's calls, as far as an agent makes them; CUDA's, as far as a copy's launch does."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """It is an agent, too."""
        self.agent = self

    nixl_agent_config = staticmethod(dict)

    def __getattr__(self, name: str) -> Any:
        """What is not said here does nothing, and gives some bytes."""
        return lambda *_: b"x" * 600

    def get_xfer_descs(self, runs: Any, kind: str) -> Any:
        """Of NIXL."""
        return runs

    def transfer(self, handle: Any) -> str:
        """Of NIXL: begin."""
        COPIES.begin()
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        """Of NIXL."""
        return "DONE" if COPIES.query() else "PROC"

    def cuLaunchKernel(self, *_: Any) -> int:
        """Of CUDA: begin."""
        COPIES.begin()
        return 0


Library.nixl_agent = Library  # type: ignore[attr-defined]


def without_device() -> None:
    """Let what a load asks of a GPU take no time."""
    ipc.IpcWay.memory = TimedMemory
    P2P.make_way = _way  # type: ignore[method-assign]
    nixl_agent._library = Library
    library = Library()
    driver._library = lambda: library  # type: ignore[assignment]
    driver.load = lambda *_: 1
    nvrtc.machine_code = lambda *_: b""
    copy_blocks_bulk.is_there = lambda _: True  # type: ignore[assignment]


def _way(self: P2P, cache: CacheBytes) -> Any:
    make = nixl.NixlWay if self._backend == "nccl" else ipc.IpcWay
    return make(cache, gives=self._transfer.produces)


class Half:
    """A worker's half, with the cache that it is of."""

    def __init__(self, way: str, role: str, block_size: int) -> None:
        """role: as kv_role."""
        num_blocks = 4 * LENGTH // block_size
        self.block_bytes = LAYERS * block_size * TOKEN_BYTES
        data = torch.zeros((LAYERS, num_blocks, block_size * TOKEN_BYTES), dtype=torch.uint8)
        described = GroupDescription(
            kind="full",
            block_size=block_size,
            layers=list(range(LAYERS)),
            kernel_block_sizes=[block_size] * LAYERS,
            num_heads=8,
            total_heads=8,
            head_bytes=TOKEN_BYTES // 8,
        )
        cache = CacheDescription(layout="LBNHC", block_bytes=self.block_bytes, groups=[described], facts={})
        backend = {"ipc": "ipc", "nixl": "nccl"}[way]
        config = {
            "kv_connector": "p2p",
            "kv_role": role,
            "kv_port": 0,
            "kv_connector_extra_config": {"backend": backend},
        }
        self.transfer, self.num_blocks = read_kv_transfer(config), num_blocks
        self.kind = P2P(self.transfer)
        self.half: Any = self.kind.worker_half(CacheBytes(data, 1 << 30, description=cache), "")

    def transfer_call(self, name: str, *args: Any) -> list[Any]:
        """What a scheduler's half asks."""
        return [getattr(self.half, name)(*args)]


def serve(way: str, block_size: int) -> None:
    """The side that offers: an order a line, until input ends."""
    without_device()
    offers = Half(way, "kv_producer", block_size)
    print(json.dumps(offers.half.address()), flush=True)
    for line in sys.stdin:
        offers.half.take()
        offers.half.begin(msgspec.json.decode(line, type=Order))
        print("[]", flush=True)
    offers.half.close()


class Engine:
    """An engine that fetches, and does nothing else."""

    def __init__(self, way: str, block_size: int) -> None:
        """It knows nobody."""
        side = self.side = Half(way, "kv_consumer", block_size)
        group = CacheGroup(kind="full", block_size=block_size, layers=tuple(range(LAYERS)), num_heads=8)
        kv = KVManager([group], side.num_blocks, enable_prefix_caching=False)
        limits = StepLimits(max_num_rows=16, max_num_tokens=8192, max_model_len=LENGTH + 64, max_num_drafts=0)
        self.connector: Any = side.kind.scheduler_half(
            EngineSide(
                transfer=side.transfer,
                groups=(group,),
                block_bytes=side.block_bytes,
                num_blocks=side.num_blocks,
                identity="",
                ask=side.transfer_call,
            )
        )
        self.marks: dict[str, float] = {}
        scheduler = Scheduler(kv, limits, connector=self.connector)
        runner = NullRunner(group, limits, torch.arange(limits.max_num_rows))
        self.core = EngineCore(scheduler, InlineExecutor(runner), eos_token_ids=[2], async_scheduling=True)
        mover = side.half._mover
        self._note(mover, "begin", "order")
        self._note(self.core._executor, "submit", "computes")

    def _note(self, owner: Any, name: str, mark: str) -> None:
        call = getattr(owner, name)

        def noted(*args: Any) -> Any:
            self.marks[mark] = time.perf_counter()
            return call(*args)

        setattr(owner, name, noted)

    def fetch(self, number: int, prompt: list[int], said: dict[str, Any]) -> dict[str, float]:
        """Microseconds of one load."""
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said})
        self.core.add([str(number)], prompt, params, max_tokens=1)
        busy = self.side.half.stats().load_seconds
        cpu, started = time.thread_time(), time.perf_counter()
        while not any(update.finish_reason for update in self.core.step()):
            pass
        cpu = time.thread_time() - cpu
        marks = self.marks
        loaded = marks["order"] + self.side.half.stats().load_seconds - busy
        to_launch = COPIES.launched - marks["order"]
        behind = loaded - COPIES.ended
        seconds = {
            "to order": marks["order"] - started,
            "to launch": to_launch,
            "to end": behind,
            "to step": marks["computes"] - loaded,
            "around": to_launch + behind,
            "all": marks["computes"] - started - COPIES.seconds,
            "cpu": cpu,
        }
        return {name: value * 1e6 for name, value in seconds.items()}


def offered(number: int, prompt: list[int], block_size: int, address: Any) -> tuple[Order, dict[str, Any]]:
    """An offer of a prompt's blocks, and what its answer says of it."""
    count = -(-len(prompt) // block_size)
    blocks = list(range(1, count + 1))
    request = SimpleNamespace(tokens=prompt, cache_salt="")
    digest = p2p._digest(SimpleNamespace(request=request, end=len(prompt), version=""))  # type: ignore[arg-type]
    wanted = Wanted(
        transfer_id=str(number),
        digest=digest,
        places=[(0, place) for place in range(count)],
        end=len(prompt),
        offer=f"offer {number}",
    )
    said = {
        "do_remote_prefill": True,
        "transfer_id": str(number),
        "remote_host": address[0],
        "remote_port": address[1],
        "remote_num_tokens": len(prompt),
        "remote_block_ids": [blocks],
        "remote_offer": f"offer {number}",
    }
    order = Order(number=number, is_load=False, blocks=blocks, wanted=wanted)
    return order, said


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """One way: medians."""
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, "--serve", way, "--block-size", str(options.block_size)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        engine = Engine(way, options.block_size)
        address = json.loads(other.stdout.readline())
        found: list[dict[str, float]] = []
        for number in range(options.rounds + 2):
            prompt = [(7 * number + place) % 4000 for place in range(LENGTH)]
            order, said = offered(number, prompt, options.block_size, address)
            other.stdin.write(msgspec.json.encode(order).decode() + "\n")
            other.stdin.flush()
            other.stdout.readline()
            time.sleep(options.pause)
            found.append(engine.fetch(number, prompt, said))
        assert engine.core.scheduler.stats().num_loaded_tokens >= len(found) * (LENGTH - 1), "all were fetched"
        engine.side.half.close()
        other.stdin.close()
        other.wait()
    middle = {name: statistics.median(each[name] for each in found[2:]) for name in found[0]}
    least = {name: min(each[name] for each in found[2:]) for name in found[0]}
    for name, row in (("median", middle), ("least", least)):
        print(f"{way:5} {name:7}" + "".join(f"  {key} {value:7.0f}" for key, value in row.items()), flush=True)
    return middle


def main() -> None:
    """Measure each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="*", default=["ipc", "nixl"])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--copy-ms", type=float, default=1.6)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two loads")
    parser.add_argument("--marks", action="store_true", help="say what takes how long of each load")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.block_size)
        return
    if options.marks:
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
        logging.getLogger("octavo.kv_connector.worker.fetches").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    without_device()
    COPIES.seconds = options.copy_ms / 1e3
    results = {way: measure(way, options) for way in options.ways}
    print(json.dumps({"block_size": options.block_size, "microseconds": results}))


if __name__ == "__main__":
    main()

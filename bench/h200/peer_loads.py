"""Loads from another GPU's cache without engines: `python bench/h200/peer_loads.py ipc nixl nixl@BLNHC nccl`.

A process with a cache on the next GPU offers the blocks of a prompt of 4,000 tokens of 8b, this one fetches them:
by the worker's halves of the connectors, as engines do. What is told of each way, for blocks that lie together on both
sides and for such that do not: the median time from a load's order to its report, the rate of that, and when what
happened in between, in milliseconds. The bytes are compared. Without GPUs small blocks go by gloo.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from octavo.config.kv_transfer import read_kv_transfer
from octavo.kv_connector.orders import Order
from octavo.kv_connector.peers.description import CacheDescription, GroupDescription
from octavo.kv_connector.peers.offers import Wanted
from octavo.kv_connector.table import make_kind
from octavo.kv_connector.worker.cache_bytes import CacheBytes

_ON_GPU = torch.cuda.is_available()
_LAYERS, _BLOCKS, _PAGE_BYTES, _COUNT = 36, 252, (256 << 10) if _ON_GPU else 512, 63
_ROUNDS = 24
_CASES = {"together": range(1, 1 + _COUNT), "apart": range(1, 1 + 3 * _COUNT, 3)}


def worker(way: str, role: str) -> tuple[Any, torch.Tensor]:
    """A worker's half, and its cache: of an offering side full of bytes that follow from a seed."""
    device = torch.device("cuda", 0) if _ON_GPU else torch.device("cpu")
    way, _, layout = way.partition("@")
    shape = (1, _BLOCKS, _LAYERS * _PAGE_BYTES) if layout.startswith("B") else (_LAYERS, _BLOCKS, _PAGE_BYTES)
    data = filled(shape, device) if role == "kv_producer" else torch.zeros(shape, dtype=torch.uint8, device=device)
    layers = list(range(_LAYERS))
    group = GroupDescription(
        kind="full",
        block_size=64,
        layers=layers,
        kernel_block_sizes=[64] * _LAYERS,
        num_heads=8,
        total_heads=8,
        head_bytes=_PAGE_BYTES // 512,
    )
    described = CacheDescription(layout=layout or "LBNHC", block_bytes=_LAYERS * _PAGE_BYTES, groups=[group], facts={})
    extra = {"backend": way} if way != "nixl" else {}
    config = {
        "kv_connector": "nixl" if way == "nixl" else "p2p",
        "kv_role": role,
        "kv_port": 0,
        "kv_connector_extra_config": extra,
    }
    cache = CacheBytes(data, 1 << 30, description=described)
    return make_kind(read_kv_transfer(config)).worker_half(cache, ""), data


def filled(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The same bytes in each process."""
    return torch.randint(256, shape, dtype=torch.uint8, device=device, generator=torch.Generator(device).manual_seed(1))


def order(number: int, blocks: list[int], /, *, is_load: bool, **more: Any) -> Order:
    """Offer, or fetch."""
    wanted = Wanted(
        transfer_id=str(number),
        digest=b"",
        places=[(0, place) for place in range(_COUNT)],
        end=64 * _COUNT,
        offer=f"offer {number}",
        **more,
    )
    return Order(number=number, is_load=is_load, blocks=blocks, wanted=wanted)


def serve(way: str) -> None:
    """The side that offers: (number, blocks) a line, until input ends."""
    offers, _ = worker(way, "kv_producer")
    print(json.dumps(offers.address()), flush=True)
    for line in sys.stdin:
        number, blocks = json.loads(line)
        offers.take()
        offers.begin(order(number, blocks, is_load=False))
        print("[]", flush=True)
    offers.close()


def heard(pipe: Any) -> Any:
    """The other side's next line; libraries print lines of their own."""
    for line in pipe:
        if line.startswith("["):
            return json.loads(line)
    raise RuntimeError("the other side has ended")


def measure(way: str) -> None:
    """A line for each case."""
    more = {"CUDA_VISIBLE_DEVICES": "1,0"} if torch.cuda.device_count() > 1 else {}
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, "--serve", way]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **more}) as other:
        try:
            fetch(way, other)
        except BaseException:
            other.kill()
            raise


def fetch(way: str, other: subprocess.Popen[str]) -> None:
    """Of the side that offers, until all is measured."""
    assert other.stdin is not None and other.stdout is not None
    fetches, data = worker(way, "kv_consumer")
    marks = Marks()
    address, number = tuple(heard(other.stdout)), 0
    expected = filled(tuple(data.shape), data.device)
    for name, found in _CASES.items():
        theirs, own = list(found), [block + 1 for block in found]
        seconds = []
        marks.found.clear()
        for _ in range(_ROUNDS):
            number += 1
            other.stdin.write(json.dumps([number, theirs]) + "\n")
            other.stdin.flush()
            heard(other.stdout)
            time.sleep(0.02)
            data.zero_()
            if _ON_GPU:
                torch.cuda.synchronize()
            load = {"fetch": str(number), "addresses": [address], "position": 64 * _COUNT - 1, "blocks": theirs}
            started = time.perf_counter()
            fetches.begin(order(number, own, is_load=True, **load))
            while not (reports := fetches.take()):
                fetches.wait(0.01)
            seconds.append(time.perf_counter() - started)
            assert not reports[0].failed, "a load failed"
        assert torch.equal(data[:, own], expected[:, theirs]), "other bytes than there"
        middle, least = statistics.median(seconds[2:]), min(seconds[2:])
        rate = _COUNT * _LAYERS * _PAGE_BYTES / middle / 1e9
        told = f"{middle * 1e3:6.2f} ms (least {least * 1e3:.2f}) {rate:6.1f} GB/s: {marks.told()}"
        print(f"{way:10} {name:9} {told}", flush=True)
    fetches.close()
    other.stdin.close()
    other.wait()


class Marks(logging.Handler):
    """What loads say of themselves."""

    def __init__(self) -> None:
        """From now on."""
        super().__init__()
        self.found = collections.defaultdict[str, list[float]](list)
        log = logging.getLogger("octavo.kv_connector.worker.fetches")
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        """Of a load: what happened, and when."""
        for each in record.getMessage().partition("ms: ")[2].split(", "):
            what, at = each.rsplit(" ", 1)
            self.found[what].append(float(at))

    def told(self) -> str:
        """The medians."""
        return ", ".join(f"{what} {statistics.median(at[2:] or at):.2f}" for what, at in self.found.items())


def main() -> int:
    """Each way; what fails is told, and the others are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=["ipc"] if _ON_GPU else ["gloo"])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    failed = 0
    for way in options.ways:
        try:
            measure(way)
        except Exception as error:  # of a library or a driver
            print(f"{way}: {type(error).__name__}: {error}"[:300], flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())

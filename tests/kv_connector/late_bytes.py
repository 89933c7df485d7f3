"""A program of test_nixl.py: reads blocks by NIXL over TCP from a process that is stopped meanwhile. Says what came."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time

import msgspec
import torch

from octavo.kv_connector.orders import Order
from octavo.kv_connector.peers.description import NO_DESCRIPTION
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair, TransferError
from octavo.kv_connector.worker.ways.nixl import NixlWay

BLOCKS = range(8)


def make_cache(value: int) -> CacheBytes:
    data = torch.full((1, len(BLOCKS), 1 << 20), value, dtype=torch.uint8)
    description = msgspec.structs.replace(NO_DESCRIPTION, block_bytes=1 << 20)
    return CacheBytes(data, 1 << 30, description=description)


def gives(path: str) -> None:
    way = NixlWay(make_cache(7), gives=True)
    with open(path + ".part", "wb") as file:
        file.write(way.tell(BLOCKS))
    os.rename(path + ".part", path)
    while not select.select([sys.stdin], [], [], 0.0005)[0]:
        way._agent.work()


def takes(path: str) -> None:
    cache = make_cache(0)
    way = NixlWay(cache, gives=False)
    process = subprocess.Popen([sys.executable, __file__, path, "gives"], stdin=subprocess.PIPE)
    try:
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path, "rb") as file:
            told = file.read()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pair = Pair(socket.create_connection(listener.getsockname()), 1.0)
        pair.theirs = cache.description
        job = Job(Order(number=1, is_load=True, blocks=list(BLOCKS)))
        way.take(pair, told, job, [BLOCKS])
        print("arrived", int((cache.data == 7).sum()))
        cache.data.zero_()
        process.send_signal(signal.SIGSTOP)
        try:
            way.take(pair, told, job, [BLOCKS])
        except TransferError as error:
            print(error)
        pair.close()
        process.send_signal(signal.SIGCONT)
        other, until = way._make_reader(), time.monotonic() + 1.0
        while time.monotonic() < until:
            other.work()
            (pair.state or other).work()
        print("late", int(cache.data.sum()))
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    (gives if sys.argv[2:] else takes)(sys.argv[1])

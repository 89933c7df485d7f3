"""A trainer's process for tests: sends weights to an LLM elsewhere, and says over its output what an engine is to do.

`python weight_sender.py FOLDER HOW`: HOW is "whole", "stops" (in the middle, and waits to be killed) or "spoils" (the
same, and its first weight is NaN).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo.rl.sender import WeightSource, told
from octavo.rl.transport import buffers
from octavo.rl.transport.gloo import make_gloo
from octavo.rl.transport.group import Group

FOLDER, HOW, PACKED = sys.argv[1], sys.argv[2], sys.argv[3] == "packed"
BUFFER = 1 << 20


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


source = WeightSource(load_file(f"{FOLDER}/model.safetensors"))
store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
say(master_address="127.0.0.1", master_port=store.port, rank_offset=1, world_size=2, packed=PACKED)
group = Group(make_gloo, "127.0.0.1", store.port, 0, 2, 30.0, store=store)
incoming = source.incoming
if HOW == "spoils":
    source.tensors[incoming[0].name].fill_(float("nan"))
say(**told(incoming), packed=PACKED, packed_buffer_size_bytes=BUFFER)
parts = list(buffers(incoming, BUFFER if PACKED else 0))
if HOW != "whole":
    parts = parts[: int(sys.argv[4]) % len(parts)]
for part in parts:
    pieces = [source.gather(each.name).reshape(-1).view(torch.uint8) for each in part]
    group.broadcast(torch.cat(pieces), part[0].name, 30.0)
if HOW != "whole":
    say(stopped=len(parts))
    time.sleep(60)
group.close()

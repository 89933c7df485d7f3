"""A trainer that speaks to a server as SGLang's do: torch's own group, rank 0 of it here; over HTTP the calls.

`python sglang_sender.py URL FOLDER HOW`: HOW is "each" (tensor by tensor) or "bucket" (all of a call as one).
"""

from __future__ import annotations

import datetime
import json
import sys
import threading
import urllib.request
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore, distributed_c10d

URL, FOLDER, HOW = sys.argv[1:4]
NAME = "slime-pp_0"


def post(path: str, **body: Any) -> dict[str, Any]:
    """One call."""
    request = urllib.request.Request(f"{URL}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


class Beside:
    """A call that runs while this end meets or sends."""

    def __init__(self, path: str, **body: Any) -> None:
        self.thread = threading.Thread(target=self.run, args=(path, body), daemon=True)
        self.reply: dict[str, Any] = {}

    def run(self, path: str, body: dict[str, Any]) -> None:
        self.reply = post(path, **body)

    def __enter__(self) -> Beside:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(60)
        assert self.reply["success"], self.reply


probe = TCPStore("127.0.0.1", 0, 1, True)  # a free port
port = probe.port
del probe
with Beside(
    "init_weights_update_group",
    master_address="127.0.0.1",
    master_port=port,
    rank_offset=1,
    world_size=2,
    group_name=NAME,
    backend="gloo",
):
    # what `init_custom_process_group` of SGLang, slime and others does
    rendezvous = distributed_c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2)
    store, rank, size = next(rendezvous)
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        distributed_c10d.Backend("gloo"),
        distributed_c10d.PrefixStore(NAME, store),
        group_name=NAME,
        timeout=datetime.timedelta(seconds=30),
    )
weights = load_file(f"{FOLDER}/model.safetensors")
names = sorted(weights)
told = {
    "names": names,
    "dtypes": [str(weights[name].dtype).removeprefix("torch.") for name in names],
    "shapes": [list(weights[name].shape) for name in names],
    "group_name": NAME,
    "flush_cache": False,
    "weight_version": f"{HOW}-1",
    "load_format": "flattened_bucket" if HOW == "bucket" else None,
}
tensors = [weights[name].contiguous() for name in names]
if HOW == "bucket":
    tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
with Beside("update_weights_from_distributed", **told):
    for tensor in tensors:
        group.broadcast(tensor, 0).wait()
print(post("destroy_weights_update_group", group_name=NAME)["success"])

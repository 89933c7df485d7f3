"""vLLM's own trainer end against `octavo serve`: `python vllm_trainer.py http://127.0.0.1:8000`.

Its HTTPVLLMWeightSyncClient, ModuleSource, NCCLTrainerWeightTransferEngine and pack_tensors run as they are. Only where
that engine wants a GPU, its end of the broadcast is a group of gloo.
"""

from __future__ import annotations

import sys
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors
from vllm.utils.network_utils import get_open_port

from octavo.checkpoint.hub import find_model
from octavo.rl.transport.gloo import make_gloo
from octavo.rl.transport.group import Group

URL = sys.argv[1]
FILE = find_model("octavo-tiny", None, None) / "model.safetensors"
GREEDY = {"prompt": list(range(40)), "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


class Trainer(NCCLTrainerWeightTransferEngine):
    """vLLM's, over gloo."""

    def _open_trainer_endpoint(self, init_info: NCCLTrainerInitInfo) -> None:
        address, port, size = init_info.master_address, init_info.master_port, init_info.world_size
        store = distributed.TCPStore(address, port, size, True, wait_for_workers=False)
        self.model_update_group: Any = Group(make_gloo, address, port, 0, size, 30, store=store)
        self.model_update_group.destroy = self.model_update_group.close

    def _broadcast(self, source: ModuleSource, meta: Any) -> None:
        self.num_buffers = 0
        pairs = self._checked_iter(source, meta)
        while (chunk := pack_tensors(pairs, lambda item: item[1], self.packed_buffer_size_bytes)) is not None:
            self.model_update_group.broadcast(chunk.packed_tensor, chunk.names[0], 30)
            self.num_buffers += 1


class Recorder(HTTPVLLMWeightSyncClient):
    """vLLM's, which remembers what it sent."""

    sent: list[tuple[str, Any]] = []

    def _post(self, path: str, json: Any = None) -> None:
        self.sent.append((path, json))
        super()._post(path, json)


def tree_of(weights: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have the checkpoint's names."""
    root = nn.Module()
    for name, weight in weights.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(weight.float()))
    return root


def ask() -> list[int]:
    """What the server says."""
    reply = requests.post(f"{URL}/v1/completions", json=GREEDY, timeout=60)
    reply.raise_for_status()
    return list(reply.json()["choices"][0]["token_ids"])


def version() -> str:
    """Of the server's weights."""
    return str(requests.get(f"{URL}/weight_info", timeout=60).json()["weight_version"])


def main() -> None:
    """Several updates."""
    client = Recorder(URL, timeout=60)
    assert isinstance(client, VLLMWeightSyncClient)
    module = tree_of(load_file(FILE))
    before = ask()
    info = NCCLTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=get_open_port(), world_size=2, packed_buffer_size_bytes=1 << 20
    )
    trainer = Trainer.trainer_init(info, client=client, source=ModuleSource(module))
    trainer.send_weights()
    assert ask() == before and version() == "1" and trainer.num_buffers > 5
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.25)
    trainer.send_weights()
    told = [json["update_info"]["names"] for path, json in client.sent if path == "update_weights"]
    assert len(told) == 2 and told[0] and not told[1], "the second update names nothing: what the first named comes"
    changed = ask()
    assert changed != before and version() == "2"
    client.start_weight_update()
    try:
        client.finish_weight_update("no tensors")
    except requests.HTTPError as error:
        assert "not whole" in error.response.text, error.response.text
    assert ask() == changed and version() == "2"
    trainer.shutdown()
    client.shutdown_weight_transfer_engine()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.div_(1.25)
    sharded = shard(module)
    again = Trainer.trainer_init(
        NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=get_open_port(), world_size=2),
        client=client,
        source=ModuleSource(sharded),
    )
    again.send_weights()
    assert ask() == before and again.num_buffers == 1
    assert any(each.owners == (0,) for each in again.source.metadata)
    again.shutdown()
    print("vLLM's trainer end drove the routes")


def shard(module: nn.Module) -> nn.Module:
    """With DTensors for parameters, as FSDP2 leaves them."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for own in module.modules():
        for name, parameter in list(own.named_parameters(recurse=False)):
            setattr(own, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return module


if __name__ == "__main__":
    main()

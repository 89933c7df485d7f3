"""One of two ranks that train octavo-tiny with FSDP2 over gloo; test_rl_fsdp.py runs it: rank, store's file, mode."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from octavo import rl
from rl_rig import random_ids, tiny


def main(rank: int, store: str, after: bool) -> None:
    """Three updates; each rank's log-probabilities equal those of one process with the same weights."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    masters = tiny(torch.float32)
    if not after:
        rl.convert(masters, dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (2,))
    for layer in masters.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(masters, mesh=mesh, mp_policy=policy)
    if after:
        rl.convert(masters, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), 1e-4)
    pack = rl.Pack.of(random_ids(40, 9, 70, vocab_size=4096, seed=rank))
    alone = rl.convert(tiny())
    for _ in range(3):
        with torch.no_grad():
            masters.reshard()  # type: ignore[attr-defined]
            for name, parameter in masters.named_parameters():
                alone.get_parameter(name).copy_(parameter.full_tensor().to(torch.bfloat16))
            expected = rl.logprobs(alone, pack).logprobs
        found = rl.logprobs(masters, pack).logprobs
        differing = int((found != expected).sum())
        assert not differing, f"{differing} of {len(found)} log-probabilities differ"
        found.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("same")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "after")

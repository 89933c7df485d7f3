"""Decode steps of all sizes and lengths through one compiled kernel, traced without a GPU: run as a program, it prints
how often it was compiled after each step. A process of its own, since what torch warns of once counts as a change.
"""

from __future__ import annotations

import functools

import torch

from octavo.attention.base import AttentionInputs, Setup
from octavo.attention.flex import backend as flex
from octavo.attention.flex import kernel as flex_kernel
from octavo.cache.specs import AttentionSpec

PLAIN = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
BLOCKS = 40


def compiled(self, lines, kv, rows, key_scale, start, count, *, sums):
    """What a kernel's call does on a GPU where it keeps nothing."""
    if not self._ways:
        call = flex_kernel.compile_call(self._variant, self._mods, self.shape, self._sizes)
        self._ways[()] = flex_kernel._through(call)
    return self._ways[()](lines, *kv[:1].chunk(2, dim=-1), rows, (), start, count, sums)


@torch.inference_mode()
def main() -> None:
    setup = Setup(max_num_rows=16, max_num_tokens=64, max_model_len=4096, num_blocks=BLOCKS, block_size=64)
    backend = flex.FlexBackend([PLAIN], torch.bfloat16, torch.device("cpu"), setup)
    layers = torch.zeros(3, BLOCKS, 2, 64, 32, dtype=torch.bfloat16).unbind()
    whole = flex._SCRATCH_BYTES
    for rows, longest, scratch in (
        (16, 4096, whole),
        (16, 2048, whole),
        (12, 4096, whole),
        (16, 4096, 1 << 14),
        (3, 100, whole),
        (1, 4096, whole),
        (1, 1, whole),
    ):
        flex._SCRATCH_BYTES = scratch  # the smaller one takes several launches
        inputs = AttentionInputs(
            num_rows=rows,
            num_tokens=rows,
            max_query_len=1,
            max_seq_len=longest,
            block_size=64,
            query_start=torch.arange(rows + 1).int(),
            seq_lens=torch.ones(rows).int(),
            block_table=torch.ones(rows, 64).int(),
            slot_mapping=torch.zeros(rows, dtype=torch.int64),
        )
        backend.prepare(inputs)
        q = torch.ones(rows, 4, 16, dtype=torch.bfloat16)
        for kv in layers:
            backend.run(q, kv, PLAIN, torch.empty_like(q))
        print(torch._dynamo.utils.counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    flex_kernel.Kernel.__call__ = compiled
    torch.compile = functools.partial(torch.compile, backend="eager")
    main()

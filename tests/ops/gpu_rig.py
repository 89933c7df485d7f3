"""What the tests of the elementwise GPU operators share, and what Triton's interpreter checks of them: run as a
program, it prints JSON of check name -> error text, empty if it holds.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops import activation, embedding, norm, rope
from octavo.ops.gpu import activation as gpu_activation
from octavo.ops.gpu import embedding as gpu_embedding
from octavo.ops.gpu import norm as gpu_norm
from octavo.ops.gpu import rope as gpu_rope

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# (heads, KV heads, head size, rotary size)
HEADS = ((16, 8, 128, 0), (4, 2, 64, 0), (5, 1, 80, 0), (3, 3, 256, 0), (6, 2, 64, 32), (2, 1, 96, 24))


def heavy(rows: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Signed, heavy-tailed rows with a gap between them, so that another order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width + 16, generator=generator)
    values *= torch.exp2(torch.rand(rows, width + 16, generator=generator) * 16 - 10)
    return values.to(dtype).to(device)[:, :width]


def assert_close(ours: Tensor, expected: Tensor, ulps: int = 1) -> None:
    """Within `ulps` of a 16-bit dtype, or 4e-6 relative in float32."""
    rtol = {BF16: 2**-7, F16: 2**-10, F32: 4e-6}[ours.dtype] * (1 if ours.dtype == F32 else ulps)
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=1e-6 * float(expected.float().abs().max()))


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    """The same bits; under the interpreter, which cuts what it rounds to few bits, nearly the same."""
    if ours.device.type == "cuda" or ours.dtype == F32:
        assert torch.equal(ours, expected)
    else:
        rtol, atol = (2**-7, 0) if ours.dtype == BF16 else (0.6, 2**-6)
        torch.testing.assert_close(ours.float(), expected.float(), rtol=rtol, atol=atol)


def check_norm(device: str, width: int, dtype: torch.dtype, rows: int = 5) -> None:
    x, residual = heavy(rows, width, dtype, device), heavy(rows, width, dtype, device, 1)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(2)).to(device)
    assert_close(gpu_norm.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6))
    normed, total = gpu_norm.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = norm.add_rms_norm_reference(x, residual, weight, 1e-6)
    assert_equal(total, expected_total)
    assert_close(normed, expected, 1 if device == "cuda" else 2)


def check_activation(device: str, kind: str, dtype: torch.dtype, width: int = 200) -> None:
    x = heavy(6, 2 * width, dtype, device)
    x[0, :4] = torch.tensor([0.0, -300.0, 300.0, 1e-30]).to(x)
    assert_close(gpu_activation.gated_activation(x, kind), activation.gated_activation_reference(x, kind), 2)


def check_embedding(device: str, dtype: torch.dtype, width: int = 1100) -> None:
    table = heavy(50, width, dtype, device).contiguous()
    ids = torch.tensor([3, 49, 0, 3]).to(device)
    for out_dtype, scale in ((dtype, 1.0), (F32, 1.0), (dtype, 33.5)):
        ours = gpu_embedding.gather_rows(ids, table, out_dtype, scale)
        assert_equal(ours, embedding.gather_rows_reference(ids, table, out_dtype, scale))


class RopeCase:
    """Arguments of `qk_norm_rope_store` for `tokens` tokens; the cache has another layout where `heads_last`."""

    def __init__(
        self, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], tokens: int, *, norm: bool = True,
        cache: torch.dtype | None = None, heads_last: bool = False,
    ) -> None:  # fmt: skip
        heads, kv_heads, size, rotary = shape
        generator = torch.Generator().manual_seed(tokens)
        self.qkv = heavy(tokens, (heads + 2 * kv_heads) * size, dtype, device)
        self.positions = torch.randint(0, 300, (tokens,), generator=generator).to(device)
        self.table = rope.rope_table(size, 300, rotary_size=rotary).to(device)
        weights = 1 + 0.1 * torch.randn(2, size, generator=generator).to(device)
        self.norms = (weights[0], weights[1]) if norm else (None, None)
        self.shape = (heads, kv_heads, size)
        blocks = tokens // 16 + 2
        kv = torch.zeros((blocks, 16, kv_heads, 2 * size) if heads_last else (blocks, kv_heads, 16, 2 * size))
        kv = kv.to(cache or dtype).to(device)
        self.kv = kv.transpose(1, 2) if heads_last else kv
        self.slots = (torch.randperm((blocks - 1) * 16, generator=generator)[:tokens] + 16).to(device)
        self.slots[2::7] = -1

    def call(self, function: Callable[..., Tensor], pick: slice | Tensor = slice(None)) -> tuple[Tensor, Tensor]:
        """(q, the cache's bytes) of the picked tokens."""
        kv = self.kv.clone(memory_format=torch.preserve_format)
        q = function(
            self.qkv[pick], self.positions[pick], self.table, *self.norms, 1e-6, *self.shape, kv, self.slots[pick],
            0.7, 0.5, 2.0,
        )  # fmt: skip
        return q, kv


def check_rope(device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], tokens: int = 9) -> None:
    for options in ({"norm": True}, {"norm": False, "heads_last": True}, {"cache": torch.float8_e4m3fn}):
        case = RopeCase(device, dtype, shape, tokens, **options)
        q, kv = case.call(gpu_rope.qk_norm_rope_store)
        expected_q, expected_kv = case.call(rope.qk_norm_rope_store_eager)
        # a normed channel may round the other way, which the rotation mixes into two
        scale = float(expected_q.float().abs().max())
        step = {BF16: 2**-7, F16: 2**-10, F32: 1e-5}[dtype]
        torch.testing.assert_close(q, expected_q, rtol=step, atol=step * scale)
        assert_equal(kv[..., case.shape[2] :].contiguous(), expected_kv[..., case.shape[2] :].contiguous())
        kv, expected_kv = kv.float(), expected_kv.float()
        step = (2**-3 if device == "cuda" else 0.6) if "cache" in options else step
        torch.testing.assert_close(kv, expected_kv, rtol=step, atol=step * float(expected_kv.abs().max()) * 0.5)
        assert torch.equal((kv == 0).all(-1), (expected_kv == 0).all(-1)), "another set of slots was written"


def interpreted_norm() -> None:
    for width in (1, 17, 96, 256):
        check_norm("cpu", width, F32)
        check_norm("cpu", width, BF16)


def interpreted_activation() -> None:
    check_activation("cpu", "silu", F32)
    check_activation("cpu", "gelu_tanh", BF16)


def interpreted_embedding() -> None:
    check_embedding("cpu", F32)
    check_embedding("cpu", BF16)


def interpreted_rope() -> None:
    for shape in HEADS[1:]:
        check_rope("cpu", F32, shape)


def interpreted_rows() -> None:
    x, weight = heavy(7, 272, F32, "cpu"), torch.ones(272)
    whole = gpu_norm.rms_norm(x, weight, 1e-6)
    for i in range(7):
        assert torch.equal(gpu_norm.rms_norm(x[i : i + 1], weight, 1e-6), whole[i : i + 1])


INTERPRETED = (interpreted_norm, interpreted_activation, interpreted_embedding, interpreted_rope, interpreted_rows)


def main() -> None:
    results = {}
    for check in INTERPRETED:
        try:
            check()
            results[check.__name__] = ""
        except Exception:
            results[check.__name__] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""What the tests of a trainer's backward kernels share, and what Triton's interpreter checks of them: against autograd
of the same mathematics in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.backward import activation, attention, logprob, norm, rope
from octavo.ops.backward.rows import Rows

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMITS = {BF16: 1e-2, F16: 2e-3, F32: 2e-5}  # of a relative distance
ROOM = 16  # slots of a row are a multiple
PROCESSORS = 2  # so that programs walk over several rows


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_near(ours: Tensor, expected: Tensor, limit: float = 0.0) -> None:
    """By the relative norm of the difference, of the type's limit or another: NaN never passes."""
    assert ours.shape == expected.shape, (ours.shape, expected.shape)
    distance = float((ours.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    assert distance < (limit or LIMITS[ours.dtype]), distance


def gradients(make: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Of float64 copies of some tensors, through what `make` makes of them."""
    wide = [tensor.double().requires_grad_() for tensor in tensors]
    return list(torch.autograd.grad(make(*wide), wide, grad.double()))


def _wide_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def check_norm(device: str, dtype: torch.dtype, rows: int, size: int) -> None:
    x, grad = (numbers(rows, size + 8, seed=seed, dtype=dtype, device=device)[:, :size] for seed in (0, 1))
    weight = numbers(size, seed=2, dtype=F32, device=device)
    ours = norm.norm_backward(grad, x, weight, 1e-6, PROCESSORS)
    for own, expected in zip(ours, gradients(_wide_norm, grad, x, weight), strict=True):
        assert_near(own, expected)


def check_activation(device: str, dtype: torch.dtype, kind: str) -> None:
    gate_up, grad = (numbers(5, size, seed=size, dtype=dtype, device=device) for size in (2200, 1100))
    act = (
        torch.nn.functional.silu if kind == "silu" else functools.partial(torch.nn.functional.gelu, approximate="tanh")
    )

    def make(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return act(gate) * up

    assert_near(activation.gated_backward(grad, gate_up, tanh=kind != "silu"), gradients(make, grad, gate_up)[0])


def check_rope(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], *, normed: bool, tokens: int = 9
) -> None:
    """shape: heads, KV heads, head size, channels that turn."""
    heads, kv_heads, size, rotary = shape
    half = rotary // 2
    qkv = numbers(tokens, (heads + 2 * kv_heads) * size, seed=0, dtype=dtype, device=device)
    grad_q = numbers(tokens, heads, size, seed=1, dtype=dtype, device=device)
    grad_states = numbers(3 * tokens, kv_heads, 2 * size, seed=2, dtype=dtype, device=device)
    slots = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(3))[:tokens].to(device)
    positions = torch.arange(tokens).flip(0).to(device)
    cos_sin = numbers(tokens, rotary, seed=4, dtype=F32, device=device)
    norms = [numbers(size, seed=seed, dtype=F32, device=device) for seed in (5, 6)] if normed else []

    def make(x: Tensor, *weights: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, size)).split((heads, kv_heads, kv_heads), dim=1)
        turned = []
        for number, part in enumerate(parts[:2]):
            own = _wide_norm(part, weights[number]) if weights else part
            cos, sin = cos_sin[positions].double()[:, None].split(half, dim=2)
            first, second, rest = own[..., :half], own[..., half:rotary], own[..., rotary:]
            turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2))
        return torch.cat((turned[0].flatten(1), torch.cat((turned[1], parts[2]), dim=2).flatten(1)), dim=1)

    grad = torch.cat((grad_q.flatten(1), grad_states[slots].flatten(1)), dim=1)
    ours = rope.rope_backward(
        grad_q, grad_states, qkv, positions, slots, cos_sin, *(norms or (None, None)), 1e-6, PROCESSORS
    )
    for own, expected in zip(ours, gradients(make, grad, qkv, *norms), strict=False):
        assert own is not None
        assert_near(own, expected)


def check_logprob(device: str, dtype: torch.dtype, vocab_size: int, *, cap: float, entropy: bool) -> None:
    """A row whose token is hidden, hidden tokens, and both gradients."""
    rows, temperature, divisor = 4, 0.7, 2.0
    ids = torch.arange(rows, device=device) * (vocab_size // rows)
    product = numbers(rows, vocab_size, seed=0, dtype=F32, device=device) * 5
    hidden = numbers(rows, vocab_size, seed=1, dtype=F32, device=device) > 1.2
    hidden[torch.arange(rows), ids] = False
    hidden[2, ids[2]] = True
    grad, other = (numbers(rows, seed=seed, dtype=F32, device=device) for seed in (2, 3))

    def scaled(x: Tensor) -> Tensor:
        x = x / divisor
        x = cap * torch.tanh(x / cap) if cap else x
        return (x / temperature).masked_fill(hidden, float("-inf"))

    def make(x: Tensor) -> Tensor:
        logs = scaled(x).log_softmax(1)
        chosen = logs.gather(1, ids[:, None])[:, 0]
        chosen = torch.where(chosen.isinf(), 0.0, chosen)
        entropies = -(logs.exp() * logs.masked_fill(hidden, 0.0)).sum(1)
        return torch.stack((chosen, entropies)) if entropy else chosen

    logits = scaled(product)
    sums = logits.logsumexp(1)
    own_entropy = logprob.entropies(logits, sums)
    logs = logits.double().log_softmax(1)
    assert_near(own_entropy, -(logs.exp() * logs.masked_fill(hidden, 0.0)).sum(1))
    ours = logprob.logprob_backward(
        logits,
        ids,
        grad,
        other if entropy else None,
        own_entropy,
        sums,
        dtype,
        temperature=temperature,
        soft_cap=cap,
        divisor=divisor,
    )
    assert_near(ours, gradients(make, torch.stack((grad, other)) if entropy else grad, product)[0])


def _attend(
    q: Tensor, states: Tensor, sinks: Tensor | None, lengths: Sequence[int], rows: Rows, facts: MaskSpec, slopes: Tensor
) -> Tensor:
    """Plain attention of each row to itself."""
    found, token = [], 0
    group, size = q.shape[1] // states.shape[1], q.shape[2]
    for row, length in enumerate(lengths):
        slot = int(rows.slot[row])
        keys, values = states[slot : slot + length].repeat_interleave(group, dim=1).split(size, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q[token : token + length], keys) * facts.scale
        if facts.soft_cap:
            scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
        query, key = torch.arange(length, device=q.device)[:, None], torch.arange(length, device=q.device)[None, :]
        scores = scores + slopes.double()[:, None, None] * (key - query)
        seen = key <= query if facts.causal else torch.ones_like(key <= query)
        if facts.window:
            seen = seen & (key > query - facts.window) & (key < query + facts.window)
        if facts.chunk:
            seen = seen & (key // facts.chunk == query // facts.chunk)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), dim=2)
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., :length], values))
        token += length
    return torch.cat(found)


def check_attention(
    device: str,
    dtype: torch.dtype,
    lengths: Sequence[int] = (70, 1, 33),
    heads: tuple[int, int, int] = (4, 2, 32),
    *,
    sinks: bool = False,
    slopes: bool = False,
    tiles: attention.Tiles | None = None,
    scale: float = 0.0,
    **facts: float | bool,
) -> None:
    """Rows of any lengths, of which none fills a tile."""
    num_heads, num_kv_heads, size = heads
    mask_spec = MaskSpec(scale or size**-0.5, **facts)  # type: ignore[arg-type]
    rooms = [-(-length // ROOM) * ROOM for length in lengths]
    slots = [ROOM + sum(rooms[:row]) for row in range(len(lengths))]
    tokens = [sum(lengths[:row]) for row in range(len(lengths))]
    rows = Rows.of(lengths, tokens, slots, rooms, torch.device(device))
    q, grad = (numbers(sum(lengths), num_heads, size, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
    states = numbers(slots[-1] + rooms[-1], num_kv_heads, 2 * size, seed=2, dtype=dtype, device=device)
    biases = tuple(2.0**-head for head in range(1, num_heads + 1)) if slopes else ()
    bias = torch.tensor(biases or (0.0,) * num_heads, device=device)
    sink = numbers(num_heads, seed=3, dtype=F32, device=device) if sinks else None
    given = (q, states) if sink is None else (q, states, sink)
    plain = lambda q, states, sink=None: _attend(q, states, sink, lengths, rows, mask_spec, bias)  # noqa: E731
    out = plain(*(tensor.double() for tensor in given)).to(dtype)
    tiles = tiles or attention.Tiles(attention.Tile(32, 16, 4, 1), attention.Tile(16, 32, 4, 1))
    ours = attention.attention_backward(
        q, states, grad, out, rows, mask_spec, alibi_slopes=biases, sinks=sink, tiles=tiles
    )
    again = attention.attention_backward(
        q, states, grad, out, rows, mask_spec, alibi_slopes=biases, sinks=sink, tiles=tiles
    )
    for own, other, expected in zip(ours, again, gradients(plain, grad, *given), strict=False):
        assert own is not None and other is not None
        assert torch.equal(own, other)
        assert_near(own, expected, LIMITS[dtype])
    if sink is not None and ours[2] is not None:
        assert_near(ours[2], _of_sinks(plain, grad, out, *given))


def _of_sinks(
    plain: Callable[..., Tensor], grad: Tensor, out: Tensor, q: Tensor, states: Tensor, sinks: Tensor
) -> Tensor:
    """The gradient of sinks in float64 by the forward's own results, whose rounding it inherits.

    A sink's share of a query is what its keys leave: 1 less attention to values of 1.
    """
    ones = torch.cat((states[..., : q.shape[2]], torch.ones_like(states[..., q.shape[2] :])), dim=2)
    share = 1.0 - plain(q.double(), ones.double(), sinks.double())[..., 0]
    return -(share * (grad.double() * out.double()).sum(2)).sum(0)


INTERPRETED: dict[str, Callable[[], None]] = {
    "norm": functools.partial(check_norm, "cpu", F32, 70, 40),
    "norm, bfloat16": functools.partial(check_norm, "cpu", BF16, 3, 130),
    "silu": functools.partial(check_activation, "cpu", F32, "silu"),
    "gelu": functools.partial(check_activation, "cpu", F32, "gelu_tanh"),
    "rope": functools.partial(check_rope, "cpu", F32, (4, 2, 64, 64), normed=True, tokens=40),
    "rope of a part": functools.partial(check_rope, "cpu", F32, (3, 1, 80, 24), normed=True),
    "rope without norms": functools.partial(check_rope, "cpu", F32, (2, 1, 32, 32), normed=False),
    "log-probabilities": functools.partial(check_logprob, "cpu", F32, 5000, cap=0.0, entropy=True),
    "capped": functools.partial(check_logprob, "cpu", F32, 700, cap=6.0, entropy=False),
    "attention": functools.partial(check_attention, "cpu", F32),
    "attention, float16": functools.partial(check_attention, "cpu", F16, (40, 1), window=20, sinks=True),
    "attention, window": functools.partial(check_attention, "cpu", F32, window=20),
    "attention, chunks": functools.partial(check_attention, "cpu", F32, chunk=24, sinks=True),
    "attention, cap and slopes": functools.partial(check_attention, "cpu", F32, soft_cap=3.0, slopes=True, scale=0.5),
    "attention, all ways": functools.partial(check_attention, "cpu", F32, (40, 64), (3, 1, 24), causal=False),
    "attention, window, all ways": functools.partial(check_attention, "cpu", F32, causal=False, window=9),
}

"""token_logprob and head_logprob: the sampler's log-probabilities, with gradients.

Owns the way from hidden states to log-probabilities of tokens in blocks of rows: logits of a block are made, used and
dropped, in both directions, so [tokens, vocab] never exists. Invariants: logits are the sampler's product, divided by
the temperature (not multiplied by its inverse), cut as the sampler cuts, and summed by its tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.gemm import linear as linear_operator
from octavo.ops.sampling import cut_, token_stats
from octavo.ops.sampling.truncation import TruncationRows
from octavo.rl.autograd.linear import add_weight, backward_input
from octavo.rl.autograd.outside import apply, first_order
from octavo.rl.autograd.packed_weights import packed

_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}  # logits of a block
_NEG_INF = float("-inf")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """A support that is found again from the logits, by the sampler's own cut: its sampling parameters' names.

    The logits over the temperature are cut by min_p first, then by top_k, then by top_p of what is left. Raises
    ValueError for what SamplingParams refuses.
    """

    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]

    def __post_init__(self) -> None:
        """Check."""
        if not isinstance(self.top_k, int) or self.top_k < -1:
            raise ValueError(f"top_k must be a whole number, at least -1, got {self.top_k!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")


Support = Truncation | Tensor
"""Which tokens could be drawn: parameters; or [tokens, K] int64, their ids, padded with -1; or [tokens, vocab] bool.

A row that names none is not cut: a sampling mask that says nothing of a token says that any could be drawn.
"""


class LogProbs(NamedTuple):
    """Both [tokens] float32."""

    logprobs: Tensor
    entropy: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Draw:
    """What becomes of logits before a token's log-probability is taken."""

    temperature: float
    support: Support | None
    soft_cap: float = 0.0
    divisor: float = 1.0

    def scaled_(self, logits: Tensor, rows: slice) -> Tensor:
        """Divided, capped, divided and cut, of a block's logits [rows, vocab] float32; they are overwritten."""
        if self.divisor != 1.0:
            logits = logits.div_(self.divisor)
        if self.soft_cap:
            logits = logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if isinstance(self.support, Truncation):
            return _cut(logits, self.temperature, self.support)
        if self.temperature != 1.0:
            logits = logits.div_(logits.new_full((len(logits), 1), self.temperature))
        return logits if self.support is None else _keep(logits, self.support[rows])

    def unscaled_(self, grad: Tensor, scaled: Tensor) -> Tensor:
        """The gradient of the head's product, of that of `scaled_`."""
        if self.temperature != 1.0:
            grad = grad.div_(self.temperature)
        if self.soft_cap:
            share = scaled.mul(self.temperature / self.soft_cap)
            grad = grad * (1 - share.square()).masked_fill_(scaled == _NEG_INF, 0.0)
        return grad if self.divisor == 1.0 else grad / self.divisor


def token_logprob(logits: Tensor, ids: Tensor, temperature: float = 1.0, support: Support | None = None) -> LogProbs:
    """Of ids [tokens] int64 under logits [tokens, vocab] float32, which stay as they are.

    `logits / temperature`, cut to the support, as the sampler's processed log-probabilities are. A token outside of the
    support has -inf, and no gradient. Entropy is that of the same distribution. Raises ValueError for a temperature
    that is not above 0, and for logits, ids and supports that do not fit.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, as the sampler's are, got {logits.dtype}")
    check_draw(temperature, support, len(logits))
    ids = checked_ids(ids, *logits.shape)
    support = _checked_support(support, logits.shape[1], logits.device)
    logprobs, entropy = apply(_TokenLogprob, logits, ids, _Draw(temperature, support))
    return LogProbs(logprobs, entropy)


def head_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    support: Support | None = None,
    soft_cap: float = 0.0,
    divisor: float = 1.0,
) -> LogProbs:
    """`token_logprob` of the logits of hidden [tokens, size] by a head's weight [vocab, size], without those in memory.

    soft_cap: of the logits, c * tanh(logits / c); 0: none. divisor: of the logits, before they are capped.
    """
    check_draw(temperature, support, len(hidden))
    ids = checked_ids(ids, len(hidden), len(weight))
    support = _checked_support(support, len(weight), hidden.device)
    logprobs, entropy = apply(_HeadLogprob, hidden, weight, ids, _Draw(temperature, support, soft_cap, divisor))
    return LogProbs(logprobs, entropy)


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, draw: _Draw) -> tuple[Tensor, Tensor]:
        logprobs, entropy, sums = _forward(lambda rows: logits[rows].detach().clone(), ids, draw, logits.shape[1])
        ctx.save_for_backward(logits, ids, entropy, sums)
        ctx.draw = draw
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, ids, entropy, sums = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _blocks(len(ids), logits.shape[1], logits.device):
            scaled = ctx.draw.scaled_(logits[rows].clone(), rows)
            of_rows = [None if each is None else each[rows] for each in grads]
            result[rows] = _of_product(scaled, ids[rows], of_rows, entropy[rows], sums[rows], ctx.draw, scaled.dtype)
        return result, None, None


class _HeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, draw: _Draw) -> tuple[Tensor, Tensor]:
        logits = _logits_of(hidden, weight)
        logprobs, entropy, sums = _forward(logits, ids, draw, len(weight))
        ctx.save_for_backward(hidden, weight, ids, entropy, sums)
        ctx.draw = draw
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, entropy, sums = ctx.saved_tensors
        logits = _logits_of(hidden, weight)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _blocks(len(ids), len(weight), hidden.device):
            scaled = ctx.draw.scaled_(logits(rows), rows)
            of_rows = [None if each is None else each[rows] for each in grads]
            own = _of_product(scaled, ids[rows], of_rows, entropy[rows], sums[rows], ctx.draw, hidden.dtype)
            del scaled
            of_hidden[rows] = backward_input(own, weight, hidden)
            add_weight(of_weight, own, hidden[rows])
        return of_hidden, of_weight.to(weight.dtype), None, None


def _logits_of(hidden: Tensor, weight: Tensor) -> Callable[[slice], Tensor]:
    """Rows of hidden states -> their logits, float32."""
    form = packed(weight, hidden.dtype)
    values = hidden.detach().contiguous()
    return lambda rows: linear_operator(values[rows], form, None, torch.float32)


def _blocks(num_rows: int, vocab_size: int, device: torch.device) -> list[slice]:
    at_once = max(1, _AT_ONCE[device.type] // vocab_size)
    return [slice(begin, min(begin + at_once, num_rows)) for begin in range(0, num_rows, at_once)]


def _forward(
    logits: Callable[[slice], Tensor], ids: Tensor, draw: _Draw, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities, entropies, logarithms of the sums of exponentials), all [tokens] float32."""
    logprobs, entropy, sums = torch.empty(3, len(ids), dtype=torch.float32, device=ids.device)
    for rows in _blocks(len(ids), vocab_size, ids.device):
        scaled = draw.scaled_(logits(rows), rows)
        logprobs[rows], sums[rows] = token_stats(scaled, ids[rows])
        entropy[rows] = _entropies(scaled, sums[rows])
    return logprobs, entropy, sums


def _entropies(scaled: Tensor, sums: Tensor) -> Tensor:
    """Of scaled logits [rows, vocab], which may be overwritten, and the logarithms of their sums of exponentials."""
    if scaled.is_cuda:
        from octavo.ops.backward.logprob import entropies  # needs triton

        return entropies(scaled, sums)
    logs = scaled - sums[:, None]
    weights = logs.exp()
    total = weights.sum(1)  # 1, but for the rounding of the sums, which is as large as logits are
    return (total.log() - (weights * logs.masked_fill_(logs == _NEG_INF, 0.0)).sum(1) / total).clamp_(min=0.0)


def _of_product(
    scaled: Tensor,
    ids: Tensor,
    grads: Sequence[Tensor | None],
    entropy: Tensor,
    sums: Tensor,
    draw: _Draw,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the head's product [rows, vocab] in `dtype`, of those of log-probabilities and entropies."""
    if not scaled.is_cuda:
        return draw.unscaled_(_backward(scaled, ids, grads, entropy, sums), scaled).to(dtype)
    from octavo.ops.backward.logprob import logprob_backward  # needs triton

    grad, grad_entropy = (None if each is None else each.contiguous() for each in grads)
    return logprob_backward(
        scaled,
        ids,
        grad,
        grad_entropy,
        entropy,
        sums,
        dtype,
        temperature=draw.temperature,
        soft_cap=draw.soft_cap,
        divisor=draw.divisor,
    )


def _backward(scaled: Tensor, ids: Tensor, grads: Sequence[Tensor | None], entropy: Tensor, sums: Tensor) -> Tensor:
    """The gradient of scaled logits [rows, vocab], of those of log-probabilities and entropies; None: nobody's."""
    grad, grad_entropy = grads
    logs = scaled - sums[:, None]
    result = torch.zeros_like(logs)
    weights = logs.exp()
    if grad_entropy is not None:
        result = -grad_entropy[:, None] * weights * (logs.masked_fill_(scaled == _NEG_INF, 0.0) + entropy[:, None])
    if grad is not None:
        hidden = scaled.gather(1, ids[:, None])[:, 0] == _NEG_INF  # of a token that could not be drawn: no gradient
        grad = grad.masked_fill(hidden, 0.0)
        result = result.sub_(weights.mul_(grad[:, None])).scatter_add_(1, ids[:, None], grad[:, None])
    return result


def _cut(logits: Tensor, temperature: float, support: Truncation) -> Tensor:
    """The sampler's division and cut, in place."""
    count, device = len(logits), logits.device
    cut_(
        logits,
        torch.arange(count, device=device),
        TruncationRows(
            divisors=torch.full((count,), temperature, device=device),
            top_k=torch.full((count,), max(support.top_k, 0), dtype=torch.int64, device=device),
            top_p=torch.full((count,), support.top_p, device=device),
            min_p=torch.full((count,), support.min_p, device=device),
        ),
    )
    return logits


def _keep(logits: Tensor, support: Tensor) -> Tensor:
    """Logits [rows, vocab] of the tokens of `support` alone, -inf elsewhere; a row that names none as it is."""
    kept = support
    if support.dtype != torch.bool:
        vocab_size = logits.shape[1]
        kept = torch.zeros(len(logits), vocab_size + 1, dtype=torch.bool, device=logits.device)
        kept = kept.scatter_(1, torch.where(support < 0, vocab_size, support), True)[:, :vocab_size]
    return logits.masked_fill_(~kept & kept.any(1, keepdim=True), _NEG_INF)


def checked_ids(ids: Tensor, num_tokens: int, vocab_size: int) -> Tensor:
    """ids as operators read them, [tokens] int64. Raises ValueError for others: memory would be read behind a row."""
    if ids.shape != (num_tokens,):
        raise ValueError(f"ids must be [{num_tokens}], one for each row, got {list(ids.shape)}")
    ids = ids.to(torch.int64).contiguous()
    if num_tokens and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"ids must lie in 0 .. {vocab_size - 1}, got {int(ids.min())} .. {int(ids.max())}")
    return ids


def _checked_support(support: Support | None, vocab_size: int, device: torch.device) -> Support | None:
    """The support on the device of the logits. Raises ValueError for one of another vocabulary."""
    if not isinstance(support, Tensor):
        return support
    if support.dtype == torch.bool:
        if support.shape[1] != vocab_size:
            raise ValueError(f"a support of bool must be [tokens, {vocab_size}], got {list(support.shape)}")
        return support.to(device)
    if support.numel() and not -1 <= int(support.min()) <= int(support.max()) < vocab_size:
        raise ValueError(f"ids of a support must lie in 0 .. {vocab_size - 1}, or be -1 for none")
    return support.to(device, torch.int64)


def check_draw(temperature: float, support: Support | None, num_tokens: int) -> None:
    """Raises ValueError for a temperature that is not above 0, and for a support of another shape."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: a greedy choice has no log-probability")
    if isinstance(support, Tensor) and (support.dim() != 2 or len(support) != num_tokens):
        raise ValueError(f"support must be [{num_tokens}, K] ids or [{num_tokens}, vocab] bool, got {support.shape}")

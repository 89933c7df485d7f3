"""logprobs: the sampler's log-probabilities of a pack's tokens under a converted model, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.rl.autograd.logprob import LogProbs, Support, check_draw
from octavo.rl.conversion import Request, in_force
from octavo.rl.pack import Pack


def logprobs(
    model: nn.Module,
    pack: Pack,
    targets: Tensor | None = None,
    temperature: float = 1.0,
    support: Support | None = None,
) -> LogProbs:
    """(log-probabilities, entropies), both [tokens] float32, of a converted model.

    Element i is of `targets[i]` behind the pack's tokens up to i: [tokens] int64, NO_TOKEN (-1) where none is asked
    for, which gives 0; None: `pack.next_tokens()`. temperature, support: as the tokens were drawn. With temperature 1
    and no support they are the engine's raw log-probabilities, in bits, else its processed ones. Both have gradients.
    Raises ValueError for a model that is not converted, and for arguments that do not fit the pack.
    """
    with in_force(model):
        return _logprobs(model, pack, targets, temperature, support)


def _logprobs(
    model: nn.Module, pack: Pack, targets: Tensor | None, temperature: float, support: Support | None
) -> LogProbs:
    if pack.ids is None:
        raise ValueError("this Pack has lengths alone: make it with ids, or by Pack.of(sequences)")
    if targets is not None and targets.is_floating_point():
        raise ValueError(f"targets must be whole numbers, got {targets.dtype}")
    asked = pack.next_tokens() if targets is None else targets.to(pack.device, torch.int64)
    if asked.shape != (pack.num_tokens,):
        raise ValueError(f"targets must be [{pack.num_tokens}], one for each token, got {list(asked.shape)}")
    check_draw(temperature, support, pack.num_tokens)
    request = Request(pack=pack, targets=asked, temperature=float(temperature), support=support)
    found: LogProbs = model(octavo=request)
    return found

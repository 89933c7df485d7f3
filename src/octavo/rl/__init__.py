"""octavo.rl: a trainer's forward with the sampler's bits, and gradients; new weights for a sampler that runs.

Operators with gradients, each the sampler's own: `linear`, `norm`, `add`, `qk_norm_rope`, `attention`, `gated`, `moe`,
`head_linear`, `latent_rope`, `token_logprob`, `head_logprob`. `Pack` holds sequences; `convert` makes a transformers
model run them; `Drawn` is what a sampler drew, with its log-probabilities beside the trainer's; `logprobs` and
`assert_same` are what a loop calls. `WeightSource` and `Sender` bring a trainer's
weights to an engine, whose side is `session`, `plan`, `in_place`, `receiver` and `transport`. No engine is imported.
Names load on first use: an engine's loop knows the session alone, without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.rl.autograd.attention import attention as attention
    from octavo.rl.autograd.gated import gated as gated
    from octavo.rl.autograd.latent import head_linear as head_linear
    from octavo.rl.autograd.latent import latent_rope as latent_rope
    from octavo.rl.autograd.linear import linear as linear
    from octavo.rl.autograd.logprob import LogProbs as LogProbs
    from octavo.rl.autograd.logprob import Truncation as Truncation
    from octavo.rl.autograd.logprob import head_logprob as head_logprob
    from octavo.rl.autograd.logprob import token_logprob as token_logprob
    from octavo.rl.autograd.moe import moe as moe
    from octavo.rl.autograd.norm import add as add
    from octavo.rl.autograd.norm import norm as norm
    from octavo.rl.autograd.rope import qk_norm_rope as qk_norm_rope
    from octavo.rl.check import Difference as Difference
    from octavo.rl.check import DifferenceError as DifferenceError
    from octavo.rl.check import assert_same as assert_same
    from octavo.rl.conversion import convert as convert
    from octavo.rl.current_weights import checksum as checksum
    from octavo.rl.pack import NO_TOKEN as NO_TOKEN
    from octavo.rl.pack import Pack as Pack
    from octavo.rl.rollouts.drawn import Drawn as Drawn
    from octavo.rl.scoring import logprobs as logprobs
    from octavo.rl.sender import Sender as Sender
    from octavo.rl.sender import WeightSource as WeightSource

_PUBLIC = {
    "Difference": "octavo.rl.check",
    "DifferenceError": "octavo.rl.check",
    "Drawn": "octavo.rl.rollouts.drawn",
    "LogProbs": "octavo.rl.autograd.logprob",
    "NO_TOKEN": "octavo.rl.pack",
    "Pack": "octavo.rl.pack",
    "Sender": "octavo.rl.sender",
    "Truncation": "octavo.rl.autograd.logprob",
    "WeightSource": "octavo.rl.sender",
    "add": "octavo.rl.autograd.norm",
    "assert_same": "octavo.rl.check",
    "attention": "octavo.rl.autograd.attention",
    "checksum": "octavo.rl.current_weights",
    "convert": "octavo.rl.conversion",
    "gated": "octavo.rl.autograd.gated",
    "head_linear": "octavo.rl.autograd.latent",
    "head_logprob": "octavo.rl.autograd.logprob",
    "latent_rope": "octavo.rl.autograd.latent",
    "linear": "octavo.rl.autograd.linear",
    "logprobs": "octavo.rl.scoring",
    "moe": "octavo.rl.autograd.moe",
    "norm": "octavo.rl.autograd.norm",
    "qk_norm_rope": "octavo.rl.autograd.rope",
    "token_logprob": "octavo.rl.autograd.logprob",
}
__all__ = [
    "NO_TOKEN",
    "Difference",
    "DifferenceError",
    "Drawn",
    "LogProbs",
    "Pack",
    "Sender",
    "Truncation",
    "WeightSource",
    "add",
    "assert_same",
    "attention",
    "checksum",
    "convert",
    "gated",
    "head_linear",
    "head_logprob",
    "latent_rope",
    "linear",
    "logprobs",
    "moe",
    "norm",
    "qk_norm_rope",
    "token_logprob",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'octavo.rl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value

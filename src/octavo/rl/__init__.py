"""octavo.rl: a trainer's forward with the sampler's bits, and gradients. No engine is imported.

Operators with gradients, each the sampler's own: `linear`, `norm`, `add`, `qk_norm_rope`, `attention`, `gated`, `moe`,
`token_logprob`, `head_logprob`. `Pack` holds sequences; `convert` makes a transformers model run them; `logprobs` and
`assert_same` are what a loop calls.
"""

from octavo.rl.autograd.attention import attention
from octavo.rl.autograd.gated import gated
from octavo.rl.autograd.linear import linear
from octavo.rl.autograd.logprob import LogProbs, Truncation, head_logprob, token_logprob
from octavo.rl.autograd.moe import moe
from octavo.rl.autograd.norm import add, norm
from octavo.rl.autograd.rope import qk_norm_rope
from octavo.rl.check import Difference, DifferenceError, assert_same
from octavo.rl.convert import convert
from octavo.rl.pack import NO_TOKEN, Pack
from octavo.rl.scoring import logprobs

__all__ = [
    "NO_TOKEN", "Difference", "DifferenceError", "LogProbs", "Pack", "Truncation", "add", "assert_same", "attention",
    "convert", "gated", "head_logprob", "linear", "logprobs", "moe", "norm", "qk_norm_rope", "token_logprob",
]  # fmt: skip

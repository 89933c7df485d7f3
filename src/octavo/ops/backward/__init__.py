"""What a trainer's backward runs on a GPU: the derivatives of the operators beside this folder, one module each.

Does not know autograd, which is `octavo.rl.autograd`'s; there too are the reference implementations, in plain torch.
Invariant: no result is added up by atomics, so gradients are the same from run to run. Modules need triton, but for
`rows` and `products`.
"""

"""Temporary: the convolution where rows decode, by variants."""
import torch
import states
from states import DEVICE, DRY
from octavo.states import gpu
from octavo.ops.scan import conv_decode_gpu
import old_conv
import mamba2 as bench


class Wrapped:
    def __init__(self, kernel, **options):
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[grid](*args, **{**options, **self.options})


def main():
    new, old = conv_decode_gpu.decode_convolution, old_conv.decode_convolution
    for count, computed in ((2, 70),) if DRY else ((512, 160), (512, 127), (256, 160), (64, 160), (8, 160), (1, 160)):
        run, rows = states.operator("conv", [1] * count, computed)
        for store in (*rows.own.states, *rows.own.kept_inputs):
            store.data.normal_()
        expected = None
        text = []
        for name, kernel, channels in (
            ("old", old, 512), ("new", new, 512), ("new half", new, 256), ("new 8 warps", Wrapped(new, num_warps=8), 512),
            ("new 64 regs", Wrapped(new, maxnreg=64), 512), ("new 72 regs", Wrapped(new, maxnreg=72), 512), ("new half 40", Wrapped(new, maxnreg=40), 256), ("old half", old, 256), ("new twice 8", Wrapped(new, num_warps=8), 1024),
        ):
            gpu.decode_convolution, gpu._DECODE_CHANNELS = kernel, channels
            try:
                us, result = bench.graph_us(run), run()
                made = [result.clone(), rows.pool.buffer.clone()]
                expected = expected or made
                text.append(f"{name} {us:.1f}{states.is_same(made, expected)}")
            except Exception as error:
                text.append(f"{name} FAILED {type(error).__name__} {str(error)[:80]}")
        print(f"convolution, {count} rows at {computed}: {', '.join(text)}", flush=True)


main()

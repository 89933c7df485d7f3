"""The Triton operators of layers with states against recurrences in float64: on a GPU, or interpreted."""

from __future__ import annotations

import contextlib
import functools
import random
import unittest.mock
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

import mamba2_rig
import state_rig as rig
from emulated import COMPILER, advances_emulated, convolves_emulated, decodes_emulated, emulated, walks_emulated
from octavo.layers.recurrent import GatedDeltaRule, ShortConvolution, state_spec
from octavo.ops.scan import SHORT_CHUNK
from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step
from octavo.ops.scan.mamba2 import mamba2_advance_gpu, mamba2_decode_gpu
from octavo.rl.autograd import recurrent
from octavo.rl.autograd.recurrent import DeltaSizes, gated_delta, short_conv
from octavo.rl.pack import Pack
from octavo.states import agreement, conv_decode, delta_gpu, example, gpu
from octavo.states.base import StateBackend
from octavo.states.gpu import GpuStates
from octavo.states.mamba2 import mamba2_advance, mamba2_decode, mamba2_prompts
from octavo.states.reference import DELTA_INPUTS, ReferenceStates

MAKERS = rig.CASES


def check_results(
    device: str,
    name: str,
    dtype: torch.dtype,
    lengths: Sequence[int],
    largest: int,
    sizes: tuple[int, ...] = (),
    **options: Any,
) -> None:
    """In steps of at most `largest` tokens of random rows, of prompts or with rejected tokens behind.

    options: Rows', beside other layers unless said.
    """
    case = MAKERS[name](dtype, *sizes)
    drawn = rig.draw_all(case, lengths)
    rig.move(case, device)
    rows = rig.Rows(case, GpuStates(), drawn, **{"beside": [rig.ATTENTION], "device": device} | options)
    rng = random.Random(3)
    while left := [row for row, count in enumerate(lengths) if rows.computed[row] < count]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        counts = {row: min(rng.randint(1, largest), lengths[row] - rows.computed[row]) for row in chosen}
        rows.compute(counts, rng.choice((0, 2)))
    rig.move(case, "cpu")
    for found, own in zip(rows.results, drawn, strict=True):
        expected = case.oracle(own)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < (3e-5 if dtype is torch.float32 else 3e-2), (name, len(expected), error)


def interpreted(name: str) -> None:
    check_results("cpu", name, torch.float32, (1, 17, 70, 140), 80 if name != "mamba1" else 20)


def walked() -> None:
    """Prompts of Mamba-2 that begin at borders, which only 16-bit types walk on a GPU, and the same cut elsewhere."""
    with unittest.mock.patch.object(gpu, "_WALKED", (torch.float32,)):
        check_results("cpu", "mamba2", torch.float32, (64, 200), 400)
        check_results("cpu", "mamba2", torch.float32, (70, 140), 64)
        check_results("cpu", "mamba2", torch.float32, (16, 3, 80), 16)


def beside_prompts() -> None:
    """Rows of one token beside longer ones, of Mamba-2, have the bits that they have in steps of their own."""
    decode = mamba2_decode_gpu.mamba2_decode
    for dtype in (torch.bfloat16, torch.float32):
        case = rig.CASES["mamba2"](dtype, 2, 16, 1, 16)
        drawn = rig.draw_all(case, (67, 66, 131, 40))
        steps = [{0: 63, 1: 64}, {0: 1, 3: 20}, {0: 1, 1: 1, 2: 70}, {0: 1, 1: 1, 3: 7, 2: 20}, {0: 1, 3: 13, 2: 41}]
        found = []
        for padded, apart in ((0, False), (0, True), (2, False))[: 3 if dtype == torch.bfloat16 else 2]:
            rows = rig.Rows(case, GpuStates(), drawn, block_size=64)
            rows.padded = padded
            for counts in steps:
                for part in [{row: count} for row, count in counts.items()] if apart else [counts]:
                    with unittest.mock.patch.object(
                        mamba2_decode_gpu, "mamba2_decode", unittest.mock.MagicMock()
                    ) as launched:
                        launched.__getitem__.side_effect = decode.__getitem__
                        rows.compute(part)
                    assert launched.__getitem__.called == (1 in part.values() or padded > 0), part
            found.append(rows.results)
        for results in found[1:]:
            for one, other in zip(results, found[0], strict=True):
                assert torch.equal(one, other), (dtype, (one != other).any(1).nonzero().flatten())


def layers_advance_together() -> None:
    """States of all of Mamba-2's layers, whose parts lie at equal distances or not, with the bits of one by itself."""
    case, launched = rig.CASES["mamba2"](torch.bfloat16, 2, 16, 1, 16), list[int]()
    advance = mamba2_advance_gpu.mamba2_advance

    def counted(grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *args, **options: (launched.append(args[4]), advance[grid](*args, **options))

    spec, drawn = rig.state_spec(case.part), rig.draw_all(case, (67, 66))
    for beside, expected in (((), [1] * 4), ((spec, spec), [3] * 4), ((spec, spec, spec), [3] * 4)):
        rows = rig.Rows(case, GpuStates(), drawn, block_size=64, beside=beside)
        if len(beside) == 3:  # of these the second is left out
            rows.others.pop(1)
            expected = [1] * 12
        rows.compute({0: 63, 1: 64})
        launched.clear()
        with unittest.mock.patch.object(mamba2_advance_gpu, "mamba2_advance", unittest.mock.MagicMock()) as kernel:
            kernel.__getitem__.side_effect = counted
            for counts in ({0: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1}):
                rows.compute(counts)
        assert launched == expected
        alone = [case.oracle(each) for each in drawn]
        for found, own in zip(rows.results, alone, strict=True):
            assert (found.double() - own).abs().max() < 3e-2 * own.abs().max()


def convolved_in_cuda(device: str = "cpu") -> None:
    """Rows that decode, by the convolution in CUDA C++, lanes on a CPU, beside Triton's: one bit of bfloat16 at most.

    Triton's interpreter rounds to bfloat16 towards zero. What is kept is the same.
    """
    emulates = device == "cpu"
    for channels, width, silu in ((1100, 4, True), (96, 3, False)):
        case, found = rig.CASES["conv"](torch.bfloat16, channels, width, silu), []
        drawn = rig.draw_all(case, (131, 66, 64, 3, 5))
        rig.move(case, device)
        for copied, parts in ((False, 0), (True, 1), (True, 3)) if emulates else ((False, 0), (True, 0)):
            own = {"_COPIED": copied, "_FEWEST_ROWS": 0} | ({"agrees": lambda *_: True} if emulates else {})
            where = convolves_emulated(parts) if emulates else contextlib.nullcontext([])
            with unittest.mock.patch.multiple(conv_decode, **own), where as launches:
                rows = rig.Rows(case, GpuStates(), drawn, block_size=64, device=device)
                rows.padded = 1
                steps = [
                    {1: 62, 0: 62, 2: 62},
                    *[{4: 1, 3: 1, 1: 1, 0: 1, 2: 1}] * 2,
                    {3: 1, 1: 1, 0: 1},
                    {1: 1},
                    {0: 63},
                ]
                for counts in [*steps, *[{0: 1}] * 3]:
                    rows.compute(counts)
            assert launches == ["conv_decode"] * (7 if copied and emulates else 0), launches
            kept = [store.data.float().nan_to_num() for store in (*rows.own.states, *rows.own.kept_inputs)]
            found.append([*(each.float() for each in rows.results), *kept])
        for others in found[1:]:
            for place, (one, other) in enumerate(zip(found[0], others, strict=True)):
                assert one.shape == other.shape
                near = emulates and place < len(drawn)
                assert (one - other).abs().max() <= (8e-3 * one.abs().max() if near else 0)


def kernels_of_rows_are_compared() -> None:
    """By examples of a layer's own shape, before those in CUDA C++ run: here they sum in another order."""
    mamba2, conv = rig.CASES["mamba2"](torch.bfloat16, 8, 64, 1, 128), rig.CASES["conv"](torch.bfloat16, 96, 4)
    holds = unittest.mock.patch.object(agreement.validation_cache, "holds", lambda told, device, compare: compare())
    captured = unittest.mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module, emulator, case, same in (
        (mamba2_advance, advances_emulated, mamba2, [False, True, True, True, True]),
        (mamba2_decode, decodes_emulated, mamba2, [False, True, True, True, False, False]),
        (mamba2_prompts, walks_emulated, mamba2, [False, False, True, True, True, True]),
        (conv_decode, convolves_emulated, conv, [False, True, True]),
    ):
        found = list[list[bool]]()

        def near(
            results: Sequence[Sequence[torch.Tensor]], found: list[list[bool]] = found, agree: Any = module.agree
        ) -> bool:
            assert agree([results[0], results[0]])
            pairs = zip(results[0], results[-1], strict=True)
            found.append([torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in pairs])
            return agree(results)

        asked = unittest.mock.patch.object(module, "agree", near)
        others = [each for each in (mamba2_decode, conv_decode) if each is not module]
        with contextlib.ExitStack() as stack:
            for each in others:
                stack.enter_context(unittest.mock.patch.object(each, "_COPIED", False))
            if module in (mamba2_decode, conv_decode):
                stack.enter_context(unittest.mock.patch.object(module, "_FEWEST_ROWS", 0))
            stack.enter_context(unittest.mock.patch.dict(agreement._found, clear=True))
            stack.enter_context(holds), stack.enter_context(captured), stack.enter_context(asked)
            launches = stack.enter_context(emulator(3))
            rows = rig.Rows(case, GpuStates(), rig.draw_all(case, (65,)), block_size=64)
            rows.compute({0: 63})
            rows.compute({0: 1})
        assert len(launches) == 1 and len(found) == 1, (launches, found)  # a difference ends it
        assert all(is_same or not told for is_same, told in zip(found[0], same, strict=True)), found


def parted() -> None:
    """States of Mamba-2 in two halves have the bits of whole ones, in heads of one line and of several, however cut.

    What is no number stays none.
    """
    case = rig.CASES["mamba2"](torch.bfloat16, 2, 16, 1, 64)
    drawn = rig.draw_all(case, (140, 66))
    drawn[1][0][3, 0] = torch.nan
    steps = [{0: 63, 1: 64}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {0: 5, 1: 1}, {0: 64}, {0: 5}]
    found = []
    for block_size in (64, 16):
        for is_parted in (gpu._is_parted, lambda *_: False):
            with unittest.mock.patch.object(gpu, "_is_parted", is_parted):
                rows = rig.Rows(case, GpuStates(), drawn, block_size=block_size)
                for counts in steps:
                    rows.compute(counts)
            found.append((rows.own.states[0].lines, rows.results))
    assert [lines for lines, _ in found] == [2, 2, 128, 128]
    for _, results in found:
        for one, other in zip(results, found[0][1], strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), (one != other).any(1).nonzero()
    (first, second), expected = found[0][1], case.oracle(drawn[0])
    assert (first.double() - expected).abs().max() < 3e-2 * expected.abs().max()
    assert second[3:, 0].isnan().all() and not second[:, 1:].isnan().any()


def streamed() -> None:
    """The delta rule's prompts that begin at borders, and its decoding, which only 16-bit types do so on a GPU."""
    types = (torch.float32,)
    with unittest.mock.patch.multiple(delta_gpu, _STREAMED=types, _WALKED=types):
        check_results("cpu", "delta", torch.float32, (64, 150), 400)
        check_results("cpu", "delta", torch.float32, (70, 140), 64, (1, 3, 16, 40))
        check_decoding("cpu", "delta", torch.float32)


def wide_convolution() -> None:
    """LFM3's, without silu."""
    check_results("cpu", "conv", torch.float32, (1, 6, 7, 70), 20, (40, 7, False))


def convolved_prompts() -> None:
    """A convolution of prompts has the bits of one token a step, wherever the prompts are cut."""
    case = rig.CASES["conv"](torch.float32)
    drawn = rig.draw_all(case, (5, 33, 70))
    rows = rig.Rows(case, GpuStates(), drawn)
    for place in range(70):
        rows.compute({row: 1 for row, each in enumerate(drawn) if place < len(each[0])})
    for cuts in ((4, 18, 69), (3, 30, 17), (1, 19, 47), (2, 32, 64)):
        other = rig.Rows(case, GpuStates(), drawn, seed=sum(cuts))
        other.compute(dict(enumerate(cuts)))
        other.compute({row: len(each[0]) - cut for row, (cut, each) in enumerate(zip(cuts, drawn, strict=True))})
        for found, expected in zip(other.results, rows.results, strict=True):
            assert torch.equal(found, expected), (cuts, (found != expected).any(1).nonzero().flatten())


def packed_sequences() -> None:
    """A trainer's sequences, which leave nothing behind: near the reference's, and the same bits however packed."""
    lengths, drawn = (1, 17, 70), torch.Generator().manual_seed(0)
    sizes, channels = DeltaSizes(1, 2, 16, 16), 64
    spec = state_spec(ShortConvolution(0, channels, 4, torch.float32), GatedDeltaRule(0, *sizes, torch.float32))
    qkv, gates = torch.randn(88, channels, generator=drawn), torch.randn(2, 88, 2, generator=drawn)
    weight, of_heads = torch.randn(channels, 1, 4, generator=drawn), torch.randn(2, 2, generator=drawn)

    def run(backend: StateBackend, lengths: tuple[int, ...], rows: slice) -> torch.Tensor:
        with unittest.mock.patch.object(recurrent, "state_backend", lambda device: backend):
            pack = Pack(lengths)
            found = short_conv(qkv[rows], weight, pack, spec)
            return gated_delta(found, gates[0, rows], gates[1, rows], *of_heads, pack, spec, sizes)

    found = run(GpuStates(), lengths, slice(None))
    expected = run(ReferenceStates(), lengths, slice(None))
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    alone = [
        run(GpuStates(), (count,), slice(end - count, end)) for count, end in zip(lengths, (1, 18, 88), strict=True)
    ]
    assert torch.equal(torch.cat(alone), found)


def check_decoding(device: str, name: str, dtype: torch.dtype, sizes: tuple[int, ...] = (), **options: Any) -> None:
    """Two prompts that end shortly before a border, then steps of one token a row across it. Row 0 has one state.

    options: as of `check_results`.
    """
    case = MAKERS[name](dtype, *sizes)
    chunk = case.part.chunk or SHORT_CHUNK
    drawn = rig.draw_all(case, (2 * chunk + 3, chunk + 2))
    rig.move(case, device)
    rows = rig.Rows(case, GpuStates(), drawn, **{"beside": [rig.ATTENTION], "device": device} | options)
    rows.keep_one_state(0)
    rows.compute({0: chunk - 1, 1: chunk - 2})
    for _ in range(4):
        rows.compute({0: 1, 1: 1})
    rows.compute({0: chunk - 4})
    for _ in range(4):  # from a state on
        rows.compute({0: 1})
    rig.move(case, "cpu")
    for found, own in zip(rows.results, drawn, strict=True):
        expected = case.oracle(own)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < (3e-5 if dtype is torch.float32 else 3e-2), (name, error)


def one_kernel_decodes(heads: tuple[int, int], begins: Sequence[int], steps: int) -> None:
    """The delta rule, its lanes on a CPU, beside Triton's kernels: rows in blocks' middles, on a border, and padding.

    heads: of keys and of values.
    """
    case = rig.CASES["delta"](torch.float16, *heads, 128, 128)
    drawn = rig.draw_all(case, [begin + steps for begin in begins])
    found = []
    for copied in ((), (delta_step,)):
        own = unittest.mock.patch.multiple(delta_gpu, _COPIED=copied, _FEWEST_STEPS=1)
        with own, emulated(3) as launches:
            rows = rig.Rows(case, GpuStates(), drawn, block_size=64)
            rows.compute(dict(enumerate(begins)))
            rows.padded = 1
            for _ in range(steps):
                rows.compute(dict.fromkeys(reversed(range(len(begins))), 1))
        assert launches.count("delta_step") == (steps if copied else 0)
        found.append([*rows.results, *(store.data.float().nan_to_num(0, 0, 0) for store in rows.own.kept_inputs[3:])])
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).abs().max() <= 1e-3 * other.float().abs().max()


def prompts_in_cuda(groups: int, *kernels: ModuleType) -> None:
    """The delta rule's, lanes on a CPU, beside Triton's: from a state on over chunks, within a block, an open chunk."""
    (found, kept), (expected, alike) = _delta_prompts(groups, *kernels), _delta_prompts(0)
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert (one.float() - other.float()).abs().max() <= 1e-3 * other.float().abs().max(), place
    assert all(map(torch.equal, alike, kept)), "the same tokens' inputs are kept"


@functools.cache
def _delta_prompts(groups: int, *kernels: ModuleType) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By Triton's kernels and these: results and what is kept of them, and which kept inputs are no numbers."""
    case = rig.CASES["delta"](torch.float16, 1, 2, 128, 128)
    rows = rig.Rows(case, GpuStates(), rig.draw_all(case, (215, 70, 139)), block_size=64)
    own = unittest.mock.patch.multiple(delta_gpu, _COPIED=kernels)
    with own, emulated(3, groups=groups) as launches:
        rows.compute({1: 70, 0: 64, 2: 62})
        rows.padded = 1
        rows.compute({2: 76, 0: 150})
        rows.compute({0: 1, 2: 1})  # by what is kept
    assert launches == [each.__name__.rpartition(".")[2] for each in kernels] * 2
    stores = [rows.own.states[0], *rows.own.kept_inputs[4:]]
    blocks = rows.own.input_table.long()
    found = [*rows.results, *(store.data.float().nan_to_num(0, 0, 0).clamp(-99, 99) for store in stores)]
    return found, [store.data[blocks].isnan() for store in rows.own.kept_inputs]


def delta_beside_prompts(*kernels: ModuleType) -> None:
    """The delta rule's rows of one token beside longer ones have the bits that they have in steps of their own."""
    case = rig.CASES["delta"](torch.float16, 1, 2, *((128, 128) if kernels else (16, 32)))
    drawn = rig.draw_all(case, (67, 66, 131, 40))
    steps = [{0: 63, 1: 64}, {0: 1, 3: 20}, {0: 1, 1: 1, 2: 70}, {0: 1, 1: 1, 3: 7, 2: 20}, {0: 1, 3: 13, 2: 41}]
    found = []
    ways = ((0, False), (0, True), *([] if kernels else [(2, False)]))  # both kernels' own checks have padding
    for padded, apart in ways:
        rows = rig.Rows(case, GpuStates(), drawn, block_size=64)
        rows.padded = padded
        for counts in steps:
            for part in [{row: count} for row, count in counts.items()] if apart else [counts]:
                decode = unittest.mock.patch.object(delta_gpu, "_decode_rows", side_effect=delta_gpu._decode_rows)
                own = unittest.mock.patch.multiple(delta_gpu, _COPIED=kernels, _FEWEST_STEPS=1)
                with own, emulated(3) as launches, decode as decoded:
                    rows.compute(part)
                assert decoded.called == (1 in part.values() or padded > 0), part
                if kernels:
                    assert ("delta_step" in launches) == decoded.called
                    assert ("delta_prompts" in launches) == (max(part.values()) > 1), part
        found.append(rows.results)
    for results in found[1:]:
        for one, other in zip(results, found[0], strict=True):
            near = (one.float() - other.float()).abs() <= 1e-3 * other.float().abs().max()  # lanes on a CPU
            assert (near if kernels else one == other).all(), (one != other).any(1).nonzero().flatten()


def kernels_are_compared() -> None:
    """By an example of a layer's own shape, before they run: near each other here, of the same bits on a GPU."""
    case = rig.CASES["delta"](torch.float16, 1, 2, 128, 128)
    rows = rig.Rows(case, GpuStates(), rig.draw_all(case, (70,)), block_size=64)
    told = GpuStates()._tell(rows.own, "delta", ("state",), DELTA_INPUTS, (128, 128, 128, 128, 1, 1))
    like, agreed = torch.empty(0, 512, dtype=torch.float16), list[int]()

    def agree(found: Sequence[Sequence[torch.Tensor]]) -> bool:
        assert same([found[0], found[0]]) and not same([found[0], [each + 1 for each in found[0]]])
        for other in found[1:]:
            for one, theirs in zip(found[0], other, strict=True):
                assert (one.float() - theirs.float()).abs().max() <= 1e-3 * theirs.float().abs().max(), one.shape
        agreed.append(len(found))
        return True

    same = example.agree
    asked = unittest.mock.patch.object(agreement.validation_cache, "holds", lambda told, device, compare: compare())
    near = unittest.mock.patch.object(example, "agree", agree)
    captured = unittest.mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
    for kernel, launched in (
        (delta_prompts, ["delta_prompts"] * 4),
        (delta_prepare, ["delta_prepare", "delta_prompts"] * 2),
        (delta_step, ["delta_step"] * 2),
    ):
        with emulated(3, compares=True) as launches, asked, near, captured:
            if kernel is delta_prepare:
                assert delta_prompts.is_loaded({}, torch.device("cpu"))
            assert delta_gpu.chosen(kernel, rows.own, told, case.part.operands, like)
        assert launches == launched, (launches, told.forms)
    assert agreed == [3, 3, 3, 2, 2]


def several_heads_decode() -> None:
    """By one program, which reads one while it computes another, of several groups; and by uneven ones."""
    for programs in (1, 3):
        with unittest.mock.patch.object(gpu, "programs_of", lambda *_, programs=programs: programs):
            check_decoding("cpu", "mamba2", torch.float32, (4, 16, 2, 16))


_DECODED = {f"{name} decodes": lambda name=name: check_decoding("cpu", name, torch.float32) for name in MAKERS}
_ONE = (((1, 2), (63, 30, 15, 1), 3), ((1, 4), (66, 47), 1)) if COMPILER else ()
_OF_PROMPTS = ((2, delta_prompts), (1, delta_prepare, delta_prompts)) if COMPILER else ()
INTERPRETED = (
    {name: lambda name=name: interpreted(name) for name in MAKERS}
    | _DECODED
    | {
        "a pack": packed_sequences,
        "mamba2 walks": walked,
        "mamba2's halves": parted,
        "mamba2 beside prompts": beside_prompts,
        "mamba2's layers together": layers_advance_together,
        "delta streams": streamed,
    }
    | {"mamba2 decodes several heads": several_heads_decode}
    | {f"{heads[1]} heads in one kernel": lambda own=(heads, *rest): one_kernel_decodes(*own) for heads, *rest in _ONE}
    | {"delta beside prompts": delta_beside_prompts}
    | (
        {"kernels beside prompts": lambda: delta_beside_prompts(delta_step, delta_prepare, delta_prompts)}
        if COMPILER
        else {}
    )
    | ({f"{len(each) - 1} kernels for prompts": lambda each=each: prompts_in_cuda(*each) for each in _OF_PROMPTS})
    | ({"kernels are compared": kernels_are_compared} if COMPILER else {})
    | ({"mamba2's states in one kernel": mamba2_rig.advanced_in_cuda} if COMPILER else {})
    | ({"mamba2 decodes in one kernel": mamba2_rig.decoded_in_cuda} if COMPILER else {})
    | ({"mamba2's prompts in one kernel": mamba2_rig.walked_in_cuda} if COMPILER else {})
    | ({"rows are convolved in one kernel": convolved_in_cuda} if COMPILER else {})
    | ({"kernels of rows are compared": kernels_of_rows_are_compared} if COMPILER else {})
    | {"conv of 7 tokens": wide_convolution, "conv of prompts": convolved_prompts}
)

"""Operators of layers with states: against recurrences in float64, and one row's bits in every cut, batch and place."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import pytest
import torch

import state_rig as rig
from octavo.cache.specs import with_state_dtype
from octavo.layers.recurrent import ShortConvolution, state_spec
from octavo.ops import native
from octavo.ops.gemm import pack_linear
from octavo.ops.scan import DeltaNetOperands, decay_of
from octavo.states.base import StateBackend
from octavo.states.cpu import CpuStates
from octavo.states.reference import ReferenceStates

BACKENDS: list[StateBackend] = [ReferenceStates(), CpuStates()]
ODD = {"conv": (13, 3, False), "delta": (1, 3, 20, 12), "mamba2": (3, 5, 1, 9), "mamba1": (21, 3)}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 150)

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
each_case = pytest.mark.parametrize("name", list(rig.CASES))


@each_backend
@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_its_results_are_those_of_a_recurrence_in_float64(backend: StateBackend, name: str, dtype: torch.dtype) -> None:
    case = rig.CASES[name](dtype)
    drawn = rig.draw_all(case, LENGTHS)
    for found, own in zip(rig.alone(case, backend, drawn), drawn, strict=True):
        expected = case.oracle(own)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < (2e-6 if dtype is torch.float32 else 2e-2), (len(expected), error)


@each_backend
@each_case
def test_H_8_a_row_has_the_same_bits_in_any_cut_and_batch(backend: StateBackend, name: str) -> None:
    """Cut anywhere, among other rows in any order, with rejected tokens behind, over other blocks."""
    case = rig.CASES[name]()
    lengths = LENGTHS if backend.name != "reference" else (17, 66)
    drawn = rig.draw_all(case, lengths)
    expected = rig.alone(case, backend, drawn)
    rng = random.Random(5)
    for largest, spoilt, options in ((1, 0, {}), (7, 3, {}), (64, 0, {"block_size": 32}), (100, 2, {})):
        beside = [rig.ATTENTION] * rng.randrange(3)
        rows = rig.Rows(case, backend, drawn, beside=beside, seed=largest, **options)
        while left := [row for row, count in enumerate(lengths) if rows.computed[row] < count]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            counts = {row: min(rng.randint(1, largest), lengths[row] - rows.computed[row]) for row in chosen}
            rows.compute(counts, spoilt)
        for row, (found, own) in enumerate(zip(rows.results, expected, strict=True)):
            assert torch.equal(found, own), (lengths[row], largest, spoilt)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_operators_have_the_bits_of_the_reference(name: str, dtype: torch.dtype) -> None:
    """Sizes that fill no vector, states that are cut in heads or rows, and such that lie together."""
    case, other = rig.CASES[name](dtype), rig.CASES[name](dtype, *ODD[name])
    for own, options in ((case, {}), (other, {}), (case, {"beside": [rig.ATTENTION]})):
        drawn = rig.draw_all(own, LENGTHS)
        for each, expected in zip(drawn, rig.alone(own, ReferenceStates(), drawn, **options), strict=True):
            rows = rig.Rows(own, CpuStates(), [each], **options)
            for begin in range(0, len(expected), 37):
                rows.compute({0: min(37, len(expected) - begin)})
            assert torch.equal(rows.results[0], expected), len(expected)


@pytest.mark.parametrize("num_beside", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mamba1_of_several_tasks_a_row_has_the_bits_of_the_reference(dtype: torch.dtype, num_beside: int) -> None:
    """The last task's channels fill no vector; an item is cut at other places under each size of block."""
    case, options = rig.mamba1_case(dtype, 150, 5), {"beside": [rig.ATTENTION] * num_beside}
    drawn = rig.draw_all(case, (33, 70))
    expected, rows = rig.alone(case, ReferenceStates(), drawn, **options), rig.Rows(case, CpuStates(), drawn, **options)
    for begin in range(0, 70, 5):
        rows.compute({row: min(5, len(own[0]) - begin) for row, own in enumerate(drawn) if begin < len(own[0])})
    assert all(map(torch.equal, rows.results, expected))


@each_case
def test_every_instruction_set_has_the_same_bits(name: str) -> None:
    case = rig.CASES[name](torch.bfloat16)
    drawn = rig.draw_all(case, (100,))
    found = []
    for isa in native.built_isas():
        with native.using(isa):
            found += rig.alone(case, CpuStates(), drawn)
    assert all(torch.equal(each, found[0]) for each in found)


@each_case
def test_any_number_of_threads_has_the_same_bits(name: str) -> None:
    case = rig.CASES[name]()
    drawn = rig.draw_all(case, (150, 20))
    before, found = native.num_threads(), []
    for count in (1, 3):
        native.set_num_threads(count)
        rows = rig.Rows(case, CpuStates(), drawn)
        rows.compute({1: 20, 0: 150})
        found.append(rows.results)
    native.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_state_in_bfloat16_is_rounded_at_borders_alone() -> None:
    """The option's error: a state is read with 8 bits, and what is added to it within a chunk is not rounded."""
    for make in (rig.delta_case, rig.mamba2_case):
        case = make()
        drawn = rig.draw_all(case, (300,))
        spec = with_state_dtype(state_spec(case.part), "bfloat16")
        for backend in BACKENDS:
            (found,) = rig.alone(case, backend, drawn, spec=spec)
            error = (found.double() - case.oracle(drawn[0])).abs().max() / found.abs().max()
            assert 1e-5 < error < 1e-2
            rows = rig.Rows(case, backend, drawn, spec=spec)
            for count in (1, 62, 2, 100, 135):
                rows.compute({0: count})
            assert torch.equal(rows.results[0], found)


@each_backend
@each_case
def test_a_new_state_may_take_the_blocks_of_the_one_before_it(backend: StateBackend, name: str) -> None:
    """Of a row that decodes: all is read of a state before the next one is written."""
    case = rig.CASES[name]()
    chunk = case.part.chunk or 16
    drawn = rig.draw_all(case, (2 * chunk + 3, 2 * chunk + 5))
    expected = rig.alone(case, backend, drawn)
    rows = rig.Rows(case, backend, drawn)
    rows.keep_one_state(0)
    rows.compute({0: chunk - 1, 1: 2 * chunk + 1})
    for count in (1, 1, chunk - 2, 1, 1, 1, 1):
        rows.compute({0: count} | ({1: 1} if rows.computed[1] < 2 * chunk + 5 else {}))
    for found, own in zip(rows.results, expected, strict=True):
        assert torch.equal(found, own)


@each_case
def test_H_3_a_state_behind_rejected_tokens_is_written_again(name: str) -> None:
    """A verification may pass a border with tokens that are rejected: what it wrote there is of no row's tokens."""
    case = rig.CASES[name]()
    drawn = rig.draw_all(case, (130,))
    rows, clean = (rig.Rows(case, CpuStates(), drawn, seed=3) for _ in range(2))
    rows.compute({0: 62}, spoilt=6)
    rows.compute({0: 1}, spoilt=3)
    rows.compute({0: 67})
    clean.compute({0: 130})
    assert torch.equal(rows.results[0], clean.results[0])
    own, other = (
        each.own.states[0].data[each.own.state_table[0, : each.own.states[0].blocks * (128 // each.own.chunk)].long()]
        for each in (rows, clean)
    )
    assert torch.equal(own.nan_to_num(9.0), other.nan_to_num(9.0)) and not own.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_delta_net_in_one_call_has_the_bits_of_its_operators(dtype: torch.dtype) -> None:
    rule = rig.delta_case(dtype).part
    conv = ShortConvolution(0, rule.channels, 4, dtype)
    rig.fill(conv)
    random = torch.Generator().manual_seed(9)
    projections = torch.randn(rule.channels + 4 * 32 + 2 * 4, 24, generator=random).to(dtype)
    net = DeltaNetOperands(pack_linear(projections), conv.operands, rule.operands, torch.linspace(0.5, 2, 32), 1e-6)
    case = rig.Case(
        "net",
        rule,
        lambda random, n: (torch.randn(n, 24, generator=random).to(dtype),),
        lambda backend, own, drawn: backend.delta_net(own, net, *drawn),
        lambda drawn: drawn[0],
    )
    drawn, spec = rig.draw_all(case, (1, 70, 130)), state_spec(conv, rule)
    expected = rig.alone(case, ReferenceStates(), drawn, spec=spec)
    rows = rig.Rows(case, CpuStates(), drawn, spec=spec)
    for counts in ({1: 65, 0: 1}, {2: 100, 1: 1}, {1: 4, 2: 30}):
        rows.compute(counts)
    assert all(map(torch.equal, rows.results, expected))


@pytest.mark.parametrize("code", ["", "AVX2", "COMPATIBLE"], ids=lambda code: code or "this process's")
def test_how_fast_states_forget_has_one_set_of_bits_on_all_processors(code: str) -> None:
    """Of float32, e^x of torch has others with another code of its library."""
    run = (
        "import hashlib, torch; from octavo.ops.scan import decay_of;"
        "x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 6 - 3;"
        "print(hashlib.sha256(decay_of(x).numpy().tobytes()).hexdigest()[:16])"
    )
    if not code:
        x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 6 - 3
        assert hashlib.sha256(decay_of(x).numpy().tobytes()).hexdigest()[:16] == "2c42cd7089d4ac47"
        return
    environment = os.environ | {"MKL_CBWR": code, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", run], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2c42cd7089d4ac47"

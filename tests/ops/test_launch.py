"""Direct launches run what Triton would: on a driver that has no device, each launch is compared with Triton's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from octavo.ops.compile import launch  # noqa: E402


def _add(x, y, count, scale, BLOCK: tl.constexpr, TWICE: tl.constexpr = False):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count) * scale
    if TWICE:
        value += value
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < count)


def _between(x, BLOCK: tl.constexpr, count):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at, mask=at < count)


class _Launcher:
    """Notes what is launched."""

    launches: list[tuple[Any, ...]] = []

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        x, y, z, stream, function, packed, _, _, _, *values = args
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
        self.launches.append((x, y, z, stream, function, packed, *values))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What is launched, on a Hopper that is not there."""
    modules = itertools.count(1)
    utils = SimpleNamespace(
        load_binary=lambda *args: (next(modules), next(modules), 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    no_device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 77,
        utils=utils,
        launcher_cls=_Launcher,
    )
    monkeypatch.setattr(driver, "_active", no_device)
    monkeypatch.setattr("triton.compiler.compiler.max_shared_mem", lambda device: 232448)
    _Launcher.launches.clear()
    yield _Launcher.launches


def same_as_triton(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> bool:
    """Launch in both ways, and compare. Whether the first of them left Triton out."""
    runs, run = [], type(kernel.kernel).run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kernel.kernel), "run", lambda *a, **o: runs.append(1) or run(*a, **o))
        kernel[grid](*args, **constants)
    kernel.kernel[grid](*args, **constants)
    first, second = _Launcher.launches[-2:]
    assert first == second
    return not runs


def test_the_same_machine_code_for_every_kind_of_argument(launches: list[tuple[Any, ...]]) -> None:
    """Aligned and not, 1, multiples of 16, 64 bits, none, other dtypes, constants, options: twice in random order."""
    kernel = launch.launched(triton.jit)(_add)
    room = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    counts = [0, 1, 2, 15, 16, 17, 1 << 31, (1 << 31) + 16, -16, -1]
    calls = [
        ((room[dtype][start:], room[other][at:], count, scale), {"BLOCK": block, "num_warps": warps} | more)
        for dtype, start, other, at, count, scale, block, warps, more in [
            *((torch.float32, 0, torch.bfloat16, 0, count, 0.5, 16, 1, {}) for count in counts),
            *((torch.float32, start, torch.bfloat16, at, 16, 2.0, 16, 1, {}) for start in (0, 1, 4) for at in (0, 1)),
            (torch.bfloat16, 0, torch.bfloat16, 0, 16, 1, 16, 1, {}),
            (torch.bfloat16, 0, torch.bfloat16, 0, 16, 1.0, 16, 1, {"TWICE": True}),
            (torch.bfloat16, 0, torch.bfloat16, 0, 16, 1.0, 16, 1, {"TWICE": False}),
            (torch.bfloat16, 0, torch.bfloat16, 0, 16, 1.0, 32, 1, {}),
            (torch.bfloat16, 0, torch.bfloat16, 0, 16, 1.0, 32, 2, {}),
            (torch.bfloat16, 0, torch.bfloat16, 0, 16, 1.0, 32, 2, {"enable_fp_fusion": False}),
        ]
    ]
    for args, constants in calls:
        same_as_triton(kernel, (3,), *args, **constants)
    for args, constants in reversed(calls):
        assert same_as_triton(kernel, (5, 2), *args, **constants), "it was launched before"
    functions = {one[4] for one in launches}
    assert len(functions) > 10, "the calls need several kernels"


def test_the_stream_and_the_device_are_asked_each_time(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch goes to the stream that is current, and a device has machine code of its own."""
    kernel, x = launch.launched(triton.jit)(_add), torch.zeros(16)
    kernel[(1,)](x, x, 16, 1.0, BLOCK=16)
    monkeypatch.setattr(driver.active, "get_current_stream", lambda device: 78)
    kernel[(1,)](x, x, 16, 1.0, BLOCK=16)
    monkeypatch.setattr(driver.active, "get_current_device", lambda: 1)
    kernel[(1,)](x, x, 16, 1.0, BLOCK=16)
    assert [one[3] for one in launches] == [77, 78, 78]
    assert launches[0][4] == launches[1][4] != launches[2][4]


def test_a_constant_before_an_argument_is_left_to_triton(launches: list[tuple[Any, ...]]) -> None:
    """Direct launches put constants last."""
    kernel, x = launch.launched(triton.jit)(_between), torch.zeros(16, dtype=torch.int32)
    assert not any(same_as_triton(kernel, (1,), x, 16, 16) for _ in range(2))
    assert not any(same_as_triton(kernel, (1,), x, BLOCK=16, count=16) for _ in range(2))


def test_an_argument_of_an_unknown_kind_is_left_to_triton(launches: list[tuple[Any, ...]]) -> None:
    """A subclass of tensors may lie elsewhere than its address says."""
    kernel, x = launch.launched(triton.jit)(_add), torch.zeros(16)
    special = torch.nn.Parameter(x)
    assert not any(same_as_triton(kernel, (1,), special, x, 16, 1.0, BLOCK=16) for _ in range(2))


def test_whether_a_kernel_was_compiled_shows_in_its_first_launch(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one, however long it takes, is no sign."""
    clock = [0.0]
    monkeypatch.setattr(launch, "_slowest", 0.0)
    monkeypatch.setattr(launch, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    kernel, x = launch.launched(triton.jit)(_add), torch.zeros(16)

    def take(seconds: float) -> None:
        plain = _Launcher.__call__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Launcher, "__call__", lambda *args: clock.__setitem__(0, clock[0] + seconds) or plain(*args))
            kernel[(1,)](x, x, 16, 1.0, BLOCK=16)

    take(0.01)
    take(3.0)
    assert not launch.has_compiled()
    kernel = launch.launched(triton.jit)(_add)
    take(0.5)
    assert launch.has_compiled()

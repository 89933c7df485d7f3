"""Backends through the AttentionBackend protocol, and what each refuses by name."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from batches import run_backend
from octavo.attention.base import BACKENDS
from octavo.cache.specs import AttentionSpec
from octavo.ops import native

CPU = torch.device("cpu")
SPECS = (
    AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32, scale=0.2),
    AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32, scale=0.2, window=20, soft_cap=15.0),
)


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_equals_reference(dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, expected in zip(run_backend("cpu", dtype, CPU), run_backend("reference", dtype, CPU), strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)


def test_reference_takes_float16() -> None:
    assert all(out.isfinite().all() for out in run_backend("reference", torch.float16, CPU))


@pytest.mark.parametrize(
    ("dtype", "device", "named"), [(torch.float16, "cpu", "float16"), (torch.float32, "cuda", "cuda")]
)
def test_cpu_refuses_with_the_value(dtype: torch.dtype, device: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BACKENDS.resolve("cpu")(SPECS, dtype, torch.device(device))


def test_cpu_without_the_library_names_the_way_out() -> None:
    with native.disabled(), pytest.raises(ValueError, match=r"build_ext --inplace.*reference"):
        BACKENDS.resolve("cpu")(SPECS, torch.float32, CPU)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on any device")
def test_paged_refuses_the_cpu_and_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"cuda, got cpu.*attention_backend='cpu'"):
        BACKENDS.resolve("paged")(SPECS, torch.float32, CPU)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_backend_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="triton"):
        BACKENDS.resolve("paged")

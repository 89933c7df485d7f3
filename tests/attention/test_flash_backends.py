"""The backends of other libraries: what they hand over, and what they say where the library is missing.

The libraries run on GPUs only. Here stand-ins compute what their documentation says, from the arguments alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types

import pytest
import torch

from batches import make_history
from contract_rig import CPU, Row, Setting, attend_plainly, make_step
from octavo.attention import flash
from octavo.attention.base import BACKENDS, NO_TENSORS, Setup
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import paged_attention_eager
from octavo.ops.attention.mask_spec import MaskSpec

FULL = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, scale=0.2)
SPECS = [FULL, dataclasses.replace(FULL, window=40), dataclasses.replace(FULL, causal=False)]
SHAPES = {"ragged": ((90, 1), (300, 40), (3, 3)), "decode": ((90, 1), (300, 1), (17, 1))}


def make_rows(shape: str) -> list[Row]:
    return [(make_history(n, n, 4, 2, 64, torch.bfloat16), n, queries) for n, queries in SHAPES[shape]]


def attend_as_documented(q, key, value, starts, lengths, table, scale, window, soft_cap=0.0) -> torch.Tensor:
    """Row i has queries starts[i] .. starts[i + 1], the last of its `lengths[i]` tokens."""
    left, right = window
    assert right in (0, left), "a window is causal or symmetric"
    out = torch.empty_like(q)
    kv = torch.cat([key, value], dim=-1).transpose(1, 2)
    paged_attention_eager(
        q,
        kv,
        starts,
        lengths,
        table,
        out,
        mask_spec=MaskSpec(scale, window=left + 1, soft_cap=soft_cap, causal=right == 0),
    )
    return out


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert enable_gqa and cu_seq_k is None and max_q == cu_seq_q.diff().max() and max_k >= seqused_k.max()
    return attend_as_documented(query, key, value, cu_seq_q, seqused_k, block_table, scale, window_size)


def older_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """Of torch 2.11: each row's K and V lie together."""
    assert max_q == cu_seq_q.diff().max() and max_k >= cu_seq_k.diff().max() and len(key) == cu_seq_k[-1]
    lengths = cu_seq_k.diff()
    pages = [torch.nn.utils.rnn.pad_sequence(x.split(lengths.tolist()), batch_first=True) for x in (key, value)]
    table = torch.arange(len(lengths), dtype=torch.int32)[:, None]
    return attend_as_documented(query, *pages, cu_seq_q, lengths, table, scale, window_size)


def flash_attn_varlen_func(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    seqused_k,
    page_table,
    softcap=0.0,
):
    assert causal == (window_size[1] == 0) and max_seqlen_k >= seqused_k.max() and max_seqlen_q >= 1
    return attend_as_documented(
        q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window_size, softcap
    ), None  # and the log-sum-exp


@pytest.fixture(params=["torch", "older torch", "package"])
def library(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is installed: torch with or without block tables, or FlashAttention 3."""
    for name in ("flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
    if "torch" in request.param:
        function = varlen_attn if request.param == "torch" else older_varlen_attn
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    else:
        module = types.ModuleType("flash_attn_interface")
        module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return request.param


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLNHC"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS, ids=["full", "window", "not causal"])
def test_flash_hands_over_lengths_tables_and_views(library: str, spec: AttentionSpec, shape: str, layout: str) -> None:
    if not spec.causal and shape == "decode":
        pytest.skip("a decode row sees all of it either way")
    step = make_step(make_rows(shape), Setting(layout, 256, 256))
    backend = object.__new__(flash.FlashBackend)  # its constructor wants a GPU
    backend._library = flash.find_library()
    assert backend._library.block_tables == (library != "older torch")
    key = step.kv[..., :64]
    assert key.untyped_storage().data_ptr() == step.pool.buffer.untyped_storage().data_ptr(), "no copy"
    assert_near(step.run(backend, spec), attend_plainly(make_rows(shape), spec))


def test_flash_soft_cap_is_the_packages_only(library: str) -> None:
    assert flash.find_library().soft_cap == (library == "package")


def test_flash_says_what_it_found_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None):
        raise AssertionError

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    with pytest.raises(ValueError, match=r"takes no window_size.*set attention_backend='paged'"):
        flash.find_library()


class Wrapper:
    """A stand-in of FlashInfer's wrappers: plans on the host, checks as they do, attends as documented."""

    def __init__(self, workspace, kv_layout, *, backend=None, use_tensor_cores=False) -> None:
        assert kv_layout == "HND"
        self.is_decode = use_tensor_cores

    def plan(self, *arguments, causal=True, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type) -> None:
        query_start, arguments = (None, arguments) if self.is_decode else (arguments[0], arguments[1:])
        page_start, self.indices, last_page, *_, self.page = arguments
        assert page_start.device.type == last_page.device.type == "cpu" and self.page in (16, 32, 64)
        pages = page_start.diff()
        self.lengths = torch.where(pages > 0, (pages - 1) * self.page + last_page, 0).to(torch.int32)
        self.starts = torch.arange(len(pages) + 1, dtype=torch.int32) if query_start is None else query_start
        self.table = torch.nn.utils.rnn.pad_sequence(self.indices.split(pages.tolist()), batch_first=True)
        self.words = sm_scale, (window_left, 0), logits_soft_cap

    def run(self, q, kv, *, out) -> None:
        key, value = kv
        assert key.stride() == value.stride() and key.shape[2] == self.page and len(q) == self.starts[-1]
        pages = key.transpose(1, 2), value.transpose(1, 2)
        out.copy_(attend_as_documented(q, *pages, self.starts, self.lengths, self.table, *self.words))


@pytest.mark.parametrize("setting", [Setting("LBHNC", 16, 16), Setting("LBNHC", 128, 64), Setting("BLHNC", 64, 32)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("change", [{}, {"window": 40, "soft_cap": 20.0}])
def test_flashinfer_hands_over_pages_and_views(change, shape: str, setting: Setting) -> None:
    spec = dataclasses.replace(FULL, **change)
    backend = object.__new__(BACKENDS.resolve("flashinfer"))
    backend._dtype = torch.bfloat16
    backend._prefill = {spec: Wrapper(None, "HND", backend="fa2")}
    backend._decode = {spec: Wrapper(None, "HND", use_tensor_cores=True)}
    step = make_step(make_rows(shape), setting)
    expected = attend_plainly(make_rows(shape), spec)
    assert_near(step.run(backend, spec), expected)
    if shape != "decode":
        assert_near(step.run_last(backend, spec), expected[step.inputs.live[0][1:].long() - 1])
    with pytest.raises(ValueError, match="plans on the host"):
        backend.prepare(step.inputs, for_capture=True)
    step.inputs.block_size = 128
    with pytest.raises(ValueError, match="kernel blocks of 16, 32, 64 tokens, got 128"):
        backend.prepare(step.inputs)


@pytest.mark.parametrize("name", ["flash", "flashinfer"])
def test_refusals_name_the_way_out(name: str) -> None:
    backend = BACKENDS.resolve(name)
    with pytest.raises(ValueError, match=r"cuda, got cpu.*attention_backend='cpu'"):
        backend([FULL], torch.bfloat16, CPU)
    sinks = dataclasses.replace(FULL, sinks=True)
    with pytest.raises(ValueError, match="has no sinks"):
        backend([sinks], torch.bfloat16, torch.device("cuda"), Setup())
    assert NO_TENSORS.sinks is None


def test_flashinfer_refuses_kernels_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    setup = Setup(options={"flashinfer_kernels": "fa1"})
    with pytest.raises(ValueError, match="flashinfer_kernels must be one of fa2, fa3, auto, got 'fa1'"):
        BACKENDS.resolve("flashinfer")([FULL], torch.bfloat16, torch.device("cuda"), setup)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_flashinfer_says_that_the_package_is_missing() -> None:
    with pytest.raises(ValueError, match="needs the package flashinfer-python"):
        BACKENDS.resolve("flashinfer")([FULL], torch.bfloat16, torch.device("cuda"))

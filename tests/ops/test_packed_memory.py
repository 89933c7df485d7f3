"""Memory of packed weights: parts do not overlap, begin at huge pages, and free their chunk with the last owner."""

import itertools
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from octavo.ops import native
from octavo.ops.gemm import KINDS, linear, linear_reference, pack_linear
from octavo.ops.native.memory import CHUNK_BYTES, ChunkedMemory

HUGE_PAGE = 2 << 20
needs_native = pytest.mark.skipif(not native.available(), reason="no native library is built")


@needs_native
def test_parts_share_a_chunk_side_by_side() -> None:
    memory = ChunkedMemory()
    parts = [memory.take(size) for size in (100, 64, 1, 4096)]
    assert parts[0][0].data_ptr() % (2 << 20) == 0
    for (part, owner), (following, same) in itertools.pairwise(parts):
        assert owner is same
        assert following.data_ptr() % 64 == 0
        assert following.data_ptr() >= part.data_ptr() + part.numel()


@needs_native
def test_a_part_that_does_not_fit_begins_a_chunk() -> None:
    memory = ChunkedMemory()
    _, first = memory.take(100)
    part, second = memory.take(2 * CHUNK_BYTES)
    assert second is not first
    assert part.numel() == 2 * CHUNK_BYTES
    part[-1] = 7  # it is all there


@needs_native
def test_a_chunk_lives_as_long_as_an_owner_of_its_parts() -> None:
    memory = ChunkedMemory()
    (_, owner), (_, other) = memory.take(100), memory.take(100)
    chunk = weakref.ref(owner)
    del owner
    assert chunk() is other
    del other, _
    assert chunk() is None
    assert memory.take(100)[0].numel() == 100


@needs_native
def test_a_weight_outlives_those_packed_beside_it() -> None:
    weights = [pack_linear(torch.randn(40, 48)) for _ in range(3)]
    x = torch.randn(2, 48)
    expected = linear_reference(x, weights[1])
    kept = weights[1]
    del weights
    for _ in range(3):
        pack_linear(torch.full((40, 48), 9.0))
    torch.testing.assert_close(linear(x, kept), expected)


@needs_native
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_where_the_system_grants_huge_pages_weights_have_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the system grants no huge pages")

    def huge_bytes() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

    values, size = torch.randn(512, 1024), 20 * HUGE_PAGE
    for _ in range(10):
        before = huge_bytes()
        weights = [pack_linear(values) for _ in range(20)]  # one page each
        granted = huge_bytes() - before
        if granted > size // 2:
            return
        del weights
        before = huge_bytes()
        with mmap.mmap(-1, size + HUGE_PAGE) as others:
            others.madvise(mmap.MADV_HUGEPAGE)
            others[:: mmap.PAGESIZE] = b"1" * (len(others) // mmap.PAGESIZE)
            if huge_bytes() - before < size:
                pytest.skip("the system has no free huge pages now")
    pytest.fail(f"weights had {granted} bytes of {size} in huge pages, and others all of theirs, ten times over")


@needs_native
@pytest.mark.parametrize(
    ("kind", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("bfloat16 pairs", torch.bfloat16)]
)
@pytest.mark.parametrize(("n", "k"), [(70, 33), (32, 32), (31, 100), (65, 1)])
def test_every_library_packs_the_same_bytes_wherever_they_go(kind: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Lines go past the caches where memory begins at one, and as ever elsewhere; what stands behind is left alone."""
    weight, code, packed = torch.randn(n, k + 3).to(dtype)[:, 1 : k + 1], native.DTYPE_CODES[dtype], set()
    for name in native.built_isas():
        with native.using(name):
            lib = native.lib()
            size = -(-n // 32) * lib.octavo_panel_bytes(KINDS[kind], k)
            for offset in (0, 4):
                out = torch.full((size + 192,), 7, dtype=torch.uint8)
                begin = -out.data_ptr() % 64 + offset
                lib.octavo_pack(weight.data_ptr(), k + 3, code, n, k, KINDS[kind], out[begin:].data_ptr())
                packed.add(out[begin : begin + size].numpy().tobytes())
                assert out[begin + size :].eq(7).all() and out[:begin].eq(7).all()
    assert len(packed) == 1

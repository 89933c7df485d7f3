"""Fresh pages are made beside an import, taken once, and given back."""

import json
import mmap
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.ops import native
from octavo.ops.native.memory import ChunkedMemory
from octavo.startup.fresh_pages import CHUNK_BYTES, FreshPages, bytes_of_weights
from patience import patient

needs_pages = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asked of Linux only")


@needs_pages
def test_what_was_asked_for_is_made_taken_and_given_back() -> None:
    pages = FreshPages()
    with pages:
        pages.begin(2 * CHUNK_BYTES + 1)
        deadline = time.monotonic() + patient(60)
        while pages.num_bytes < 3 * CHUNK_BYTES and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pages.num_bytes == 3 * CHUNK_BYTES
        first, second = pages.take(), pages.take()
        assert first is not None and second is not None and first is not second
        first[CHUNK_BYTES - 1] = second[0] = 7
    assert pages.num_bytes == 0
    assert pages.take() is None
    assert (first[CHUNK_BYTES - 1], second[0], second[CHUNK_BYTES - 1]) == (7, 7, 0)


def test_who_finds_none_ready_has_one_fewer_made() -> None:
    pages = FreshPages()
    pages._wanted = 2  # as if the thread were slow
    assert pages.take() is None
    assert pages._wanted == 1
    assert pages.take() is None and pages.take() is None
    assert pages._wanted == 0


def test_little_is_not_worth_a_thread() -> None:
    pages = FreshPages()
    pages.begin(CHUNK_BYTES - 1)
    assert pages._wanted == 0
    assert pages.num_bytes == 0


@pytest.mark.skipif(not native.available(), reason="no native library is built")
def test_packed_weights_lie_in_what_a_source_gives() -> None:
    memory, given = ChunkedMemory(), [mmap.mmap(-1, CHUNK_BYTES + (2 << 20)) for _ in range(2)]
    first, second = given
    with memory.fed_by(lambda: given.pop(0) if given else None):
        parts = [memory.take(CHUNK_BYTES) for _ in range(3)]  # a chunk holds one
    for value, (part, _) in enumerate(parts, 1):
        part.fill_(value)
    assert not given
    assert first.find(b"\1") >= 0 and first.find(b"\2") < 0
    assert second.find(b"\2") >= 0 and second.find(b"\3") < 0
    assert memory.take(CHUNK_BYTES)[0].numel() == CHUNK_BYTES


@pytest.mark.parametrize(
    "dtype, quantization, expected",
    [
        (torch.bfloat16, None, 2),
        (torch.float16, None, 4),
        (torch.float32, None, 4),
        (torch.bfloat16, "int8", 17 / 16),
        (torch.float32, "int8", 17 / 16),
    ],
)
def test_the_bytes_of_packed_weights_are_known_beforehand(
    dtype: torch.dtype, quantization: str | None, expected: float, tmp_path: Path
) -> None:
    save_file({"w": torch.zeros(1000, 1000, dtype=dtype)}, tmp_path / "model.safetensors")
    assert bytes_of_weights(tmp_path, quantization) == pytest.approx(expected * 1e6, rel=1e-3)


def test_what_cannot_be_read_asks_for_nothing(tmp_path: Path) -> None:
    assert bytes_of_weights(tmp_path, None) == 0
    assert bytes_of_weights(tmp_path / "no such folder", None) == 0
    file = tmp_path / "model.safetensors"
    for content in (
        b"",
        b"short",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
    ):
        file.write_bytes(content)
        assert bytes_of_weights(tmp_path, None) == 0
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": "no"}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert bytes_of_weights(tmp_path, None) == 0

"""Tensors of files that several threads read ahead: what comes, in which order, and what ends it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint.safetensors import Checkpoint
from octavo.rl.plan import Incoming
from octavo.rl.transport import pieces
from octavo.rl.transport.pieces import read_ahead

CPU = torch.device("cpu")
NUM_SHAPES = 40


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Tensors in two files of tmp_path; a piece is small and ends in the middle of an element's row."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "_SMALL", 0)
    generator = torch.Generator().manual_seed(0)
    types = (torch.float32, torch.bfloat16, torch.float16)
    tensors = {
        f"w{index}": torch.randn(index + 1, 37 * (index % 5) + 1, generator=generator).to(types[index % 3])
        for index in range(NUM_SHAPES)
    }
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:25]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[25:]}, tmp_path / "b.safetensors")
    return tensors


def incoming_of(checkpoint: Checkpoint, stored: dict[str, torch.Tensor]) -> list[Incoming]:
    return [Incoming(name, stored[name].dtype, tuple(stored[name].shape)) for name in checkpoint.entries]


def num_threads() -> int:
    return sum(thread.name.startswith("octavo-files") for thread in threading.enumerate())


def test_all_come_in_order(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    wanted = incoming_of(checkpoint, stored)
    found = [(each.name, tensor) for each, tensor in read_ahead(checkpoint, wanted, CPU)]
    assert [name for name, _ in found] == list(checkpoint.entries) and len(found) == NUM_SHAPES
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found)
    assert list(read_ahead(checkpoint, [], CPU)) == [] and not num_threads()
    checkpoint.close()


def test_few_pieces_are_read_ahead(
    stored: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no thread reads once the taker has gone."""
    checkpoint = Checkpoint(tmp_path)
    begun = list[tuple[str, int]]()
    read = checkpoint.read_bytes
    monkeypatch.setattr(
        checkpoint, "read_bytes", lambda name, *rest: (begun.append((name, rest[0])), read(name, *rest))
    )
    tensors = read_ahead(checkpoint, incoming_of(checkpoint, stored), CPU)
    next(tensors)
    tensors.close()
    assert not num_threads()
    assert 0 < len(begun) <= pieces._AHEAD + 1
    checkpoint.close()


def test_a_file_that_ends_early_is_an_error(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    file = tmp_path / "b.safetensors"
    with open(file, "r+b") as cut:
        cut.truncate(file.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"b.safetensors: ends in the middle of a tensor"):
        list(read_ahead(checkpoint, incoming_of(checkpoint, stored), CPU))
    assert not num_threads()
    checkpoint.close()

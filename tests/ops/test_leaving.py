"""Weights that leave the L2 first: which nodes of a captured graph are told so."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.ops import leaving
from octavo.ops.compile import driver


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(node, address, bytes) of what the driver was told, of a graph of three launches and a copy."""
    found: list[Any] = []
    params = {1: ((8, 77), (4, 3)), 2: ((8, 4096), (8, 5)), 3: ((8, 8192), (8, 4096))}

    def read(node: int) -> Any:
        if node not in params:
            raise driver.DriverError("a graph's node is of the kind 1")
        return SimpleNamespace(params=params[node])

    def call(name: str, node: int, attribute: int, window: Any) -> None:
        held = ctypes.cast(window, ctypes.POINTER(driver._Window)).contents
        assert (name, attribute, ctypes.sizeof(held)) == ("cuGraphKernelNodeSetAttribute", 1, 64)
        found.append((node, held.base, held.num_bytes, held.hit, held.miss))

    monkeypatch.setattr(driver, "_nodes", lambda graph: [1, 2, 9, 3])
    monkeypatch.setattr(driver, "_read", read)
    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(leaving, "_weights", {})
    return found


def test_launches_that_are_given_a_weight_are_told(told: list[Any]) -> None:
    assert driver.let_leave(0, {4096: 640}) == 2
    assert told == [(2, 4096, 640, 1, 1), (3, 4096, 640, 1, 1)]


def test_graphs_are_kept_where_a_weight_leaves(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes no hint leaves the graph as it is."""
    assert not leaving.is_asked()
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    leaving.let_leave(weight)
    assert leaving.is_asked() and leaving._there() == {weight.data_ptr(): 64}
    leaving.mark(SimpleNamespace(raw_cuda_graph=lambda: 0))
    assert not told

    def refuse(*given: Any) -> int:
        raise driver.DriverError("no such call")

    monkeypatch.setattr(driver, "let_leave", refuse)
    leaving.mark(SimpleNamespace(raw_cuda_graph=lambda: 0))
    del weight
    assert not leaving.is_asked(), "a weight that is gone leaves nothing"

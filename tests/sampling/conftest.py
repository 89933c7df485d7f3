"""The worlds of the sampler's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from world import World


@pytest.fixture
def make_world() -> Callable[..., World]:
    """World's constructor."""
    return World


@pytest.fixture
def world() -> World:
    """A plain World: 97 tokens, 40 rows of 64 places."""
    return World()

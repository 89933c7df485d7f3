"""House tests look at the syntax of all files: millions of objects, none of them garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()

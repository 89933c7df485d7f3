"""Every test of a trainer's operators draws the same numbers in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seed torch's generator."""
    torch.manual_seed(0)

"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from loading import load_model
from model_rig import SEEDS, Case, make_reference
from octavo.checkpoint.config_reader.checkpoint import read_arch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes (once per session) the checkpoint of a family, in many small shards."""
    made: dict[str, Case] = {}

    def make(family: str) -> Case:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            reference = make_reference(family, seed=SEEDS.get(family, 1))
            reference.save_pretrained(folder, max_shard_size="60KB")
            made[family] = Case(folder, reference, load_model(read_arch(folder), folder, torch.float32))
        return made[family]

    return make

"""Engines on the bundled model, one per setting, closed when a test ends; and the prompts that it never saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest

from octavo import LLM

NUM_PROMPTS = 50


@pytest.fixture(scope="session")
def held_out_prompts() -> list[str]:
    """Cut from files that the bundled model was not trained on."""
    text = resources.files("octavo").joinpath("assets/octavo-tiny/held_out_prompts.json").read_text()
    return json.loads(text)[:NUM_PROMPTS]


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """LLM on octavo-tiny with given settings."""
    made: list[LLM] = []

    def make(**fields: Any) -> LLM:
        llm = LLM(**{"dtype": "float32", **fields})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()

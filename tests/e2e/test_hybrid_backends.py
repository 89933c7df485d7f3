"""Layers that keep states beside those that attend, by every attention backend: one set of bits by each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import recurrent_rig as rig
from octavo import LLM
from octavo.attention.base import BACKENDS
from test_recurrent import LENGTHS, Result, engine_of, generate, params_of

OUT_OF_TREE = "example_backend:LoopBackend"  # of the documentation, for kernel blocks of 64
OF_A_CPU = ("cpu", "reference", "flex", OUT_OF_TREE)
OF_A_GPU = ("paged", "flash", "flashinfer")
ASKED = range(11)  # requests, of 1 to 100 tokens, every third of them greedy
MODELS = ("octavo-tiny-hybrid", "mixed")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """An engine's settings, by model: gated delta nets beside full attention; every state, windows, full attention."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))
    with rig.packages():
        mixed = rig.write_mixed(tmp_path_factory.mktemp("mixed"))
        tiny = {"model": "octavo-tiny-hybrid", "dtype": "float32", "max_model_len": 256, "block_size": 64}
        yield {"mixed": mixed, "octavo-tiny-hybrid": {**tiny, "kv_cache_memory_bytes": 64 << 20}}.__getitem__
    sys.path.remove(str(Path(__file__).resolve().parents[1] / "attention"))


@pytest.fixture(scope="module")
def alone(settings: Callable[[str], dict[str, Any]]) -> Callable[[str, str], Result]:
    """What each request says by itself, by model and backend."""
    known: dict[tuple[str, str], Result] = {}

    def results(model: str, backend: str) -> Result:
        if (model, backend) not in known:
            own = {**settings(model), "attention_backend": backend, "enable_prefix_caching": False}
            with LLM(**own) as llm:
                tables = llm.engine.memory.tables
                assert {table.backend for table in tables} == {backend, ""}, "layers that keep states have no backend"
                known[model, backend] = [one for index in ASKED for one in generate(llm, [index])]
        return known[model, backend]

    return results


def near(found: Result, expected: Result, indices: Iterable[int]) -> bool:
    """Whether those requests have the same tokens, and log-probabilities that differ as sums in another order do."""
    pairs = [(*found[index], *expected[index]) for index in indices]
    return all(one == other for one, _, other, _ in pairs) and all(
        abs(p - q) < 1e-4 for _, one, _, other in pairs for p, q in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("backend", OF_A_CPU)
@pytest.mark.parametrize("model", MODELS)
def test_H_8_a_request_has_one_set_of_bits_by_each_backend(
    settings: Callable[[str], dict[str, Any]], alone: Callable[[str, str], Result], model: str, backend: str
) -> None:
    """Alone, in a batch whose prompts are cut, and found in the cache, where nobody wrote what is no number.

    Torch's products, which the one out of tree takes, round by how many rows there are: its answers are near.
    """
    expected = alone(model, backend)
    with engine_of({**settings(model), "attention_backend": backend}, max_num_batched_tokens=33) as llm:
        for _ in range(2):
            found = generate(llm, ASKED)
            assert near(found, expected, ASKED) if backend == OUT_OF_TREE else found == expected
        assert llm.engine.scheduler.kv.stats.hits > 0


@pytest.mark.parametrize("backend", OF_A_CPU[1:])
@pytest.mark.parametrize("model", MODELS)
def test_backends_give_the_same_greedy_tokens(alone: Callable[[str, str], Result], model: str, backend: str) -> None:
    greedy = [index for index in ASKED if params_of(index).temperature == 0.0]
    assert len(greedy) > 3 and near(alone(model, backend), alone(model, "cpu"), greedy)


@pytest.mark.parametrize("backend", OF_A_GPU)
def test_a_backend_of_another_device_is_refused_by_name(
    settings: Callable[[str], dict[str, Any]], backend: str
) -> None:
    with pytest.raises(ValueError, match=rf"{backend}.*cuda"):
        LLM(**settings("mixed"), attention_backend=backend)


def test_every_backend_is_asked() -> None:
    assert {*OF_A_CPU, *OF_A_GPU, "mla"} - {OUT_OF_TREE} == {*BACKENDS}, "mla serves latent attention alone"
    assert max(LENGTHS[index] for index in ASKED) > 64, "a prompt is longer than a chunk"

"""Pauses, sleep and resets: every face takes the same words, with the same defaults, and none of them is dropped."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.frontend.control import check_tags
from octavo.serve.engine.control import AsyncControl
from octavo.serve.routes import control as routes

ADAPTER = Path(__file__).parents[2] / "adapters" / "octavo-vllm" / "src"
# the move by LLM's name -> AsyncControl's, the route's struct
MOVES: dict[str, tuple[str, type]] = {
    "sleep": ("sleep", routes.Sleep),
    "wake_up": ("wake_up", routes.Tags),
    "pause_generation": ("pause", routes.Pause),
    "reset_prefix_cache": ("reset_prefix_cache", routes.Reset),
}
# what one face says in an older word, or alone can do
OTHERS = {"new", "wait_for_inflight_requests", "reset_external"}


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `vllm` of octavo-vllm."""
    monkeypatch.syspath_prepend(str(ADAPTER))
    import vllm

    yield vllm
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def words(face: Any) -> dict[str, Any]:
    """What a face takes, with the defaults."""
    if hasattr(face, "__struct_fields__"):
        made = face()
        found = {name: getattr(made, name) for name in face.__struct_fields__}
    else:
        taken = inspect.signature(face).parameters.values()
        assert not any(each.kind is each.VAR_KEYWORD for each in taken), "a wrong word would pass in silence"
        found = {each.name: each.default for each in taken if each.name != "self"}
    return {name: default for name, default in found.items() if name not in OTHERS}


@pytest.mark.parametrize("move", MOVES)
def test_every_face_takes_the_same_words(move: str, theirs: Any) -> None:
    control, struct = MOVES[move]
    wanted = words(getattr(octavo.LLM, move))
    assert (
        words(getattr(AsyncControl, control)) == words(struct) == words(getattr(theirs.AsyncLLMEngine, move)) == wanted
    )
    if move != "reset_prefix_cache":  # that of octavo-vllm's LLM hands on whatever it is given
        assert words(getattr(theirs.LLM, move)) == wanted


def test_no_word_is_dropped_on_the_way(theirs: Any) -> None:
    """octavo-vllm's engines hand on all that they are given."""
    asked = list[tuple[str, tuple[Any, ...], dict[str, Any]]]()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            async def take(*args: Any, **fields: Any) -> bool:
                asked.append((name, args, fields))
                return True

            return take

    async def use() -> None:
        engine = object.__new__(theirs.AsyncLLMEngine)
        made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        made.set_result(types.SimpleNamespace(control=Recorder(), reset_prefix_cache=Recorder().reset_prefix_cache))
        engine._starting = made
        await engine.sleep(1, "keep", ["kv_cache"])
        await engine.wake_up(["kv_cache"])
        await engine.pause_generation(wait_for_inflight_requests=True, clear_cache=True)
        await engine.pause_generation("keep")
        await engine.reset_prefix_cache(True, True)

    asyncio.run(use())
    assert asked == [
        ("sleep", (1, "keep", ["kv_cache"]), {}),
        ("wake_up", (["kv_cache"],), {}),
        ("pause", ("wait",), {"clear_cache": True}),
        ("pause", ("keep",), {"clear_cache": None}),
        ("reset_prefix_cache", (), {"reset_running_requests": True, "reset_connector": True}),
    ]


def test_no_tag_is_every_tag() -> None:
    """As vLLM has it, and as a query without tags says it."""
    assert check_tags([]) is check_tags(None) is check_tags(()) is None
    assert check_tags(("weights",)) == check_tags(tag for tag in ["weights"]) == ["weights"]  # type: ignore[arg-type]

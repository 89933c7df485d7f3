"""How a request's prompts are read: what is tokenized on the event loop, and what is refused before the rest is."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.sampling_params import Limits, ParameterError
from octavo.serve.generation import Prompt, read_prompts
from octavo.serve.state import ServeState


class _Tokenizer:
    """A token per character; notes how many were tokenized on the main thread, and in all."""

    def __init__(self) -> None:
        self.num_here = self.num_chars = 0

    def encode(self, text: str, _: bool) -> list[int]:
        self.num_chars += len(text)
        if threading.current_thread() is threading.main_thread():
            self.num_here += len(text)
        return [1] * len(text)


def _read(tokenizer: _Tokenizer, given: Any) -> list[Prompt]:
    limits = Limits(vocab_size=10, max_model_len=9000)
    engine = SimpleNamespace(limits=limits, tokenizer=tokenizer)
    state = SimpleNamespace(engine=engine, config=SimpleNamespace(max_prompts=128))
    return asyncio.run(read_prompts(cast(ServeState, state), given))


def test_many_short_texts_hold_up_the_loop_no_longer_than_one_long_text() -> None:
    tokenizer = _Tokenizer()
    assert len(_read(tokenizer, ["x" * 4000] * 20)) == 20
    assert tokenizer.num_here == 16_000 and tokenizer.num_chars == 80_000


def test_a_text_that_is_too_long_is_refused_before_the_next_is_tokenized() -> None:
    tokenizer = _Tokenizer()
    with pytest.raises(ParameterError, match=r"prompt 9000 .* max_model_len 9000"):
        _read(tokenizer, ["x" * 9000] * 20)
    assert tokenizer.num_chars == 9000

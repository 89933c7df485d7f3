"""How a request's prompts are read: what is tokenized on the event loop, and what is refused before the rest is."""

from __future__ import annotations

import asyncio
from importlib import resources
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.frontend.frontend import Prompt
from octavo.request.sampling_params import Limits, ParameterError
from octavo.serve.api.generation import read_prompts
from octavo.serve.sandbox.texts import Texts
from octavo.serve.state import ServeState
from octavo.text.tokenizer import Tokenizer


class _Counting(Texts):
    """Notes how many characters were tokenized in this process, and in all."""

    def __init__(self) -> None:
        with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny")) as folder:
            tokenizer = Tokenizer.load(folder)
        super().__init__(tokenizer)
        self.num_here = self.num_chars = 0
        encode = tokenizer.encode

        def counted(text: str, add_special_tokens: bool = True) -> list[int]:
            self.num_here += len(text)
            return encode(text, add_special_tokens)

        tokenizer.encode = counted  # type: ignore[method-assign]

    async def encode(self, text: str, **options: Any) -> list[int]:
        self.num_chars += len(text)
        return await super().encode(text, **options)


def _read(texts: Texts, given: Any, max_model_len: int) -> list[Prompt]:
    engine = SimpleNamespace(limits=Limits(vocab_size=10, max_model_len=max_model_len))
    state = SimpleNamespace(engine=engine, texts=texts, config=SimpleNamespace(max_prompts=128))
    try:
        return asyncio.run(read_prompts(cast(ServeState, state), given))
    finally:
        texts.close()


def test_many_short_texts_hold_up_the_loop_no_longer_than_one_long_text() -> None:
    texts = _Counting()
    prompts = _read(texts, ["x" * 4000] * 20, 9000)
    assert len(prompts) == 20 and all(prompt == prompts[0] for prompt in prompts)
    assert texts.num_here == 16_000 and texts.num_chars == 80_000


def test_a_text_that_is_too_long_is_refused_before_the_next_is_tokenized() -> None:
    texts = _Counting()
    with pytest.raises(ParameterError, match=r"prompt: \d+ tokens .* max_model_len 100"):
        _read(texts, ["x" * 9000] * 20, 100)
    assert texts.num_chars == 9000

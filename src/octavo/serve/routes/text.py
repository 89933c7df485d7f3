"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer by itself.

Owns their replies. Invariant: what /tokenize says of a prompt or a conversation is what generation would see.
"""

from __future__ import annotations

import asyncio
from typing import Any

from octavo.frontend.frontend import Prompt
from octavo.request.sampling_params import ParameterError
from octavo.serve.api.generation import read_text, render_chat
from octavo.serve.api.protocol import DetokenizeRequest, TokenizeRequest, read
from octavo.serve.api.tools import check_tools
from octavo.serve.errors import bad_request
from octavo.serve.http.exchange import Exchange
from octavo.serve.state import ServeState

_NOTHING: frozenset[str] = frozenset()
MAX_TOKENS = 1 << 20  # of a list to detokenize


async def tokenize(state: ServeState, exchange: Exchange) -> None:
    """Token ids of a prompt or of messages."""
    body = await exchange.json()
    request = read(TokenizeRequest, body, strict=state.config.strict, sampling=_NOTHING).shape
    if request.model is not None:
        state.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("missing_field", "exactly one of prompt and messages is needed", "prompt")
    async with exchange.watching():
        prompt = await _prompt(state, request)
    reply: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": state.engine.limits.max_model_len,
        "tokens": prompt.token_ids,
        "token_strs": None,
    }
    if request.return_token_strs:
        decode = state.tokenizer.decode_token
        # on a thread, which gives way: there may be a million
        reply["token_strs"] = await asyncio.to_thread(lambda: [decode(token_id) for token_id in prompt.token_ids])
    await exchange.reply_json(reply)


async def _prompt(state: ServeState, request: TokenizeRequest) -> Prompt:
    special = request.add_special_tokens
    if request.messages is None:
        return await read_text(state, request.prompt, add_special_tokens=special is not False)
    return await render_chat(
        state,
        request.messages,
        tools=check_tools(request.tools, state.config.max_tools),
        add_special_tokens=special is True,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.chat_template_kwargs,
    )


async def detokenize(state: ServeState, exchange: Exchange) -> None:
    """The text of token ids."""
    body = await exchange.json()
    request = read(DetokenizeRequest, body, strict=state.config.strict, sampling=_NOTHING).shape
    if request.model is not None:
        state.check_model(request.model)
    tokens = _check_tokens(request.tokens, state.tokenizer.num_token_ids)
    async with exchange.watching():
        text = await state.texts.decode(tokens, skip_special_tokens=request.skip_special_tokens)
    await exchange.reply_json({"prompt": text})


def _check_tokens(tokens: Any, limit: int) -> list[int]:
    if tokens is None:
        raise ParameterError("tokens", "is missing", "missing_field")
    if not isinstance(tokens, list):
        raise ParameterError("tokens", "must be a list of token ids", "invalid_type")
    if len(tokens) > MAX_TOKENS:
        raise ParameterError("tokens", f"may hold at most {MAX_TOKENS}, got {len(tokens)}", "too_many_items")
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < limit:
            message = f"token id at index {index} must be an integer in [0, {limit})"
            raise ParameterError("tokens", message, "invalid_token_id")
    return tokens


async def tokenizer_info(state: ServeState, exchange: Exchange) -> None:
    """What a client needs to know of the tokenizer."""
    tokenizer = state.tokenizer
    special = tokenizer.special_tokens
    await exchange.reply_json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": state.engine.limits.max_model_len,
            **{name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "chat_template": tokenizer.chat_template,
        }
    )

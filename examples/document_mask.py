"""Serve a model whose requests hold several documents that do not see each other.

    octavo serve --attention-mods examples/document_mask.py:mods

    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{
        "prompt": [5, 6, 7, 8, 9, 10, 11, 12], "max_tokens": 8,
        "extra_args": {"document_ids": [0, 0, 0, 0, 1, 1, 1, 1]}}'

Run as a program, it shows that the second document's answer is the one that it gets alone:

    python examples/document_mask.py
"""

from __future__ import annotations

import octavo
from octavo.attention import request_field

# One number per token, sent with the request; tokens that are generated belong to the last document.
documents = request_field("document_ids", per_token=True)


def same_document(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """A token sees the earlier tokens of its own document."""
    return documents[b, q_idx] == documents[b, kv_idx]


mods = octavo.AttentionMods(mask_mod=same_document, fields=(documents,))


def main() -> None:
    """Complete two documents in one request, the second by itself, and both as if they were one."""
    first, second = "The cat sat on the mat.", " Once upon a time there was a"
    with octavo.LLM(dtype="float32", attention_mods=mods) as llm:
        first_ids, second_ids = (llm.get_tokenizer().encode(text) for text in (first, second))
        ids = [0] * len(first_ids) + [1] * len(second_ids)
        plain = octavo.SamplingParams(temperature=0, max_tokens=12)
        masked = octavo.SamplingParams(temperature=0, max_tokens=12, extra_args={"document_ids": ids})
        for name, prompt, params in (
            ("two documents", first_ids + second_ids, masked),
            ("the second one", second_ids, plain),
            ("one document", first_ids + second_ids, plain),
        ):
            print(f"{name}: {llm.generate(prompt, params)[0].outputs[0].text!r}")


if __name__ == "__main__":
    main()

"""Tiny tokenizers of the kinds that models have, made with the tokenizers library in milliseconds."""

from __future__ import annotations

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "The quick brown fox jumps over the lazy dog. The end, the END!\n\n",
    "naïve café über straße — “quotes” … 日本語のテキスト 🙂🙂 привет мир",
    "stop strings and tokens: <stop> </s> ### User: STOP\n" * 3,
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS[:1],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIALS[1:])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@functools.cache
def byte_fallback(strip: int = 1) -> Tokenizer:
    """BPE over metaspace text with byte fallback, as Llama 2 and Mistral (strip=1) or Gemma (strip=0)."""
    alphabet = sorted(set("".join(CORPUS[:2])) - {" ", "\n"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *alphabet]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for word in ("\u2581t", "\u2581th", "\u2581the", "er", "in", "\u2581\u2581", "\u2581s", "st", "sto", "stop"):
        left, right = word[:-1], word[-1]
        if left in vocab and right in vocab:
            vocab[word] = len(vocab)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("\u2581")] if strip else []) + [normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", strip, 0)] if strip else []))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Unigram with a metaspace decoder, as T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    """WordPiece, as BERT: a decoder that is no concatenation of bytes."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "the": 2, "quick": 3, "##ly": 4, "fox": 5, "##es": 6, ".": 7, "##s": 8, "a": 9}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def kinds() -> dict[str, Tokenizer]:
    """All of them by name."""
    return {
        "byte_level": byte_level(),
        "byte_fallback": byte_fallback(1),
        "byte_fallback_no_strip": byte_fallback(0),
        "metaspace": metaspace(),
        "other": word_piece(),
    }


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save(folder, tokenizer: Tokenizer | None = None, template: str | None = CHATML, **config) -> None:
    """Write a model folder's tokenizer files."""
    tokenizer = byte_level() if tokenizer is None else tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | config
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

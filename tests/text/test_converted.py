"""Tokenizers in other files than tokenizer.json give the ids that the files' own libraries give."""

from __future__ import annotations

import base64
import builtins
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.text import converted
from octavo.text.detokenizer import byte_level_alphabet
from octavo.text.tokenizer import Tokenizer
from tiny_tokenizers import CORPUS, byte_level

TEXTS = [
    "",
    " ",
    "a",
    "  two  spaces ",
    "The quick brown fox",
    "don't we'LL 12345 x=1\n\n\ty",
    "naïve café straße — 日本語",
    "🙂 привет мир\r\n end   ",
    "".join(CORPUS).replace("</s>", ""),
    "HTTPResponse 你好world 漢字",
    "\u2581literal",
]


def ranks() -> dict[bytes, int]:
    """A small byte-level vocabulary, with all bytes."""
    found = {bytes([byte]): byte for byte in range(256)}
    alphabet = byte_level_alphabet()
    merges = json.loads(byte_level(600).to_str())["model"]["merges"]
    for left, right in merges:
        token = bytes(alphabet[char] for char in left + right)
        found.setdefault(token, len(found))
    return found


def write_ranks(path: Path, table: dict[bytes, int]) -> None:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in table.items()))


def tekken(table: dict[bytes, int], **changes: Any) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in table.items()
    ]
    config = {
        "pattern": converted._LLAMA3,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + 20 - 5,
        "default_num_special_tokens": 20,
        "version": "v7",
    }
    specials = [
        {"rank": rank, "token_str": text, "is_control": True}
        for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    ]
    return {"config": config, "vocab": vocab, "special_tokens": specials, **changes}


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model"])
def test_tiktokens_ranks(tmp_path: Path, name: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    table = ranks()
    write_ranks(tmp_path / name, table)
    specials = {"<|begin|>": len(table), "<|end|>": len(table) + 7}
    config = {
        "added_tokens_decoder": {str(token_id): {"content": text} for text, token_id in specials.items()},
        "bos_token": "<|begin|>",
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    theirs = tiktoken.Encoding("x", pat_str=converted._PATTERNS[name], mergeable_ranks=table, special_tokens=specials)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode_ordinary(text)
        assert ours.decode(ids) == text
        assert ours.encode(text)[0] == len(table)
    assert ours.encode("a<|end|>b", add_special_tokens=False) == [97, len(table) + 7, 98]
    assert ours.num_token_ids == len(table) + (256 if name == "tiktoken.model" else 8)


def test_tekken(tmp_path: Path) -> None:
    """Ids begin with 20 special tokens; the five last ranks have no room."""
    tiktoken = pytest.importorskip("tiktoken")
    table = ranks()
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(table)))
    ours = Tokenizer.load(tmp_path)
    kept = {token: rank for token, rank in table.items() if rank < len(table) - 5}
    theirs = tiktoken.Encoding("x", pat_str=converted._LLAMA3, mergeable_ranks=kept, special_tokens={})
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [1, *(20 + token for token in theirs.encode_ordinary(text))]
        assert ours.decode(ids) == text
    assert (ours.bos_token_id, ours.eos_token_id, ours.num_token_ids) == (1, 2, len(table) + 15)
    assert ours.encode("[INST]", add_special_tokens=False) == [3]
    assert ours.decode([19], skip_special_tokens=False) == "<SPECIAL_19>"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bpe", {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}),
        (
            "bpe",
            {
                "byte_fallback": True,
                "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False,
                "add_dummy_prefix": False,
                "user_defined_symbols": ["<start_of_turn>"],
            },
        ),
        ("bpe", {"normalization_rule_name": "nmt_nfkc"}),
        ("unigram", {"byte_fallback": True}),
    ],
    ids=["llama", "gemma", "nfkc", "unigram"],
)
def test_sentencepiece(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    model = io.BytesIO()
    lines = [line for text in CORPUS for line in text.splitlines() if line] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        model_type=kind,
        minloglevel=2,
        **options,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    ours, theirs = Tokenizer.load(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), text
        if theirs.unk_id() not in ids:  # which has a text of its own there, and none here
            assert ours.decode(ids) == theirs.decode(ids)
        assert ours.encode(text) == [theirs.bos_id(), *ids]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())
    if "user_defined_symbols" in options:
        assert ours.encode("<start_of_turn>a", add_special_tokens=False) == theirs.encode("<start_of_turn>a")
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert Tokenizer.load(tmp_path).encode("The")[-1] == theirs.eos_id() != theirs.bos_id()


# of what odd texts are made: marks in every order, spaces of every kind, spelled bytes, what tables take apart
ODD = [
    "e", "\u0301", "\u0323", "\u0302", "a", "b", " ", "  ", "\n", "\t", "\u3000", "\u00a0", "\u200b",
    "<0xFF>", "<0x41>",
    "한", "\u1112", "\u1161", "\u11ab", "日本", "🙂", "क्षि", "ก็", "ﬁ", "ｶ", "½", "\u2581", "x", "the", "\r", "👩‍👩‍👧",
    "o",
    "\u0308", "é", "\ufeff", "№", "\u00ad",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nfkc", "nmt_nfkc"])
def test_odd_texts_have_sentencepieces_ids(tmp_path: Path, kind: str, rule: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    model = io.BytesIO()
    lines = [line for text in CORPUS for line in text.splitlines() if line] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        model_type=kind,
        minloglevel=2,
        byte_fallback=True,
        normalization_rule_name=rule,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    ours, theirs = Tokenizer.load(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    draw = random.Random(7)
    texts = ["".join(draw.choices(ODD, k=draw.randint(1, 6))) for _ in range(3000)]
    for text in ["a\n", "\ta", "a\n\nb", "e\u0301\u0323", "o\u031b\u0301", "def f():\n    x\n", *texts]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text), ascii(text)


def test_without_the_library_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sentencepiece"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b\x0a\x05<unk>")
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"tokenizer\.model: .*pip install 'octavo\[sentencepiece\]'"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tekken.json", b"{", "not a usable tokenizer"),
        ("tekken.json", b"{}", "not a usable tokenizer"),
        (
            "tekken.json",
            json.dumps(tekken({b"a": 0}, vocab=[{"rank": 0, "token_bytes": "?"}])).encode(),
            "not a usable",
        ),
        ("tekken.json", json.dumps(tekken({b"a": 0})).encode(), "has no room beside 20"),
        (
            "tekken.json",
            json.dumps(tekken(ranks(), special_tokens=[{"rank": 20, "token_str": "x"}])).encode(),
            "beyond",
        ),
        ("tokenizer.model", b"YQ== 0\n", "names? no special tokens"),
        ("tiktoken.model", b"YQ== 0\n", "names? no special tokens"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tekken.json").write_text("{")
    assert Tokenizer.load(tmp_path).encode("a")

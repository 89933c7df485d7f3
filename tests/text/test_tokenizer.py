"""Tokenizer: what a folder holds, what is refused, and encoding that equals Hugging Face's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tokenizers

from octavo.request.sampling_params import ParameterError, SamplingParams
from octavo.text.tokenizer import Tokenizer
from tiny_tokenizers import CHATML, byte_fallback, byte_level, kinds, save, word_piece


@pytest.mark.parametrize("add_bos_token", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_encoding_equals_transformers(tmp_path, adds, add_bos_token):
    """What is added to a prompt is in tokenizer.json; `add_bos_token` of the config does nothing beside it."""
    config = {"bos_token": "<|endoftext|>", "add_bos_token": add_bos_token}
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    if adds:
        bos = ("<|endoftext|>", 0)
        backend.post_processor = tokenizers.processors.TemplateProcessing(f"{bos[0]} $A", f"{bos[0]} $A $B", [bos])
    save(tmp_path, backend, **config)
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("def f(x):", "a<|im_end|>b", " naïve 🙂", ""):
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
    assert len(tokenizer) == len(reference)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    save(tmp_path, backend)
    assert len(Tokenizer.load(tmp_path).encode("def f(x): return x, x, x, x")) in range(4, 50)


def test_chat_template_sources(tmp_path):
    save(tmp_path, template=[{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}])
    assert Tokenizer.load(tmp_path).chat_template == "list"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.load(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.load(tmp_path).chat_template == "jinja"
    assert Tokenizer.load(tmp_path).template.sources["tool_use"] == "tools"


def test_tokens_that_the_config_calls_special_are_special(tmp_path):
    save(tmp_path, additional_special_tokens=["<think>"], pad_token={"content": "<|endoftext|>", "lstrip": False})
    tokenizer = Tokenizer.load(tmp_path)
    think = tokenizer.backend.token_to_id("<think>")
    assert tokenizer.decode([think]) == ""
    assert tokenizer.decode([think], skip_special_tokens=False) == "<think>"
    assert tokenizer.special_tokens["pad_token"] == "<|endoftext|>"


def test_special_tokens_map_is_read(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer.load(tmp_path).eos_token_id == byte_level().token_to_id("<|im_end|>")


def _cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("file", "harm", "text"),
    [
        ("tokenizer.json", lambda path: path.unlink(), "not found"),
        ("tokenizer.json", _cut, "not a usable tokenizer"),
        ("tokenizer.json", lambda path: path.write_text("{}"), "not a usable tokenizer"),
        ("tokenizer.json", lambda path: path.write_text("null"), "not a usable tokenizer"),
        ("tokenizer.json", lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
        ("tokenizer.json", lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        ("tokenizer_config.json", lambda path: path.write_text("[1]"), "object"),
        ("tokenizer_config.json", lambda path: path.write_text("{"), "not JSON"),
        ("tokenizer_config.json", lambda path: path.write_text("[" * 100_000), "not JSON"),
        ("tokenizer_config.json", lambda path: path.write_text("1" * 5000), "not JSON"),
        ("chat_template.jinja", lambda path: path.write_bytes(b"\xff"), "not UTF-8"),
    ],
)
def test_bad_file_is_one_line_that_names_it(tmp_path, file, harm, text):
    save(tmp_path)
    harm(tmp_path / file)
    with pytest.raises(ValueError, match=text) as caught:
        Tokenizer.load(tmp_path)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "harm",
    [
        {"merges": [["a", "zzzz"]]},
        {"vocab": {}},
        {"vocab": {"a": -1}},
        {"vocab": {"a": 2**40}},
        {"type": "Nothing"},
    ],
)
def test_bad_model_is_refused(tmp_path, harm):
    tree = json.loads(byte_level().to_str())
    tree["model"] |= harm
    if harm == {"vocab": {}}:
        tree["added_tokens"], tree["model"]["merges"] = [], []
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_more_tokens_than_the_model_has_rows_are_refused():
    tokenizer = Tokenizer(byte_level())
    tokenizer.check_fits(tokenizer.num_token_ids)
    with pytest.raises(ValueError, match="vocab_size"):
        tokenizer.check_fits(tokenizer.num_token_ids - 1)


def test_broken_template_does_not_hinder_loading(tmp_path):
    save(tmp_path, template="{% for %}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("def")
    with pytest.raises(ValueError, match="template_failed"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_no_strip"])
def test_token_bytes_together_are_the_text(name):
    tokenizer = Tokenizer(kinds()[name])
    text = " the naïve café 🙂\x00"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, token_ids)).decode()
    assert joined.removeprefix(" " if name == "byte_fallback" else "") == text
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_decode_token_keeps_its_space():
    tokenizer = Tokenizer(byte_fallback())
    token_ids = tokenizer.encode("the the", add_special_tokens=False)
    assert [tokenizer.decode_token(token_id) for token_id in token_ids] == [" the", " the"]
    assert tokenizer.decode_token(tokenizer.backend.token_to_id("<0xE2>")) == "\ufffd"


def test_max_token_bytes_bounds_every_text():
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.max_token_bytes >= max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.num_token_ids))
    assert Tokenizer(byte_fallback()).max_token_bytes >= 4
    assert Tokenizer(word_piece()).max_token_bytes == 0


def test_bad_words_become_token_ids():
    tokenizer = Tokenizer(byte_level())
    params = tokenizer.resolve_bad_words(SamplingParams(bad_words=["stop", " the"]))
    texts = [tokenizer.decode(token_ids) for token_ids in params.bad_words_token_ids]
    assert texts == ["stop", " stop", "the", " the"]
    assert tokenizer.resolve_bad_words(SamplingParams()).bad_words_token_ids is None


def test_bad_words_without_tokens_or_with_too_many_are_refused():
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(ParameterError, match=r"bad_words\[0\]"):
        tokenizer.resolve_bad_words(SamplingParams(bad_words=[" "]))
    with pytest.raises(ParameterError, match="1024"):
        tokenizer.resolve_bad_words(SamplingParams(bad_words=["\U0001f680" * 1000]))
    small = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])))  # other letters have no tokens
    with pytest.raises(ParameterError, match=r"bad_words\[1\]: has no tokens"):
        small.resolve_bad_words(SamplingParams(bad_words=["a", "b"]))


def test_odd_texts_are_encoded_and_come_back():
    tokenizer = Tokenizer(byte_level(), {"chat_template": CHATML})
    for text in ("\0", "\u202ertl\u200b", "🙂" * 5000, "e" + "\u0301" * 5000, "\ufffe", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_neither_transformers_nor_torch_is_imported():
    heavy = "{'torch', 'transformers', 'tokenizers', 'jinja2'}"
    code = f"import sys, octavo.text.output; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})

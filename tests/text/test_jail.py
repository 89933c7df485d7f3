"""The text jail: hostile templates end within their limits, and honest work has the bits that it has without a jail."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from octavo.request.sampling_params import Limits, ParameterError
from octavo.text import jail as jail_module
from octavo.text.jail import LONG_TEXT, JailError, TextJail
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.template import TemplateError
from octavo.text.tokenizer import Tokenizer
from test_template import CALLS, CASES, QWEN, SPECIALS, TALK, TOOLS
from tiny_tokenizers import CHATML, CORPUS, byte_level, kinds

LIMITS = Limits(vocab_size=1000, max_model_len=1 << 22)
MakeJail = Callable[..., TextJail]


@pytest.fixture
def make_jail() -> Iterator[MakeJail]:
    with contextlib.ExitStack() as closed:

        def make(template: str = CHATML, backend: object = None) -> TextJail:
            config = {"bos_token": "<s>", "eos_token": SPECIALS[2], "chat_template": template}
            made = TextJail(Tokenizer(backend or byte_level(), config))
            closed.callback(made.close)
            return made

        yield make


def child_of(jail: TextJail) -> psutil.Process:
    (child,) = jail._children
    return psutil.Process(child._process.pid)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",  # noqa: E501
    "search": "{{ ('a' * 900000).count('a' * 400000 + 'b') }}{% for a in range(99999) %}{% for b in range(99999) %}{{ ('a' * 900000)[0:0] }}{% endfor %}{% endfor %}",  # noqa: E501
}
LARGE = {
    "percent": "{{ '%3000000000d' % 1 }}",
    "percent of a variable": "{{ ('%' ~ messages|length ~ '000000000d') % 1 }}",
    "ljust": "{{ 'x'.ljust(3000000000) }}",
    "tilde": "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "replace": "{{ ('x' * 100000).replace('x', 'x' * 100000) }}",
    "join": "{{ range(99999) | join('x' * 100000) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_ended(make_jail: MakeJail, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(jail_module, "RENDER_SECONDS", 0.2)
    jail = make_jail(ENDLESS[name])
    jail.start()
    first = child_of(jail).pid
    with pytest.raises(TemplateError, match=r"^template_failed: it takes more than 0\.2 s to render"):
        jail.render_chat(TALK, LIMITS)
    assert jail.num_killed == 1 and not psutil.pid_exists(first)
    assert jail.encode("a" * (LONG_TEXT + 1)), "another child takes its place"


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_fills_the_memory_fails(make_jail: MakeJail, name: str) -> None:
    with pytest.raises(TemplateError, match=r"^template_failed: "):
        make_jail(LARGE[name]).render_chat([{"role": "user", "content": "x"}] * 3, LIMITS)


def test_prompts_are_those_of_the_same_work_without_a_jail(make_jail: MakeJail) -> None:
    for template, messages, options in CASES.values():
        kwargs = dict(options)
        given = {name: kwargs.pop(name) for name in ("tools", "continue_final_message") if name in kwargs}
        given["add_generation_prompt"] = kwargs.pop("add_generation_prompt", False)
        jail = make_jail(template)
        prompt = jail.render_chat(messages, LIMITS, chat_template_kwargs=kwargs, **given)
        assert prompt == jail._tokenizer.render_chat(messages, chat_template_kwargs=kwargs, **given)
        jail.close()


def test_plain_values_arrive_as_they_are(make_jail: MakeJail) -> None:
    jail = make_jail("{{ messages[0].extra | tojson }}{{ number }}")
    extra = [10**19, 0.1, 1e300, -0.0, True, None, {"1": ()}, "\ufdd2\0\u2028"]
    messages, kwargs = [{"role": "user", "content": "", "extra": extra}], {"number": 2**70}
    prompt = jail.render_chat(messages, LIMITS, chat_template_kwargs=kwargs)
    assert prompt == jail._tokenizer.render_chat(messages, chat_template_kwargs=kwargs)
    with pytest.raises(ParameterError, match="which is no plain data"):
        jail.render_chat([{"role": "user", "content": "", "extra": object()}], LIMITS)
    with pytest.raises(ParameterError) as caught:
        jail.render_chat([{"role": "user", "content": "", "extra": "\ud800"}], LIMITS)
    assert caught.value.code in ("invalid_unicode", "out_of_range")


@pytest.mark.parametrize("name", kinds())
def test_long_texts_have_the_tokens_of_the_same_text_without_a_jail(make_jail: MakeJail, name: str) -> None:
    jail = make_jail(QWEN, kinds()[name])
    tokenizer = jail._tokenizer
    text = "".join(CORPUS) * (LONG_TEXT // sum(map(len, CORPUS)) + 1) + " <|im_end|> </s> <"
    for add_special_tokens in (True, False):
        token_ids = jail.encode(text, add_special_tokens=add_special_tokens)
        assert token_ids == tokenizer.encode(text, add_special_tokens)
    assert jail.decode(token_ids, skip_special_tokens=True) == tokenizer.decode(token_ids)
    messages = [*CALLS, {"role": "user", "content": text}]
    assert jail.render_chat(messages, LIMITS, tools=TOOLS) == tokenizer.render_chat(messages, tools=TOOLS)


def test_rendered_text_that_cannot_fit_is_not_tokenized(make_jail: MakeJail) -> None:
    jail = make_jail()
    limits = Limits(vocab_size=1000, max_model_len=10, max_token_bytes=8)
    rendered = jail.render(jail.conversation([{"role": "user", "content": "x" * 1000}]))
    with pytest.raises(ParameterError, match=r"messages: .* bytes cannot fit in 10 tokens") as caught:
        jail.plain(rendered, limits)
    assert caught.value.code == "context_length_exceeded"


def test_a_child_that_died_unasked_is_replaced(make_jail: MakeJail) -> None:
    jail = make_jail()
    wanted = jail.render_chat(TALK, LIMITS)
    child = child_of(jail)
    child.kill()
    assert jail.render_chat(TALK, LIMITS) == wanted
    assert child_of(jail).pid != child.pid


def test_who_waits_for_a_child_is_told_when_the_jail_closes(make_jail: MakeJail) -> None:
    jail = make_jail()
    jail.start()
    child = child_of(jail)
    child.send_signal(signal.SIGSTOP)
    said: list[str] = []

    def ask() -> None:
        try:
            jail.render_chat(TALK, LIMITS)
        except JailError as error:
            said.append(error.exceeded)

    thread = threading.Thread(target=ask)
    thread.start()
    while jail._idle:
        os.sched_yield()
    jail.close()
    thread.join(20)
    assert said == [""] and not child.is_running()
    with pytest.raises(JailError, match="closed"):
        jail.start()


def test_a_jail_that_is_forgotten_leaves_no_child() -> None:
    jail = TextJail(Tokenizer(byte_level(), {"chat_template": CHATML}))
    jail.start()
    child = child_of(jail)
    del jail
    gc.collect()
    assert not child.is_running()


def test_a_forked_process_has_children_of_its_own(make_jail: MakeJail) -> None:
    """Both ask at once: an answer that went to the other would be another's prompt."""
    jail = make_jail()
    wanted = jail.render_chat(TALK, LIMITS)
    child = child_of(jail)
    pid = os.fork()
    if not pid:
        same = [jail.render_chat(TALK, LIMITS) == wanted for _ in range(20)]
        is_own = child_of(jail).pid != child.pid
        jail.close()
        os._exit(0 if all(same) and is_own else 1)
    other = [{"role": "user", "content": "of the parent"}]
    for _ in range(20):
        assert "of the parent" in jail.render_chat(other, LIMITS)[0]
    assert os.waitpid(pid, 0)[1] == 0
    assert child.is_running() and child_of(jail).pid == child.pid


def test_a_model_without_tokenizer_says_so() -> None:
    jail = TextJail(NoTokenizer())
    with pytest.raises(ParameterError, match="pass token ids"):
        jail.render_chat(TALK, LIMITS)
    with pytest.raises(ParameterError, match="pass token ids"):
        jail.encode("a")


def test_a_text_without_tokens_is_a_users_mistake(make_jail: MakeJail) -> None:
    """A WordLevel model without an unknown token has none for most words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    jail = make_jail("{{ messages[0].content }}", backend)
    assert jail.encode("a b a") == [0, 1, 0]
    for text in ("a c", "c " * LONG_TEXT):
        with pytest.raises(ParameterError, match=r"^prompt: cannot be tokenized") as caught:
            jail.encode(text)
        assert caught.value.code == "untokenizable"
        with pytest.raises(ParameterError, match=r"^messages: cannot be tokenized"):
            jail.render_chat([{"role": "user", "content": text}], LIMITS)

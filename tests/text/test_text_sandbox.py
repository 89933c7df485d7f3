"""The text sandbox: hostile templates end within their limits, and honest work has the bits that it has without."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import tokenizers

from octavo.request.sampling_params import Limits, ParameterError
from octavo.text import sandbox as sandbox_module
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.sandbox import LONG_TEXT, SandboxError, TextSandbox
from octavo.text.template import TemplateError
from octavo.text.tokenizer import Tokenizer
from standstill import stop
from test_template import CALLS, CASES, QWEN, SPECIALS, TALK, TOOLS
from tiny_tokenizers import CHATML, CORPUS, byte_level, kinds

LIMITS = Limits(vocab_size=1000, max_model_len=1 << 22)
MakeSandbox = Callable[..., TextSandbox]


@pytest.fixture
def make_sandbox() -> Iterator[MakeSandbox]:
    with contextlib.ExitStack() as closed:

        def make(template: str = CHATML, backend: object = None) -> TextSandbox:
            config = {"bos_token": "<s>", "eos_token": SPECIALS[2], "chat_template": template}
            made = TextSandbox(Tokenizer(backend or byte_level(), config))
            closed.callback(made.close)
            return made

        yield make


def child_of(sandbox: TextSandbox) -> psutil.Process:
    (child,) = sandbox._children
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
def test_a_template_that_does_not_end_is_ended(
    make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sandbox_module, "RENDER_SECONDS", 0.2)
    sandbox = make_sandbox(ENDLESS[name])
    sandbox.start()
    first = child_of(sandbox).pid
    with pytest.raises(TemplateError, match=r"^template_failed: it takes more than 0\.2 s to render"):
        sandbox.render_chat(TALK, LIMITS)
    assert sandbox.num_killed == 1 and not psutil.pid_exists(first)
    assert sandbox.encode("a" * (LONG_TEXT + 1)), "another child takes its place"


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_fills_the_memory_fails(make_sandbox: MakeSandbox, name: str) -> None:
    with pytest.raises(TemplateError, match=r"^template_failed: "):
        make_sandbox(LARGE[name]).render_chat([{"role": "user", "content": "x"}] * 3, LIMITS)


def test_prompts_are_those_of_the_same_work_without_a_sandbox(make_sandbox: MakeSandbox) -> None:
    for template, messages, options in CASES.values():
        kwargs = dict(options)
        given = {name: kwargs.pop(name) for name in ("tools", "continue_final_message") if name in kwargs}
        given["add_generation_prompt"] = kwargs.pop("add_generation_prompt", False)
        sandbox = make_sandbox(template)
        prompt = sandbox.render_chat(messages, LIMITS, chat_template_kwargs=kwargs, **given)
        assert prompt == sandbox._tokenizer.render_chat(messages, chat_template_kwargs=kwargs, **given)
        sandbox.close()


def test_plain_values_arrive_as_they_are(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox("{{ messages[0].extra | tojson }}{{ number }}")
    extra = [10**19, 0.1, 1e300, -0.0, True, None, {"1": ()}, "\ufdd2\0\u2028"]
    messages, kwargs = [{"role": "user", "content": "", "extra": extra}], {"number": 2**70}
    prompt = sandbox.render_chat(messages, LIMITS, chat_template_kwargs=kwargs)
    assert prompt == sandbox._tokenizer.render_chat(messages, chat_template_kwargs=kwargs)
    with pytest.raises(ParameterError, match="which is no plain data"):
        sandbox.render_chat([{"role": "user", "content": "", "extra": object()}], LIMITS)
    with pytest.raises(ParameterError) as caught:
        sandbox.render_chat([{"role": "user", "content": "", "extra": "\ud800"}], LIMITS)
    assert caught.value.code in ("invalid_unicode", "out_of_range")


@pytest.mark.parametrize("name", kinds())
def test_long_texts_have_the_tokens_of_the_same_text_without_a_sandbox(make_sandbox: MakeSandbox, name: str) -> None:
    sandbox = make_sandbox(QWEN, kinds()[name])
    tokenizer = sandbox._tokenizer
    text = "".join(CORPUS) * (LONG_TEXT // sum(map(len, CORPUS)) + 1) + " <|im_end|> </s> <"
    for add_special_tokens in (True, False):
        token_ids = sandbox.encode(text, add_special_tokens=add_special_tokens)
        assert token_ids == tokenizer.encode(text, add_special_tokens)
    assert sandbox.decode(token_ids, skip_special_tokens=True) == tokenizer.decode(token_ids)
    messages = [*CALLS, {"role": "user", "content": text}]
    assert sandbox.render_chat(messages, LIMITS, tools=TOOLS) == tokenizer.render_chat(messages, tools=TOOLS)


@pytest.mark.parametrize("said", ["hello", "a <|im_end|> of a user's own"], ids=["plain", "guarded"])
def test_rendered_text_may_have_the_tokenizers_special_tokens_around(make_sandbox: MakeSandbox, said: str) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    added = (SPECIALS[0], backend.token_to_id(SPECIALS[0]))
    backend.post_processor = tokenizers.processors.TemplateProcessing(f"{added[0]} $A", special_tokens=[added])
    sandbox = make_sandbox(QWEN, backend)
    rendered = sandbox.render(sandbox.conversation([{"role": "user", "content": said}]))
    plain = sandbox.encode(rendered, guarded=True)
    assert sandbox.encode(rendered, guarded=True, add_special_tokens=True) == [added[1], *plain]


def test_rendered_text_that_cannot_fit_is_not_tokenized(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox()
    limits = Limits(vocab_size=1000, max_model_len=10, max_token_bytes=8)
    rendered = sandbox.render(sandbox.conversation([{"role": "user", "content": "x" * 1000}]))
    with pytest.raises(ParameterError, match=r"messages: .* bytes cannot fit in 10 tokens") as caught:
        sandbox.plain(rendered, limits)
    assert caught.value.code == "context_length_exceeded"


def test_a_child_that_died_unasked_is_replaced(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox()
    wanted = sandbox.render_chat(TALK, LIMITS)
    child = child_of(sandbox)
    child.kill()
    assert sandbox.render_chat(TALK, LIMITS) == wanted
    assert child_of(sandbox).pid != child.pid


def test_who_waits_for_a_child_is_told_when_the_sandbox_closes(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox()
    sandbox.start()
    child = child_of(sandbox)
    stop(child.pid)
    said: list[str] = []

    def ask() -> None:
        try:
            sandbox.render_chat(TALK, LIMITS)
        except SandboxError as error:
            said.append(error.exceeded)

    thread = threading.Thread(target=ask)
    thread.start()
    while sandbox._idle:
        os.sched_yield()
    sandbox.close()
    thread.join(20)
    assert said == [""] and not child.is_running()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.start()


def test_a_sandbox_that_is_forgotten_leaves_no_child() -> None:
    sandbox = TextSandbox(Tokenizer(byte_level(), {"chat_template": CHATML}))
    sandbox.start()
    child = child_of(sandbox)
    del sandbox
    gc.collect()
    assert not child.is_running()


def test_a_forked_process_has_children_of_its_own(make_sandbox: MakeSandbox) -> None:
    """Both ask at once: an answer that went to the other would be another's prompt."""
    sandbox = make_sandbox()
    wanted = sandbox.render_chat(TALK, LIMITS)
    child = child_of(sandbox)
    pid = os.fork()
    if not pid:
        same = [sandbox.render_chat(TALK, LIMITS) == wanted for _ in range(20)]
        is_own = child_of(sandbox).pid != child.pid
        sandbox.close()
        os._exit(0 if all(same) and is_own else 1)
    other = [{"role": "user", "content": "of the parent"}]
    for _ in range(20):
        assert "of the parent" in sandbox.render_chat(other, LIMITS)[0]
    assert os.waitpid(pid, 0)[1] == 0
    assert child.is_running() and child_of(sandbox).pid == child.pid


def test_a_model_without_tokenizer_says_so() -> None:
    sandbox = TextSandbox(NoTokenizer())
    with pytest.raises(ParameterError, match="pass token ids"):
        sandbox.render_chat(TALK, LIMITS)
    with pytest.raises(ParameterError, match="pass token ids"):
        sandbox.encode("a")


def test_a_text_without_tokens_is_a_users_mistake(make_sandbox: MakeSandbox) -> None:
    """A WordLevel model without an unknown token has none for most words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sandbox = make_sandbox("{{ messages[0].content }}", backend)
    assert sandbox.encode("a b a") == [0, 1, 0]
    for text in ("a c", "c " * LONG_TEXT):
        with pytest.raises(ParameterError, match=r"^prompt: cannot be tokenized") as caught:
            sandbox.encode(text)
        assert caught.value.code == "untokenizable"
        with pytest.raises(ParameterError, match=r"^messages: cannot be tokenized"):
            sandbox.render_chat([{"role": "user", "content": text}], LIMITS)


def test_closing_in_a_forked_process_leaves_the_parents_children_alone(make_sandbox: MakeSandbox) -> None:
    """Also while another thread of the parent holds the lock: that thread is not there."""
    sandbox = make_sandbox()
    sandbox.start()
    child = child_of(sandbox)
    with sandbox._lock:
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            sandbox.close()
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert child.is_running() and sandbox.render_chat(TALK, LIMITS)


def test_a_child_that_did_not_use_its_time_is_not_the_texts_fault(
    make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still, or the machine is busy: nobody is told that a text takes too long."""
    monkeypatch.setattr(sandbox_module, "RENDER_SECONDS", 0.01)
    monkeypatch.setattr(sandbox_module, "SPARE_SECONDS", 0.01)
    sandbox = make_sandbox()
    sandbox.start()
    stop(child_of(sandbox).pid)
    with pytest.raises(SandboxError) as caught:
        sandbox.render_chat(TALK, LIMITS)
    assert not caught.value.exceeded


def test_a_child_that_starts_while_all_are_closed_ends_and_the_reason_is_said(
    make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at a server's start: "a text's child cannot be started: None"."""
    sandbox, popen = make_sandbox(), subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> Any:
        sandbox.close()
        started.append(popen(*args, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SandboxError, match=f"^{sandbox_module.CLOSED}$"):
        sandbox.start()
    assert started[0].poll() is not None

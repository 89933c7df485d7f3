"""Which prompts begin with reasoning, and what the worker is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.settings import ConfigError
from octavo.request.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams
from octavo.request.thinking import BRACKETS, HARMONY, MARKS, THINK, find_marks
from octavo.serve.parsers.output import REASONING_PARSERS, ParserChoice
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.thinking import ThinkingRule
from octavo.text.tokenizer import Tokenizer
from tiny_tokenizers import byte_level

FORM = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
BUDGET = SamplingParams(thinking_token_budget=5)


def _tokenizer(template: str = "<think>") -> Tokenizer:
    return Tokenizer(byte_level(), {"chat_template": template})


def _rule(template: str = "<think>", parser: str = "auto", **options: Any) -> ThinkingRule:
    return ThinkingRule(_tokenizer(template), parser, **{"enable_in_reasoning": False, **options})


@pytest.mark.parametrize(
    ("prompt", "may_open", "is_open", "may_begin"),
    [
        ("assistant\n<think>\n", False, True, False),
        ("assistant\n<think>", True, True, False),
        ("assistant\n", True, False, True),
        ("assistant\n", False, False, False),
        ("assistant\n<think>\n\n</think>\n\n", True, False, False),
        ("what does <think> mean?", False, False, False),
    ],
)
def test_a_form_waits_where_reasoning_is_due(prompt: str, may_open: bool, is_open: bool, may_begin: bool) -> None:
    rule, tokenizer = _rule(), _tokenizer()
    for text in (prompt, None):  # a prompt in ids has no text
        found = rule.apply(FORM, text, tokenizer.encode(prompt), may_open=may_open).thinking
        assert (found is not None and found.is_open, found is not None and found.opening_id >= 0) == (
            is_open,
            may_begin,
        )
        if found is not None:
            assert tokenizer.decode(found.closing_ids) == found.closing == "</think>"
            assert may_begin is False or tokenizer.decode([found.opening_id]) == "<think>"


def test_a_budget_counts_reasoning_that_any_prompt_leads_to() -> None:
    rule = _rule()
    assert rule.apply(BUDGET, "say", [1], may_open=False).thinking is not None
    assert rule.apply(SamplingParams(), "<think>", [1], may_open=True).thinking is None
    ended = _rule(end_text="So.</think>").apply(BUDGET, "<think>", [1], may_open=False).thinking
    assert ended is not None and _tokenizer().decode(ended.closing_ids) == "So.</think>"


def test_a_model_without_reasoning_leaves_requests_alone_and_refuses_budgets() -> None:
    for rule in (
        _rule("{{ messages }}"),
        _rule(parser="none"),
        ThinkingRule(NoTokenizer(), "auto", enable_in_reasoning=False),
    ):
        assert rule.apply(FORM, "<think>", [1], may_open=True) is FORM
        with pytest.raises(ParameterError, match="--reasoning-parser"):
            rule.apply(BUDGET, "<think>", [1], may_open=True)


def test_a_form_may_hold_for_the_reasoning() -> None:
    rule = _rule(enable_in_reasoning=True)
    assert rule.apply(FORM, "<think>", [1], may_open=True) is FORM
    both = SamplingParams(structured_outputs=FORM.structured_outputs, thinking_token_budget=5)
    with pytest.raises(ParameterError, match="enable_in_reasoning"):
        rule.apply(both, "<think>", [1], may_open=True)


def test_marks_by_name_and_by_template() -> None:
    assert set(MARKS) == set(REASONING_PARSERS)
    for name, marks in MARKS.items():
        assert find_marks(None, name) == marks
        parser = ParserChoice.of(None, "none", name).reasoning
        assert parser is not None and (parser.opening, parser.closing) == (marks.opening, marks.closing)
    assert [find_marks(text, "auto") for text in ("a <think>", "[THINK]", "<|channel|>", "", None)] == [
        THINK,
        BRACKETS,
        HARMONY,
        None,
        None,
    ]
    assert find_marks(None, "octavo.serve.parsers.reasoning:MistralReasoning") == BRACKETS
    assert HARMONY.are_open("<|end|><|start|>assistant")
    for wrong in ("no-such", "no.such:Thing"):
        with pytest.raises(ConfigError, match="reasoning_parser"):
            _rule(parser=wrong)
    with pytest.raises(ConfigError, match="must end with </think>"):
        _rule(end_text="so")

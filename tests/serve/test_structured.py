"""The sandbox that tries foreign forms, and what clients' fields mean."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import octavo.serve.sandbox.grammar
from octavo.grammar.compiler import Vocabulary
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams
from octavo.serve.sandbox.grammar import (
    GrammarSandbox,
    SandboxBusyError,
    from_request,
    from_response_format,
    from_tool_choice,
)
from patience import patient

TOKENS = [b"<eos>", *(bytes([byte]) for byte in range(256)), b"ab", b'{"', b"true"]
VOCABULARY = Vocabulary(TOKENS, [0], [0])
SLOW = "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(30)) + '\nA30: "x"'  # 0.4 s and more


def _form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def _with_sandbox(use: Callable[[GrammarSandbox], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        sandbox = GrammarSandbox(VOCABULARY, len(TOKENS), [0], **options)
        try:
            await use(sandbox)
        finally:
            pids = [child.process.pid for child in sandbox._children]
            await sandbox.close()
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    asyncio.run(asyncio.wait_for(run(), patient(60)))


async def _error(sandbox: GrammarSandbox, form: StructuredOutputsParams) -> ParameterError | None:
    try:
        await sandbox.check_structured(form)
    except ParameterError as error:
        return error
    return None


def test_good_forms_pass_and_one_child_serves_them() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        await sandbox.check_structured(None)
        assert not sandbox._children
        for form in (_form(choice=["a"]), _form(regex="a+"), _form(json={}), _form(grammar='start: "a"')):
            await sandbox.check_structured(form)
        assert len(sandbox._children) == 1 and sandbox.num_killed == 0

    _with_sandbox(use)


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"not": {}}}, "unsupported"),
    ({"json": {"$ref": "#"}}, "schema_invalid"),
    ({"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(6)]}
                         for i in range(12)]}}, "schema_too_complex"),
    ({"regex": "(?<=a)b"}, "unsupported"),
    ({"regex": "("}, "regex_invalid"),
    ({"regex": "(" * 30_000 + ")" * 30_000}, "schema_too_complex"),
    ({"grammar": "start: start"}, "grammar_invalid"),
    ({"grammar": "start: nothing"}, "grammar_invalid"),
    ({"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000}, "schema_too_complex"),
    ({"grammar": SLOW}, "schema_too_complex"),
    ({"structural_tag": {"format": {"type": "tag", "begin": "", "end": "x",
                                    "content": {"type": "grammar", "grammar": SLOW}}}}, "schema_too_complex"),
]  # fmt: skip


def test_hostile_forms_are_answered_in_time_and_the_sandbox_goes_on() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        for fields, code in HOSTILE:
            began = time.monotonic()
            error = await _error(sandbox, _form(**fields))
            assert error is not None and error.code == code, (fields, error)
            assert time.monotonic() - began < patient(5) and len(str(error)) <= 300
        for regex in ("(a+)+$", "(ab){1,1000000}", "((a{1,1000}){1,1000}){1,1000}", "a" * 65_000):
            began = time.monotonic()
            await sandbox.check_structured(_form(regex=regex))
            assert time.monotonic() - began < patient(5)

    _with_sandbox(use)


def test_a_child_that_takes_too_long_is_killed_and_replaced() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        await sandbox.check_structured(_form(choice=["a"]))
        (child,) = sandbox._children
        began, usual = time.monotonic(), sandbox._seconds
        sandbox._seconds = 0.05  # of the clock: also a small form may take longer where others work
        error = await _error(sandbox, _form(grammar=SLOW))
        sandbox._seconds = usual
        assert error is not None and error.code == "schema_too_complex" and "0.05 s" in str(error)
        assert time.monotonic() - began < patient(5)
        assert sandbox.num_killed == 1 and not Path(f"/proc/{child.process.pid}").exists()
        assert await _error(sandbox, _form(grammar=SLOW)) is not None
        assert sandbox.num_killed == 1  # the verdict is kept
        await sandbox.check_structured(_form(choice=["b"]))

    _with_sandbox(use)


def test_a_child_that_takes_too_much_memory_answers_for_it() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        error = await _error(sandbox, _form(json={"enum": [f"{number:060}" for number in range(1000)]}))
        assert error is not None and error.code == "schema_too_complex"
        assert "memory" in str(error)

    _with_sandbox(use, memory_bytes=1 << 20)


@pytest.mark.parametrize("limit", ["-v 900000", "-n 12"])
def test_a_stricter_limit_of_the_servers_stays_and_blames_no_form(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every form was too complex under `ulimit -v`: its child may not raise what it was started under."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit {limit}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    async def use(sandbox: GrammarSandbox) -> None:
        assert await _error(sandbox, _form(json={"type": "object"})) is None
        assert sandbox.num_killed == 0

    _with_sandbox(use)


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGSEGV])
def test_a_child_that_crashes_says_by_what_signal(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Short memory may crash a library by SIGSEGV, and by no other signal that names a crash."""
    ask = octavo.serve.sandbox.grammar._Child.ask

    async def crash(child: Any, structured: StructuredOutputsParams) -> Any:
        os.kill(child.process.pid, number)
        await child.process.wait()  # a signal that leaves a core reaches one thread, while the others may answer
        return await ask(child, structured)

    monkeypatch.setattr(octavo.serve.sandbox.grammar._Child, "ask", crash)

    async def use(sandbox: GrammarSandbox) -> None:
        error = await _error(sandbox, _form(choice=["a"]))
        assert error is not None and error.code == "schema_too_complex"
        assert number.name in str(error) and ("memory" in str(error)) == (number == signal.SIGSEGV)

    _with_sandbox(use)


def test_a_child_that_dies_is_replaced() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        await sandbox.check_structured(_form(choice=["a"]))
        (child,) = sandbox._children
        os.kill(child.process.pid, signal.SIGKILL)
        await sandbox.check_structured(_form(choice=["b"]))  # it was dead before it was asked: no fault of the form
        (child,) = sandbox._children
        os.kill(child.process.pid, signal.SIGKILL)
        while child.process.returncode is None:
            await asyncio.sleep(0.01)
        await sandbox.check_structured(_form(choice=["c"]))

    _with_sandbox(use)


def test_a_child_has_limits_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "a-secret-key")

    async def use(sandbox: GrammarSandbox) -> None:
        await sandbox.check_structured(_form(choice=["a"]))
        (child,) = sandbox._children
        folder = Path(f"/proc/{child.process.pid}")
        limits = (folder / "limits").read_text()
        assert re.search(rf"Max address space +{1 << 30} +{1 << 30} ", limits)
        assert re.search(r"Max open files +16 +16 ", limits) and re.search(r"Max cpu time +\d+ ", limits)
        assert b"a-secret-key" not in (folder / "environ").read_bytes()
        maps = (folder / "maps").read_text()
        assert "libtorch" not in maps

    _with_sandbox(use)


def test_many_at_once_share_children_and_answers() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        forms = [_form(regex=f"a{{{number % 10}}}") for number in range(200)]
        await asyncio.gather(*(sandbox.check_structured(form) for form in forms))
        assert len(sandbox._children) == 2 and len(sandbox._verdicts) == 10

    _with_sandbox(use)


def test_a_client_that_leaves_takes_nothing_along() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        await sandbox.check_structured(_form(choice=["a"]))
        leaving = asyncio.create_task(sandbox.check_structured(_form(grammar=SLOW)))
        staying = asyncio.create_task(_error(sandbox, _form(grammar=SLOW)))
        await asyncio.sleep(0.05)
        leaving.cancel()
        error = await staying
        assert error is not None and error.code == "schema_too_complex"
        assert sandbox.num_killed == 0

    _with_sandbox(use)


def _slow(number: int) -> StructuredOutputsParams:
    return _form(grammar=SLOW.replace('"x"', f'"x{number}"'))


def test_forms_whose_senders_have_left_hold_up_nobody() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        leaving = [asyncio.create_task(sandbox.check_structured(_slow(number))) for number in range(30)]
        while not all(check.num_askers for check in sandbox._checks.values()) or len(sandbox._checks) < 30:
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert sum(not check.has_begun for check in sandbox._checks.values()) == 0
        await sandbox.check_structured(_form(choice=["a"]))
        assert len(sandbox._verdicts) <= 3 and len(sandbox._children) <= 2

    _with_sandbox(use)


def _tag(schema: dict[str, Any]) -> dict[str, Any]:
    """Free text in which calls may stand."""
    call = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [call]}}


def test_the_engine_gets_forms_in_words_that_compile_at_once() -> None:
    """What takes the interpreter's lock for long is done in the sandbox, once."""
    rules = "\n".join(f'r{number} ::= "a" r{number + 1}' for number in range(50))
    forms = [
        _form(grammar=f'root ::= r0\n{rules}\nr50 ::= "z"'),
        _form(json={"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}),
        _form(json={"type": "string", "format": "color"}),
        _form(structural_tag=_tag({"type": "string", "format": "color"})),
    ]

    async def use(sandbox: GrammarSandbox) -> None:
        for form in forms:
            spelled = await sandbox.check_structured(form)
            assert spelled is not None and spelled != form and spelled.form == form.form
            assert await sandbox.check_structured(spelled) == spelled
        assert await sandbox.check_structured(_form(choice=["a"])) == _form(choice=["a"])

    _with_sandbox(use)


def test_too_many_forms_are_turned_away() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        tasks = [asyncio.create_task(_error(sandbox, _slow(number))) for number in range(3)]
        while len(sandbox._checks) < 3 or not any(check.has_begun for check in sandbox._checks.values()):
            await asyncio.sleep(0)
        with pytest.raises(SandboxBusyError, match="2 forms of outputs wait") as caught:
            await sandbox.check_structured(_slow(3))
        assert caught.value.retry_after >= 1
        same = asyncio.create_task(_error(sandbox, _slow(2)))  # who asks for what is asked already needs no place
        errors = await asyncio.gather(*tasks, same)
        assert {error.code for error in errors if error is not None} == {"schema_too_complex"} and all(errors)
        await sandbox.check_structured(_form(choice=["a"]))

    _with_sandbox(use, max_children=1, max_waiting=2)


def test_a_machine_that_stood_still_says_nothing_of_a_form() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        await sandbox.check_structured(_form(choice=["a"]))
        (child,) = sandbox._children
        os.kill(child.process.pid, signal.SIGSTOP)
        threads = list(Path(f"/proc/{child.process.pid}/task").glob("*/stat"))
        while not all(thread.read_text().rsplit(")", 1)[1].split()[0] == "T" for thread in threads):
            await asyncio.sleep(0.001)
        usual, sandbox._seconds = sandbox._seconds, 0.2
        with pytest.raises(SandboxBusyError, match="too busy to check"):
            await sandbox.check_structured(_form(choice=["b"]))
        sandbox._seconds = usual
        assert not sandbox._checks and not sandbox._children
        await sandbox.check_structured(_form(choice=["b"]))

    _with_sandbox(use, max_children=1)


def test_a_form_that_waits_too_long_is_turned_away() -> None:
    async def use(sandbox: GrammarSandbox) -> None:
        first = asyncio.create_task(_error(sandbox, _slow(0)))
        while not any(check.is_compiling for check in sandbox._checks.values()):
            await asyncio.sleep(0.001)
        with pytest.raises(SandboxBusyError, match=r"within 0\.01 s"):
            await sandbox.check_structured(_slow(1))
        assert await first is not None and not sandbox._checks

    _with_sandbox(use, max_children=1, wait_seconds=0.01)


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    whole = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert from_response_format(None) is from_response_format({"type": "text"}) is None
    assert from_response_format({"type": "json_object"}) == _form(json_object=True)
    assert from_response_format(whole) == _form(json=schema)
    assert from_response_format({"type": "json_schema", "name": "n", "schema": schema}) == _form(json=schema)
    assert from_response_format({"type": "json_schema", "json_schema": {"name": "n"}}) == _form(json_object=True)
    older = {"structures": [{"begin": "<f=a>", "schema": schema, "end": "</f>"}], "triggers": ["<f="]}
    for tag in (_tag(schema), {"type": "structural_tag", **older}):
        assert from_response_format(tag) == _form(structural_tag=_tag(schema))
        assert from_request(None, {"structural_tag": json.dumps(tag)}) == _form(structural_tag=_tag(schema))
    assert from_request(None, {"regex": "a"}) == _form(regex="a")
    assert from_request({"type": "text"}, {"regex": "a"}) == _form(regex="a")
    assert from_request(whole, None) == _form(json=schema)


@pytest.mark.parametrize(
    ("response_format", "structured", "field", "code"),
    [
        ("json", None, "response_format", "invalid_type"),
        ({}, None, "response_format.type", "invalid_value"),
        ({"type": "xml"}, None, "response_format.type", "invalid_value"),
        ({"type": "json_schema"}, None, "response_format.json_schema", "invalid_type"),
        (
            {"type": "json_schema", "json_schema": {"schema": "x"}},
            None,
            "response_format.json_schema.schema",
            "invalid_type",
        ),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs", "conflicting"),
        (None, {"regex": "a", "json": {}}, "structured_outputs", "conflicting"),
        (None, "a", "structured_outputs", "invalid_type"),
        ({"type": "structural_tag"}, None, "structured_outputs.structural_tag", "grammar_invalid"),
    ],
)
def test_bad_fields(response_format: Any, structured: Any, field: str, code: str) -> None:
    with pytest.raises(ParameterError) as caught:
        from_request(response_format, structured)
    assert (caught.value.field, caught.value.code) == (field, code)


def test_the_schema_of_required_calls_means_calls() -> None:
    arguments = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": arguments}},
        {"type": "function", "function": {"name": "g"}},
    ]
    schema = json.loads(str(from_tool_choice(tools).json))
    jsonschema.validate([{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}], schema)
    for bad in ([], [{"name": "h", "arguments": {}}], [{"name": "f", "arguments": {"x": "1"}}], {"name": "g"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)

    async def use(sandbox: GrammarSandbox) -> None:
        await sandbox.check_structured(from_tool_choice(tools))
        await sandbox.check_structured(from_tool_choice(tools, "f"))

    _with_sandbox(use)


def test_the_schemas_of_tools_refer_to_themselves_only() -> None:
    """Definitions of one name in two tools are two; a tool's root and what is below it are its own."""
    one, two = (
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": kind}}}
        for kind in ("integer", "string")
    )
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    twin = {
        "$id": "https://example.org/twin",
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/properties/x"}},
    }
    named = {"one": one, "two": two, "tree": tree, "twin": twin}
    tools = [{"type": "function", "function": {"name": name, "parameters": named[name]}} for name in named]
    schema = json.loads(str(from_tool_choice(tools).json))
    good = {"one": {"x": 1}, "two": {"x": "1"}, "tree": {"kids": [{"kids": []}, {}]}, "twin": {"x": 1, "y": 2}}
    bad = {"one": {"x": "1"}, "two": {"x": 1}, "tree": {"kids": [{"x": []}]}, "twin": {"x": 1, "y": "2"}}
    jsonschema.validate([{"name": name, "arguments": good[name]} for name in good], schema)
    for name in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": name, "arguments": bad[name]}], schema)
    _with_sandbox(lambda sandbox: sandbox.check_structured(from_tool_choice(tools)))

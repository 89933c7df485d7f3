"""The command line: every mistake is one line and exit code 2; streaming, chat commands, Ctrl-C. No model is loaded."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.cli import flags, terminal
from octavo.cli import main as cli
from octavo.config.settings import ConfigError
from octavo.request.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.request.sampling_params import ParameterError, SamplingParams

Run = Callable[..., tuple[int, str, str]]


class EchoLLM:
    """Stands in for LLM: streams the prompt's words backwards, in capitals."""

    made: list[EchoLLM]
    interrupt_after = -1
    error: Exception | None = None
    failure: str | None = None  # what ends an output early
    logprobs: list[dict[int, Logprob]] | None = None

    def __init__(self, **fields: Any) -> None:
        if self.error is not None:
            raise self.error
        self.fields, self.closed, self.aborted = fields, False, False
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.made.append(self)

    def __enter__(self) -> EchoLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5, max_tokens=7)

    def _output(self, index: int, prompt: str, text: str, finished: bool) -> RequestOutput:
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=[1],
            cumulative_logprob=None,
            logprobs=self.logprobs,
            finish_reason="error" if self.failure else "stop" if finished else None,
            stop_reason=self.failure,
        )
        return RequestOutput(
            request_id=str(index),
            prompt=prompt,
            prompt_token_ids=[5, 6],
            outputs=[completion],
            finished=finished,
            prompt_logprobs=self.logprobs and [None, *self.logprobs],
        )

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(json.loads(json.dumps(prompt)))
        self.params.append(params)
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        if text == "too long":
            raise ParameterError("prompt", "exceeds max_model_len 16")
        words = text.upper().split()[::-1]
        try:
            for index, word in enumerate(words):
                if index == self.interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
                yield self._output(0, text, word + " ", index + 1 == len(words))
        except GeneratorExit:
            self.aborted = True
            raise

    def generate(self, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        self.prompts += prompts
        self.params.append(params)
        return [self._output(i, prompt, prompt.upper(), True) for i, prompt in enumerate(prompts)]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[EchoLLM]:
    """EchoLLM in the place of octavo.llm.LLM."""

    class Fresh(EchoLLM):
        made: list[EchoLLM] = []

    module = types.ModuleType("octavo.llm")
    module.LLM = Fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.llm", module)
    return Fresh


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with an input; gives exit code, stdout and stderr."""
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)

    def run_command(*argv: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generat"], "did you mean generate?"),
        (["--verison"], "unknown flag"),
        (["generate", "a", "--max-tokns", "3"], "unknown flag --max-tokns; did you mean --max-tokens?"),
        (["generate", "a", "--max_model_length", "3"], "did you mean --max-model-len?"),
        (["generate", "a", "--max-tok", "3"], "unknown flag --max-tok"),
        (["generate", "a", "--zzzzzz"], "see `octavo generate --help`"),
        (["generate", "a", "--seed", "1", "--seed", "-1"], "seed='-1'"),  # the last one counts
        (["generate", "a", "--enable-prefix-caching=maybe"], "--enable-prefix-caching: expected true or false"),
        (["generate", "a", "--tensor-parallel-size", "2"], "tensor_parallel_size='2' (from command line): an engine"),
        (["generate", "a", "--ssl-keyfile", "x"], "unknown flag --ssl-keyfile; see `octavo generate --help`"),
        (["generate", "a", "--max-tokens"], "expected"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens: must be in [1,"),
        (["generate", "a", "--max-tokens", "ten"], "--max-tokens: expected a whole number"),
        (["generate", "a", "--temperature", "-1"], "temperature: must be in [0, "),
        (["generate", "a", "--temperature", "hot"], "--temperature: expected a number"),
        (["generate", "a", "--top-p", "0"], "top_p"),
        (["generate", "a", "--stop", ""], "stop[0]"),
        (["generate", "a", "--stop-token-ids", "1,x"], "numbers with commas"),
        (["generate", "a", "--logit-bias", "{"], "expected JSON"),
        (["generate", "a", "--block-size", "13"], "block_size=13 (from command line): must be 8 or a multiple of 16"),
        (["generate", "a", "--block-size", "4"], "from 8 to 1024"),
        (["generate", "a", "--nope"], "unknown flag --nope; see `octavo generate --help`"),
        (["generate", "a", "--dtype", "float17"], "did you mean float16?"),
        (["generate", "a", "--max-model-len", "many"], "16k"),
        (["generate", "a", "--kv-cache-memory-bytes", "4Q"], "512M"),
        (["generate", "a", "--gpu-memory-utilization", "1.5"], "at most 1"),
        (["generate", "a", "--enable-lora"], "there are no LoRA adapters"),
        (["generate", "a", "--attention-config", "[1]"], "expected a mapping"),
        (["generate", "a", "--attention-config.bakend", "cpu"], "did you mean backend?"),
        (["generate", "a", "--attention-confg.backend", "cpu"], "did you mean --attention-config?"),
        (["generate", "a", "--attention-config.backend"], "needs a value"),
        (
            ["generate", "a", "--attention-config", '{"backend": "cpu"}', "--attention-config.backend", "cpu"],
            "both set",
        ),
        (["generate", "a", "--config", "/nowhere/settings.yaml"], "No such file"),
        (["generate", "-", "-"], "given twice"),
        (["chat", "hello"], "unexpected argument 'hello'"),
        (["doctor", "--explian"], "did you mean --explain?"),
        (["doctor", "--block-size", "7"], "from 8 to 1024"),
        (["doctor", "--", "x"], "unexpected argument"),
        (["bench", "everything"], "engine"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: list[str], said: str, run: Run, llm: type[EchoLLM]) -> None:
    code, out, err = run(*argv)
    assert code == 2 and out == "" and not llm.made
    assert err.startswith("octavo: error: ") and err.count("\n") == 1 and said in err


def test_a_bad_yaml_file_is_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("model: !!python/object:os.system {}\n")
    code, _, err = run("generate", "a", "--config", str(path))
    assert code == 2 and "tags" in err and err.count("\n") == 1


def test_stdin_that_is_no_text_is_refused(run: Run, llm: type[EchoLLM]) -> None:
    code, _, err = run("generate", "-", stdin=b"caf\xe9")
    assert code == 2 and "not UTF-8 at byte 3" in err


def test_an_engine_that_refuses_its_settings_names_their_origin(run: Run, llm: type[EchoLLM]) -> None:
    llm.error = ConfigError("max_model_len", 4096, "the checkpoint has 2048 positions")
    code, _, err = run("generate", "a", "--max-model-len", "4096")
    assert code == 2 and "max_model_len=4096 (from command line): the checkpoint has 2048 positions" in err


def test_our_own_mistakes_have_no_traceback_unless_asked(run: Run, llm: type[EchoLLM]) -> None:
    llm.error = RuntimeError("two\nlines")
    code, _, err = run("generate", "a")
    assert code == 1 and err.count("\n") == 1 and "RuntimeError: two lines" in err
    with pytest.raises(RuntimeError):
        run("generate", "a", "--debug")


def test_the_first_error_is_told_and_not_the_clean_up_s(
    run: Run, llm: type[EchoLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: EchoLLM, **_: Any) -> None:
        try:
            raise TypeError("first")
        finally:
            raise AssertionError("clean-up")

    monkeypatch.setattr(llm, "__init__", fail)
    code, _, err = run("generate", "a")
    assert code == 1 and "TypeError: first" in err


def test_version_and_overview(run: Run) -> None:
    assert run("--version")[:2] == (0, "octavo 0.1.0\n")
    for argv in ([], ["--help"], ["-h"]):
        code, out, _ = run(*argv)
        assert code == 0 and all(name in out for name in ("generate", "chat", "bench", "doctor"))


def test_bench_says_what_it_measures(run: Run) -> None:
    code, out, _ = run("bench", "--help")
    assert code == 0 and all(f"\n  {name} " in out for name in ("engine", "serve", "reproducibility"))


def test_one_prompt_streams(run: Run, llm: type[EchoLLM]) -> None:
    code, out, _ = run("generate", "one two three")
    assert (code, out) == (0, "THREE TWO ONE \n")
    assert llm.made[0].closed


def test_an_output_that_is_no_file_is_written_to(run: Run, llm: type[EchoLLM]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code, _, err = run("generate", "abc")
    assert (code, text.getvalue().rstrip(), err) == (0, "ABC", "")


def test_the_prompt_is_echoed_if_asked(run: Run, llm: type[EchoLLM]) -> None:
    assert run("generate", "--echo", "a b")[1] == "a bB A \n"


def test_prompts_from_stdin_and_after_a_double_dash(run: Run, llm: type[EchoLLM]) -> None:
    run("generate", "-", stdin="from stdin\n")
    run("generate", "--max-tokens", "3", "--", "--not-a-flag")
    assert [made.prompts for made in llm.made] == [["from stdin\n"], ["--not-a-flag"]]


def test_several_prompts_run_as_one_batch(run: Run, llm: type[EchoLLM]) -> None:
    code, out, _ = run("generate", "a", "--max-tokens", "3", "b", "--no-echo")
    assert code == 0 and out == "A\n\nB\n\n"
    assert llm.made[0].prompts == ["a", "b"]


def test_json_gives_one_object_per_completion(run: Run, llm: type[EchoLLM]) -> None:
    _, out, _ = run("generate", "--json", "a", "b")
    entries = [json.loads(line) for line in out.splitlines()]
    assert [entry["text"] for entry in entries] == ["A", "B"]
    assert entries[1]["prompt_index"] == 1 and entries[0]["finish_reason"] == "stop"


def test_json_holds_all_logprobs_and_no_infinities(run: Run, llm: type[EchoLLM]) -> None:
    llm.logprobs = [{5: Logprob(-0.5), 6: Logprob(-math.inf)}]
    _, out, _ = run("generate", "--json", "a")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["logprobs"] == [{"5": -0.5, "6": -9999.0}]
    assert found["prompt_logprobs"] == [None, {"5": -0.5, "6": -9999.0}]


@pytest.mark.parametrize("flags", [(), ("--json",), ("--n", "2")])
def test_a_failed_output_is_an_error(run: Run, llm: type[EchoLLM], flags: tuple[str, ...]) -> None:
    for failure, code, said in (
        ("no_token_allowed", 2, "leave no token to go on"),
        ("nan_logits", 1, "the model failed on this prompt: nan_logits"),
    ):
        llm.failure = failure
        found, _, err = run("generate", "a", *flags)
        assert found == code and said in err


def test_flags_reach_the_engine_and_the_sampler(run: Run, llm: type[EchoLLM]) -> None:
    run(
        "generate", "a", "--max_model_len", "1k", "--no-enable-prefix-caching", "--attention_config.backend=reference",
        "--kv-cache-memory-bytes=1M", "-q", "int8", "-m", "somewhere", "--seed", "5", "--top_k", "3", "--stop", "x",
        "--stop", "y", "--stop-token-ids", "1,2", "--ignore-eos", "--logit-bias", '{"3": 1.5}', "--logprobs", "none",
    )  # fmt: skip
    fields, params = llm.made[0].fields, llm.made[0].params[0]
    assert (fields["max_model_len"], fields["enable_prefix_caching"]) == (1000, False)
    assert fields["attention_config"] == {"backend": "reference"}
    assert (fields["kv_cache_memory_bytes"], fields["quantization"], fields["model"]) == (1 << 20, "int8", "somewhere")
    assert (params.seed, fields["seed"], params.top_k, params.stop) == (5, 5, 3, ["x", "y"])
    assert params.stop_token_ids == [1, 2] and params.ignore_eos and params.logit_bias == {3: 1.5}
    assert params.temperature == 0.5, "the checkpoint's default stays where no flag is given"
    assert params.max_tokens == terminal.DEFAULT_MAX_TOKENS


def test_every_sampling_parameter_has_a_flag_or_a_reason() -> None:
    fields = set(SamplingParams.__struct_fields__)
    assert set(flags.sampling_kinds()) | flags._NO_FLAG == fields


def test_verbose_prints_the_phases(run: Run, llm: type[EchoLLM]) -> None:
    _, _, err = run("generate", "-v", "a b")
    for phase in ("import the engine", "first token", "further tokens", "total"):
        assert phase in err


def test_verbose_tells_drafts_and_the_times_that_rows_had_some(
    run: Run, llm: type[EchoLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = types.SimpleNamespace(num_drafts=20, num_draft_tokens=55, num_accepted_tokens=33)
    scheduler = types.SimpleNamespace(stats=lambda: stats)
    monkeypatch.setattr(llm, "engine", types.SimpleNamespace(scheduler=scheduler), raising=False)
    _, _, err = run("generate", "-v", "a b")
    assert "55 draft tokens in 20 verifications, 60% accepted: 2.65 tokens each\n" in err


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc", "--speculative_config"])
def test_a_key_of_a_mapping_has_its_own_flag_in_every_form(run: Run, llm: type[EchoLLM], flag: str) -> None:
    assert run("generate", f"{flag}.method", "ngram", f"{flag}.num_speculative_tokens=2", "a b")[0] == 0
    assert llm.made[0].fields["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 2}


def test_ctrl_c_in_generate_aborts_and_exits_with_130(run: Run, llm: type[EchoLLM]) -> None:
    llm.interrupt_after = 1
    code, out, _ = run("generate", "one two three four")
    assert code == 130 and out == "FOUR THREE \n"
    assert llm.made[0].aborted and llm.made[0].closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_loading_exits_with_130(run: Run, llm: type[EchoLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: EchoLLM, **_: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise AssertionError("clean-up failed as well")  # noqa: B904

    monkeypatch.setattr(llm, "__init__", interrupted)
    assert run("generate", "a")[0] == 130


def test_chat_keeps_the_conversation(run: Run, llm: type[EchoLLM]) -> None:
    code, out, _ = run("chat", "--system", "be brief", stdin="hello you\nand you\n")
    assert code == 0 and out == "YOU HELLO \nYOU AND \n"
    assert llm.made[0].prompts[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello you"},
        {"role": "assistant", "content": "YOU HELLO "},
        {"role": "user", "content": "and you"},
    ]
    assert llm.made[0].closed


def test_ctrl_c_stops_the_answer_and_not_the_chat(run: Run, llm: type[EchoLLM]) -> None:
    llm.interrupt_after = 1
    code, out, _ = run("chat", stdin="one two three\n/set\n/exit\n")
    assert code == 0 and "THREE TWO  [stopped]\n" in out and "temperature = 0.5" in out
    assert llm.made[0].aborted


def test_chat_commands(run: Run, llm: type[EchoLLM]) -> None:
    lines = [
        "/help", "first", "/reset", "second", "/system be kind", "third", "/set temperature=0.25", "/set top-k=4",
        "/set temperature=-9", "/set temprature=1", "/rest", "fourth", "too long", "fifth", "/exit", "never",
    ]  # fmt: skip
    code, out, _ = run("chat", stdin="\n".join(lines))
    prompts, params = llm.made[0].prompts, llm.made[0].params
    assert code == 0 and "/system TEXT" in out
    assert [len(prompt) for prompt in prompts] == [1, 1, 2, 4, 6, 6]
    assert prompts[2][0] == {"role": "system", "content": "be kind"}
    assert (params[2].temperature, params[3].temperature, params[3].top_k) == (0.5, 0.25, 4)
    assert "error: temperature: must be in [0, " in out and "did you mean temperature?" in out
    assert "unknown command /rest; did you mean /reset?" in out
    assert "error: prompt: exceeds max_model_len 16" in out, "a refused message leaves the conversation as it was"
    assert "NEVER" not in out


def test_chat_sets_json_and_texts_and_takes_them_back(run: Run, llm: type[EchoLLM]) -> None:
    lines = [
        '/set logit_bias={"5": 1}',
        '/set structured_outputs={"choice": ["a"]}',
        "/set stop=x",
        "/set min_tokens=3",
        "first",
        "/set logit_bias=none",
        "/set structured-outputs=none",
        "/set stop=",
        "second",
        "/set n=2",
    ]
    code, out, _ = run("chat", stdin="\n".join(lines))
    first, second = llm.made[0].params
    assert code == 0 and "error" not in out and "usage: /set NAME=VALUE" in out
    assert first.logit_bias == {5: 1.0} and first.structured_outputs is not None and first.stop == ["x"]
    assert second == msgspec.structs.replace(llm.made[0].get_default_sampling_params(), max_tokens=128, min_tokens=3)


def test_a_chat_has_one_answer(run: Run, llm: type[EchoLLM]) -> None:
    code, _, err = run("chat", "--n", "2", stdin="hello\n")
    assert code == 2 and "--n: a chat has one answer at a time, got 2" in err and not llm.made


def test_control_characters_are_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal._write("a\x1b[2Jb\n\tc\x9b\x7f")
    assert screen.getvalue() == "a\\x1b[2Jb\n\tc\\x9b\\x7f"


def test_params_survive_messagepack() -> None:
    """What the CLI builds may travel to a worker."""
    params = SamplingParams.from_optional(stop=["a"], max_tokens=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params

"""skip_tokenizer_init: token ids in, token ids out, in LLM and over HTTP, with a tokenizer in the folder or without."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
from server_rig import RunningServer

IDS = [[40, 50, 60, 70], [90] * 20]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """octavo-tiny's weights and config alone."""
    folder = tmp_path_factory.mktemp("bare")
    with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny")) as bundled:
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(bundled / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def bare(bare_folder: Path) -> Iterator[LLM]:
    with LLM(str(bare_folder), dtype="float32", skip_tokenizer_init=True) as made:
        yield made


def _plain(logprobs: Any) -> list[Any]:
    return [entry and {token: (one.logprob, one.rank) for token, one in entry.items()} for entry in logprobs]


@pytest.mark.parametrize("has_files", [False, True], ids=["no files", "files"])
def test_ids_in_ids_out(llm: LLM, bare: LLM, make_llm: Callable[..., LLM], has_files: bool) -> None:
    """The ids and the numbers of an engine with a tokenizer; every text is empty."""
    ours = make_llm(skip_tokenizer_init=True) if has_files else bare
    with pytest.raises(ValueError, match="skip_tokenizer_init is set"):
        ours.get_tokenizer()
    for found, expected in zip(ours.generate(IDS, PARAMS), llm.generate(IDS, PARAMS), strict=True):
        (said,), (wanted,) = found.outputs, expected.outputs
        assert (said.token_ids, said.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert (said.text, found.prompt, found.prompt_token_ids) == ("", None, expected.prompt_token_ids)
        assert _plain(said.logprobs) == _plain(wanted.logprobs)
        assert _plain(found.prompt_logprobs) == _plain(expected.prompt_logprobs)
        assert all(one.decoded_token is None for entry in said.logprobs for one in entry.values())
    streamed = [token for output in ours.stream(IDS[0], PARAMS) for token in output.outputs[0].token_ids]
    assert streamed == llm.generate([IDS[0]], PARAMS)[0].outputs[0].token_ids


def test_stop_tokens_and_the_end_of_the_text_need_no_tokenizer(llm: LLM, bare: LLM) -> None:
    whole = llm.generate([IDS[0]], PARAMS)[0].outputs[0].token_ids
    (said,) = bare.generate([IDS[0]], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[whole[3]]))
    assert said.outputs[0].token_ids == whole[: whole.index(whole[3]) + 1]
    assert said.outputs[0].stop_reason == whole[3]
    biased = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={0: 100.0})
    (ended,) = bare.generate([IDS[0]], biased)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].token_ids) == ("stop", [0])


def test_what_needs_text_is_refused_by_name(bare: LLM) -> None:
    with pytest.raises(ParameterError, match=r"^prompt: skip_tokenizer_init is set: pass token ids"):
        bare.generate("def f(", PARAMS)
    with pytest.raises(ParameterError, match=r"^messages: skip_tokenizer_init is set"):
        bare.chat([{"role": "user", "content": "a"}], PARAMS)
    forms = {
        "stop": SamplingParams(stop=["x"]),
        "bad_words": SamplingParams(bad_words=["x"]),
        "structured_outputs": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")),
    }
    for name, params in forms.items():
        with pytest.raises(ParameterError, match=f"^{name}: skip_tokenizer_init is set"):
            bare.generate([[5, 6]], params)


def test_a_folder_without_a_tokenizer_names_the_setting(bare_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: not found.*--skip-tokenizer-init"):
        LLM(str(bare_folder))


def test_over_http(llm: LLM, bare_folder: Path) -> None:
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(IDS, PARAMS)]
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": IDS,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    flags = [f"--model={bare_folder}", "--dtype=float32", "--served-model-name=tiny", "--skip-tokenizer-init"]
    with RunningServer(*flags) as server:
        server.wait_ready()
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply.body
        choices = reply.json()["choices"]
        assert [choice["token_ids"] for choice in choices] == expected
        assert [choice["prompt_token_ids"] for choice in choices] == IDS
        assert [choice["text"] for choice in choices] == ["", ""]
        assert choices[0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected[0]]
        assert choices[0]["logprobs"]["text_offset"] == [0] * 12
        events = server.post("/v1/completions", body | {"prompt": IDS[0], "stream": True}).events()
        streamed = [choice for event in events[:-1] for choice in event["choices"]]
        assert [token for choice in streamed for token in choice["token_ids"]] == expected[0]
        assert {choice["text"] for choice in streamed} == {""}
        echoed = server.post("/v1/completions", body | {"prompt": IDS[0], "echo": True}).json()["choices"][0]
        assert echoed["text"] == "" and echoed["logprobs"]["tokens"][:2] == ["token_id:40", "token_id:50"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        responses = {"model": "tiny", "input": "a"}
        refused: list[tuple[str, dict[str, Any], str]] = [
            ("/v1/completions", body | {"prompt": "def f("}, "prompt"),
            ("/v1/completions", body | {"stop": ["x"]}, "stop"),
            ("/v1/completions", body | {"bad_words": ["x"]}, "bad_words"),
            ("/v1/completions", body | {"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
            ("/v1/completions", body | {"response_format": {"type": "json_object"}}, "response_format"),
            ("/v1/chat/completions", chat, "messages"),
            ("/v1/chat/completions", chat | {"stream": True}, "messages"),
            ("/v1/responses", responses, "input"),
            ("/tokenize", {"model": "tiny", "prompt": "a"}, "prompt"),
            ("/detokenize", {"model": "tiny", "tokens": [5]}, "tokenizer"),
        ]
        for path, wrong, name in refused:
            reply = server.post(path, wrong)
            error = reply.json()["error"]
            assert (reply.status, name in (error["param"] or "")) == (400, True), (path, name, error)
            assert "skip_tokenizer_init is set" in error["message"], (path, name, error)
        assert server.get("/tokenizer_info").status == 400
        assert server.post("/v1/completions", body).json()["choices"][0]["token_ids"] == expected[0]

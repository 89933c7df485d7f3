"""RL.N10: a converted model compared with a running server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams, rl
from octavo.rl.session import WeightUpdateError
from rl_rig import random_ids, tiny

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer


def test_RL_N10_assert_same_with_a_server(tmp_path: Path) -> None:
    """The server prints log-probabilities so that they come back in bits; one of another dtype is caught.

    The longest sequence fills its context, as a rollout does that ended by length.
    """
    sequences = random_ids(40, 9, 300, vocab_size=4096)
    with RunningServer("--dtype", "float32", "--max-model-len", "300") as server:
        url = f"http://127.0.0.1:{server.port}"
        assert rl.assert_same(rl.convert(tiny(torch.float32)), url, sequences) == 39 + 8 + 299
        assert rl.assert_same(rl.convert(tiny(torch.float32)), f"{url}/") == 32
        with pytest.raises(rl.DifferenceError, match=r"of 346 log-probabilities differ, by at most 0\."):
            rl.assert_same(rl.convert(tiny(torch.bfloat16)), url, sequences)
        with pytest.raises(ValueError, match="answered 404"):
            rl.assert_same(rl.convert(tiny()), f"{url}/nowhere")
        _check_full_prompts(server, sequences[2])
        _check_that_wide_weights_are_refused(url, tmp_path)


def _check_that_wide_weights_are_refused(url: str, folder: Path) -> None:
    """By a float32 server that was not told of any: with the whole setting, whatever brings them."""
    weights = {name: tensor * 1.001 for name, tensor in tiny(torch.float32).state_dict().items()}
    for backend, more in (("gloo", {}), ("shm", {}), ("disk", {"folder": folder / "new"})):
        sender = rl.Sender(url, backend, **more)
        with pytest.raises(WeightUpdateError, match=r"\.weight: .*weight-transfer-config '{.*gloo.*}'\"") as caught:
            sender.send(weights)
        assert "answered 400" in str(caught.value)
        sender.close()


def _check_full_prompts(server: RunningServer, ids: list[int]) -> None:
    """Both routes that score a prompt take `ids`, which fill the context, and refuse one more by their own names."""
    asked = {"prompt": [ids, ids[:9]], "max_tokens": 0, "echo": True, "logprobs": 0}
    reply = server.post("/v1/completions", asked).json()
    scores = [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]]
    assert [len(each) for each in scores] == [300, 9] and scores[1] == scores[0][:9]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (309, 0)
    events = server.post("/v1/completions", asked | {"prompt": ids, "stream": True}).events()
    assert events[0]["choices"][0]["logprobs"]["token_logprobs"] == scores[0]
    alone = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    told = server.post("/generate", alone | {"input_ids": ids}).json()
    lines = told["meta_info"]["input_token_logprobs"]
    assert [line[:2] for line in lines] == [list(pair) for pair in zip(scores[0], ids, strict=True)]
    assert (told["output_ids"], told["meta_info"]["prompt_tokens"]) == ([], 300)
    for path, body, name in (
        ("/v1/completions", asked | {"prompt": [*ids, 1]}, "prompt"),
        ("/generate", alone | {"input_ids": [*ids, 1]}, "input_ids"),
    ):
        error = server.post(path, body).json()["error"]
        assert error["message"].startswith(f"{name}: 301 tokens exceed max_model_len 300"), error
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    error = server.post("/v1/completions", {"prompt": ids, "max_tokens": 1}).json()["error"]
    assert "leave no room for an answer" in error["message"]


def test_RL_N10_a_rollout_that_ended_by_length_is_the_same() -> None:
    """Through LLM.score, and in the bits in which its tokens were drawn."""
    with LLM("octavo-tiny", dtype="float32", max_model_len=40) as llm:
        wanted = SamplingParams(max_tokens=99, seed=3, logprobs=0, ignore_eos=True, flat_logprobs=True)
        (drawn,) = llm.generate([[5, 6, 7]], wanted)
        ids = [*drawn.prompt_token_ids, *drawn.outputs[0].token_ids]
        assert len(ids) == 40 and llm.score([ids], start=3) == [drawn.outputs[0].logprobs.logprobs.tolist()]
        assert rl.assert_same(rl.convert(tiny(torch.float32)), llm, [ids, ids[:7]]) == 39 + 6

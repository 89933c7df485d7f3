"""What is said of tokens for a trainer: which could be drawn in their place, and which experts computed them."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams, rl
from octavo.request.sampling_params import ParameterError
from rl_rig import TINY, random_ids, tiny

from model_rig import make_reference  # isort: skip, its folder is known through rl_rig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer

CUT = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
Asked = list[dict[str, list[int]]]


def asked(*lengths: int) -> Asked:
    return [{"prompt_token_ids": ids} for ids in random_ids(*lengths)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, dtype="float32", max_model_len=256, logprobs_mode="processed_logprobs") as made:
        yield made


def draw(llm: LLM, prompts: Asked, **own: Any) -> list[Any]:
    fields = {"max_tokens": 12, "seed": 3, "logprobs": 0, "ignore_eos": True, "detokenize": False} | own
    return [output.outputs[0] for output in llm.generate(prompts, SamplingParams(**fields), use_tqdm=False)]


def test_rl_g3_a_sampling_mask_is_the_support_of_the_draw(llm: LLM) -> None:
    """RL.G3: a trainer that is given it has the processed log-probabilities in bits; other rows see nothing."""
    prompts = asked(5, 40, 90)
    plain = draw(llm, prompts, **CUT)
    told = draw(llm, prompts, **CUT, return_sampling_mask=True)
    assert [each.token_ids for each in told] == [each.token_ids for each in plain] and plain[0].sampling_mask is None
    sizes = set()
    for each in told:
        assert len(each.sampling_mask) == len(each.token_ids)
        for token, mask in zip(each.token_ids, each.sampling_mask, strict=True):
            assert token in mask and mask == sorted(set(mask)) and len(mask) <= 40
            sizes.add(len(mask))
    assert len(sizes) > 5, "top-p and min-p cut, not top-k alone"
    pack = rl.Pack.of([[*own["prompt_token_ids"], *each.token_ids] for own, each in zip(prompts, told, strict=True)])
    support = torch.full((len(pack.next_tokens()), 40), -1)
    theirs, start = [], 0
    for own, each in zip(prompts, told, strict=True):
        first = start + len(own["prompt_token_ids"]) - 1
        for place, mask in enumerate(each.sampling_mask):
            support[first + place, : len(mask)] = torch.tensor(mask)
        support[start:first, 0] = pack.next_tokens()[start:first]
        support[first + len(each.token_ids), 0] = 0
        start = first + 1 + len(each.token_ids)
        theirs.append([entry[token].logprob for entry, token in zip(each.logprobs, each.token_ids, strict=True)])
    found = rl.logprobs(rl.convert(tiny(torch.float32)), pack, temperature=0.7, support=support).logprobs
    ours = [part[len(own["prompt_token_ids"]) - 1 : -1] for part, own in zip(pack.split(found), prompts, strict=True)]
    assert [part.tolist() for part in ours] == theirs


def test_rl_g3_masks_of_other_draws(llm: LLM) -> None:
    """RL.G3: nothing cut, one token alone, and what stands beside a cut."""
    prompts = asked(6)
    (plain,) = draw(llm, prompts, return_sampling_mask=True)
    assert plain.sampling_mask == [None] * 12, "all tokens could be drawn"
    (greedy,) = draw(llm, prompts, temperature=0.0, return_sampling_mask=True)
    assert greedy.sampling_mask == [[token] for token in greedy.token_ids]
    (biased,) = draw(llm, prompts, allowed_token_ids=[7, 9, 4000], return_sampling_mask=True)
    assert biased.sampling_mask == [[7, 9, 4000]] * 12
    (both,) = draw(llm, prompts, allowed_token_ids=[7, 9, 4000], top_k=1, return_sampling_mask=True)
    assert both.sampling_mask == [[token] for token in both.token_ids]


def test_rl_g3_and_g7_drafts_change_nothing_of_it(llm: LLM, moe: tuple[Path, Any]) -> None:
    """RL.G3, RL.G7: of accepted drafts and of those that were not."""
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    repeating = [{"prompt_token_ids": [5, 6, 7, 8] * 8}, *asked(9)]
    with LLM(TINY, dtype="float32", max_model_len=256, logprobs_mode="processed_logprobs", **drafts) as other:
        for own in ({"top_k": 3, "temperature": 0.5}, {"temperature": 0.0}):
            ours, theirs = (draw(each, repeating, **own, return_sampling_mask=True) for each in (llm, other))
            assert [(a.token_ids, a.sampling_mask) for a in ours] == [(b.token_ids, b.sampling_mask) for b in theirs]
    plain = {
        "dtype": "float32",
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        "enable_return_routed_experts": True,
    }
    found = []
    for settings in (plain, plain | drafts):
        with LLM(str(moe[0]), **settings) as each:
            own = {"temperature": 0.0, "max_tokens": 40, "return_routed_experts": True}
            found.append([(out.token_ids, out.routed_experts.tolist()) for out in draw(each, repeating, **own)])
    assert found[0] == found[1]


def test_rl_g3_a_mask_beyond_its_limit_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.text.output.MAX_SUPPORT_IDS", 100)
    narrow, wide = (
        SamplingParams(max_tokens=9, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=9, seed=1, ignore_eos=True, top_k=50, return_sampling_mask=True),
    )
    first, second = llm.generate(asked(5, 5), [narrow, wide], use_tqdm=False)
    assert first.outputs[0].finish_reason == "length" and len(first.outputs[0].token_ids) == 9
    assert (second.outputs[0].finish_reason, second.outputs[0].stop_reason) == ("error", "sampling_mask_too_large")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small model with experts in all layers but one, and the reference that its router is compared with."""
    path = tmp_path_factory.mktemp("moe")
    model = make_reference("qwen3-moe")
    model.save_pretrained(path)
    return path, model


def chosen_by(model: Any, ids: list[int]) -> dict[int, np.ndarray]:
    """transformers' own routing: layer -> [tokens, experts], by router."""
    found, hooks = {}, []
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            hooks.append(
                layer.mlp.gate.register_forward_hook(
                    lambda _, inputs, __, number=number, gate=layer.mlp.gate: found.__setitem__(
                        number, torch.nn.functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), gate.weight)
                    )
                )
            )
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return {number: logits.topk(3, -1).indices.numpy() for number, logits in found.items()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 4}, {"num_gpu_blocks_override": 14, "block_size": 16}],
    ids=["whole", "chunked", "preempted"],
)
def test_rl_g7_experts_are_those_that_computed_each_token(moe: tuple[Path, Any], settings: dict[str, Any]) -> None:
    """RL.G7: of prompt and output, whatever is cut, cached or computed again; neighbours draw what they ever draw."""
    path, model = moe
    own = {"dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True, **settings}
    prompts = asked(70, 33, 70)
    with LLM(str(path), **own, enable_return_routed_experts=True) as llm:
        plain = draw(llm, prompts, max_tokens=30)
        told = draw(llm, prompts, max_tokens=30, return_routed_experts=True)
        mixed = llm.generate(
            prompts,
            [
                SamplingParams(max_tokens=30, seed=3, ignore_eos=True, detokenize=False, return_routed_experts=wanted)
                for wanted in (True, False, False)
            ],
            use_tqdm=False,
        )
        (late,) = draw(llm, prompts[:1], max_tokens=30, return_routed_experts=True, routed_experts_prompt_start=69)
    assert [each.token_ids for each in told] == [each.token_ids for each in plain]
    assert [each.outputs[0].token_ids for each in mixed] == [each.token_ids for each in plain]
    assert mixed[1].outputs[0].routed_experts is None and plain[0].routed_experts is None
    assert np.array_equal(mixed[0].outputs[0].routed_experts, told[0].routed_experts)
    assert np.array_equal(late.routed_experts, told[0].routed_experts[69:])
    for asked_for, each in zip(prompts, told, strict=True):
        ids = [*asked_for["prompt_token_ids"], *each.token_ids]
        layers = model.config.num_hidden_layers
        assert each.routed_experts.shape == (len(ids) - 1, layers, 3) and each.routed_experts.dtype == np.int16
        theirs = chosen_by(model, ids[:-1])
        assert set(theirs) == set(range(layers)) - {1}
        assert (each.routed_experts[:, 1] == -1).all(), "a layer without experts"
        for layer, experts in theirs.items():
            assert np.array_equal(np.sort(each.routed_experts[:, layer]), np.sort(experts)), layer


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_rl_g7_new_weights_measure_a_cache_whose_steps_are_short(moe: tuple[Path, Any], cache: str) -> None:
    """The text that is measured is no step: it had no room in what is told of one, and broke the weights for all."""
    path, model = moe
    own = {"dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True, "kv_cache_dtype": cache}
    steps = {"max_num_batched_tokens": 7, "max_num_seqs": 1, "enable_return_routed_experts": True}
    with LLM(str(path), **own, **steps) as llm:
        (before,) = draw(llm, asked(9), return_routed_experts=True)
        with llm.weights("again") as load:
            for name, tensor in model.state_dict().items():
                load(name, tensor)
        (after,) = draw(llm, asked(9), return_routed_experts=True)
    assert after.token_ids == before.token_ids and np.array_equal(after.routed_experts, before.routed_experts)


def test_rl_g7_experts_over_http(moe: tuple[Path, Any]) -> None:
    """RL.G7: vLLM's form and SGLang's, whole and as a stream; a server says them where it was started to."""
    path, _ = moe
    ids = random_ids(20)[0]
    flags = ("--dtype", "float32", "--max-model-len", "64", "--skip-tokenizer-init", "--enable-return-routed-experts")
    with RunningServer(str(path), *flags) as server:
        server.wait_ready()
        params = {"max_tokens": 6, "seed": 1, "ignore_eos": True, "top_k": 5, "return_sampling_mask": True}
        body = {"token_ids": ids, "sampling_params": params}
        (choice,) = server.post("/inference/v1/generate", body).json()["choices"]
        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        assert experts.shape[0] == 25 and experts.shape[2] == 3 and len(choice["sampling_mask"]) == 6
        events = server.post("/inference/v1/generate", body | {"stream": True}).events()
        parts = [event["choices"][0] for event in events[:-1]]
        assert [part["routed_experts"] for part in parts if part["routed_experts"]] == [choice["routed_experts"]]
        assert [mask for part in parts for mask in part["sampling_mask"]] == choice["sampling_mask"]
        theirs = {"max_new_tokens": 6, "sampling_seed": 1, "ignore_eos": True, "top_k": 5}
        told = {"return_routed_experts": True, "routed_experts_start_len": 4, "return_sampling_mask": True}
        for stream in (False, True):
            reply = server.post("/generate", {"input_ids": ids, "sampling_params": theirs, "stream": stream, **told})
            meta = (reply.events()[-2] if stream else reply.json())["meta_info"]
            found = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(21, -1, 3)
            assert np.array_equal(found, experts[4:]) and meta["output_token_sampling_mask"] == choice["sampling_mask"]
        plain = {"prompt": ids, "max_tokens": 2, "return_token_ids": True}
        assert "routed_experts" not in server.post("/v1/completions", plain).json()["choices"][0]
        asking = plain | {"return_routed_experts": True, "return_weight_versions": True}
        (choice,) = server.post("/v1/completions", asking).json()["choices"]
        assert np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))).shape[0] == 21
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 2}]


def test_rl_g7_what_is_not_kept_is_refused_by_name(llm: LLM, moe: tuple[Path, Any]) -> None:
    with pytest.raises(ParameterError, match="enable_return_routed_experts"):
        draw(llm, asked(4), return_routed_experts=True)
    with pytest.raises(ValueError, match="has no experts"):
        LLM(TINY, enable_return_routed_experts=True)
    with pytest.raises(ParameterError, match=r"must be <= the prompt's 4 tokens, got 5"):
        draw(llm, asked(4), routed_experts_prompt_start=5)

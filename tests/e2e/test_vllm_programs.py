"""What programs written for vLLM's LLM do: they run here, or are told what there is instead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo import LLM, SamplingParams
from octavo.request.sampling_params import ParameterError, RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
HI: Any = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"


def test_default_parameters_may_be_changed(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.ignore_eos = 0.0, 3, True
    assert len(llm.generate("a", params)[0].outputs[0].token_ids) == 3
    assert llm.get_default_sampling_params().max_tokens != 3
    params.top_k = -5
    with pytest.raises(ParameterError, match="top_k"):
        llm.generate("a", params)
    with pytest.raises(ParameterError, match="top_k"):
        llm.generate(["a", "b"], [GREEDY, params])
    with pytest.raises(ParameterError, match="top_k"):
        next(llm.stream("a", params))
    with pytest.raises(ParameterError, match="top_k"):
        llm.engine.add("x", [5], params)


def test_a_request_keeps_the_parameters_that_it_was_given(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={5: -1.0})
    stream = llm.stream("import os", params)
    next(stream)
    params.max_tokens, params.temperature = 1, 1.0
    assert params.logit_bias is not None
    params.logit_bias[5] = 100.0
    assert sum(len(output.outputs[0].token_ids) for output in stream) == 5


def test_none_for_what_there_is_not(llm: LLM) -> None:
    absent: Any = {"lora_request": None, "tokenization_kwargs": None, "mm_processor_kwargs": None}
    assert llm.generate("a", GREEDY, **absent) and llm.chat(HI, GREEDY, **absent)
    for name in absent:
        for ask in (lambda **given: llm.generate("a", GREEDY, **given), lambda **given: llm.chat(HI, GREEDY, **given)):
            with pytest.raises(ParameterError, match=name):
                ask(**{name: {"x": 1}})


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == [] and llm.generate([], GREEDY) == [] and llm.generate([], []) == []


def test_a_chat_template_of_a_call(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(PLAIN)
    before = llm.chat(HI, GREEDY)[0].prompt
    for given in (PLAIN, str(path)):
        assert llm.chat(HI, GREEDY, chat_template=given)[0].prompt == "user=hi;"
    assert llm.chat(HI, GREEDY)[0].prompt == before
    with pytest.raises(ValueError, match="chat_template"):
        llm.chat(HI, GREEDY, chat_template=str(tmp_path / "none"))
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    loops = "{% for m in messages %}{% for c in m.content %}[{{ c.text or c }}]{% endfor %}{% endfor %}"
    for wanted, messages, prompt in (("auto", parts, "[a][b]"), ("openai", HI, "[hi]"), ("string", HI, "[h][i]")):
        told = llm.chat(messages, GREEDY, chat_template=loops, chat_template_content_format=wanted)
        assert told[0].prompt == prompt
    with pytest.raises(ParameterError, match="chat_template_content_format: must be one of auto"):
        llm.chat(HI, GREEDY, chat_template_content_format="json")


def test_a_chat_template_of_all_calls(make_llm: Any) -> None:
    assert make_llm(chat_template=PLAIN).chat(HI, GREEDY)[0].prompt == "user=hi;"
    with pytest.raises(ValueError, match="chat_template='/nowhere'"):
        make_llm(chat_template="/nowhere")


def test_tools_that_the_template_does_not_show_are_told(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    llm.chat(HI, GREEDY, tools=tools, chat_template=PLAIN + "{% if tools %}{{ tools }}{% endif %}")
    assert not caplog.messages
    with caplog.at_level(logging.WARNING, "octavo"):
        llm.chat(HI, GREEDY, tools=tools, chat_template=PLAIN)
    assert "tools are left out" in caplog.text


def test_a_stream_yields_what_is_new_whatever_its_kind(llm: LLM) -> None:
    whole = llm.generate("import os", GREEDY)[0].outputs[0].text
    for kind in RequestOutputKind:
        params = GREEDY.clone()
        params.output_kind = kind
        assert "".join(output.outputs[0].text for output in llm.stream("import os", params)) == whole


def test_the_tokenizer_may_be_called(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("import os")
    assert tokenizer("import os") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer(["import os", "a"])["input_ids"] == [ids, tokenizer.encode("a")]


def test_a_type_of_torch_is_its_name(make_llm: Any) -> None:
    assert make_llm(dtype=torch.bfloat16).engine.resolved.dtype == "bfloat16"


def test_errors_of_settings_name_arguments_not_flags(make_llm: Any) -> None:
    for fields in (
        {"max_model_len": 10**6},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
        {"port": 1},
        {"seed": -1},
    ):
        with pytest.raises(ValueError) as caught:
            make_llm(**fields)
        assert "--" not in str(caught.value).replace("`octavo doctor --explain`", ""), caught.value


def test_fields_of_the_checkpoint_may_be_overridden(make_llm: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.125}')
    llm = make_llm(hf_overrides={"max_position_embeddings": 512}, rope_theta=1e5, generation_config=str(tmp_path))
    assert llm.engine.limits.max_model_len == 512 and llm.engine.arch.layers[0].rope.theta == 1e5
    assert llm.get_default_sampling_params().temperature == 0.125
    with pytest.raises(ValueError, match="must be auto, vllm, or a folder"):
        make_llm(generation_config=str(tmp_path / "none"))


def test_prompts_by_vllm_s_types(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("import os")
    prompts: Any = [octavo.TokensPrompt(prompt_token_ids=ids), octavo.TextPrompt(prompt="import os")]
    one, two = llm.generate(prompts, GREEDY)
    assert one.outputs == two.outputs


def test_public_names_are_there() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name)

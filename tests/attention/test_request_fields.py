"""Request fields: bounds, names, and lists as long as a request can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import octavo.attention as A
from octavo import LLM
from octavo.device.field_tables import FieldTables
from octavo.device.staging import HostQueue
from octavo.plan import StepLimits
from octavo.request.fields import FieldSpec, salt_with_fields
from octavo.request.sampling_params import Limits, SamplingParams, check
from octavo.request.validation import ParameterError

IDS = FieldSpec("document_ids", per_token=True)
HEAT = FieldSpec("heat", "float", 1.0, per_token=True)
LIMITS = Limits(vocab_size=10, max_model_len=50_000, request_fields=(IDS, HEAT, FieldSpec("prefix_len", low=0)))


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**fields: Any) -> LLM:
        made.append(LLM(dtype="float32", num_threads=1, **fields))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def admit(**extra: Any) -> int:
    return check(SamplingParams(extra_args=extra), LIMITS, 3)


@pytest.mark.parametrize("extra", [{"ids": [0]}, {"kind": 4}, {}])
def test_what_no_field_is_called_is_a_plug_ins(extra: dict[str, Any]) -> None:
    assert admit(**extra)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"document_idz": [0]}, "extra_args.document_idz: unknown request field, did you mean document_ids?"),
        ({"documentids": [0]}, "did you mean document_ids?"),
        ({"Prefix_len": 3}, "did you mean prefix_len?"),
        ({"prefix_len": -1}, "extra_args.prefix_len: must be in [0, 2147483647], got -1"),
        ({"document_ids": [0] * 65_537}, "extra_args.document_ids: may hold 65536 values (max_model_len is 50000)"),
        ({"other": [0] * 70_000}, "extra_args: must encode to at most 65536 bytes"),
        ({"document_ids": [0] * 60_000 + [2**31]}, "extra_args.document_ids[60000]: must be in"),
        ({"document_ids": [0] * 60_000 + [2**65]}, "extra_args: must hold plain data only"),
        ({"document_ids": {"lengths": [3, 0]}}, "extra_args.document_ids.lengths[1]: must be in [1, 2147483647]"),
        ({"document_ids": {"lengths": [3], "values": [1, 2]}}, "as many values as lengths, got 2 and 1"),
        ({"document_ids": {"values": [1]}}, "an object with lengths and values"),
        ({"document_ids": {"lengths": [1], "x": 3}}, "an object with lengths and values"),
        ({"document_ids": {"lengths": "ab"}}, "extra_args.document_ids.lengths: must be a list of whole numbers"),
        ({"document_ids": {"lengths": [1.5]}}, "extra_args.document_ids.lengths[0]: must be an integer"),
        ({"prefix_len": {"lengths": [1]}}, "extra_args.prefix_len: must be an integer"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        admit(**extra)
    assert message in str(error.value)


def test_a_list_may_be_as_long_as_a_request() -> None:
    assert admit(document_ids=list(range(50_000)), heat=[0.5] * 50_000)
    longer = Limits(vocab_size=10, max_model_len=200_000, request_fields=(IDS,))
    assert check(SamplingParams(extra_args={"document_ids": [7] * 200_000}), longer, 3)


def test_all_forms_of_the_same_values_are_one() -> None:
    forms: list[Any] = [
        [0, 0, 0, 1, 1, 2],
        [0, 0, 0, 1, 1, 2, 2, 2],
        (0.0, 0, 0, 1, 1, 2),
        {"lengths": [3, 2, 1]},
        {"lengths": [3, 2, 2**31 - 1], "values": [0, 1, 2]},
        {"lengths": [1, 2, 2, 4], "values": [0, 0, 1, 2]},
    ]
    salts = {salt_with_fields("", [IDS], {"document_ids": form}) for form in forms}
    assert len(salts) == 1 and "" not in salts
    limits = StepLimits(max_num_rows=len(forms), max_num_tokens=7, max_model_len=7)
    queue = HostQueue()
    tables = FieldTables([IDS], limits, device=torch.device("cpu"), queue=queue)
    for row, form in enumerate(forms):
        tables.add(row, {"document_ids": form})
    queue.apply()
    assert tables.data["document_ids"][: len(forms)].tolist() == [[0, 0, 0, 1, 1, 2, 2]] * len(forms)
    for empty in ([], {"lengths": []}, None):
        assert IDS.read({"document_ids": empty}).expand(3).tolist() == [0, 0, 0]


def test_runs_are_cut_at_the_length_asked_for() -> None:
    runs = HEAT.read({"heat": {"lengths": [2, 3, 1], "values": [0.5, 2, 4]}})
    for length in range(8):
        assert runs.expand(length).tolist() == [0.5, 0.5, 2, 2, 2, 4, 4][:length]
    assert runs.values.dtype == np.float64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": 3, "high": 2}, "low=3 is above high=2"),
        ({"low": 1}, r"default: must be in \[1, 2147483647\], got 0"),
        ({"high": 2**40}, r"high: must be in"),
        ({"low": "a"}, r"low: must be an integer"),
        ({"default": 0.5}, r"default: must be an integer"),
    ],
)
def test_a_fields_own_numbers_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        A.request_field("kind", **fields)


def test_runs_and_lists_serve_alike(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=128, max_num_seqs=2, attention_mods=A.document())
    prompt = list(range(20, 40))

    def logprobs(ids: Any) -> Any:
        params = SamplingParams(
            max_tokens=3, temperature=0, logprobs=0, ignore_eos=True, extra_args={"document_ids": ids}
        )
        return llm.generate([prompt], params)[0].outputs[0].logprobs

    assert logprobs([0] * 8 + [1] * 12) == logprobs({"lengths": [8, 12]}) != logprobs([0])

"""speculative_config: vLLM's names, and what is refused by name (S.1)."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.engine_config import EngineConfig
from octavo.config.settings import ConfigError
from octavo.config.speculative import NO_SPECULATION, read_speculative
from octavo.speculate import NO_SPECULATOR, make_speculator


def test_S_1_the_fields_names_are_read() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 6}
    found = read_speculative(given)
    assert (found.method, found.num_speculative_tokens) == ("ngram", 5)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (2, 6)
    assert make_speculator(found).num_drafts == 5


def test_nothing_said_is_the_null_member() -> None:
    assert read_speculative({}) is NO_SPECULATION
    assert make_speculator(NO_SPECULATION) is NO_SPECULATOR


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"method": "ngrm", "num_speculative_tokens": 3}, "did you mean ngram?"),
        ({"num_speculative_tokens": 3}, "method is missing; add it: one of ngram"),
        (
            {"metod": "ngram", "num_speculative_tokens": 3},
            "{'metod': 'ngram'}: metod: unknown key; did you mean method?",
        ),
        ({"method": 4, "num_speculative_tokens": 3}, "method: must be one of ngram"),
        ({"method": "custom_class", "num_speculative_tokens": 3}, "the method itself: package.module:Class"),
        ({"method": "extract_hidden_states", "num_speculative_tokens": 3}, "it drafts nothing"),
        (
            {"method": "ngram"},
            "{'method': 'ngram'}: num_speculative_tokens is missing; add it: a whole number from 1 to 16",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "zzz": 1},
            "known keys: method, num_speculative_tokens, adaptive",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "from 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_mn": 2}, "did you mean prompt_lookup_min?"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 9, "prompt_lookup_max": 4}, "lower it"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 0},
            "prompt_lookup_max: must be a whole",
        ),
        ({"method": "ngram", "num_speculative_tokens": 3, "model": "x"}, "method ngram has no use for it"),
        ({"model": "x", "num_speculative_tokens": 3, "prompt_lookup_max": 3}, "a drafter has no use for it"),
        ({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "x"}, "no bit changes"),
        ({"method": "ngram", "num_speculative_tokens": 3, "parallel_drafting": True}, "dflash"),
        ({"method": "ngram", "num_speculative_tokens": 3, "code_revision": "main"}, "no code of a checkpoint is run"),
        ({"method": "ngram", "num_speculative_tokens": 3, "suffix_decoding_max_tree_depth": 8}, "no method suffix"),
        ({"method": "ngram", "num_speculative_tokens": 3, "options": {}}, "takes method, num_speculative_tokens, adap"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "; change num_speculative_tokens in --speculative-config"),
        ({"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 8}, "set adaptive_depth"),
        ({"method": "a:B", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}, "one device"),
        ({"method": "a:B", "num_speculative_tokens": 3, "draft_sample_method": "hot"}, "greedy or probabilistic"),
        ({"method": "a:B", "num_speculative_tokens": 3, "options": 4}, "expected a mapping"),
        ({"method": "ngram", "num_speculative_tokens": 3, "adaptive_depth": "yes"}, "expected true or false"),
    ],
)
def test_S_1_what_is_unknown_or_does_not_suit_is_refused_by_name(given: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config=") as caught:
        EngineConfig(speculative_config=given)
    assert wanted in str(caught.value)


def test_S_3_other_rules_of_acceptance_are_refused_with_the_reason() -> None:
    for rule in ("block", "synthetic"):
        with pytest.raises(ConfigError, match=r"verified by equality.*no bit changes"):
            read_speculative({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": rule})


@pytest.mark.parametrize(
    "idle",
    [
        {"model": None, "max_model_len": None, "quantization": None, "speculative_token_tree": None},
        {"disable_padded_drafter_batch": False, "parallel_drafting": False, "enforce_eager": False},
        {"rejection_sample_method": "standard"},
        {"draft_tensor_parallel_size": 1, "attention_backend": None, "draft_load_config": None, "revision": None},
        {"model": "ngram"},
        {"prompt_lookup_min": None, "prompt_lookup_max": None},
    ],
)
def test_S_1_what_asks_for_nothing_is_taken(idle: dict[str, Any]) -> None:
    plain = {"method": "ngram", "num_speculative_tokens": 3}
    assert read_speculative({**plain, **idle}) == read_speculative(plain)


def test_S_1_a_null_of_an_unknown_key_is_no_wish_that_is_met() -> None:
    with pytest.raises(ConfigError, match="zzz: unknown key"):
        read_speculative({"method": "ngram", "num_speculative_tokens": 3, "zzz": None})


def test_a_class_whose_name_ends_as_a_family_s_modules_do_is_a_class() -> None:
    config = read_speculative({"method": "my.package:tree_mtp", "num_speculative_tokens": 2})
    assert config.method == "my.package:tree_mtp"


@pytest.mark.parametrize("name", ["qwen3_5_mtp", "mimo_mtp", "nemotron_h_mtp", "deepseek_mtp", "step3p5_mtp"])
def test_S_1_modules_of_a_family_are_mtp(name: str) -> None:
    assert read_speculative({"method": name, "num_speculative_tokens": 1}).method == "mtp"


def test_modules_of_a_model_draft_one_token_where_no_number_is_said() -> None:
    assert read_speculative({"method": "qwen3_next_mtp"}) == read_speculative(
        {"method": "mtp", "num_speculative_tokens": 1}
    )


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_S_1_a_model_may_be_ngram(model: str) -> None:
    found = read_speculative({"model": model, "num_speculative_tokens": 3})
    assert (found.method, found.model) == ("ngram", None)


def test_a_method_out_of_tree_is_named_by_its_path() -> None:
    config = read_speculative({"method": "octavo.speculate.ngram:NgramSpeculator", "num_speculative_tokens": 2})
    assert make_speculator(config).num_drafts == 2
    with pytest.raises(ConfigError, match="does not load"):
        make_speculator(read_speculative({"method": "no.such:Thing", "num_speculative_tokens": 2}))
    for path, said in (
        ("os:path", "no load"),
        ("collections:OrderedDict", "no load, identity"),
        ("os:getcwd", "no load"),
    ):
        with pytest.raises(ConfigError, match=f"is no speculator: it has {said}"):
            make_speculator(read_speculative({"method": path, "num_speculative_tokens": 2}))


class _OfNothing:
    load = identity = allocate = propose = None

    def __init__(self) -> None:
        """Of no settings, which is not how a speculator is made."""


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("octavo.speculate:Speculator", "TypeError: Protocols cannot be instantiated"),
        (f"{__name__}:_OfNothing", "TypeError: "),
    ],
)
def test_a_class_that_cannot_be_made_is_refused_by_name(method: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config='{method}': cannot be made: {said}"):
        make_speculator(read_speculative({"method": method, "num_speculative_tokens": 2}))

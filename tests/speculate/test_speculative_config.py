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
        ({"num_speculative_tokens": 3}, "method: must be one of"),
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
        ({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "standard"}, "no bit changes"),
        ({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "x"}, "unknown"),
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
    for rule in ("standard", "block", "synthetic"):
        with pytest.raises(ConfigError, match=r"verified by equality.*no bit changes"):
            read_speculative({"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": rule})


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

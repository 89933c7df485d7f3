"""`octavo bench engine` with drafts: which workloads it compares, and the sweep over numbers of rows."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import pytest

from octavo import LLM
from octavo.bench import engine as bench
from octavo.bench import gpu_engine, speculation
from octavo.cli.main import main
from octavo.config.settings import ConfigError

COUNTS = [1, 3, 2]
ORACLE = speculation.Drafts(num_drafts=2, probability=1.0, config={}, adapts=False)


class Engines:
    """Engines of the tiny shape on a CPU, and what each was asked for."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def __call__(self, **fields: Any) -> AbstractContextManager[LLM]:
        self.made.append(fields)
        settings = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "enable_prefix_caching": False}
        return bench.dummy_model("tiny", **settings, **fields)


def test_a_smaller_number_of_rows_has_the_first_requests_of_a_larger() -> None:
    works = gpu_engine.sweep(4096, COUNTS)
    assert [len(work.prompts) for work in works.values()] == COUNTS
    for name, work in works.items():
        assert name == f"rows{len(work.prompts)}"
        assert work.prompts == works["rows3"].prompts[: len(work.prompts)]
        assert work.num_outputs == [128] * len(work.prompts) and {len(prompt) for prompt in work.prompts} == {16}
    assert max(gpu_engine.ROWS) == gpu_engine.MAX_NUM_SEQS == 512


def test_a_sweep_runs_on_two_engines_and_its_oracle_knows_all(capsys: pytest.CaptureFixture[str]) -> None:
    engines = Engines()
    assert speculation.run(engines, "tiny", [gpu_engine.sweep(4096, COUNTS)], ORACLE, {}) == 0
    assert [list(fields) for fields in engines.made] == [[], ["speculative_config"]]
    *lines, least, document = capsys.readouterr().out.splitlines()
    rows = json.loads(document)["results"]
    assert list(rows) == ["rows1", "rows3", "rows2"] and [line.split()[1] for line in lines] == list(rows)
    for row in rows.values():  # all but the steps at the two ends give three tokens
        assert row["accepted"] == 1 and 2.8 < row["tokens_per_step"] < 3
    worst = min(rows, key=lambda name: rows[name]["speedup"])
    assert least == f"least: {rows[worst]['speedup']:.3f} times, {worst}"


def test_a_drafter_that_finds_nothing_costs_no_step() -> None:
    """Random prompts hold nothing that n-grams find twice; tokens are compared, so a wrong one would be an error."""
    ngrams = speculation.Drafts(num_drafts=4, probability=None, config={"method": "ngram"}, adapts=True)
    ((_, row),) = speculation.compare(Engines(), gpu_engine.sweep(4096, [2]), ngrams, num_rounds=1)
    assert row["accepted"] < 0.2 and 1 <= row["tokens_per_step"] < 1.2


def test_tokens_that_differ_are_an_error() -> None:
    engines = Engines()
    short = {"one": gpu_engine.Workload([[1] * 16], [4], 0.0)}
    with pytest.raises(RuntimeError, match="tokens of one with drafts differ"):
        list(speculation.compare(lambda **fields: engines(seed=len(engines.made), **fields), short, ORACLE))


@pytest.mark.parametrize(
    ("count", "probability", "method"), [(17, 1.0, ""), (2, None, "ngrm"), (2, 1.0, "ngrm")], ids=str
)
def test_drafts_that_an_engine_refuses_are_refused_before_one_without_them_runs(
    count: int, probability: float | None, method: str
) -> None:
    engines, works = Engines(), [gpu_engine.sweep(4096, [1])]
    config = {"method": method, "num_speculative_tokens": count} if method else {}
    with pytest.raises(ConfigError, match=r"must be a whole number from 1 to 16|did you mean ngram\?"):
        speculation.run(engines, "tiny", works, speculation.Drafts(count, probability, config, adapts=True), {})
    assert not engines.made


def test_workloads_of_a_group_of_one_name_no_least(capsys: pytest.CaptureFixture[str]) -> None:
    short = gpu_engine.Workload([[1] * 16], [4], 0.0)
    speculation.run(Engines(), "tiny", [{"one": short}, {"two": short}], ORACLE, {"shape": "tiny"})
    assert "least" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "latency", "--oracle", "0.8"], "latency does not run with --oracle or --drafts: known are"),
        (["--workload", "rows"], "rows does not run on cpu without --oracle or --drafts: known are throughput"),
        (["--workload", "rows", "--oracle", "1.2"], "--oracle 1.2: a probability is from 0 to 1"),
        (["--workload", "rows", "--oracle", "1", "--rows", "4,513"], "--rows: '4,513': numbers from 1 to 512"),
        (["--workload", "rows", "--oracle", "1", "--rows", "4,x"], "--rows: '4,x': numbers from 1 to 512"),
        (["--workload", "rows", "--oracle", "1", "--rows", "4,\u0663"], "numbers from 1 to 512"),
        (["--workload", "rows", "--oracle", "1", "--rows", "4," + 5000 * "9"], "numbers from 1 to 512"),
        (["--workload", "rows", "--oracle", "1", "--rows", "4,1,04"], "--rows: '4,1,04': 4 is there more than once"),
        (["--workload", "single", "--oracle", "1", "--rows", "4"], "--rows is of --workload rows alone, and this is"),
        (["--rows", "4"], "--rows is of --workload rows alone, and this is all"),
        (
            ["--workload", "none", "--drafts", '{"method": "ngram", "num_speculative_tokens": 4}', "--num-drafts", "3"],
            "--num-drafts 3: --drafts says num_speculative_tokens=4",
        ),
        (
            ["--workload", "none", "--num-drafts", "2"],
            "--num-drafts 2: nothing drafts; add --oracle P or --drafts JSON",
        ),
        (["--workload", "single", "--oracle", "0.8", "--num-drafts", "40"], "--num-drafts 40: a number from 1 to 16"),
        (["--workload", "single", "--drafts", '{"method": "ngram"}', "--num-drafts", "0"], "--num-drafts 0: a number"),
        (["--workload", "none", "--fixed-depth"], "--fixed-depth: nothing drafts; add --oracle P or --drafts JSON"),
        (["--model", "octavo-tiny"], "--model octavo-tiny: it is compared with --drafts or --oracle"),
        (["--model", "octavo-tiny", "--shape", "tiny", "--oracle", "1"], "--shape tiny names another one"),
    ],
)
def test_what_does_not_run_is_refused_for_its_true_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "5", '"x"', "[]", "{bad", "null", "{}", "", "[" * 100_000], ids=range(9))
def test_drafts_that_are_no_object_are_refused_by_name(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--device", "cpu", "--workload", "single", "--drafts", text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--drafts: " in line and ": a JSON object of its keys is needed, as {" in line and len(line) < 250


@pytest.mark.parametrize(
    ("options", "count"), [([], 4), (["--num-drafts", "2"], 2), (["--drafts-say", "3"], 3), (["--drafts-say", "0"], 0)]
)
def test_so_many_drafts_as_one_of_two_places_says(
    options: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--num-drafts, or the count in --drafts; of both the one that is there, be it none."""
    config: dict[str, Any] = {"method": "ngram"}
    if options[:1] == ["--drafts-say"]:
        config["num_speculative_tokens"], options = int(options[1]), []
    asked: list[speculation.Drafts] = []
    monkeypatch.setattr(speculation, "run", lambda *args, **_: asked.append(args[3]) or 0)
    line = ["--device", "cpu", "--workload", "single", "--drafts", json.dumps(config), *options]
    assert main(["bench", "engine", *line]) == 0
    (drafts,) = asked
    assert drafts.num_drafts == drafts.config["num_speculative_tokens"] == count


def test_a_model_with_its_weights_is_timed_with_its_drafter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled ones: a trained head is right far more often than one of random weights, which never is."""
    monkeypatch.setattr(gpu_engine, "workload", lambda name, vocab: gpu_engine.Workload([[5, 9, 21] * 4], [24], 0.0))
    drafts = {"method": "eagle3", "model": "octavo-tiny-eagle3", "num_speculative_tokens": 2}
    line = ["--model", "octavo-tiny", "--device", "cpu", "--workload", "single", "--drafts", json.dumps(drafts)]
    assert main(["bench", "engine", *line]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["model"] == "octavo-tiny" and "shape" not in document
    assert document["results"]["single"]["accepted"] > 0.3

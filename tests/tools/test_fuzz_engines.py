"""tests/gpu/fuzz_engines.py on a CPU: it finds nothing in engines that are right, and tells what is wrong in others."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import fuzz_engines
from fuzz_cases import draw
from fuzz_models import MODELS
from octavo import RequestOutput
from octavo.frontend.engine import Engine

FIRST, MANY = 0, 14  # seeds of few requests, and one of thirteen


def run(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, list[str]]:
    """The exit status and the lines of cases on a CPU."""
    status = fuzz_engines.main(["--device", "cpu", *map(str, options)])
    return status, capsys.readouterr().out.splitlines()


def count(lines: list[str], name: str) -> int:
    """What the last line says."""
    (found,) = re.findall(rf"\b{name} ([\d,]+)", lines[-1])
    return int(found.replace(",", ""))


@pytest.mark.parametrize(("model", "first"), [("octavo-tiny", FIRST), ("octavo-tiny-hybrid", 3)])
def test_nothing_differs(capsys: pytest.CaptureFixture[str], model: str, first: int) -> None:
    status, lines = run(capsys, "--models", model, "--first", first, "--count", 3)
    assert status == 0 and len(lines) == 1, lines
    assert count(lines, "engines") == 3 and count(lines, "requests") > 10
    assert count(lines, "drafts accepted") > 10 and count(lines, "hits") > 10


def test_memory_of_others_that_a_step_writes_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = fuzz_engines.Bystanders.step

    def stray(bystanders: fuzz_engines.Bystanders) -> None:
        step(bystanders)
        if len(bystanders.kept) == 30:
            bystanders.kept[-3][7] = 1

    monkeypatch.setattr(fuzz_engines.Bystanders, "step", stray)
    status, lines = run(capsys, "--models", "octavo-tiny", "--first", MANY, "--count", 1)
    assert status == 1 and "1 bytes of others' memory are 01" in lines[0]


def test_a_log_probability_that_is_off_beside_others_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def off(engine: Engine) -> list[RequestOutput]:
        outputs = step(engine)
        if engine.scheduler.num_unfinished > 2:
            for one in itertools.chain.from_iterable(output.outputs for output in outputs):
                if isinstance(one.logprobs, list):
                    one.logprobs = [{token: _larger(each) for token, each in entry.items()} for entry in one.logprobs]
        return outputs

    monkeypatch.setattr(Engine, "step", off)
    status, lines = run(capsys, "--models", "octavo-tiny", "--first", MANY, "--count", 1)
    assert status == 1 and count(lines, "different") == 1 and len(lines) == 2
    assert re.match(rf"different: seed {MANY} of octavo-tiny: request \S+: log-probabilities of 0 at \d+, ", lines[0])
    assert "'max_num_seqs': " in lines[0]


def _larger(entry: Any) -> Any:
    return msgspec.structs.replace(entry, logprob=entry.logprob + 2**-20)


def test_blocks_that_stay_held_are_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_engines, "num_missing_blocks", lambda llm: 2)
    monkeypatch.setattr(fuzz_engines, "MAX_SETTLING_STEPS", 3)
    status, lines = run(capsys, "--models", "octavo-tiny", "--first", FIRST + 2, "--count", 1)
    assert status == 1 and lines[0].startswith(
        f"different: seed {FIRST + 2} of octavo-tiny: 2 blocks are held by nobody; 0 more; "
    )


def test_an_engine_that_goes_nowhere_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the case behind it has engines of its own."""
    step, calls = Engine.step, itertools.count()
    monkeypatch.setattr(Engine, "step", lambda engine: [] if 20 <= next(calls) < 60 else step(engine))
    monkeypatch.setattr(fuzz_engines, "MAX_IDLE_STEPS", 20)
    status, lines = run(capsys, "--models", "octavo-tiny", "--first", FIRST + 1, "--count", 2)
    assert status == 1 and "20 steps computed no token" in lines[0]
    assert count(lines, "different") == 1 and count(lines, "engines") == 2


def test_settings_that_are_refused_are_not_passed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = draw(FIRST, ["octavo-tiny"], "cpu")
    wrong = dataclasses.replace(case, settings={**case.settings, "block_size": 17})
    monkeypatch.setattr(fuzz_engines, "draw", lambda *given: wrong)
    status, lines = run(capsys, "--count", 1)
    assert status == 0 and lines[0].startswith("refused: seed 0 of octavo-tiny: block_size=17")
    assert count(lines, "refused") == 1 and count(lines, "engines") == 0


def test_a_case_is_its_seeds_and_has_what_its_device_runs() -> None:
    drawn = {device: [draw(seed, MODELS, device, 16) for seed in range(150)] for device in ("cpu", "cuda")}
    assert drawn["cpu"] == [draw(seed, MODELS, "cpu", 16) for seed in range(150)]
    assert {case.drafts["num_speculative_tokens"] for case in drawn["cuda"]} == {16, 7, 4}
    narrow = {
        device: {case.numerics["dtype"] for case in cases if "state_dtype" in case.numerics}
        for device, cases in drawn.items()
    }
    assert narrow == {"cpu": {"float32", "bfloat16"}, "cuda": {"bfloat16"}}


def test_an_abort_leaves_a_beginning() -> None:
    alone = {"tokens of 0": [1, 2, 3], "text of 0": "abc", "end of 0": ("length", None)}
    assert not fuzz_engines.difference({"tokens of 0": [1, 2], "text of 0": "a"}, alone, is_part=True)
    found = fuzz_engines.difference({"tokens of 0": [1, 4], "text of 0": "a"}, alone, is_part=True)
    assert found == "tokens of 0 at 1, 2 and 2 of them: [4], not [2]"
    assert fuzz_engines.difference({**alone, "tokens of 0": [1, 2]}, alone).startswith("tokens of 0 at 2, 2 and 3")

"""`octavo bench reproducibility` on the bundled model: nothing differs, and what does is seen."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from insides import runner_of
from octavo import LLM
from octavo.bench import reproducibility
from octavo.bench.circumstances import Answer, Run, in_groups, make_jobs
from octavo.bench.reproducibility import Bench, Difference, Narrator, make_axes
from octavo.bench.shapes import SHAPES
from octavo.checkpoint.hub import find_model
from octavo.cli.flags import UsageError
from random_models import EXAONE4, settings_of

# Every axis in float32, with one family of requests; in bfloat16, with two, those that test_same_bits.py has not.
ALL: tuple[str, ...] = ()
OTHERS = ("restart", "batch size", "order", "neighbours", "mixed steps", "siblings", "logprobs", "kernel block")


@pytest.mark.parametrize(
    ("dtype", "tokens", "chosen"), [("float32", 256, ALL), ("bfloat16", 512, OTHERS)], ids=["float32", "bfloat16"]
)
def test_no_axis_changes_a_bit(
    dtype: str, tokens: int, chosen: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    only = [word for name in chosen for word in ("--axis", name)]
    code = reproducibility.main(["--dtype", dtype, "--tokens", str(tokens), "--seed", "3", *only])
    *lines, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    axes = document["axes"]
    control = axes.pop("control")
    assert len(lines) == len(axes) + 1 and (set(axes) == set(chosen) if chosen else len(axes) >= 14)
    for name, row in axes.items():
        assert row["tokens"] >= tokens and "NOT MET" not in row["remark"], (name, row)
        assert not (row["different_tokens"] or row["different_logprobs"] or row["different_folds"]), (name, row)
    if control["different_folds"]:  # else this processor's library gives the same bits at every number of rows
        assert code == 0 and document["good"]


NARROW_AXES = ["restart", "prefix hit", "host memory", "oracle's drafts"]  # test_cache_dtypes.py has preemptions


@pytest.mark.parametrize(("given", "dtype", "axes"), [("int8", "int8", ["restart"]), ("fp8_e4m3", "fp8", NARROW_AXES)])
def test_no_axis_changes_a_bit_of_a_narrow_cache(
    given: str, dtype: str, axes: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which every engine has, and the one of another process as it is given the same words."""
    made, argv = [], []

    class Watched(LLM):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            made.append(self.engine.resolved.kv_cache_dtype)

    def in_another_process(words: list[str]) -> list[Answer]:
        argv.extend(words)
        return ask(words)

    ask = reproducibility._in_another_process
    monkeypatch.setattr(reproducibility, "_in_another_process", in_another_process)
    monkeypatch.setattr(reproducibility, "LLM", Watched)
    only = [word for name in axes for word in ("--axis", name)]
    reproducibility.main(["--dtype", "float32", "--kv-cache-dtype", given, "--tokens", "128", *only])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["kv_cache_dtype"] == given and set(made) == {dtype}
    assert argv[argv.index("--kv-cache-dtype") + 1] == given
    for name in axes:
        row = document["axes"][name]
        assert row["tokens"] >= 128 and "NOT MET" not in row["remark"], (name, row)
        assert not (row["different_tokens"] or row["different_logprobs"] or row["different_folds"]), (name, row)


def test_a_type_that_no_cache_has_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"--kv-cache-dtype: .*'fp4'.*int8"):
        reproducibility.main(["--kv-cache-dtype", "fp4"])


def test_what_runs_is_told_as_it_begins_and_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = [10.0]
    narrator = Narrator(10.0, lambda: times[-1])
    narrator.begin("reference")
    for seconds, done in ((12.0, 1), (15.5, 3), (17.0, 4), (20.5, 9)):
        times.append(seconds)
        narrator.tell(done, 9)
    assert capsys.readouterr().err.splitlines() == [
        "   0.0 s       reference: begins",
        "   5.5 s       reference: 3 of 9 requests",
        "  10.5 s       reference: 9 of 9 requests",
    ]


def test_every_stage_says_that_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    reproducibility.main(["--dtype", "float32", "--device", "cpu", "--tokens", "64", "--axis", "speculation"])
    told = [line.split(" s ")[1].strip() for line in capsys.readouterr().err.splitlines() if line.endswith("begins")]
    assert told == ["reference: begins", "speculation: begins"]


def test_no_axis_changes_a_bit_of_a_model_with_states(capsys: pytest.CaptureFixture[str]) -> None:
    """What a state could be caught by: cut chunks, hits at its borders, requests between two."""
    axes = ("border hit", "A, B, A", "chunks of 7", "chunks of 100", "prefix hit", "last states", "host memory")
    axes += ("host memory, alone",)
    only = [word for name in axes for word in ("--axis", name)]
    model = ["--model", "octavo-tiny-hybrid", "--dtype", "float32", "--device", "cpu"]
    reproducibility.main([*model, "--tokens", "256", "--times", "6", *only])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["axes"]
    del found["control"]
    assert set(found) == set(axes)
    for name, row in found.items():
        assert row["tokens"] >= 256 and "NOT MET" not in row["remark"], (name, row)
        assert not (row["different_tokens"] or row["different_logprobs"] or row["different_folds"]), (name, row)
    assert "8 times A, B, A" in found["A, B, A"]["remark"] and found["A, B, A"]["tokens"] >= 512
    assert found["border hit"]["remark"] == "2 lengths of hits, 64 to 128", "prompts of 129 tokens have two borders"


def test_no_axis_changes_a_bit_of_the_shape_of_mamba2(tmp_path: Path) -> None:
    """Made small; the shape `gdn` has the layers of `octavo-tiny-hybrid`."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "vocab_size": 500}
    sizes |= {"num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
    shape = {**SHAPES["mamba2"], **sizes, "ssm_state_size": 32, "hybrid_override_pattern": "M-M*-M-"}
    axes = ("batch size", "border hit", "A, B, A", "preemption", "oracle's drafts", "chunks of 7", "everything")
    for name, difference, remark in Bench(None, settings_of(shape, tmp_path), 256, 0, times=9).results([], axes):
        assert "NOT MET" not in remark and difference.tokens >= 256 and not difference.any, (name, remark)
        if name == "preemption":
            assert "in the middle of a chunk" in remark
        axes = tuple(axis for axis in axes if axis != name)
    assert not axes


def test_a_host_that_keeps_few_states_is_asked_by_groups_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a large model, one request of which leaves a gigabyte: all of them would push out each other's states."""
    monkeypatch.setattr(reproducibility, "HOST_BYTES", 1 << 20)
    monkeypatch.setattr(reproducibility, "_HOST_REQUESTS", 1)
    bench = Bench(None, {"model": "octavo-tiny-hybrid", "dtype": "float32", "device": "cpu"}, 512, 0)
    ((_, difference, remark),) = bench.results([], ["host memory"])
    num_loaded, num_groups = (int(word) for word in remark.split() if word.isdigit())
    assert num_groups > 1 and num_loaded >= 64 * num_groups, remark  # the first of a family is longer than a chunk
    assert difference.tokens >= 512 and not difference.any


def test_a_model_that_depends_on_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its logits, long before it says another token."""
    with LLM(dtype="float32", enable_prefix_caching=False) as llm:
        model = runner_of(llm.engine).model
        compute = model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            found = compute(hidden)
            if len(found) == 2:
                found[1, 7] = torch.nextafter(found[1, 7], torch.tensor(torch.inf))
            return found

        monkeypatch.setattr(model, "logits", logits)
        run = Run(llm, random.Random(0))
        jobs = make_jobs(256, llm.engine.limits.vocab_size, 1)
        expected = run.answers(jobs)
        found, _ = in_groups(run, jobs, random.Random(0))
    difference = Difference()
    for one, other in zip(expected, found, strict=True):
        difference.add(one, other)
    assert difference.different_folds > 0 and difference.different_tokens == 0


def test_folds_of_plain_steps_are_told_by_position_where_drafts_are_in_flight() -> None:
    """As on a GPU: the host knows bounds of lengths, and a step without drafts comes behind one with some."""
    bench = Bench(None, {"dtype": "float32", "async_scheduling": True}, 1024, 0)
    for name, difference, remark in bench.results([], ["speculation", "oracle's drafts"]):
        assert "NOT MET" not in remark and "drafts" in remark, name
        assert difference.tokens >= 1024 and not difference.any


def test_few_blocks_are_counted_in_blocks_of_the_reference_where_layers_keep_states() -> None:
    jobs = make_jobs(256, 1000, 1)
    for device in ("cpu", "cuda"):
        axes = {axis.name: axis.settings for axis in make_axes(device, jobs, random.Random(0), state_blocks=131)}
        assert axes["preemption"]["num_gpu_blocks_override"] >= 131 and "block_size" not in axes["preemption"]


def test_few_blocks_are_enough_for_a_request_where_layers_are_of_two_kinds(tmp_path: Path) -> None:
    settings = settings_of({**EXAONE4, "max_position_embeddings": 1024}, tmp_path)
    found = {name: rest for name, *rest in Bench(None, settings, 256, 0).results([], ["preemption"])}
    difference, remark = found["preemption"]
    assert difference.tokens >= 256 and not difference.any and "NOT MET" not in remark


def test_a_folder_without_a_tokenizer_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in find_model("octavo-tiny").iterdir():
        if path.suffix == ".safetensors" or path.name == "config.json":
            shutil.copy(path, tmp_path)
    reproducibility.main(["--model", str(tmp_path), "--tokens", "64", "--axis", "order"])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["axes"]["order"]
    assert row["tokens"] >= 64 and not row["different_folds"]


def test_a_model_of_ones_own_package_is_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "packages"))
    own = {"architectures": ["far_away.models.deep:DeepForCausalLM"], "depth": 2, "max_position_embeddings": 512}
    settings_of({**EXAONE4, **own}, tmp_path)
    model = ["--model", str(tmp_path), "--axis", "order"]
    with pytest.raises(UsageError, match="requests of this benchmark have 640 tokens; the checkpoint has 512"):
        reproducibility.main([*model, "--model-packages", "far_away"])
    with pytest.raises(ValueError, match="it names code: "):
        reproducibility.main(model)
    with pytest.raises(UsageError, match="--axis restart: the engine of another process ended with exit code 2"):
        reproducibility.main(["--model", str(tmp_path), "--axis", "restart"])


def test_the_control_asks_float32_where_the_fast_mode_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(None, {}, 1, 0), []
    bench.device = "cuda"

    def batch_sizes(**settings: Any) -> Difference:
        asked.append(settings)
        return Difference(tokens=1, different_folds=int("dtype" in settings or splits))

    monkeypatch.setattr(bench, "_batch_sizes", batch_sizes)
    splits = False
    difference, remark = bench.control()
    assert difference.any and "float32" in remark
    assert [one.get("dtype") for one in asked] == [None, "float32"] and all(one["numerics"] == "fast" for one in asked)
    splits = True
    assert bench.control() == (Difference(tokens=1, different_folds=1), "numerics=fast") and len(asked) == 3


def test_an_unknown_axis_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"preemptoin: no such axis; did you mean preemption\?"):
        reproducibility.main(["--axis", "preemptoin"])


@pytest.mark.parametrize(
    ("model", "chosen", "said"),
    [
        (
            "octavo-tiny",
            ["order", "A, B, A"],
            "'A, B, A': a model without states has no such axis on cpu; it has restart",
        ),
        ("octavo-tiny", ["graph or eager"], "'graph or eager': a model without states has no such axis on cpu; it has"),
        ("octavo-tiny-hybrid", ["odd kernel block"], "'odd kernel block': a model with states has no such axis on cpu"),
    ],
)
def test_an_axis_that_the_model_does_not_have_is_refused_before_the_reference_runs(
    model: str, chosen: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out without a word, and where it was the only one the verdict was bad for no reason that was told."""
    monkeypatch.setattr(Run, "answers", lambda *_, **__: pytest.fail("it runs"))
    bench = Bench(None, {"model": model, "device": "cpu", "dtype": "float32"}, 64, 0)
    for ask in (lambda: list(bench.results([], chosen)), lambda: bench.reference(chosen)):
        with pytest.raises(UsageError, match=f"^--axis {said}") as caught:
            ask()
        assert "; order; " in str(caught.value)


@pytest.mark.parametrize("flag", ["--tokens", "--times"])
@pytest.mark.parametrize("value", ["0", "-5", "1e3", "many", "\u0663", "", "9" * 30])
def test_how_many_is_a_whole_number_that_can_be(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"{flag}: '.*': a whole number from 1 to 1000*000 is needed"):
        reproducibility.main(["--axis", "order", f"{flag}={value}"])


def test_a_comparison_ends_where_tokens_part() -> None:
    difference = Difference()
    difference.add(Answer([1, 2, 3], [-0.0, 1.0, 1.0], [5, 6, 7]), Answer([1, 4, 3], [0.0, 1.0, 2.0], [5, 6, 8]))
    assert difference == Difference(tokens=2, different_tokens=1, different_logprobs=1, different_folds=0)
    rounds = reproducibility._compare([Answer([1], [], [5])], [Answer([1], [], [5]), Answer([1], [], [6])])
    assert (rounds.tokens, rounds.different_folds) == (2, 1)
    without: Any = Difference()
    without.add(Answer([1], [-1.0], [5]), Answer([1], [], [5]))
    assert not without.any

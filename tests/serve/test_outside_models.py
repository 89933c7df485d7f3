"""A model of a package that Octavo does not know: `"architectures": ["package.module:Class"]`, loaded and served."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.checkpoint.config_reader.checkpoint import arch_from_config
from octavo.checkpoint.hub import find_model
from octavo.cli.main import main as cli
from server_rig import SRC, StartServer

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
DEEP = "far_away.models.deep:DeepForCausalLM"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "def main():"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package `far_away` can be imported."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "far_away"]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """octavo-tiny's checkpoint, whose config.json is one of DeepForCausalLM."""
    tiny = find_model("octavo-tiny")
    for path in tiny.iterdir():
        if path.suffix in (".json", ".jinja", ".safetensors") and path.name != "config.json":
            shutil.copy(path, tmp_path)
    config: dict[str, Any] = json.loads((tiny / "config.json").read_text())
    config["depth"] = config.pop("num_hidden_layers")
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [DEEP]}))
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_its_answers_are_those_of_the_layers_that_it_uses(folder: Path) -> None:
    with LLM(dtype="float32") as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    with LLM(model=str(folder), model_packages=["other", "far_away"], dtype="float32") as llm:
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
        assert llm.engine.arch.name == DEEP


def test_it_is_served(folder: Path, server: Any, start_server: StartServer) -> None:
    own = start_server(
        "--dtype",
        "float32",
        "--model",
        str(folder),
        "--model-packages",
        "far_away",
        "--served-model-name",
        "deep",
        mock=False,
        env={"PYTHONPATH": os.pathsep.join((str(SRC), str(PACKAGES)))},
    )
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    texts = [
        each.request("POST", "/v1/completions", {**body, "model": name}).json()["choices"][0]["text"]
        for each, name in ((own, "deep"), (server, "octavo-tiny"))
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.usefixtures("installed")
def test_doctor_reads_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["doctor", "--model", str(folder), "--model-packages", "far_away"]) == 0
    assert DEEP in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("packages", [None, "far", "far_away.model", "far_away.models.deep.more", "far_away_too", ","])
def test_what_was_not_listed_is_not_imported(packages: str | None) -> None:
    with pytest.raises(ValueError, match="if you installed 'far_away', set --model-packages far_away"):
        arch_from_config({"architectures": [DEEP]}, packages=packages)
    assert "far_away" not in sys.modules


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("far_away.models.missing:Model", "does not load: .*No module named"),
        ("far_away.models.deep:Missing", "does not load: .*Missing"),
        ("far_away.models.falls:Model", "does not load: RuntimeError: no such accelerator"),
        ("far_away.models.deep:BrokenForCausalLM", "no static method read"),
        ("far_away.models.deep:FailingForCausalLM", "its read fails: ZeroDivisionError: in config.json"),
        (DEEP, "depth=null"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(path: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json: unsupported .*{reason}") as error:
        arch_from_config({"architectures": [path]}, packages="far_away")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("installed")
def test_a_class_that_cannot_be_made_is_refused_by_name(folder: Path) -> None:
    name = "far_away.models.deep:UnmadeForCausalLM"
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [name], "num_hidden_layers": config["depth"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"the model {name} cannot be made: TypeError: .*__init__\(\)") as error:
        LLM(str(folder), model_packages="far_away")
    assert "\n" not in str(error.value)


def test_the_class_of_the_page_is_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/adding.md shows a file that runs as it stands."""
    page = (Path(__file__).resolve().parents[2] / "docs/adding.md").read_text(encoding="utf-8")
    code = page.partition("### Outside of this repository")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage/__init__.py").write_text("")
    (tmp_path / "mypackage/foo.py").write_text(code)
    fields = json.loads((find_model("octavo-tiny") / "config.json").read_text())
    fields |= {"architectures": ["mypackage.foo:FooForCausalLM"], "num_hidden_layers": 2, "vocab_size": 199}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"eos_token_id": 7, "bos_token_id": 1}))
    monkeypatch.syspath_prepend(str(tmp_path))
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True}
    try:
        with LLM(str(tmp_path), model_packages="mypackage", **options) as llm:
            outputs = llm.generate({"prompt_token_ids": [3, 5, 9]}, SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(outputs[0].outputs[0].token_ids) == 4
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
            del sys.modules[name]

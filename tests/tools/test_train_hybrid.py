"""The bundled hybrid can be made again: the whole path in seconds, on a few files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from octavo import LLM, SamplingParams

SCRIPT = Path(__file__).parents[2] / "tools" / "train_hybrid.py"


def test_smoke_run_gives_a_folder_that_generates(tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.xz", tmp_path / "model"
    for arguments in (["--prepare", str(tokens)], ["--tokens", str(tokens), "--out", str(out)]):
        subprocess.run([sys.executable, str(SCRIPT), "--smoke", *arguments], check=True, capture_output=True)
    assert "bits per byte" in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["layer_types"][3] == "full_attention"
    with LLM(str(out)) as llm:
        output = llm.generate("def f(", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4

"""The bundled model can be made again: the whole path in seconds, on a few files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from octavo import LLM, SamplingParams

SCRIPT = Path(__file__).parents[2] / "tools" / "train_tiny.py"


def test_smoke_run_gives_a_folder_that_generates(tmp_path: Path) -> None:
    out = tmp_path / "model"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--steps", "4", "--out", str(out)], check=True, capture_output=True
    )
    assert "bits per byte" in (out / "README.md").read_text()
    assert len(json.loads((out / "held_out_prompts.json").read_text())) > 0
    with LLM(str(out)) as llm:
        output = llm.generate("def f(", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4

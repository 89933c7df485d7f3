"""Starts of several source trees by turns, in new processes: `python bench/h200/starts.py old=/path/src new=src`.

Each tree is copied, to where Python can keep its bytecode, and starts once ahead, which compiles that and its kernels;
this start is told and not counted. Seconds from the start of the process, as the engine tells its phases; ends by
itself within `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.bench.shapes import SHAPES

_CHILD = """
import json, os, resource, sys, time
began = time.perf_counter()
from octavo import LLM, SamplingParams
from octavo.observe import Phases
imported = time.perf_counter() - began
phases = Phases()
llm = LLM(sys.argv[1], phases=phases, **json.loads(sys.argv[2]))
ready = phases.total
used = resource.getrusage(resource.RUSAGE_SELF)
modules = sorted(sys.modules)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
seconds = {"ready": ready, "first token": phases.total, "processor": used.ru_utime + used.ru_stime, "LLM": imported}
parts = {name: spent for name, spent, depth in phases.entries if not depth}
print(json.dumps({"seconds": seconds, "parts": parts, "modules": modules}), flush=True)
os._exit(0)  # an end takes longer than a start
"""


def start(tree: str, model: str, fields: dict[str, Any], limit: float) -> dict[str, Any]:
    """One start of a tree, a folder with the package: its seconds by name, its phases, and the modules it imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    others = environment.get("PYTHONPATH", "").split(os.pathsep)  # third-party packages may be there
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(tree).resolve()), *filter(None, others)])
    command = [sys.executable, "-c", _CHILD, model, json.dumps(fields)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit, check=False)
    if ended.returncode:
        raise SystemExit(f"{tree}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line for each figure: of every tree the median, and the least in brackets."""
    rows = [f"{'seconds':<38}" + "".join(f"{name:>20}" for name in runs)]
    for kind in ("seconds", "parts"):
        names = dict.fromkeys(name for own in runs.values() for run in own for name in run[kind])
        for name in names:
            cells = []
            for own in runs.values():
                values = [run[kind][name] for run in own if name in run[kind]]
                cells.append(f"{statistics.median(values):.3f} ({min(values):.3f})" if values else "")
            rows.append(f"{'  ' * (kind == 'parts') + name:<38}" + "".join(f"{cell:>20}" for cell in cells))
    for name, prefix in (("modules", ""), ("of them octavo's", "octavo"), ("Triton's", "triton")):
        counts = [sum(module.startswith(prefix) for module in own[0]["modules"]) for own in runs.values()]
        rows.append(f"{name:<38}" + "".join(f"{count:>20}" for count in counts))
    return rows


def main() -> None:
    """Starts by turns until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=SRC", help="source trees, by names of their own")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b", help="dummy weights of a shape")
    parser.add_argument("--model", help="a model in the place of a shape, as octavo-tiny")
    parser.add_argument("--fields", default="{}", help="more settings of the engine, as JSON")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--keep", type=Path, help="a file for all that was measured, names of modules too, as JSON")
    options = parser.parse_args()
    ends, runs = time.perf_counter() + options.seconds, dict[str, list[dict[str, Any]]]()
    trees = dict(each.split("=", 1) for each in options.trees)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        fields: dict[str, Any] = {"max_num_seqs": 512} if options.model is None else {}
        if options.model is None:
            Path(folder, "config.json").write_text(json.dumps(SHAPES[options.shape]), encoding="utf-8")
            fields["load_format"] = "dummy"
        fields |= json.loads(options.fields)
        model, longest = options.model or folder, 0.0
        for name, tree in list(trees.items()):
            trees[name] = str(Path(folder, name))
            shutil.copytree(Path(tree, "octavo"), Path(folder, name, "octavo"), copy_function=shutil.copyfile)
        for name, tree in trees.items():
            first = start(tree, model, fields, options.seconds)
            print(f"{name}: ahead, ready after {first['seconds']['ready']:.2f} s", flush=True)
        for number in range(options.rounds):
            if time.perf_counter() + longest > ends:
                break
            began = time.perf_counter()
            for name in list(trees)[:: 1 if number % 2 else -1]:  # each goes first as often
                runs.setdefault(name, []).append(start(trees[name], model, fields, options.seconds))
            longest = max(longest, time.perf_counter() - began)
    if not runs:
        raise SystemExit("there was no time for a round")
    ordered = {name: runs[name] for name in trees}
    for name, own in ordered.items():
        print(f"{name}: ready after {', '.join(format(run['seconds']['ready'], '.2f') for run in own)} s")
    if options.keep is not None:
        options.keep.write_text(json.dumps(ordered), encoding="utf-8")
    first, *others = ordered
    for name in others:
        pairs = zip(ordered[first], ordered[name], strict=True)
        gains = [one["seconds"]["ready"] - two["seconds"]["ready"] for one, two in pairs]
        print(f"{name} is ready {statistics.median(gains):+.3f} s before {first}, median of {len(gains)} rounds")
    print("\n".join(table(ordered)))


if __name__ == "__main__":
    main()

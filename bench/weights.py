"""Benchmark of an update of a running engine's weights: `python bench/weights.py [--model 8b] [disk ipc nccl local]`.

A trainer's process makes the weights on a GPU, the engine's own one or (nccl) the next, and sends them; an update's
time is from its start to the first new token of an engine that idles. `files` are safetensors that were just written,
so that the system's cache has them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.bench.engine import dummy_model
from octavo.rl import Sender, WeightSource
from trainer_model import make_model

CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "abort_weight_update",
)
SHARD = 4 << 30  # bytes of a file


class Remote:
    """An engine's calls for weights, in the process at the other end of this one's input and output."""

    def __getattr__(self, name: str) -> Any:
        """A call, as JSON."""
        if name not in CALLS:
            raise AttributeError(name)

        def call(*args: Any, **keywords: Any) -> Any:
            print(json.dumps({"call": name, "args": args, "keywords": keywords}), flush=True)
            answer = json.loads(sys.stdin.readline())
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return answer["result"]

        return call


def be_trainer(name: str, backend: str, device: int) -> None:
    """Send the weights of each seed that is asked for, by a line."""
    torch.cuda.set_device(device)
    sender = Sender(Remote(), backend)
    print(json.dumps({"ready": True}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        seed = json.loads(line)["seed"]
        model = make_model(name, seed)
        torch.cuda.synchronize()
        sender.send(WeightSource(model), f"seed-{seed}")
        del model
        print(json.dumps({"sent": seed}), flush=True)
    sender.close()


class Trainer:
    """A trainer's process, whose calls are made of an engine here."""

    def __init__(self, llm: Any, name: str, backend: str, device: int = 0) -> None:
        """Starts it."""
        command = [sys.executable, str(Path(__file__)), "--trainer", name, backend, str(device)]
        self._llm = llm
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.began = 0.0  # of the last update

    def __enter__(self) -> Trainer:
        """Once it is there."""
        self._serve("ready")
        return self

    def __exit__(self, *error: object) -> None:
        """It ends."""
        self._process.kill()
        self._process.communicate()

    def send(self, seed: int) -> None:
        """One update."""
        self._say({"seed": seed})
        self._serve("sent")

    def _say(self, words: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def _serve(self, end: str) -> None:
        """Make its calls until it says `end`."""
        assert self._process.stdout is not None, "a pipe"
        for line in iter(self._process.stdout.readline, ""):
            words = json.loads(line)
            if end in words:
                return
            if words["call"] == "start_weight_update":
                self.began = time.perf_counter()
            try:
                result = getattr(self._llm, words["call"])(*words["args"], **words["keywords"])
                self._say({"result": result})
            except ValueError as error:
                self._say({"error": str(error)})
        raise RuntimeError(f"the trainer ended with {self._process.wait()}")


def write_files(folder: Path, name: str) -> int:
    """Save a model's weights; their bytes."""
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    total = count = 0
    for key, tensor in WeightSource(make_model(name, 1)).tensors.items():
        shard[key] = tensor.cpu()
        total += tensor.nbytes
        if sum(each.nbytes for each in shard.values()) > SHARD:
            save_file(shard, folder / f"part-{count}.safetensors")
            shard, count = {}, count + 1
    if shard:
        save_file(shard, folder / f"part-{count}.safetensors")
    return total


def first_token(llm: LLM) -> None:
    """One, of one request."""
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False)


def measure(name: str, backend: str, rounds: int) -> tuple[list[float], float]:
    """(seconds of each update, memory that the engine's process took beside, in GiB)."""
    config = {"backend": backend, "staging": "none"} | ({"timeout": 30} if backend == "nccl" else {})
    with dummy_model(
        name, weight_transfer_config=config, gpu_memory_utilization=0.4, max_model_len=1024, enforce_eager=True
    ) as llm:
        first_token(llm)
        torch.cuda.reset_peak_memory_stats()
        before, times = torch.cuda.memory_allocated(), []
        if backend == "disk":
            with tempfile.TemporaryDirectory(prefix="octavo-weights-") as folder:
                write_files(Path(folder), name)
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                for _ in range(rounds):
                    began = time.perf_counter()
                    llm.start_weight_update()
                    llm.update_weights({"update_info": {"path": folder}})
                    llm.finish_weight_update()
                    first_token(llm)
                    times.append(time.perf_counter() - began)
        else:
            with Trainer(llm, name, backend, 1 if backend == "nccl" else 0) as trainer:
                for seed in range(rounds):
                    trainer.send(seed)
                    first_token(llm)
                    times.append(time.perf_counter() - trainer.began)
        return times, (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", default=["ipc", "disk"])
    parser.add_argument("--model", default="8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        be_trainer(options.trainer[0], options.trainer[1], int(options.trainer[2]))
        return
    lines = []
    for backend in options.backends:
        times, extra = measure(options.model, backend, options.rounds)
        lines.append(f"{options.model:<6} {backend:<6} {times[0]:>8.3f} {min(times):>8.3f} {extra:>8.2f}")
    print(f"{torch.cuda.get_device_name()}: seconds from an update's start to the next token; GiB beside the model")
    print(f"{'model':<6} {'how':<6} {'first':>8} {'best':>8} {'extra':>8}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

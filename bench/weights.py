"""Benchmark of an update of a running engine's weights: `python bench/weights.py [--model 8b] [ipc nccl disk ...]`.

A trainer's process makes the weights on a GPU, the engine's own one or (nccl) the next, and sends them; an update's
time is from its start to the first new token of an engine that idles. `disk` reads safetensors that lie in memory, in
/dev/shm or, where that is too small, in the system's cache of files that were just written. `shm` and `gloo` pass
through the host, and run without a GPU too. NCCL refuses two processes on one GPU: what a machine has not is left out,
by name. One engine serves all; what is made ready meanwhile is told with its time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.bench.engine import dummy_model
from octavo.rl import Sender, WeightSource

CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "abort_weight_update",
)
NUM_FILES = 8  # each is written by a thread
IN_MEMORY = Path("/dev/shm")


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


def be_trainer(name: str, device: int) -> None:
    """Send the weights of each seed that is asked for, by a line, or write them to files."""
    from trainer_model import make_model  # imports transformers, which the engine's process does without

    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    senders: dict[str, Sender] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        words = json.loads(line)
        model = make_model(name, words["seed"])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if "folder" in words:
            write_files(Path(words["folder"]), WeightSource(model).tensors)
        else:
            backend = words["backend"]
            if backend not in senders:
                senders[backend] = Sender(Remote(), backend)
            for _ in range(words["times"]):
                senders[backend].send(WeightSource(model), f"seed-{words['seed']}")
        del model
        print(json.dumps({"done": words["seed"]}), flush=True)
    for sender in senders.values():
        sender.close()


class Trainer:
    """A trainer's process, whose calls are made of an engine here."""

    def __init__(self, name: str, device: int = 0) -> None:
        """Starts it."""
        command = [sys.executable, str(Path(__file__)), "--trainer", name, str(device)]
        self._llm: Any = None
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.began = 0.0  # of the last update

    def meet(self, llm: Any) -> None:
        """Wait until it is there; its calls are made of this engine from now on."""
        self._llm = llm
        self._serve("ready")

    def __enter__(self) -> Trainer:
        """As it is."""
        return self

    def __exit__(self, *error: object) -> None:
        """It ends."""
        self._process.kill()
        self._process.communicate()

    def send(self, seed: int, backend: str, times: int = 1) -> None:
        """One update, or many of the same weights."""
        self._say({"seed": seed, "backend": backend, "times": times})
        self._serve("done")

    def write(self, seed: int, folder: str) -> None:
        """What it would send."""
        self._say({"seed": seed, "folder": folder})
        self._serve("done")

    def _say(self, words: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def _serve(self, end: str) -> None:
        """Make its calls until it says `end`."""
        assert self._process.stdout is not None, "a pipe"
        for line in iter(self._process.stdout.readline, ""):
            if not line.startswith("{"):  # a library's
                continue
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


def write_files(folder: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Save tensors as safetensors, in a file a thread; their bytes."""
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_FILES)]
    for name, tensor in tensors.items():
        min(files, key=lambda held: sum(each.nbytes for each in held.values()))[name] = tensor
    with concurrent.futures.ThreadPoolExecutor(NUM_FILES) as pool:
        done = [pool.submit(write_file, folder / f"part-{n}.safetensors", held) for n, held in enumerate(files) if held]
    return sum(each.result() for each in done)


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """One of them. safetensors' own writer copies a whole file's bytes first."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    raw = json.dumps(header).encode()
    with open(path, "wb", buffering=0) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            rest = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())  # type: ignore[arg-type]
            while rest:  # one call writes 2 GiB at most
                rest = rest[file.write(rest) :]
    return end


def first_token(llm: LLM) -> None:
    """One, of one request."""
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False)


def by_files(llm: LLM, trainer: Trainer, rounds: int) -> list[float]:
    """Seconds of each update."""
    size, times = llm.engine.memory.weight_bytes, list[float]()
    fits = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 1.1 * size
    with tempfile.TemporaryDirectory(prefix="octavo-weights-", dir=IN_MEMORY if fits else None) as folder:
        trainer.write(1, folder)
        tell(f"{size / 1e9:.1f} GB of files are written below {Path(folder).parent}")
        for _ in range(rounds):
            began = time.perf_counter()
            llm.start_weight_update()
            llm.update_weights({"update_info": {"path": folder}})
            llm.finish_weight_update()
            first_token(llm)
            times.append(time.perf_counter() - began)
    return times


def by_trainer(llm: LLM, trainer: Trainer, backend: str, rounds: int) -> list[float]:
    """Seconds of each update."""
    times = []
    for seed in range(rounds):
        trainer.send(seed, backend)
        first_token(llm)
        times.append(time.perf_counter() - trainer.began)
    return times


def report(name: str, backend: str, measure: Callable[[], list[float]]) -> None:
    """A line, as soon as it is known. What is beside the model is a GPU's."""
    extra, has_gpu = 0.0, torch.cuda.is_available()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if has_gpu else 0
    times = measure()
    if has_gpu:
        extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"{name:<6} {backend:<6} {times[0]:>8.3f} {min(times):>8.3f} {extra:>8.2f}", flush=True)


def tell(what: str) -> None:
    """What has been made ready, and when."""
    print(f"  [{time.perf_counter() - _BEGAN:.1f} s] {what}", file=sys.stderr, flush=True)


def has_gpus(backend: str) -> bool:
    """Whether there are as many as a backend needs; what is left out is told."""
    needed, count = {"ipc": 1, "nccl": 2}.get(backend, 0), torch.cuda.device_count()
    if count < needed:
        tell(f"{backend} is left out: it needs {needed} GPUs, and there are {count}")
    return count >= needed


def run(name: str, backends: list[str], rounds: int) -> None:
    """All of them with one engine, and a trainer on each GPU that one is needed on, which starts meanwhile."""
    fields = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True}
    with contextlib.ExitStack() as stack:
        places = {backend: int(backend == "nccl") for backend in backends if has_gpus(backend)}
        trainers = {device: stack.enter_context(Trainer(name, device)) for device in sorted(set(places.values()))}
        config = {"staging": "none", "timeout": 30}
        llm = stack.enter_context(dummy_model(name, weight_transfer_config=config, **fields))
        first_token(llm)
        tell("the engine is there")
        for trainer in trainers.values():
            trainer.meet(llm)
        tell("trainers are there")
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
        print(f"{device_name}: seconds from an update's start to a token; GiB beside the model")
        print(f"{'model':<6} {'how':<6} {'first':>8} {'best':>8} {'extra':>8}", flush=True)
        for backend, device in places.items():
            if backend == "disk":
                report(name, backend, lambda: by_files(llm, trainers[device], rounds))  # noqa: B023
            else:
                report(name, backend, lambda: by_trainer(llm, trainers[device], backend, rounds))  # noqa: B023
            tell(f"{backend} is measured")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", default=["ipc", "disk"])
    parser.add_argument("--model", default="8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        be_trainer(options.trainer[0], int(options.trainer[1]))
    else:
        run(options.model, options.backends, options.rounds)


_BEGAN = time.perf_counter()

if __name__ == "__main__":
    main()

"""A start opens a GPU beside Python; nothing but time depends on it."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import threading
from typing import Any

import pytest

from octavo.config.engine_config import EngineConfig
from octavo.observe import Phases
from octavo.startup import cuda_init, warm_start
from patience import patient


class Library:
    """A shared library whose functions note that they were called."""

    def __init__(self, *names: str, status: int = 0) -> None:
        self.calls: list[str] = []
        for name in names:
            setattr(self, name, lambda *args, own=name: self.calls.append(own) or status)


def load(monkeypatch: pytest.MonkeyPatch, **libraries: Library) -> None:
    """Let these be the only ones that there are."""

    def find(name: str) -> Library:
        if name.partition(".")[0] not in libraries:
            raise OSError(name)
        return libraries[name.partition(".")[0]]

    monkeypatch.setattr(cuda_init.ctypes, "CDLL", find)


def test_the_context_is_made_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Library("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
    counter = Library("nvmlInit_v2")
    load(monkeypatch, **{"libcuda": driver, "libnvidia-ml": counter})
    assert cuda_init.has_driver()
    cuda_init.open_driver()
    cuda_init.open_counter()
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert counter.calls == ["nvmlInit_v2"]


def test_a_driver_that_fails_or_is_another_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Library("cuInit", "cuDeviceGet", status=100)
    load(monkeypatch, libcuda=failing)
    cuda_init.open_driver()
    assert failing.calls == ["cuInit"]
    load(monkeypatch, libcuda=Library())
    cuda_init.open_driver()
    load(monkeypatch)
    assert not cuda_init.has_driver()
    cuda_init.open_driver()
    cuda_init.open_counter()
    cuda_init.open_runtime("12.8")


def test_the_runtime_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    runtime = Library("cudaFree")
    monkeypatch.setattr(cuda_init.ctypes, "CDLL", lambda name: names.append(name) or runtime)
    cuda_init.open_runtime("12.8")
    assert names == ["libcudart.so.12"] and runtime.calls == ["cudaFree"]


@pytest.mark.parametrize(("device", "opened"), [("cpu", False), ("auto", True), ("cuda", True)])
def test_a_start_opens_the_device_first(device: str, opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, thresholds = threading.Event(), []

    def build_core(config: EngineConfig, phases: Phases, opening: object, *, text: bool, **_: object) -> Any:
        assert begun.wait(patient(5) if opened else 0.1) is opened
        thresholds.append(gc.get_threshold()[0])
        return config, text

    monkeypatch.setattr(warm_start, "open_driver", lambda: begun.set())
    monkeypatch.setattr("octavo.worker.device.Opening", lambda config: None)
    monkeypatch.setattr("octavo.startup.build.build_core", build_core)
    config, before = EngineConfig(device=device), gc.get_threshold()
    parts: Any = warm_start.start(config, Phases(), text=False)
    assert parts == (config, False)
    assert thresholds[0] > before[0], "garbage is looked for less often during a start"
    assert gc.get_threshold() == before


def test_the_gpu_opens_while_the_engine_is_imported() -> None:
    """In a process of its own, where nothing is imported yet."""
    code = (
        "import sys, threading, torch\nfrom octavo.config.engine_config import EngineConfig\n"
        "from octavo.observe import Phases\nfrom octavo.startup import warm_start\nfrom octavo.worker import device\n"
        "seen = []\n"
        "class Opening:\n"
        "    opens = False\n"
        "    def __init__(self, config): seen.append('octavo.worker.runner' in sys.modules)\n"
        "device.Opening = Opening\n"
        "try: warm_start.start(EngineConfig(model='/nowhere', device='cpu'), Phases())\n"
        "except ValueError: pass\n"
        "assert seen == [False] and 'octavo.worker.runner' in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert ended.returncode == 0, ended.stderr


def test_a_gpu_that_the_process_has_chosen_is_the_only_one_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trainer's rank has by torch.cuda.set_device: a thread of its own would open the first one."""
    import torch

    from octavo.worker import device

    opened: list[str | None] = []
    for name in ("open_driver", "open_counter"):
        monkeypatch.setattr(warm_start, name, lambda: opened.append("first"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(device, "has_driver", lambda: True)
    monkeypatch.setattr(device, "_open", opened.append)
    monkeypatch.setattr("octavo.startup.build.build_core", lambda config, phases, opening, **_: opening)
    opening: Any = warm_start.start(EngineConfig(device="auto"), Phases())
    opening.join()
    assert opened == [None]


def test_what_fails_while_the_device_opens_is_left_to_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from octavo.ops.compile import launch
    from octavo.ops.gemm import gpu as matmul
    from octavo.worker import device

    called: list[str] = []

    def fails() -> None:
        called.append("library")
        raise RuntimeError("no device")

    monkeypatch.setattr(launch, "open_driver", lambda: called.append("driver"))

    monkeypatch.setattr(device, "open_runtime", called.append)
    monkeypatch.setattr(matmul, "open_library", fails)
    device._open(None)
    assert not called
    device._open("12.8")
    assert called == ["12.8", "driver", "library"]


# What an engine of one dense model has no use for: it is loaded where somebody asks for it.
WINGS = (
    "bench", "cli", "router", "serve", "device.cuda_pages", "device.virtual_memory", "frontend.metrics",
    "kv_connector.guard", "kv_connector.host", "kv_connector.orders", "kv_connector.p2p", "kv_connector.peers",
    "kv_connector.worker.cache_bytes", "layers.latent_attention", "layers.mixers", "layers.moe", "models.drafters",
    "models.hybrids", "ops.scan", "rl.plan", "rl.receiver", "rl.transport", "speculate.block", "speculate.head",
    "speculate.step", "states.cpu", "states.gpu", "worker.calibration", "worker.identity",
)  # fmt: skip
FOREIGN = ("httptools", "llguidance", "prometheus_client", "starlette", "transformers", "triton", "uvicorn", "xxhash")


def test_a_plain_engine_loads_none_of_what_it_does_not_use() -> None:
    code = (
        "import sys\nfrom octavo import LLM, SamplingParams\n"
        "llm = LLM('octavo-tiny', device='cpu', dtype='float32', max_model_len=64, max_num_seqs=2)\n"
        "llm.generate('a', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "print(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert ended.returncode == 0, ended.stderr
    loaded = ended.stdout.split()
    assert "octavo.worker.runner" in loaded
    unused = [*(f"octavo.{wing}" for wing in WINGS), *FOREIGN]
    assert not [name for name in loaded if any(name == own or name.startswith(own + ".") for own in unused)]
    known = {name for name in unused if name.startswith("octavo")}
    assert all(importlib.util.find_spec(name) for name in known), "a wing that was renamed is watched no more"


def test_a_model_without_states_loads_no_kernels_of_them() -> None:
    """On a GPU they are two dozen modules of Triton."""
    code = (
        "import sys, torch\nfrom types import SimpleNamespace\nfrom octavo.states.choice import backend_of\n"
        "buffer = SimpleNamespace(device=torch.device('cuda'))\n"
        "assert backend_of(SimpleNamespace(states={}, buffer=buffer)) is None\n"
        "assert 'octavo.states.gpu' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert ended.returncode == 0, ended.stderr


def test_every_module_of_kernels_that_a_start_imports_is_there() -> None:
    pytest.importorskip("triton")
    from octavo.worker import device

    for name in (*device._KERNELS, *device._PAGED_KERNELS):
        importlib.import_module(f"octavo.ops.{name}")

"""The device of a worker: opened early, asked for its memory, and told of where that runs out.

Owns the thread that opens a GPU while Python imports, the choice of operators around what a worker does, and the words
for memory that is short. Holds nothing afterwards. Invariant: a start depends on opening early for its time only.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator

import torch

from octavo.cache.plan import show_bytes
from octavo.config.engine_config import EngineConfig, Resolved, asked_backend
from octavo.config.settings import ConfigError
from octavo.ops import native
from octavo.ops.rope import rope_table
from octavo.startup import gc_control, probe
from octavo.startup.cuda_init import has_driver, open_runtime

# Modules of what any step launches, and any with the attention of the default: Python takes as long to import them as
# a GPU to open.
_KERNELS = (
    "embedding.gpu",
    "gemm.skinny_gemm",
    "inputs.gpu",
    "rope.gpu",
    "sampling.gpu",
    "inputs.staged_write_gpu",
    "cache_write.zero_blocks_gpu",
)
_PAGED_KERNELS = "attention.hopper.prefill_kernel", "attention.rope_decode_kernel", "attention.hopper.decode_kernel"


class Opening:
    """A GPU that is being opened by a thread of its own.

    One that is open is left alone: it may be another than the first, which is a thread's own.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Begin."""
        self._config = config
        opens = config.device != "cpu" and not torch.cuda.is_initialized() and has_driver()
        cuda = torch.version.cuda if opens else None
        self.opens = bool(cuda)
        # waited for at exit: a start that is refused meanwhile would else end the process within torch's C++
        self._thread = threading.Thread(target=_open, args=[cuda])
        self._thread.start()

    def import_kernels(self) -> None:
        """Meanwhile."""
        _read_quickly()
        with gc_control.loading():
            for name in (*_KERNELS, *(_PAGED_KERNELS if asked_backend(self._config) in ("auto", "paged") else ())):
                importlib.import_module(f"octavo.ops.{name}")

    def join(self) -> None:
        """Wait until nothing more is loaded."""
        self._thread.join()


def _open(cuda: str | None) -> None:
    """Open the GPU, and let torch load what it takes longest to: 40 to 110 ms for the first call of an operator."""
    if not cuda:
        return
    open_runtime(cuda)
    with contextlib.suppress(Exception), torch.device("cuda"):  # what fails here fails again where it is needed
        _read_quickly()
        from octavo.ops.compile import launch  # need Triton
        from octavo.ops.gemm import gpu as matmul

        launch.open_driver()
        matmul.open_library()
        torch.zeros(2, 2, dtype=torch.bfloat16).index_select(0, torch.zeros(1, dtype=torch.int64))
        rope_table(8, 4)


def _read_quickly() -> None:
    """Ahead of kernels, most of whose import is the search for where each ends."""
    from octavo.ops.compile import kernel_sources

    kernel_sources.read_quickly()


class Operators:
    """Within: this thread computes with the operators that an engine was given, and with so many threads, uncast.

    Afterwards it has its own again: another engine in this process, or a trainer, is not touched. For one thread at a
    time.
    """

    def __init__(self, resolved: Resolved) -> None:
        """Nothing is entered."""
        self._serving = native.Serving(resolved.native, resolved.bfloat16_chain, resolved.num_threads)
        self._num_threads, self._numerics = resolved.num_threads, resolved.numerics
        self._device, self._is_gpu = resolved.device, resolved.device == "cuda"
        self._select: Callable[[str], str] = str  # chooses a GPU's products; what was chosen before
        self._before: list[tuple[int, str, bool]] = []

    def __enter__(self) -> None:
        """Begin."""
        if self._is_gpu and self._select is str:  # not earlier: a start imports Triton beside other things
            from octavo.ops.gemm import gpu as matmul

            self._select = matmul.select
        self._serving.__enter__()
        num_threads = torch.get_num_threads()
        if num_threads != self._num_threads:
            torch.set_num_threads(self._num_threads)
        casts = torch.is_autocast_enabled(self._device)
        if casts:  # a caller's: products would be of its type
            torch.set_autocast_enabled(self._device, False)
        self._before.append((num_threads, self._select(self._numerics), casts))

    def __exit__(self, *_: object) -> None:
        """End."""
        num_threads, numerics, casts = self._before.pop()
        self._select(numerics)
        if casts:
            torch.set_autocast_enabled(self._device, True)
        if num_threads != self._num_threads:
            torch.set_num_threads(num_threads)
        self._serving.__exit__()


def memory_of(resolved: Resolved) -> tuple[int, int]:
    """Free and total bytes of the device, now."""
    if resolved.device == "cuda":
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return free_bytes, total_bytes
    return probe.memory_bytes()


@contextlib.contextmanager
def room(resolved: Resolved, what: str, field: str, change: str) -> Iterator[None]:
    """Say which part of the start ran out of memory, and what to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if not on_host and not isinstance(error, torch.OutOfMemoryError):
            raise
        free, total = map(show_bytes, memory_of(resolved))
        where = "memory" if on_host else "the GPU"
        limit = f"{what} do not fit {where}, which has {free} of {total} left"
        raise ConfigError(field, getattr(resolved, field), limit, change) from None

"""What this machine is: processors, memory, GPUs, compiled operators, and the identity of its numerics.

Owns the reading of these facts from the system, torch and the installed package. Decides nothing:
config.engine_config.resolve and startup.memory_plan do, from these facts. Importing it asks nothing and imports no
torch. Invariant: a fact that the system does not tell is an honest zero or an empty value, never a guess.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import resource
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from octavo.config.device_facts import DeviceFacts
from octavo.config.engine_config import Resolved

_CGROUP = Path("/sys/fs/cgroup")
_STATM = Path("/proc/self/statm")  # its first number: pages of address space
_SHOWN_FEATURES = (
    "avx", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_bf16",
    "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
_COMPILED = frozenset(("cpu",))  # attention backends of a CPU that are compiled; others, out of tree too, run in torch
_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "msgspec", "Jinja2", "huggingface_hub", "rich")


def device_facts(device: str = "auto") -> DeviceFacts:
    """The facts that matter for `device` (auto, cpu or cuda). Imports torch."""
    import torch

    from octavo.ops import native

    free, total = memory_bytes()
    name, capability, cuda_free, cuda_total = "", (0, 0), 0, 0
    if device != "cpu" and torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        cuda_free, cuda_total = torch.cuda.mem_get_info()
    return DeviceFacts(
        num_cores=num_cores(),
        omp_num_threads=omp_num_threads(),
        free_bytes=free,
        total_bytes=total,
        native_isas=native.built_isas(),
        cuda=name,
        cuda_capability=capability,
        cuda_free_bytes=cuda_free,
        cuda_total_bytes=cuda_total,
        cpu_features=cpu_features(),
    )


def num_cores() -> int:
    """Processors that this process may use: its affinity, cut to the CPU quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


def omp_num_threads() -> int:
    """The threads that OMP_NUM_THREADS grants a process (the first of a list); 0 where it says nothing usable."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def memory_bytes() -> tuple[int, int]:
    """Bytes of main memory that this process could still take, and that it could ever have."""
    table = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, amount = line.partition(":")
        table[name] = int(amount.split()[0]) * 1024
    total = table.get("MemTotal", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = table.get("MemAvailable", total // 2)
    limit = _read(_CGROUP / "memory.max")
    if limit.isdecimal():
        used = int(_read(_CGROUP / "memory.current") or 0)
        for line in _read(_CGROUP / "memory.stat").splitlines():
            if line.startswith("inactive_file "):  # page cache that the kernel gives back on demand
                used -= int(line.split()[1])
        free, total = min(free, max(int(limit) - used, 0)), min(total, int(limit))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:  # ulimit -v
        used = int((_read(_STATM) or "0").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        free, total = min(free, max(space - used, 0)), min(total, space)
    return free, total


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """The instruction sets that matter to matrix products, of those this processor has."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.partition(":")[2].split())
            return tuple(name for name in _SHOWN_FEATURES if name in present)
    return ()


def versions() -> dict[str, str]:
    """Package -> installed version, of what results and speed depend on. Imports none of them."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def attention_names(resolved: Resolved) -> str:
    """The backends, their options and users' mods, for people and for the numerics contract."""
    others = [f"{name} in layers {list(layers)}" for name, layers in resolved.layer_backends.items() if layers]
    options = [f"{name}={value}" for name, value in sorted(resolved.attention_options.items()) if name != "backend"]
    return ", ".join([resolved.attention_backend, *others, *options])


def numerics_contract(resolved: Resolved, *, native: str, gpu: str = "") -> dict[str, str]:
    """What the bits of a result depend on, beside the model and the request.

    Two engines whose contracts have the same `numerics_id` give the same bits. Instruction sets are not part of it
    where all compiled libraries agree; whether the compiled operators serve at all is (`native`: "none" if they do
    not), and which chain their bfloat16 products follow. Where torch's own operators serve on a CPU, what they compute
    on this one is. On a GPU (`gpu` is its name) the compiler of its kernels is. Imports torch.
    """
    installed = versions()
    if resolved.device == "cuda":
        place = {"gpu": gpu, "triton": installed["triton"]}
    else:
        place = {"bfloat16 chain": resolved.bfloat16_chain}
        used = {resolved.attention_backend, *(name for name, layers in resolved.layer_backends.items() if layers)}
        if native == "none" or not used <= _COMPILED:
            place["torch's operators here"] = torch_digest()
    return place | {
        "operators": _source_digest(Path(__file__).parents[1]),
        "torch": installed["torch"],
        "machine": f"{platform.system()} {platform.machine()}",
        "device": resolved.device,
        "dtype": resolved.dtype,
        "quantization": resolved.quantization or "none",
        "cpu operators": "eager" if native == "none" else "compiled",
        "attention": attention_names(resolved),
        "cache": resolved.kv_cache_dtype,
        "states": resolved.state_dtype,
        "numerics": resolved.numerics,
    }


def torch_digest() -> str:
    """8 hexadecimal digits of what torch's operators give on this CPU, in bits. Imports torch.

    They come from libraries that choose by instruction set and by the processor's maker, exponentials and logarithms
    among them: two CPUs that torch treats alike have the same digits.
    """
    import torch

    order = torch.arange(4096, device="cpu") * 2657 % 4096
    x = (order.to(torch.float32) - 4095.5) / 256  # -16 to 0 in disorder, exact
    rows, matrices = x.view(2, 2, 16, 64), x.repeat(4).view(2, 2, 64, 64)
    with torch.autocast("cpu", enabled=False):  # whoever asks may compute within one
        found = [rows @ matrices, rows @ matrices.mT, x.exp(), (-x).log(), x.tanh()]
        found += [x.view(-1, width).softmax(-1) for width in (8, 64)]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in found)).hexdigest()[:8]


def numerics_id(contract: Mapping[str, str]) -> str:
    """16 hexadecimal digits that name a contract."""
    text = "\n".join(f"{key}={contract[key]}" for key in sorted(contract))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_digest(package: Path) -> str:
    """Digest of the sources that compute: operators, attention, states, layers, models, sampling."""
    digest = hashlib.sha256()
    for folder in ("ops", "attention", "states", "layers", "models", "sampling"):
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".cu"):
                digest.update(path.relative_to(package).as_posix().encode() + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _read(path: Path) -> str:
    """The text of a system file, or "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

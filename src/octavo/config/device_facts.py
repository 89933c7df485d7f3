"""DeviceFacts: what a start must know of a machine, as plain data. Whoever asks the machine is `startup.probe`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What `resolve` and the memory plan need to know of a machine. Bytes are those an engine could take now."""

    num_cores: int
    omp_num_threads: int = 0  # what OMP_NUM_THREADS asks for; 0: nothing
    free_bytes: int
    total_bytes: int
    native_isas: tuple[str, ...] = ()  # instruction sets whose compiled operators are built and run here, best first
    cuda: str = ""  # the GPU's name; empty: none
    cuda_capability: tuple[int, int] = (0, 0)
    cuda_free_bytes: int = 0
    cuda_total_bytes: int = 0
    cpu_features: tuple[str, ...] = ()

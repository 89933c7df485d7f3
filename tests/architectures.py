"""A small architecture and a small machine, for tests of what follows from both."""

from __future__ import annotations

from octavo.checkpoint.arch import Arch, LayerKind
from octavo.config.device_facts import DeviceFacts

ARCH = Arch(
    name="Qwen3ForCausalLM",
    dtype="bfloat16",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_position=2048,
    norm_eps=1e-6,
    layers=(LayerKind(),) * 2,
)
CPU = DeviceFacts(num_cores=2, free_bytes=8 << 30, total_bytes=16 << 30, native_isas=("x86_64_v3",))

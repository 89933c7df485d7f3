"""What a Hopper GPU would be asked to launch, layer after layer, by steps of every kind: found on a CPU.

Tensors say that they are on a GPU, and each operator that would launch a kernel notes its name and its operands down
and computes with its reference implementation. So the order of launches is seen, and that whatever is fused gives the
bits of the lines that it stands for. Run as a program, this records the order for all families, or prints that of one:
`python tests/models/launches.py [family step]`; what changed is printed. To record is right only after a change that is
meant to move launches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program it knows its own folder alone

from loading import load_model
from octavo.attention.base import (
    NO_TENSORS,
    AttentionInputs,
    ForwardContext,
    LayerContext,
    TableContext,
    forward_context,
)
from octavo.attention.reference import ReferenceBackend
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.layers.embedding import Embedding, TiedEmbedding
from octavo.layers.linear import Linear
from octavo.ops import activation, native, rope
from octavo.ops import norm as norms
from octavo.ops.activation import gpu as gpu_activation
from octavo.ops.gemm import LinearWeight, cluster_gemm, linear_reference, skinny_gemm
from octavo.ops.gemm import gpu as gpu_gemm
from octavo.ops.inputs.tensors import LogitTokens
from octavo.ops.norm import gpu as gpu_norm
from octavo.ops.rope import Rotation
from octavo.ops.rope import gpu as gpu_rope

FILE = Path(__file__).with_name("recorded_launches.json")
BF16, BLOCK = torch.bfloat16, 16
_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-mlp-bias": {"architectures": ["LlamaForCausalLM"], "mlp_bias": True, "attention_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 128, "sliding_window": 64,
        "query_pre_attn_scalar": 24, "sliding_window_pattern": 3, "hidden_activation": "gelu_pytorch_tanh",
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 64, "attention_bias": True},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "glm": {"architectures": ["GlmForCausalLM"], "head_dim": 128},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "head_dim": 128},
    "granite": {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"]},
    "seed-oss": {"architectures": ["SeedOssForCausalLM"], "attention_out_bias": True},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 64},
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "sliding_window": 64},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "deepseek2": {"architectures": ["DeepseekV2ForCausalLM"], **_LATENT, "topk_method": "greedy"},
    "deepseek3": {
        "architectures": ["DeepseekV3ForCausalLM"], **_LATENT, "q_lora_rank": 64, "n_group": 2, "topk_group": 1,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
    """Queries of each row, and what a runner says of the step."""

    queries: tuple[int, ...]
    in_graph: bool
    narrows: bool = False
    warmup_only: bool = False


STEPS = {
    **{f"decode graph of {rows}": Step((1,) * rows, True) for rows in (1, 3, 8, 64)},
    "mixed graph": Step((1, 1, 9, 13), True, True),
    "rehearsed decode": Step((1,) * 8, True, warmup_only=True),
    "decode": Step((1,) * 6, False),
    "prompts": Step((3, 30), False, True),
    "one prompt": Step((1,), False, True),
    "all tokens of prompts": Step((3, 2), False),
    "a long prompt": Step((520, 1), False, True),
}
_NO_LAUNCH = {
    "__get__", "view", "split", "flatten", "unflatten", "__getitem__", "stride", "size", "dim", "new_empty",
    "empty_like", "unsqueeze", "data_ptr", "is_contiguous", "__len__", "transpose", "permute", "reshape", "as_subclass",
    "numel", "view_as", "expand", "t", "element_size",
}  # fmt: skip
LOG: list[str] = []


class OnGpu(Tensor):
    """A tensor of the CPU that says that it lies on a GPU."""

    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _NO_LAUNCH:
            _note(func.__name__, *args)
        return super().__torch_function__(func, types, args, kwargs or {})


def on_gpu(x: Tensor) -> Tensor:
    return x.as_subclass(OnGpu)


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Tensor) else value


def _note(name: str, *operands: Any) -> None:
    """Shapes and types of tensors; of all else nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        shapes = [f"{list(x.shape)}{str(x.dtype).removeprefix('torch.')}" for x in operands if isinstance(x, Tensor)]
    LOG.append(f"{name} {' '.join(shapes)}")


def _kernel(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of what launches a kernel."""

    def call(*operands: Any, **options: Any) -> Any:
        _note(name, *operands, *options.values())
        out = compute(*map(_plain, operands), **{key: _plain(value) for key, value in options.items()})
        return tuple(map(on_gpu, out)) if isinstance(out, tuple) else None if out is None else on_gpu(out)

    return call


def _weight(weight: Tensor) -> LinearWeight:
    return LinearWeight(*weight.shape, "bfloat16", weight)


def _linear(x: Tensor, weight: Tensor, bias: Any, out: Tensor, tile: Any = None) -> Tensor:
    return linear_reference(x, _weight(weight), bias, out.dtype, out)


def _normed_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Any, kind: str | None, dtype: torch.dtype | None = None
) -> Tensor:
    y = linear_reference(norms.rms_norm_reference(x, norm, eps), _weight(weight), bias, dtype)
    return y if kind is None else activation.gated_activation_reference(y, kind)


def _linear_add(x: Tensor, weight: Tensor, bias: Any, residual: Tensor) -> Tensor:
    return (linear_reference(x, _weight(weight), bias).float() + residual.float()).to(x.dtype)


def _product(
    x: Tensor, weight: Tensor, out: Tensor, kind: str | None = None, tile: Any = None, residual: Any = None
) -> Tensor:
    y = linear_reference(x, _weight(weight))
    if kind is not None:
        y = activation.gated_activation_reference(y, kind)
    return out.copy_(y if residual is None else (y.float() + residual.float()).to(x.dtype))


def _gated(x: Tensor, *, tanh: bool) -> Tensor:
    return activation.gated_activation_reference(x, "gelu_tanh" if tanh else "silu")


class Backend(ReferenceBackend):
    """As the GPU's own: with a kernel for rotation, store and attention of decoding rows, in graphs."""

    def prepare(self, inputs: AttentionInputs, *, for_capture: bool = False) -> None:
        """As BackendFrame's."""
        _note("prepare", inputs.query_start)
        self._in_graph = for_capture
        super().prepare(inputs, for_capture=for_capture)

    def attend(self, q: Tensor, kv: Tensor, spec: Any, out: Tensor, layer: Any) -> None:
        """As BackendFrame's."""
        _note("attend", q, kv, out)
        super().attend(_plain(q), _plain(kv), spec, _plain(out), layer)

    def rotates(self, rotation: Rotation, kv: Tensor, spec: Any) -> bool:
        """As `octavo.attention.paged` and `octavo.ops.attention.rope_decode` say."""
        whole = rotation.cos_sin.shape[1] == spec.head_size and (rotation.q_norm is None) == (rotation.k_norm is None)
        return self._in_graph and self.inputs.max_query_len == 1 and whole and not spec.value_size

    def run_fused_rope(self, projected: Tensor, rotation: Rotation, kv: Tensor, spec: Any, out: Tensor) -> None:
        """See FusedRopeBackend."""
        _note("fused_rope_decode", projected, rotation.positions, rotation.slot_mapping, kv, out)
        q = rope.qk_norm_rope_store_eager(
            _plain(projected),
            _plain(rotation.positions),
            rotation.cos_sin,
            rotation.q_norm,
            rotation.k_norm,
            rotation.eps,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            _plain(kv),
            _plain(rotation.slot_mapping),
        )
        super().attend(q, _plain(kv), spec, _plain(out), NO_TENSORS)


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Nothing compiled on the CPU, and a Hopper GPU whose kernels are all loaded."""
    from octavo.layers import latent_attention, moe
    from octavo.ops.moe import routing

    patches: list[tuple[Any, str, Any]] = [
        (gpu_norm, "rms_norm", _kernel("rms_norm", norms.rms_norm_reference)),
        (gpu_norm, "add_rms_norm", _kernel("add_rms_norm", norms.add_rms_norm_reference)),
        (gpu_activation, "gated_activation", _kernel("gated_activation", _gated)),
        (gpu_rope, "qk_norm_rope_store", _kernel("qk_norm_rope_store", rope.qk_norm_rope_store_eager)),
        (gpu_gemm, "linear", _kernel("linear", _linear)),
        (skinny_gemm, "normed_linear", _kernel("skinny normed_linear", _normed_linear)),
        (skinny_gemm, "linear_add", _kernel("skinny linear_add", _linear_add)),
        (cluster_gemm, "product", _kernel("cluster product", _product)),
        (cluster_gemm, "is_hopper", lambda device: True),
        (cluster_gemm, "_is_loaded", lambda tile, weights: True),
        (moe, "choose_experts", _kernel("choose_experts", routing.choose_experts_reference)),
        (moe, "run_experts", _kernel("run_experts", moe.run_experts)),
        (moe, "sum_experts", _kernel("sum_experts", routing.sum_experts_reference)),
        (latent_attention, "head_linear", _kernel("head_linear", latent_attention.head_linear)),
        (latent_attention, "latent_rope_store", _kernel("latent_rope_store", latent_attention.latent_rope_store)),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(native.disabled())
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def make_model(family: str) -> Any:
    """Of random weights, on what says that it is a GPU. Within `pretended`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_BASE | FAMILIES[family]))
        model: Any = load_model(read_arch(Path(folder)), None, BF16, load_format="dummy")
    for name, module in model.named_modules():
        if isinstance(module, Linear) and ".experts." not in name:
            storage = on_gpu(module.packed.storage.to(BF16))
            module.packed = dataclasses.replace(module.packed, kind="bfloat16", storage=storage)
            if module.rest is not None:
                rows = module.packed.n - module.rest.n
                module.rest = dataclasses.replace(module.rest, kind="bfloat16", storage=storage[rows:])
        elif isinstance(module, Embedding | TiedEmbedding):
            module.forward = _embed  # type: ignore[method-assign]
    LOG.clear()
    return model


def _embed(ids: Tensor) -> Tensor:
    return on_gpu(torch.randn(len(ids), 512, generator=torch.Generator().manual_seed(len(ids))).to(BF16))


class Engine:
    """As much of one as runs a model's steps: each step's rows are new ones."""

    def __init__(self, model: Any) -> None:
        self.model, self.arch = model, model.arch
        self.specs = model.layer_specs
        self.tables = [
            TableContext(Backend(list(dict.fromkeys(self.specs)), BF16, torch.device("cpu"))) for _ in range(1)
        ]
        heads = self.arch.num_kv_heads
        caches = [on_gpu(torch.zeros(80, heads, BLOCK, spec.channels, dtype=BF16)) for spec in self.specs]
        self.layers = tuple(
            LayerContext(spec, self.tables[0], 0, cache) for spec, cache in zip(self.specs, caches, strict=True)
        )

    @torch.inference_mode()
    def run(self, step: Step) -> tuple[Tensor, list[Tensor]]:
        """(Hidden states, caches) behind a step of prompts."""
        starts = torch.tensor([0, *step.queries]).cumsum(0).int()
        lengths = torch.tensor(step.queries, dtype=torch.int32)
        width, total = -(-max(step.queries) // BLOCK), sum(step.queries)
        table = torch.zeros(len(step.queries), width, dtype=torch.int32)
        slots, positions, block = [], [], 1
        for row, count in enumerate(step.queries):
            used = -(-count // BLOCK)
            table[row, :used] = torch.arange(block, block + used)
            slots += [block * BLOCK + place for place in range(count)]
            positions += range(count)
            block += used
        inputs = AttentionInputs(
            num_rows=len(step.queries),
            num_tokens=total,
            max_query_len=max(step.queries),
            max_seq_len=max(step.queries),
            block_size=BLOCK,
            query_start=starts,
            seq_lens=lengths,
            block_table=table,
            slot_mapping=on_gpu(torch.tensor(slots)),
        )
        at = on_gpu(torch.tensor(positions))
        last = starts[1:].long() - 1
        logits = LogitTokens(
            on_gpu(last), torch.arange(len(lengths)), lengths.long(), torch.arange(len(lengths) + 1, dtype=torch.int32)
        )
        context = ForwardContext(
            layers=self.layers,
            tables=self.tables,
            positions=at,
            logit_tokens=logits if step.narrows else None,
            for_capture=step.in_graph,
            warmup_only=step.warmup_only,
        )
        for own in self.layers:
            own.cache.as_subclass(Tensor).zero_()
        LOG.clear()
        self.tables[0].prepare(inputs, for_capture=step.in_graph)
        with forward_context(context):
            hidden = self.model.forward(torch.arange(total), at)
        return _plain(hidden), [_plain(own.cache).clone() for own in self.layers]


def launches(family: str, *names: str) -> dict[str, list[str]]:
    """Step -> what it launches."""
    with pretended():
        engine, found = Engine(make_model(family)), {}
        for name in names or STEPS:
            engine.run(STEPS[name])
            found[name] = list(LOG)
    return found


def digests(family: str) -> dict[str, str]:
    """Step -> number of launches and a digest of them."""
    return {
        name: f"{len(log)} {hashlib.sha256(chr(10).join(log).encode()).hexdigest()[:12]}"
        for name, log in launches(family).items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)  # thousands of small products: threads that wait for each other take minutes
    if sys.argv[1:]:
        print("\n".join(launches(sys.argv[1], sys.argv[2])[sys.argv[2]]))
    else:
        before, found = json.loads(FILE.read_text()), {family: digests(family) for family in FAMILIES}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        for name in {**before, **found}:
            for step in STEPS:
                old, new = (each.get(name, {}).get(step, "nothing") for each in (before, found))
                if old != new:
                    print(f"{name}, {step}: {old} -> {new}")

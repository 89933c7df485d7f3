"""200 fixed requests whose tokens and log-probabilities are kept: a change of the code shows where it moved bits.

Run as a program, this records them for the device it is given: `python tests/e2e/recorded.py cpu` (or cuda). That is
right only after a change that is meant to move bits, and says so. The figures are kept by torch's version and, on a
GPU, by its name and Triton's version: elsewhere other bits are to be expected. On a CPU `flex` runs in torch, whose
exponentials and logarithms depend on the processor, so its requests are kept by what these give as well.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import user_mods
from octavo import LLM, AttentionMods, SamplingParams
from octavo.attention import sliding_window
from octavo.request.outputs import RequestOutput
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.startup.probe import torch_digest
from random_models import DEEPSEEK, GEMMA, settings_of, token_prompts

FILE = Path(__file__).with_name("recorded_bits.json")
OF_TORCH = "mods: "  # so begin the groups that torch's operators serve on a CPU
_QWEN_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [0], "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "torch_dtype": "float32", "eos_token_id": 1, "bos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "sliding_window": 30, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "eos_token_id": 1, "bos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
_LENGTHS = (1, 2, 15, 16, 17, 31, 40, 63, 64, 65, 100, 128, 7, 90, 33, 48, 5, 80, 120, 150)
_FORMS = (
    {"regex": "[a-f]{3,9}(-[0-9]{2}){1,3}"},
    {"choice": ["return", "raise", "yield"]},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    },
)


def _params(index: int, num_vocabulary: int, *, text: bool) -> SamplingParams:
    """Of request `index`: one of ten kinds."""
    common: dict[str, Any] = {
        "detokenize": text,
        "max_tokens": 12 + index % 7,
        "logprobs": index % 4,
        "ignore_eos": index % 5 != 0,
    }
    drawn = common | {"temperature": 0.5 + 0.1 * (index % 7), "seed": 100 + index}
    match index % 10:
        case 0 | 1:
            return SamplingParams(temperature=0, **common)
        case 2:
            return SamplingParams(top_p=0.9, top_k=30, **drawn)
        case 3:
            return SamplingParams(min_p=0.05, n=2, **drawn)
        case 4:
            return SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2, **drawn)
        case 5:
            return SamplingParams(temperature=0, prompt_logprobs=2, **common)
        case 6:
            return SamplingParams(logit_bias={5: 3.0, 9: -8.0}, min_tokens=4, stop_token_ids=[7, 11], **drawn)
        case 7 if text:
            return SamplingParams(structured_outputs=StructuredOutputsParams(**_FORMS[index // 10 % 3]), **drawn)
        case 8:
            return SamplingParams(allowed_token_ids=list(range(3, num_vocabulary, 3)), **drawn)
        case _:
            return SamplingParams(top_p=0.95, **drawn)


def _groups(folder: Path, device: str) -> Iterator[tuple[str, dict[str, Any], list[Any], list[SamplingParams]]]:
    """(name, settings of an engine, prompts, parameters): 200 requests in all."""
    text = resources.files("octavo").joinpath("assets/octavo-tiny/held_out_prompts.json").read_text()
    prompts = json.loads(text)[:30]
    place: dict[str, Any] = {"device": device} | ({"kv_cache_memory_bytes": 1 << 30} if device == "cuda" else {})
    place |= {"bfloat16_chain": "single"} if device == "cpu" else {}  # on every processor
    tiny = place | {"max_model_len": 512}
    for dtype in ("float32", "bfloat16"):
        yield (
            f"octavo-tiny {dtype}",
            tiny | {"dtype": dtype},
            prompts,
            [_params(index, 4000, text=True) for index in range(30)],
        )
    mods = {"window": sliding_window(24), "scores": user_mods.near, "not causal": AttentionMods(causal=False)}
    for index, (name, own) in enumerate(mods.items()):
        settings = tiny | {"dtype": "float32", "attention_backend": "flex", "attention_mods": own}
        count = 8 if index else 4
        yield f"mods: {name}", settings, prompts[:count], [_params(index, 4000, text=False) for index in range(count)]
    shapes = {"windows": GEMMA, "latent": DEEPSEEK, "experts": _QWEN_MOE, "mistral": _MISTRAL}
    for index, (name, shape) in enumerate(shapes.items()):
        own_folder = folder / name
        own_folder.mkdir()
        settings = settings_of(shape, own_folder) | place | {"dtype": "bfloat16" if index % 2 else "float32"}
        lengths = (_LENGTHS * 2)[:30]
        yield name, settings, token_prompts(*lengths), [_params(index, 290, text=False) for index in range(30)]


def _digest(output: RequestOutput) -> str:
    """Of all tokens and the bits of all log-probabilities."""
    digest = hashlib.sha256()
    for entries in (output.prompt_logprobs or (), *(completion.logprobs or () for completion in output.outputs)):
        for entry in entries:
            for token, own in sorted((entry or {}).items()):
                digest.update(struct.pack("<qf", token, own.logprob))
    for completion in output.outputs:
        digest.update(json.dumps([list(completion.token_ids), completion.finish_reason]).encode())
    return digest.hexdigest()[:12]


def observe(device: str, of_torch: bool | None = None) -> dict[str, list[str]]:
    """Group -> a digest per request. of_torch: only of groups that are, or are not, OF_TORCH."""
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings, prompts, params in _groups(Path(folder), device):
            if of_torch in (None, name.startswith(OF_TORCH)):
                with LLM(**settings) as llm:
                    seen[name] = [_digest(output) for output in llm.generate(prompts, params)]
    return seen


def key(device: str, group: str = "") -> str:
    """Where the bits of a group are to be expected."""
    own = f"{platform.machine()}, torch {metadata.version('torch').partition('+')[0]}"
    if device == "cpu":
        return f"cpu: {own}" + (f", its operators {torch_digest()}" if group.startswith(OF_TORCH) else "")
    import torch

    return f"{torch.cuda.get_device_name()}: {own}, triton {metadata.version('triton')}"


def recorded() -> dict[str, dict[str, list[str]]]:
    """Key -> what was observed there."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


if __name__ == "__main__":
    everything = recorded()
    for name, found in observe(sys.argv[1]).items():
        everything.setdefault(key(sys.argv[1], name), {})[name] = found
    FILE.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    print(f"{FILE.name}: {', '.join(everything)}")

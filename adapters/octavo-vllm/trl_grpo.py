"""TRL's GRPOTrainer over Octavo: `python trl_grpo.py colocate 10`, or `server 10 http://127.0.0.1:8000`.

`logps`, in place of TRL's own forward, makes the trainer's log-probabilities the sampler's. Prints what TRL logs of
every step: `sampling/sampling_logp_difference/max` is 0.0 in all of them.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client

from octavo import rl
from octavo.checkpoint.hub import find_model

TINY = str(find_model("octavo-tiny", None, None))


def logps(
    self: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **options: Any
) -> Any:
    """GRPOTrainer._get_per_token_logps_and_entropies, in the sampler's bits."""
    lengths = attention_mask.sum(1).tolist()
    pack = rl.Pack.of([row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)])
    found = rl.logprobs(model, pack, temperature=self.temperature)
    shape = len(lengths), input_ids.shape[1]
    rows = [torch.zeros(shape) for _ in found]
    for own, out in zip(found, rows, strict=True):
        for index, part in enumerate(pack.split(own)):
            places = attention_mask[index].nonzero()[1:, 0]  # the first token has none
            out[index] = out[index].index_put((places,), part[:-1])
    kept = [out[:, -logits_to_keep:] for out in rows]
    return kept[0], kept[1] if options.get("compute_entropy") else None, None


def allow_cpu() -> None:
    """TRL refuses to send weights from a CPU, in one line."""
    source = inspect.getsource(vllm_client.VLLMClient.init_communicator)
    changed = source.replace('if device.type != "cuda":', "if False:")
    assert changed != source, "TRL has the line that refuses a CPU"
    scope: dict[str, Any] = {}
    exec(inspect.cleandoc(changed) if changed[0] != " " else "if True:\n" + changed, vars(vllm_client), scope)
    vllm_client.VLLMClient.init_communicator = scope["init_communicator"]


def main(mode: str, num_steps: int, url: str | None = None) -> list[dict[str, Any]]:
    """TRL's log of the steps."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    masters = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = rl.convert(masters, dtype=torch.bfloat16)  # the engine's
    prompts = ["def add(a, b):", "import os\n", "class Stack:\n", "for i in range(10):"] * num_steps
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_vllm=True, vllm_mode=mode, vllm_server_base_url=url,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=24, max_steps=num_steps,
        learning_rate=1e-4, logging_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no", beta=0.0,
        temperature=1.0, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=256, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    if mode == "server":
        allow_cpu()
    GRPOTrainer._get_per_token_logps_and_entropies = logps
    trainer = GRPOTrainer(
        model=model, args=config, processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=lambda completions, **_: [len(set(text)) / max(len(text), 1) for text in completions],
    )  # fmt: skip
    trainer.train()
    return [line for line in trainer.state.log_history if "sampling/sampling_logp_difference/max" in line]


if __name__ == "__main__":
    for line in main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:4]):
        sys.stdout.write(json.dumps(line) + "\n")

"""TRL's VLLMClient against `octavo serve`, method by method: `python trl_client.py http://127.0.0.1:8000`."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient

sys.path.insert(0, sys.argv[2])

from trl_grpo import TINY, allow_cpu

allow_cpu()
url = sys.argv[1]
client = VLLMClient(base_url=url, connection_timeout=30)
tokenizer = AutoTokenizer.from_pretrained(TINY)
ids = [tokenizer.encode("def add(a, b):"), tokenizer.encode("import os")]
for num_logprobs in (0, 2, None):
    found = client.generate(ids, n=2, max_tokens=6, logprobs=num_logprobs, temperature=1.0)
    assert found["prompt_ids"] == ids and len(found["completion_ids"]) == 4, found
    assert (found["logprobs"] is None) == (num_logprobs is None)
chatted = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=4)
assert len(chatted["completion_ids"]) == 1, chatted
scored = client.get_sequence_logprobs([ids[0]], [2], top_logprobs=2)
assert scored, scored
assert client.get_server_info()["weight_transfer_config"] and client.get_world_size() == 1
client.init_communicator(device="cpu")
model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
greedy = {"max_tokens": 12, "temperature": 0.0}
client.update_model_params(model)
before = client.generate(ids, **greedy)["completion_ids"]
client.update_model_params(model)
assert client.generate(ids, **greedy)["completion_ids"] == before
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(1.25)
client.update_model_params(model)
assert client.generate(ids, **greedy)["completion_ids"] != before
client.reset_prefix_cache()
client.close_communicator()
print("every method passed")

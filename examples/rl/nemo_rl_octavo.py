"""Octavo as NeMo-RL's generation: an object of its GenerationInterface, in the place of VllmGeneration.

    generation = OctavoGeneration(config["policy"]["generation"])

Every engine is one `octavo serve` of this node, which the driver starts; requests go to them in turn. For a refit the
driver asks the policy's first worker to call `send_weights` of `generation.sender_facts()`: that worker is rank 0, has
the whole of each tensor, and sends to each engine. Written for NeMo-RL's interface of 2026-08.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationInterface, verify_right_padding
from octavo_server import OctavoServer

from octavo import rl

AT_ONCE = 256  # requests on their way to an engine


def send_weights(urls: list[str], named: Iterable[tuple[str, torch.Tensor]], version: str, backend: str) -> None:
    """What the policy's first worker does in a refit: tensors are gathered once, and go to every engine."""
    senders = [rl.Sender(url, backend) for url in urls]
    weights = dict(named) if len(senders) > 1 else None
    for sender in senders:
        sender.send(named if weights is None else weights.items(), version)
        sender.close()


class OctavoGeneration(GenerationInterface):
    """Engines, and the calls that NeMo-RL makes of a generation backend."""

    def __init__(self, config: dict[str, Any], num_engines: int = 1, backend: str = "gloo") -> None:
        """`config`: policy.generation, whose `octavo_cfg` may hold max_model_len, dtype and `arguments`."""
        own = config.get("octavo_cfg", {})
        arguments = ["--dtype", own.get("dtype", "bfloat16"), *own.get("arguments", [])]
        if "max_model_len" in own:
            arguments += ["--max-model-len", str(own["max_model_len"])]
        self.config, self.backend, self.version = config, backend, 0
        self.engines = [OctavoServer(config["model_name"], *arguments, backend=backend) for _ in range(num_engines)]
        self._pool = ThreadPoolExecutor(AT_ONCE * num_engines)

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Right-padded prompts in; prompts with what was drawn behind them, right-padded, and log-probabilities."""
        pad, config = self.config["_pad_token_id"], self.config
        verify_right_padding(data, pad_value=pad)
        lengths = data["input_lengths"].tolist()
        stops = data.get("stop_strings", [None] * len(lengths))
        params = {
            "max_tokens": config["max_new_tokens"],
            "temperature": 0.0 if greedy else config["temperature"],
            "top_p": 1.0 if greedy else config["top_p"],
            "top_k": -1 if greedy or config["top_k"] is None else config["top_k"],
            "stop_token_ids": config["stop_token_ids"],
            "include_stop_str_in_output": True,
            "logprobs": 0,
        }

        def draw(index: int) -> dict[str, Any]:
            stop = [*(stops[index] or []), *(config["stop_strings"] or [])]
            ids = data["input_ids"][index, : lengths[index]].tolist()
            own = params | ({"stop": stop} if stop else {})
            return self.engines[index % len(self.engines)].generate(ids, own)

        said = list(self._pool.map(draw, range(len(lengths))))
        width = data["input_ids"].shape[1] + max(len(each["token_ids"]) for each in said)
        ids, scores = torch.full((len(said), width), pad), torch.zeros(len(said), width)
        for row, (length, each) in enumerate(zip(lengths, said, strict=True)):
            end = length + len(each["token_ids"])
            ids[row, :length] = data["input_ids"][row, :length]
            ids[row, length:end] = torch.tensor(each["token_ids"], dtype=torch.int64)
            scores[row, length:end] = torch.tensor(each["logprobs"])
        drawn = torch.tensor([len(each["token_ids"]) for each in said])
        return BatchedDataDict(
            {
                "output_ids": ids,
                "logprobs": scores,
                "generation_lengths": drawn,
                "unpadded_sequence_lengths": torch.tensor(lengths) + drawn,
                "truncated": torch.tensor([each["finish_reason"] == "length" for each in said]),
            }
        )

    def sender_facts(self) -> tuple[list[str], str, str]:
        """(urls, version, backend) of the next refit, for `send_weights`."""
        self.version += 1
        return [engine.url for engine in self.engines], f"refit-{self.version}", self.backend

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int) -> list[Any]:
        """Senders meet their engines by themselves."""
        return []

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """An update says itself what comes."""

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Wake what sleeps."""
        for engine in self.engines:
            engine.post("/wake_up")
        return True

    def finish_generation(self, *args: Any, release_gpu: bool = True, **kwargs: Any) -> bool:
        """Give memory back, where the trainer stands on the same device."""
        if release_gpu and self.blocks_training():
            for engine in self.engines:
                engine.post("/sleep?level=1&mode=wait")
        return True

    def blocks_training(self) -> bool:
        """Whether engines and trainer share a device."""
        return bool(self.config.get("colocated", {}).get("enabled", False))

    def pause_generation(self, *, clear_cache: bool) -> bool:
        """Freeze what runs; an update computes it again."""
        for engine in self.engines:
            engine.post("/pause?mode=keep")
        return True

    def resume_generation(self) -> bool:
        """Go on."""
        for engine in self.engines:
            engine.post("/resume")
        return True

    def invalidate_kv_cache(self) -> bool:
        """Nothing is to be invalidated: blocks know the weights that they were made with."""
        return True

    def shutdown(self) -> bool:
        """Stop the engines. May be called twice."""
        self._pool.shutdown()
        for engine in self.engines:
            engine.close()
        return True

"""World: a sampler with its request table, and the oracle's answer for every row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from octavo.device.staging import make_queue
from octavo.plan import NewRow, StepLimits, TokenLogprobs
from octavo.request.sampling_params import SamplingParams
from octavo.sampling.rows import SampleBatch
from octavo.sampling.sampler import Sampler, SamplerOutput
from sampler_reference import sample_reference

POISON = 2**31 - 1  # what unused places of the request table hold


class World:
    """`requests[row]` is the NewRow, `known[row]` its tokens so far."""

    def __init__(
        self, vocab_size: int = 97, max_num_rows: int = 40, max_model_len: int = 64, device: str = "cpu", **options: Any
    ) -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self.mode = options.get("logprobs_mode", "raw_logprobs")
        self.table = torch.full((max_num_rows, max_model_len), POISON, dtype=torch.int32, device=device)
        self.prompt_lens = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        options.setdefault("mask_patience", math.inf)  # no row is held unless a test wants it
        self.queue = make_queue(self.device)
        self.sampler = Sampler(
            StepLimits(max_num_rows=max_num_rows - 1, max_num_tokens=max_num_rows, max_model_len=max_model_len),
            vocab_size=vocab_size,
            device=self.device,
            tokens=self.table,
            prompt_lens=self.prompt_lens,
            queue=self.queue,
            **options,
        )
        self.requests: dict[int, NewRow] = {}
        self.known: dict[int, list[int]] = {}

    def add(
        self,
        row: int,
        prompt: Sequence[int] = (1, 2, 3),
        output: Sequence[int] = (),
        *,
        seed: int = 7,
        eos: Sequence[int] = (),
        **params: Any,
    ) -> None:
        """Give `row` a request, as new or as resumed with replayed output."""
        self.remove(row)
        tokens = [*prompt, *output]
        new = NewRow(
            row=row,
            request_id=f"r{row}",
            token_ids=tokens,
            num_prompt=len(prompt),
            num_computed=0,
            block_ids=[[]],
            sampling=SamplingParams(max_tokens=None, **params),
            seed=seed,
            eos_token_ids=list(eos),
        )
        self.requests[row], self.known[row] = new, tokens.copy()
        self.prompt_lens[row] = len(prompt)
        self.table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.sampler.add(new)

    def remove(self, row: int) -> None:
        """The request of `row` ends."""
        if row in self.requests:
            self.sampler.remove(row)
            self.table[row] = POISON
            del self.requests[row], self.known[row]

    def commit(self, row: int, token: int) -> None:
        """A sampled token becomes known."""
        self.table[row, len(self.known[row])] = token
        self.known[row].append(token)

    def batch(self, rows: Sequence[int], positions: Sequence[int] | None = None) -> SampleBatch:
        """One step's rows. `positions`: the end of each row's tokens unless given."""
        at = [len(self.known[row]) for row in rows] if positions is None else list(positions)
        return SampleBatch(
            rows=torch.tensor(rows, device=self.device),
            positions=torch.tensor(at, device=self.device),
            rows_np=np.array(rows, np.int64),
            max_position=min(max(at) + 3, self.table.shape[1]),  # an upper bound may be loose
        )

    def sample(
        self, rows: Sequence[int], logits: torch.Tensor, positions: Sequence[int] | None = None
    ) -> SamplerOutput:
        """One step, of `batch`."""
        self.queue.apply()
        self.sampler.apply_staged()
        return self.sampler(logits.to(self.device, copy=True), self.batch(rows, positions))

    def expected(self, row: int, logits: torch.Tensor, position: int = -1) -> tuple[int, TokenLogprobs | None]:
        """The oracle's answer for one logits row, [V]."""
        new = self.requests[row]
        tokens = self.known[row] if position < 0 else self.known[row][:position]
        return sample_reference(
            logits.numpy(),
            new.sampling,
            tokens=tokens,
            num_prompt=new.num_prompt,
            seed=new.seed,
            eos_token_ids=new.eos_token_ids,
            logprobs_mode=self.mode,
        )

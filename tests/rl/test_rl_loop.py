"""RL.N6: GRPO on octavo-tiny, the weights handed to an engine after every update: KL 0 and ratio 1 in each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, rl
from rl_rig import DTYPES, TINY, num_differing, random_ids, sampled, tiny


def _sampler(dtype: torch.dtype) -> LLM:
    return LLM(TINY, dtype=str(dtype)[6:], skip_tokenizer_init=True, weight_transfer_config={"backend": "disk"})


class Loop:
    """A trainer, a sampler that takes its weights, and what each update said."""

    def __init__(self, llm: LLM, dtype: torch.dtype) -> None:
        self.model, self.llm = rl.convert(tiny(dtype)), llm
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.sender = rl.Sender(llm, "local")
        self.stale: list[int] = []  # log-probabilities of an update's tokens that differ after it

    def update(self, step: int, group: int, max_tokens: int) -> tuple[float, float, int]:
        """(largest KL, largest distance of the ratio from 1, log-probabilities compared)."""
        prompts = [prompt for prompt in random_ids(3, 17, vocab_size=4096, seed=step) for _ in range(group)]
        sequences, old = sampled(self.llm, prompts, seed=None, max_tokens=max_tokens)
        rewards = torch.tensor([float(sum(token % 7 == 0 for token in each[-max_tokens:])) for each in sequences])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        kl, ratio, count = 0.0, 0.0, 0
        half = len(sequences) // 2 - 1  # microbatches of unequal packing
        for part in (slice(0, half), slice(half, None)):
            pack = rl.Pack.of(sequences[part])
            new = rl.logprobs(self.model, pack).logprobs
            seen = new.detach()
            given = torch.cat([torch.tensor([*each, 0.0]) for each in old[part]])
            difference = given - seen
            kl = max(kl, float((difference.exp() - difference - 1).abs().max()))
            ratio = max(ratio, float(((seen - given).exp() - 1).abs().max()))
            weights = advantages[part].repeat_interleave(torch.tensor(pack.lengths))
            (-((new - given).exp() * weights).sum() / len(sequences)).backward()
            count += pack.num_tokens - len(pack.lengths)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            pack = rl.Pack.of(sequences)
            self.stale.append(num_differing(pack.split(rl.logprobs(self.model, pack).logprobs), old))
        self.sender.send(rl.WeightSource(self.model), f"step-{step}")
        return kl, ratio, count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N6_ten_updates(dtype: torch.dtype) -> None:
    with _sampler(dtype) as llm:
        loop = Loop(llm, dtype)
        for step in range(10):
            kl, ratio, count = loop.update(step, group=3, max_tokens=12)
            assert (kl, ratio) == (0.0, 0.0) and count > 100
        assert min(loop.stale) > 0, "an update moves weights, and stale ones are seen"
        assert llm.get_weight_version() == "step-9"


def test_RL_A7_the_lines_of_the_page_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TINY, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs/rl.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert "range(100)" in code
    own: dict[str, Any] = {}
    exec(code.replace("range(100)", "range(2)"), own)
    assert all(torch.equal(each, torch.ones_like(each)) for each in [own["ratio"]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N6_a_hundred_updates(dtype: torch.dtype) -> None:
    with _sampler(dtype) as llm:
        loop = Loop(llm, dtype)
        for step in range(100):
            kl, ratio, _ = loop.update(step, group=8, max_tokens=32)
            assert (kl, ratio) == (0.0, 0.0)
        assert min(loop.stale) > 0

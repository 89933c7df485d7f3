"""RL.N6: GRPO on octavo-tiny, the weights sent to a sampler by a session after every update: KL 0 and ratio 1 in each.

The sampler is an LLM of this process or an `octavo serve`. Three controls differ in every update that they are asked
in: the same weights in transformers' forward, the weights before the update, and those with one lowest bit flipped.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, rl
from octavo.rl.session import WeightUpdateError
from rl_rig import DTYPES, TINY, flip_lowest_bit, num_differing, random_ids, sampled, tiny

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer

PAGE = Path(__file__).resolve().parents[2] / "docs/rl.md"
Samples = tuple[list[list[int]], list[list[float]]]


class InProcess:
    """An LLM that draws, and takes weights as they lie."""

    def __init__(self, dtype: torch.dtype) -> None:
        config = {"backend": "disk"}
        self.llm = LLM(TINY, dtype=str(dtype)[6:], skip_tokenizer_init=True, weight_transfer_config=config)
        self.sender, self.close = rl.Sender(self.llm, "local"), self.llm.close

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Samples:
        return sampled(self.llm, prompts, seed=None, max_tokens=max_tokens)

    def version(self) -> str:
        return self.llm.get_weight_version()


class OverHttp:
    """An `octavo serve` that draws for eight clients at once, and takes weights over gloo."""

    def __init__(self, dtype: torch.dtype) -> None:
        config = ("--weight-transfer-config", '{"backend": "gloo"}')
        self.server = RunningServer("--dtype", str(dtype)[6:], "--skip-tokenizer-init", *config).wait_ready()
        self.sender, self.close = rl.Sender(self.server.url, "gloo"), self.server.close
        self.pool = ThreadPoolExecutor(8)

    def sample(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Samples:
        drawn = {"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}

        def draw(prompt: Sequence[int]) -> tuple[list[int], list[float]]:
            reply = self.server.post("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": drawn})
            assert reply.status == 200, reply.body
            (choice,), scores = reply.json()["choices"], reply.json()["prompt_logprobs"]
            known = [entry[str(token)]["logprob"] for entry, token in zip(scores[1:], prompt[1:], strict=True)]
            ids = [*prompt, *choice["token_ids"]]
            return ids, known + [entry["logprob"] for entry in choice["logprobs"]["content"]]

        sequences, values = zip(*self.pool.map(draw, prompts), strict=True)
        return list(sequences), list(values)

    def version(self) -> str:
        return str(self.server.get("/weight_info").json()["weight_version"])


class Loop:
    """A trainer, a sampler that takes its weights, and what each update said."""

    def __init__(self, sampler: InProcess | OverHttp, dtype: torch.dtype) -> None:
        self.model, self.sampler = rl.convert(tiny(dtype)), sampler
        self.plain = tiny(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.stale: list[int] = []  # log-probabilities of an update's tokens that differ after it

    def update(self, step: int, group: int, max_tokens: int) -> tuple[float, float, int]:
        """(largest KL, largest distance of the ratio from 1, log-probabilities compared)."""
        prompts = [prompt for prompt in random_ids(3, 17, vocab_size=4096, seed=step) for _ in range(group)]
        sequences, old = self.sampler.sample(prompts, max_tokens)
        if step % 10 == 0:
            self.check_plain(sequences, old)
        if step == 0:  # later on a policy may be so sure of itself that a float32's lowest bit is lost in rounding
            self.check_flipped(sequences, old)
        rewards = torch.tensor([float(sum(token % 7 == 0 for token in each[-max_tokens:])) for each in sequences])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        kl, ratio, count = 0.0, 0.0, 0
        half = len(sequences) // 2 - 1  # microbatches of unequal packing
        for part in (slice(0, half), slice(half, None)):
            pack = rl.Pack.of(sequences[part])
            new = rl.logprobs(self.model, pack).logprobs
            seen = new.detach()
            given = torch.cat([torch.tensor([*each, 0.0]) for each in old[part]])
            assert torch.equal(seen, given), "max() below would pass over a NaN"
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
        self.sampler.sender.send(rl.WeightSource(self.model), f"step-{step}")
        assert self.sampler.version() == f"step-{step}"
        return kl, ratio, count

    @torch.no_grad()
    def check_plain(self, sequences: list[list[int]], old: list[list[float]]) -> None:
        """The same weights in transformers' forward differ."""
        self.plain.load_state_dict(self.model.state_dict())
        found = []
        for ids in sequences:
            logs = self.plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            found.append(logs.gather(1, torch.tensor([*ids[1:], 0])[:, None])[:, 0])
        assert num_differing(found, old) > 0

    @torch.no_grad()
    def check_flipped(self, sequences: list[list[int]], old: list[list[float]]) -> None:
        """The lowest bit of one weight is seen; back again, all is the same."""
        weight, pack = self.model.model.layers[3].mlp.down_proj.weight, rl.Pack.of(sequences)
        for flipped in (True, False):
            flip_lowest_bit(weight, int(weight.detach().abs().argmax()))
            assert (num_differing(pack.split(rl.logprobs(self.model, pack).logprobs), old) > 0) == flipped


@pytest.fixture(params=[InProcess, OverHttp])
def sampler(request: pytest.FixtureRequest, dtype: torch.dtype) -> Iterator[InProcess | OverHttp]:
    made = request.param(dtype)
    yield made
    made.close()


@pytest.mark.parametrize("sampler", [InProcess], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N6_ten_updates(sampler: InProcess, dtype: torch.dtype) -> None:
    _run(Loop(sampler, dtype), num_updates=10, group=3, max_tokens=12)


@pytest.mark.parametrize("sampler", [OverHttp], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_RL_N6_three_updates_over_http(sampler: OverHttp, dtype: torch.dtype) -> None:
    _run(Loop(sampler, dtype), num_updates=3, group=3, max_tokens=12)


def lines_of_the_page() -> str:
    """Its first block of Python."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith("# Your loop, exact in ten lines\n")
    return page.partition("```python\n")[2].partition("```")[0]


def test_RL_A7_the_lines_of_the_page_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TINY, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    code = lines_of_the_page()
    assert "range(100)" in code
    own: dict[str, Any] = {}
    exec(code.replace("range(100)", "range(3)"), own)
    assert torch.equal(own["ratio"], torch.ones_like(own["ratio"])) and len(own["ratio"]) > 16
    assert own["llm"].get_weight_version() == "step-2"
    own["llm"].close()


def test_RL_A7_the_lines_in_float32_want_one_setting_which_the_refusal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page writes it, and so does what refuses a tensor that bfloat16 does not hold; the old weights stay."""
    shutil.copytree(TINY, tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    (setting,) = re.findall(
        r"`LLM\(\"policy\", dtype=\"float32\", (weight_transfer_config=.*?})\)`", PAGE.read_text("utf-8")
    )
    code = lines_of_the_page().replace("range(100)", "range(2)").replace("torch.bfloat16", "torch.float32")
    for more in ("", f", {setting}"):
        own: dict[str, Any] = {}
        lines = code.replace('dtype="bfloat16")', f'dtype="float32"{more})')
        if more:
            exec(lines, own)
        else:
            with pytest.raises(
                WeightUpdateError, match=rf"^model\.embed_tokens\.weight: .* {re.escape(setting)}, octavo"
            ):
                exec(lines, own)
        assert torch.equal(own["ratio"], torch.ones_like(own["ratio"]))
        assert own["llm"].get_weight_version() == ("step-1" if more else "default")
        own["llm"].close()


def test_RL_A7_the_page_has_ten_lines_beside_its_imports() -> None:
    """Plain ones: a statement each, of which none is folded, and what a loop is about is to be seen in them."""
    module = ast.parse(lines_of_the_page())
    imports = [each for each in module.body if isinstance(each, ast.Import | ast.ImportFrom)]
    (loop,) = (each for each in module.body if isinstance(each, ast.For))
    statements = [each for each in [*module.body, *loop.body] if each not in imports]
    written = [line for line in lines_of_the_page().splitlines() if line.strip()]
    assert len(imports) + len(statements) == len(written) and len(statements) <= 10
    assert len({each.lineno for each in statements}) == len(statements) and max(map(len, written)) <= 120
    assigned = [each.targets[0].id for each in loop.body if isinstance(each, ast.Assign)]  # type: ignore[attr-defined]
    assert {"ratio", "loss"} <= set(assigned)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_RL_N6_a_hundred_updates(sampler: InProcess | OverHttp, dtype: torch.dtype) -> None:
    _run(Loop(sampler, dtype), num_updates=100, group=8, max_tokens=32)


def _run(loop: Loop, num_updates: int, group: int, max_tokens: int) -> None:
    compared = 0
    for step in range(num_updates):
        kl, ratio, count = loop.update(step, group, max_tokens)
        assert (kl, ratio) == (0.0, 0.0) and count > 2 * group * max_tokens
        compared += count
    assert min(loop.stale) > 0, "an update moves weights, and stale ones are seen"
    print(f"{compared} log-probabilities compared, none differs; at least {min(loop.stale)} of stale weights do")

"""A head's product that draws, on Hopper: the tokens and failures of product and draw, and which calls it takes."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from insides import runner_of
from matmul_rig import heavy_tailed
from octavo import LLM, SamplingParams
from octavo.bench.shapes import SHAPES
from octavo.ops import sampling as sample
from octavo.ops.gemm import gpu as matmul
from octavo.ops.gemm import linear, pack_linear
from octavo.ops.sampling import fused_lm_head_sampling
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
Tables = tuple[Tensor, Tensor, Tensor, Tensor]


def _tables(num_rows: int, temperatures: tuple[float, ...], seed: int) -> Tables:
    """Rows' places in larger tables, temperatures in turn, seeds and positions of all sizes."""
    torch.manual_seed(seed)
    size = num_rows + 9
    rows = torch.randperm(size)[:num_rows]
    table = torch.tensor(temperatures).repeat(size)[:size]
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (size,))
    positions = torch.randint(0, 1 << 20, (num_rows,))
    return rows.cuda(), table.cuda(), seeds.cuda(), positions.cuda()


def _check(x: Tensor, weight: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Equal to two kernels. Gives those."""
    packed = pack_linear(weight)
    assert fused_lm_head_sampling.serves(x, packed.storage) == (len(x) in fused_lm_head_sampling.ROWS)
    expected = sample.draw(linear(x, packed, out_dtype=torch.float32), *tables)
    drawn = fused_lm_head_sampling.draw(x, packed.storage, *tables)
    for own, other in zip(drawn, expected, strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other), (len(x), int((own != other).sum()))
    return expected


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("n", "k"), [(151936, 1024), (65536 + 40, 64), (70000, 1088)])
def test_draws_what_product_and_draw_do(n: int, k: int, dtype: torch.dtype) -> None:
    """Greedy, hot and cold rows, alone and beside each other, at many numbers of rows."""
    weight = torch.randn(n, k, device="cuda").div(k**0.5).to(dtype)
    for num_rows in (65, 72, 96, 127, 128, 129, 200, 256, 257, 320, 384, 385, 448, 500, 512):
        x = torch.randn(num_rows, k, device="cuda").to(dtype)
        for temperatures in ((0.0,), (1.0,), (0.0, 0.3, 1.0, 0.0, 7.0), (0.0,) * 16 + (1.0,), (1e-30, 1e30, 0.0)):
            tokens, failed = _check(x, weight, _tables(num_rows, temperatures, num_rows))
            assert not failed.any()
            if 1e30 not in temperatures:
                assert len(tokens.unique()) > num_rows / 2, "rows draw their own"


def test_ties_go_to_the_lower_token_and_not_a_number_is_told() -> None:
    n, k, num_rows = 151936, 256, 300
    weight = torch.randn(n, k, device="cuda").to(BF16)
    weight[n // 2 :] = weight[: n // 2].flip(0)  # every logit twice
    x = torch.randn(num_rows, k, device="cuda").to(BF16)
    x[::7] = 0.0  # all logits equal
    x[1::7] = float("nan")
    x[2::7] = float("inf")  # infinite ones of both signs
    x[3::7, 0], x[3::7, 1:] = float("inf"), 0.0  # infinite ones, none a NaN, but where a weight is 0
    for temperatures in ((0.0,), (1.0,), (0.0, 0.0, 0.5)):
        tables = _tables(num_rows, temperatures, 3)
        tokens, failed = _check(x, weight, tables)
        assert bool(failed[1::7].all()) and not failed[::7].any()
        if temperatures == (0.0,):
            assert not tokens[::7].any()
            assert bool((tokens[4::7] < n // 2).all())
    weight[100_000, 3] = float("nan")  # a NaN of one token, which is not drawn
    tokens, failed = _check(x[4::7].contiguous().repeat(2, 1), weight, _tables(2 * len(x[4::7]), (0.0, 1.0), 4))
    assert bool(failed.all()) and not (tokens == 100_000).any()


def test_sums_are_the_canonical_ones() -> None:
    """Of values over 16 binades, any other order of the sums gives other tokens."""
    weight = heavy_tailed(65536 + 64, 1024, dtype=BF16, seed=1, device="cuda")
    for num_rows in (72, 200, 512):
        x = heavy_tailed(num_rows, 1024, dtype=BF16, seed=2, device="cuda")
        _check(x, weight / 4096, _tables(num_rows, (0.0, 1.0), 5))


def test_captured_behind_the_kernel_that_makes_its_rows() -> None:
    """Of a replay, rows and tables are those of its time; many replays leave the scratch as they found it."""
    n, k, num_rows = 151936, 512, 130
    weight, x = torch.randn(n, k, device="cuda").to(BF16), torch.randn(num_rows, k, device="cuda").to(BF16)
    turned, tables = torch.zeros_like(x), _tables(num_rows, (0.0, 1.0), 6)
    fused_lm_head_sampling.draw(turned, weight, *tables)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.neg(x, out=turned)
        drawn = fused_lm_head_sampling.draw(turned, weight, *tables)
    for turn in range(5):
        x.normal_(generator=torch.Generator("cuda").manual_seed(turn))
        tables[1].fill_(0.5 * turn)
        tables[3].add_(1)
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
        expected = _check(-x, weight, tables)
        assert all(map(torch.equal, drawn, expected))
    assert not any(part.any() for part in fused_lm_head_sampling.SCRATCH.of(x.device)[2:])


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(65536, 256, device="cuda").to(BF16), torch.randn(513, 264, device="cuda").to(BF16)
    rows = x[:512, :256]
    assert fused_lm_head_sampling.supports(weight) == fused_lm_head_sampling.ROWS
    assert fused_lm_head_sampling.serves(rows, weight) and fused_lm_head_sampling.serves(x[:112, 8:], weight)
    assert not fused_lm_head_sampling.serves(x[:, :256], weight), "many rows"
    assert not any(fused_lm_head_sampling.serves(rows[:count], weight) for count in (1, 64, 111, 129, 320))
    assert not fused_lm_head_sampling.serves(x[:512, 1:257], weight), "the copy engine steps over 16 bytes"
    assert not fused_lm_head_sampling.serves(rows.half(), weight) and not fused_lm_head_sampling.serves(
        rows.float(), weight.float()
    )
    assert not fused_lm_head_sampling.supports(weight[:65535]) and not fused_lm_head_sampling.supports(
        weight[:, :250].contiguous()
    )
    matmul.select("fast")
    try:
        assert not fused_lm_head_sampling.serves(rows, weight)
    finally:
        matmul.select("reproducible")
    monkeypatch.setattr(fused_lm_head_sampling, "_functions", {})
    assert fused_lm_head_sampling.supports(weight) == fused_lm_head_sampling.ROWS
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert not fused_lm_head_sampling.serves(rows, weight), "nothing is loaded while a graph is captured"
        x.neg_()


@pytest.mark.parametrize("why", ["other tokens", "does not load"])
def test_a_kernel_that_cannot_be_had_is_told_once(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Where it is compared now, not as kept before."""
    weight, x = torch.randn(65536, 256, device="cuda").to(BF16), torch.randn(128, 256, device="cuda").to(BF16)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("_are_found", "_functions"):
        monkeypatch.setattr(fused_lm_head_sampling, name, {})
    if why == "other tokens":
        expected = fused_lm_head_sampling.sample.draw
        monkeypatch.setattr(
            fused_lm_head_sampling.sample, "draw", lambda *args: (expected(*args)[0] + 1, expected(*args)[1])
        )
    else:
        monkeypatch.setattr(
            fused_lm_head_sampling,
            "machine_codes",
            lambda *_: dict.fromkeys([fused_lm_head_sampling.SHARED_ROWS], b"none"),
        )
    with caplog.at_level(logging.WARNING):
        assert not any(fused_lm_head_sampling.serves(x, weight) for _ in range(3))
    assert len(caplog.records) == 1


def test_an_engines_steps_have_the_same_tokens_with_and_without_logits(tmp_path: Path) -> None:
    """Of rows that only draw, one of which fails; of rows beside one with a cut; and without graphs."""
    shape = SHAPES["0.6b"] | {"tie_word_embeddings": False, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    prompts = [{"prompt_token_ids": [7, 8, 1000 + index]} for index in range(125)]
    plain, cut = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}, {"temperature": 1.0, "top_p": 0.5}
    params = [SamplingParams(temperature=index % 3 / 2, seed=index, **plain) for index in range(125)]
    beside_cut = [SamplingParams(seed=1, **cut, **plain), *params[1:]]
    found = []
    for eager in (False, True):
        with LLM(
            str(tmp_path),
            load_format="dummy",
            device="cuda",
            dtype="bfloat16",
            max_num_seqs=128,
            enforce_eager=eager,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
            max_model_len=256,
        ) as llm:
            runner = runner_of(llm.engine)
            runner.model.embedding.weight[1005] = float("nan")
            assert runner.model.fused_sampling_rows() == fused_lm_head_sampling.ROWS
            replayed, replay = set(), runner._graphs.replay
            runner._graphs.replay = lambda key, _, to=replayed, call=replay: to.add(key) or call(key)
            for wishes, gives_logits in ((params, False), (beside_cut, True)):
                replayed.clear()
                with no_waits():
                    found.append([[*output.outputs[0].token_ids] for output in llm.generate(prompts, wishes)])
                kinds = {key.gives_logits for key in replayed if key.is_decode and key.num_rows == 128}
                assert kinds == (set() if eager else {gives_logits})
    assert found[:2] == found[2:]
    assert found[0][1:] == found[1][1:] and found[0][0] != found[1][0]
    assert [index for index, tokens in enumerate(found[0]) if len(tokens) < 12] == [5]

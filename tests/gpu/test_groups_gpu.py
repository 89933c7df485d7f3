"""Models whose layers are not all alike, on a CUDA device: mixed cache groups and latent states, on every backend."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from insides import runner_of
from octavo import LLM, SamplingParams
from octavo.plan import IntArray, NewRow
from random_models import DEEPSEEK, GEMMA, settings_of, token_prompts
from sync_guard import no_waits

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
FORCED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, allowed_token_ids=[11])
PROMPTS = token_prompts(5, 130, 67, 300, 1)
SMALL = {
    "num_gpu_blocks_override": 400,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
}
WIDE_GEMMA = GEMMA | {"head_dim": 64}  # every backend has kernels for it
# Of Gemma 3 4B's width, where embeddings of standard deviation 0.02 times its root are of size 1; `_scale_by_depth`.
SCALED_GEMMA = WIDE_GEMMA | {"hidden_size": 2560, "intermediate_size": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "octavo-tiny": {},
    "Gemma 3": WIDE_GEMMA,
    "Gemma 3, scaled": SCALED_GEMMA,
    "DeepSeek": DEEPSEEK,
}
OWN_BLOCKS = {"flash": 256, "flashinfer": 128}  # cache blocks; flashinfer splits them into kernel blocks of 64
# backends that look at what is on the device, and one that compiles, and compares what it compiled, within a step
WAITING = {"reference", "flex", *OWN_BLOCKS}
CASES = [
    (model, backend)
    for model in ("octavo-tiny", "Gemma 3, scaled", "DeepSeek")
    for backend in (["mla"] if model == "DeepSeek" else ["paged", "paged and reference", "flex", "flash", "flashinfer"])
]
GEMMA_SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {"enforce_eager": False},
    "chunks of 32": {"max_num_batched_tokens": 32},
    "kernel blocks of 16 in BLNHC": {
        "block_size": 128,
        "kv_cache_layout": "BLNHC",
        "attention_config": {"kernel_block_size": 16},
    },
    "kernel blocks of 64 in BLHNC": {
        "block_size": 128,
        "kv_cache_layout": "BLHNC",
        "attention_config": {"kernel_block_size": 64},
    },
    "blocks of 32 in LBNHC": {"block_size": 32, "kv_cache_layout": "LBNHC"},
}
Answer = tuple[list[int], list[float]]


@contextlib.contextmanager
def made(model: str, folder: Path, backend: str, **fields: Any) -> Iterator[LLM]:
    """An engine on a backend. Skips where the backend's library is not installed."""
    own = settings_of(MODELS[model], folder) if MODELS[model] else {}
    if backend in OWN_BLOCKS:
        fields = {"block_size": OWN_BLOCKS[backend], **fields}
    backend, _, other = backend.partition(" and ")
    config = {"backend": backend, **fields.pop("attention_config", {})}
    if other:
        config["layer_backends"] = {other: [1, 2]}
    try:
        llm = LLM(attention_config=config, **own, **{"device": "cuda", **SMALL, **fields})
    except ValueError as error:
        if backend in OWN_BLOCKS and ("found" in str(error) or "needs the package" in str(error)):
            pytest.skip(str(error))
        raise
    waits = {backend, other} & WAITING or llm.engine.resolved.device == "cpu"
    with llm, contextlib.nullcontext() if waits else no_waits():
        if model == "Gemma 3, scaled":
            _scale_by_depth(llm)
        yield llm


def _scale_by_depth(llm: LLM) -> None:
    """Weigh what attention and MLP add as models with norms behind them are started (arXiv 2504.07866).

    With weights of 1 each adds a vector of the embedding's size: then one key of 40 moves logits by a fifth of their
    size, and whatever bfloat16 rounds anywhere, attention or not, by 1e-2. So one key moves them by 3e-2.
    """
    layers = runner_of(llm.engine).model.layers
    for layer in layers:
        for norm in (layer.attention_norm, layer.mlp_out_norm):
            norm.weight.mul_((2 * len(layers)) ** -0.5)


@functools.cache
def alone_in_bfloat16() -> list[Answer]:
    """Of each prompt by itself, on the mixed groups of the Gemma 3 style."""
    fields = {"dtype": "bfloat16", "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as folder, made("Gemma 3", Path(folder), "paged", **fields) as llm:
        assert llm.engine.scheduler.kv.num_groups == 3  # one full, two sliding
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


def answers(llm: LLM, prompts: list[Any]) -> list[Answer]:
    found = []
    for output in llm.generate(prompts, GREEDY):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        entries = completion.logprobs or []
        found.append((tokens, [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]))
    return found


class _Logits:
    """All logits of a run, [positions, vocabulary], in the order of (request, position)."""

    def __init__(self) -> None:
        self._order: dict[int, int] = {}
        self._seen: dict[tuple[int, int], torch.Tensor] = {}
        self._count = 0

    def add(self, new: NewRow) -> None:
        self._order[new.row] = self._count
        self._count += 1

    def __call__(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> None:
        for row, position, own in zip(rows.tolist(), positions.tolist(), logits.clone(), strict=True):
            self._seen[self._order[row], position] = own

    def all(self) -> torch.Tensor:
        return torch.stack([self._seen[at] for at in sorted(self._seen)]).double()


def logits_of(model: str, folder: Path, backend: str, dtype: str = "bfloat16", **fields: Any) -> torch.Tensor:
    """Of prompts and of the same forced tokens behind them: prefill and decode."""
    seen = _Logits()
    with made(model, folder, backend, dtype=dtype, **fields) as llm:
        runner_of(llm.engine).observe(seen)
        for output in llm.generate(PROMPTS, FORCED):
            assert list(output.outputs[0].token_ids) == [11] * 6
    return seen.all()


@functools.cache
def oracles(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the `reference` backend: in bfloat16, and in float32 on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        expected = logits_of(model, Path(folder), "reference")
        return expected, logits_of(model, Path(folder), "reference", "float32", device="cpu").to(expected.device)


@pytest.mark.parametrize(("model", "backend"), CASES)
def test_bfloat16_logits_are_near_the_reference_backends(
    tmp_path: Path, model: str, backend: str, record_property: Any
) -> None:
    """A relative error of at most 1e-2, and no further from float32 than the reference."""
    found, (expected, exact) = logits_of(model, tmp_path, backend), oracles(model)
    assert found.shape == expected.shape == (len(PROMPTS) * 6, found.shape[1])
    error = ((found - expected).norm() / expected.norm()).item()
    own, theirs = (((x - exact).norm() / exact.norm()).item() for x in (found, expected))
    record_property("relative_error", error)
    print(f"{model}, {backend}: {error:.2e} from reference; from float32 {own:.2e}, reference {theirs:.2e}")
    assert error <= 1e-2
    assert own <= 1.25 * theirs, "not further from float32 than the reference is"


@pytest.mark.parametrize(("model", "backend"), [("Gemma 3", "paged"), ("DeepSeek", "mla")])
def test_a_float8_cache_is_near_the_reference_backends(tmp_path: Path, model: str, backend: str) -> None:
    """The same bits alone and in a batch; nearer to `reference` over such a cache than half of what the cache moves."""
    fields = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "enable_prefix_caching": False}
    with made(model, tmp_path, backend, **fields) as llm:
        assert answers(llm, PROMPTS) == [answers(llm, [prompt])[0] for prompt in PROMPTS]
    found, expected = (logits_of(model, tmp_path, name, kv_cache_dtype="fp8") for name in (backend, "reference"))
    plain = logits_of(model, tmp_path, "reference")
    error, narrow = (((x - expected).norm() / expected.norm()).item() for x in (found, plain))
    print(f"{model}, {backend}: {error:.2e} from reference with a float8 cache; what that cache moves: {narrow:.2e}")
    assert error < narrow / 2


@pytest.mark.parametrize("backend", ["paged", "flex"])
def test_no_allocation_of_a_step_grows_with_the_pool(tmp_path: Path, backend: str) -> None:
    most = []
    for num_blocks in (400, 3200):
        fields = {"num_gpu_blocks_override": num_blocks, "enable_prefix_caching": False, "async_scheduling": False}
        with made("Gemma 3", tmp_path, backend, dtype="bfloat16", **fields) as llm:
            answers(llm, PROMPTS)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            answers(llm, PROMPTS)
            most.append(torch.cuda.max_memory_allocated() - before)
    assert most[0] == most[1] > 0


@pytest.mark.parametrize("name", GEMMA_SETTINGS)
def test_windows_and_full_layers_keep_their_bits_in_every_setting(tmp_path: Path, name: str) -> None:
    """Alone, in a batch, in chunks, from a warm prefix cache, in every layout and kernel block size."""
    alone = alone_in_bfloat16()
    assert len({tuple(tokens) for tokens, _ in alone}) == len(PROMPTS)
    with made("Gemma 3", tmp_path, "paged", dtype="bfloat16", **GEMMA_SETTINGS[name]) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == alone

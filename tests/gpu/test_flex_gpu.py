"""The flex backend on a CUDA device: against the reference, and the bits that must not move."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import octavo.attention as A
from contract_rig import GARBAGE, Setting, make_step
from flex_gpu_rig import BF16, BLOCK, DEVICE, HEADS, KV_HEADS, LIMITS, PLAIN, SIZE, Step, history, make_rows, odd_keys
from mixtures import MIXTURES, NUM_ROWS, NUM_TOKENS, padded
from octavo.attention.base import LayerTensors, Setup
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.mods import AttentionMods
from octavo.attention.paged import PagedBackend
from octavo.attention.reference import ReferenceBackend
from octavo.ops import flex as ops
from octavo.ops.flex.mask_rows import Geometry, Kind, MaskRows
from octavo.ops.rope import Rotation, qk_norm_rope_store, rope_table
from sync_guard import no_waits

pytestmark = pytest.mark.gpu

SPECS = {
    "plain": PLAIN,
    "window and cap": dataclasses.replace(PLAIN, window=100, soft_cap=20.0),
    "rswa": dataclasses.replace(PLAIN, mods=A.rswa(90)),
    "user's, capped": dataclasses.replace(PLAIN, mods=A.and_(AttentionMods(mask_mod=odd_keys), A.soft_cap(15.0))),
    "slopes": dataclasses.replace(PLAIN, mods=A.and_(A.alibi(HEADS), A.chunked(200))),
    "not causal": dataclasses.replace(PLAIN, causal=False),
}


@pytest.mark.parametrize("name", SPECS)
def test_equals_the_reference(name: str) -> None:
    step, spec = Step(make_rows()), SPECS[name]
    out = step.run(FlexBackend([spec], BF16, DEVICE, step.setup()), spec)
    expected = step.run(ReferenceBackend([spec], BF16, DEVICE, step.setup()), spec)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_K4_9_quantized_caches_with_a_scale_per_head(stored: torch.dtype) -> None:
    """Stored numbers times the scales, against the reference over their products."""
    scales = torch.tensor([0.02, 0.05], device=DEVICE), torch.tensor([0.5, 0.03], device=DEVICE)
    layer = LayerTensors(key_scale=scales[0], value_scale=scales[1])
    spec = dataclasses.replace(PLAIN, soft_cap=20.0)
    kept, plain = [], []
    for made, length, queries in make_rows():
        narrow = (made.kv.float() * 30).round().clamp(-127, 127).to(stored)
        factor = torch.cat([scale[:, None].expand(-1, SIZE) for scale in scales], dim=1)
        kept.append((dataclasses.replace(made, kv=narrow), length, queries))
        plain.append((dataclasses.replace(made, kv=narrow.float() * factor, q=made.q.float()), length, queries))
    step = Step(kept)
    backend = FlexBackend([spec], BF16, DEVICE, dataclasses.replace(step.setup(), cache_dtype=stored))
    out = step.run(backend, spec, layer)
    expected = Step(plain).run(ReferenceBackend([spec], torch.float32, DEVICE, step.setup()), spec)
    assert (out.float() - expected).norm() / expected.norm() < 1e-2


def test_sinks_and_float32() -> None:
    spec = dataclasses.replace(PLAIN, sinks=True)
    layer = LayerTensors(sinks=torch.linspace(-2, 3, HEADS, device=DEVICE))
    step = Step(make_rows(dtype=torch.float32), block=32)
    out = step.run(FlexBackend([spec], torch.float32, DEVICE, step.setup()), spec, layer)
    expected = step.run(ReferenceBackend([spec], torch.float32, DEVICE, step.setup()), spec, layer)
    torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    ("block", "size", "heads", "dtype"),
    [
        (64, 0, HEADS, BF16),
        (16, 0, HEADS, BF16),
        (64, 0, 14, BF16),  # seven heads of a KV head: tiles with lines left over
        (64, 0, HEADS, torch.float32),
        (16, 16, HEADS, BF16),
        (32, 32, HEADS, BF16),
        (64, 64, HEADS, BF16),
    ],
    ids=str,
)
def test_K4_7_decode_chunks_and_neighbours_have_the_same_bits(
    block: int, size: int, heads: int, dtype: torch.dtype
) -> None:
    options = {"flex_attn_block_m": size, "flex_attn_block_n": size} if size else {}
    spec = dataclasses.replace(PLAIN, num_heads=heads, window=3000)
    made, other = history(1, 4200, dtype, heads), history(2, 4200, dtype, heads)
    other.q *= 30  # huge but finite
    whole = Step([(made, 4200, 4200)], block)
    backend = FlexBackend([spec], dtype, DEVICE, Setup(**LIMITS, num_blocks=800, block_size=block, options=options))
    expected = whole.run(backend, spec)
    for end in (1, 16, 17, 63, 64, 65, 2047, 2048, 2049, 4200):
        alone = Step([(made, end, 1)], block, seed=end).run(backend, spec)
        assert torch.equal(alone, expected[end - 1 : end]), end
        crowd = Step([(other, 3000, 1), (made, end, 1), (other, 77, 1)], block, seed=end).run(backend, spec)
        assert torch.equal(crowd[1:2], alone), end
    position = 0
    for chunk in (3, 60, 64, 1000, 1001, 2072):
        position += chunk
        rows = [(other, 900, 1), (made, position, chunk), (other, 500, 33)]
        step = Step(rows, block, seed=chunk)
        out = step.run(backend, spec)
        assert torch.equal(out[1 : 1 + chunk], expected[position - chunk : position]), position
        step.inputs.max_long = 2  # the row that decodes gets a tile of its own
        assert torch.equal(step.run(backend, spec), out), position


def test_F1_4_one_compilation_for_all_batches_and_addresses_stay() -> None:
    """Batch sizes and lengths come and go; a replayed graph follows them."""
    step = Step(make_rows([(4000, 1)] * 6))
    backend = FlexBackend([PLAIN], BF16, DEVICE, step.setup())
    step.run(backend, PLAIN)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    addresses = {(rows.partial.data_ptr(), rows.full.stride()) for rows in backend._buffers.values()}
    for shape in ([(1, 1)], [(17, 1), (8000, 1)], [(90, 1)] * 8, [(2048, 1), (2049, 1), (4096, 1)]):
        small = Step(make_rows(shape))
        backend.prepare(small.inputs)
        out = torch.empty_like(small.q)
        backend.run(small.q, small.kv, PLAIN, out)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert {(rows.partial.data_ptr(), rows.full.stride()) for rows in backend._buffers.values()} == addresses


def test_F1_G4_a_graph_captured_at_the_bound_serves_every_length() -> None:
    lengths = [5000, 1, 64, 2049]
    step = Step(make_rows([(5000, 1)] * 4))
    step.inputs.max_seq_len = LIMITS["max_model_len"]
    step.inputs.block_table = torch.nn.functional.pad(
        step.inputs.block_table, (0, 128 - step.inputs.block_table.shape[1])
    )
    backend = FlexBackend([PLAIN], BF16, DEVICE, step.setup())
    out = torch.empty_like(step.q)

    def issue() -> None:
        backend.prepare(step.inputs, for_capture=True)
        backend.run(step.q, step.kv, PLAIN, out)

    issue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    step.inputs.seq_lens.copy_(torch.tensor(lengths))
    graph.replay()
    replayed = out.clone()
    with no_waits():
        issue()
    assert torch.equal(replayed, out)
    fresh = Step([(history(seed, 5000), 5000, 1) for seed in range(4)])
    expected = torch.empty_like(out)
    reference = ReferenceBackend([PLAIN], BF16, DEVICE)
    reference.prepare(dataclasses.replace(fresh.inputs, seq_lens=step.inputs.seq_lens))
    reference.run(fresh.q, fresh.kv, PLAIN, expected)
    torch.testing.assert_close(replayed, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 7])
def test_queries_rotated_into_their_lines_give_the_same_bits(rows: int) -> None:
    """A decode step of rows that walk one leaf, the last of them padding: as rotation, store and attention are."""
    step = Step(make_rows([(50 + 191 * row, 1) for row in range(rows)]))
    step.inputs.seq_lens[5:] = 0
    step.inputs.query_start.clamp_(max=5)
    ends = step.inputs.seq_lens.long() - 1
    slots = step.inputs.block_table.gather(1, (ends.clamp(min=0) // BLOCK)[:, None])[:, 0] * BLOCK + ends % BLOCK
    weights = torch.linspace(0.5, 2, SIZE, device=DEVICE)
    rotation = Rotation(
        positions=ends.clamp(min=0),
        cos_sin=rope_table(SIZE, 2048).to(DEVICE),
        q_norm=weights,
        k_norm=weights.flip(0),
        eps=1e-6,
        slot_mapping=torch.where(ends < 0, -1, slots),
    )
    projected = torch.randn(rows, (HEADS + 2 * KV_HEADS) * SIZE, device=DEVICE, dtype=BF16)
    backend = FlexBackend([PLAIN], BF16, DEVICE, step.setup())
    backend.prepare(step.inputs)
    caches, outs = [step.kv.clone() for _ in range(2)], [torch.zeros_like(step.q) for _ in range(2)]
    assert backend.rotates(rotation, caches[0], PLAIN)
    backend.run_fused_rope(projected, rotation, caches[0], PLAIN, outs[0])
    q = qk_norm_rope_store(
        projected,
        rotation.positions,
        rotation.cos_sin,
        rotation.q_norm,
        rotation.k_norm,
        rotation.eps,
        HEADS,
        KV_HEADS,
        SIZE,
        caches[1],
        rotation.slot_mapping,
    )
    backend.run(q, caches[1], PLAIN, outs[1])
    assert torch.equal(*caches) and torch.equal(*outs) and outs[0][: min(rows, 5)].any(-1).all()


@pytest.mark.parametrize("kind", ["plain", "user's, capped"])
def test_F1_4_a_mixed_step_replayed_has_the_bits_of_one_issued(kind: str) -> None:
    """One graph for steps of any mixture, captured while its rows were empty."""
    spec, steps = SPECS[kind], {name: Step(make_rows(shape)) for name, shape in MIXTURES.items()}
    setup = dataclasses.replace(steps["full"].setup(), max_num_rows=NUM_ROWS)
    backend = FlexBackend([spec], BF16, DEVICE, setup)
    for step in steps.values():
        step.inputs.block_table = torch.nn.functional.pad(
            step.inputs.block_table, (0, 32 - step.inputs.block_table.shape[1])
        )
    held = padded(steps["full"].inputs)
    changing = held.query_start, held.seq_lens, held.block_table, held.rows
    for tensor in changing[:3]:
        tensor.zero_()
    q, kv = torch.zeros(NUM_TOKENS, HEADS, SIZE, dtype=BF16, device=DEVICE), torch.zeros_like(steps["full"].kv)
    out = torch.empty_like(q)

    def issue() -> None:
        backend.prepare(held, for_capture=True)
        backend.run(q, kv, spec, out)

    issue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    for name, step in steps.items():
        step.inputs.max_long = sum(queries > 1 for _, queries in MIXTURES[name])
        expected, now, tokens = step.run(backend, spec), padded(step.inputs), len(step.q)
        for target, value in zip(changing, (now.query_start, now.seq_lens, now.block_table, now.rows), strict=True):
            target.copy_(value)
        q[:tokens].copy_(step.q)
        kv.copy_(step.kv)
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(out[:tokens], expected), name
        assert out[tokens:].eq(7.0).all(), "padding was written"


@pytest.mark.parametrize(
    ("layout", "block", "num_layers"),
    [("LBHNC", 64, 1), ("LBNHC", 48, 1), ("BLHNC", 16, 28), ("BLNHC", 64, 28)],
)
def test_L3_G1_pools_beyond_32_bit_offsets_in_every_layout(layout: str, block: int, num_layers: int) -> None:
    """The live blocks at the end of more than 2^31 elements, in a middle layer: the bits of a small pool."""
    setting, rows = Setting(layout, block, block), [(history(0, 300), 300, 1), (history(1, 130), 130, 100)]
    num_blocks = (1 << 31) // (num_layers * block * KV_HEADS * 2 * SIZE) + 50
    near = make_step(rows, setting, seed=1, device=DEVICE)
    far = make_step(rows, setting, seed=2, num_blocks=num_blocks, num_layers=num_layers, device=DEVICE)
    near.kv.nan_to_num_()
    tables = near.inputs.block_table, far.inputs.block_table
    live = (tables[0] != GARBAGE) & (torch.arange(tables[0].shape[0], device=DEVICE) < len(rows))[:, None]
    far.kv[tables[1][live].long()] = near.kv[tables[0][live].long()]  # with zeros in slots that nobody wrote
    assert int(tables[1][0, 0]) * far.kv.stride(0) > 2**31
    setup = Setup(**LIMITS, num_blocks=far.kv.shape[0], block_size=block)
    backend = FlexBackend([PLAIN], BF16, DEVICE, setup)
    out = far.run(backend, PLAIN)
    assert torch.equal(out, near.run(backend, PLAIN))
    for other in (ReferenceBackend, PagedBackend):
        expected = far.run(other([PLAIN], BF16, DEVICE, setup), PLAIN)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


BLOCKS = (16, 32, 48, 64, 128, 144, 256)
SIZED = {  # spec, dtype, sizes of the user's
    "plain": (PLAIN, BF16, {}),
    "user's, capped": (SPECS["user's, capped"], BF16, {}),
    "window, float32": (dataclasses.replace(PLAIN, window=700), torch.float32, {}),
    "a tile of 16": (PLAIN, BF16, {"flex_attn_block_m": 16, "flex_attn_block_n": 16}),
}


@pytest.mark.parametrize("name", SIZED)
def test_K4_7_every_block_size_has_the_same_bits(name: str) -> None:
    """Decode and prompts; block sizes that are no powers of two among them."""
    spec, dtype, sizes = SIZED[name]
    outs = []
    for block in BLOCKS:
        step = Step(make_rows(dtype=dtype), block, seed=block)
        outs.append(step.run(FlexBackend([spec], dtype, DEVICE, step.setup(**sizes)), spec))
    assert all(torch.equal(out, outs[0]) for out in outs), [torch.equal(out, outs[0]) for out in outs]
    expected = step.run(ReferenceBackend([spec], dtype, DEVICE, step.setup()), spec)
    torch.testing.assert_close(outs[0], expected, atol=2e-2, rtol=2e-2)


def test_a_kernel_serves_pools_of_every_number_of_blocks() -> None:
    """Nothing is compiled for another pool."""
    rows = make_rows([(300, 1), (70, 1)])
    backend = FlexBackend([PLAIN], BF16, DEVICE, Setup(**LIMITS, block_size=BLOCK))
    first = Step(rows).run(backend, PLAIN)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(Step(rows, num_blocks=93, seed=3).run(backend, PLAIN), first)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_kernels_equal_their_references() -> None:
    step = Step(make_rows())
    shape = Geometry(group=4, lines=64, block=BLOCK, stride=1, columns=32, q_block=16)
    rows = MaskRows(200, shape, DEVICE)
    inputs = step.inputs
    tiles = ops.max_tiles(4, inputs.num_tokens, inputs.max_query_len, shape.tokens)
    plain = AttentionMods()
    count = ops.plan_mask_rows(
        rows,
        shape,
        num_tiles=tiles,
        num_leaves=3,
        query_start=inputs.query_start,
        seq_lens=inputs.seq_lens,
        block_table=inputs.block_table,
        table_rows=inputs.rows,
        kind=Kind.ALL,
        some=plain.some_visible,
        every=plain.all_visible,
    )
    lines = ops.gather_lines(step.q, rows, shape, 0, count)
    walked = (rows.partial_num + rows.full_num)[:count, 0, 0] > 0
    assert torch.equal(lines[walked], ops.gather_lines_reference(step.q, rows, shape, 0, count)[walked])
    lines = torch.randn_like(lines)
    lse = torch.randn(lines.shape[:3], device=DEVICE)
    leaf = torch.arange(count, device=DEVICE) % 3
    lse[leaf * shape.leaf >= rows.length[:count]] = float("-inf")  # a leaf behind the request's end
    for sinks in (None, torch.linspace(-1, 1, HEADS, device=DEVICE)):
        outs = [torch.zeros_like(step.q) for _ in range(2)]
        for merge, out in zip((ops.merge_lines, ops.merge_lines_reference), outs, strict=True):
            merge(lines, lse, rows, shape, out, start=0, num_leaves=3, sinks=sinks)
        torch.testing.assert_close(*outs, atol=2e-2, rtol=2e-2)


def test_K4_7_the_control_torchs_own_choice_of_kernels_moves_bits() -> None:
    """A query alone and the same query in its prompt: torch splits the keys of one and not of the other."""
    made, length = history(3, 4096), 4096
    q, key, value = made.q[None].transpose(1, 2), *made.kv[None].transpose(1, 2).chunk(2, dim=-1)
    compiled = torch.compile(flex_attention, dynamic=False)
    outs = []
    for count in (length, 1):
        mask = create_block_mask(
            lambda b, h, i, n, count=count: i + length - count >= n, 1, None, count, length, device="cuda"
        )
        last = q[:, :, -count:].contiguous()
        outs.append(compiled(last, key.contiguous(), value.contiguous(), block_mask=mask, enable_gqa=True)[:, :, -1:])
    torch.testing.assert_close(*outs, atol=2e-2, rtol=2e-2)
    assert not torch.equal(*outs)


def test_F1_5_and_K4_7_an_engines_logprobs_alone_in_a_crowd_with_graphs_and_without() -> None:
    """32 prompts in a shuffled batch, in chunks, from the prefix cache; steps captured and issued one by one."""
    from importlib import resources

    from octavo import LLM, SamplingParams

    text = resources.files("octavo").joinpath("assets/octavo-tiny/held_out_prompts.json").read_text()
    prompts = [(prompt * 9)[: 50 + 97 * index % 401] for index, prompt in enumerate(json.loads(text)[:32])]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    fields = {
        "device": "cuda",
        "dtype": "bfloat16",
        "attention_backend": "flex",
        "block_size": 64,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 1000,
    }

    def generate(llm: LLM, order: list[int]) -> dict[int, list[object]]:
        outputs = llm.generate([prompts[index] for index in order], params)
        return {
            index: [output.outputs[0].text, [[x.logprob for x in one.values()] for one in output.outputs[0].logprobs]]
            for index, output in zip(order, outputs, strict=True)
        }

    order = random.Random(1).sample(range(32), 32)
    slowly = {"max_num_seqs": 1, "enable_prefix_caching": False, "enforce_eager": True, "async_scheduling": False}
    with LLM(**fields, **slowly) as llm:
        alone: dict[int, list[object]] = {}
        for index in order:
            alone |= generate(llm, [index])
    with LLM(**fields, max_num_seqs=32, max_num_batched_tokens=128) as llm:
        for _ in range(2):  # the second time the prefix cache is warm
            assert generate(llm, order) == alone

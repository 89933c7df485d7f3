"""What every attention backend promises: in every layout, cache block, kernel block and dtype, plain attention."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, cast

import pytest
import torch

from batches import make_history
from contract_rig import (
    CPU,
    LAYER,
    SETTINGS,
    Row,
    Setting,
    as_read,
    attend_plainly,
    backends_here,
    make_pool,
    make_step,
    takes,
)
from octavo.attention.base import (
    BACKENDS,
    NO_BACKEND,
    NO_SETUP,
    NO_TENSORS,
    AttentionBackend,
    AttentionInputs,
    ForwardContext,
    LayerTensors,
    TableContext,
    alibi_slopes,
    forward_context,
)
from octavo.cache.specs import AttentionSpec
from octavo.ops import native
from octavo.ops.rope import qk_norm_rope_store, qk_norm_rope_store_eager, rope_table

HEADS, KV_HEADS, SIZE = 4, 2, 32
FULL = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=0.2)
WINDOW = dataclasses.replace(FULL, window=40)
CAPPED = dataclasses.replace(FULL, window=150, soft_cap=15.0)
SPECS = {
    "full": FULL,
    "sliding window": WINDOW,
    "window and soft cap": CAPPED,
    "chunked local": dataclasses.replace(FULL, chunk=48),
    "ALiBi": dataclasses.replace(FULL, alibi_slopes=alibi_slopes(HEADS), window=130),
    "sinks": dataclasses.replace(FULL, sinks=True),
    "not causal": dataclasses.replace(FULL, causal=False),
}
SINKS = LayerTensors(sinks=torch.tensor([0.5, -2.0, 3.0, 1.0]))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [
    (name, dtype) for name in backends_here() for dtype in DTYPES if dtype in BACKENDS.resolve(name).capability.dtypes
]
SHAPES: dict[str, list[tuple[int, int]]] = {  # (sequence length, queries) per row
    "ragged": [(90, 1), (64, 40), (3, 3), (260, 130), (17, 1)],
    "decode": [(1, 1), (16, 1), (17, 1), (129, 1), (300, 1)],
    "verification": [(4, 4), (77, 4), (130, 4), (259, 4)],
    "prefill": [(200, 200)],
    "prefill with context": [(300, 44), (129, 1), (256, 128)],
}
PLAIN = Setting()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_backend(name: str, dtype: torch.dtype, spec: AttentionSpec | None = None) -> AttentionBackend:
    """With all specs of this page that the backend takes. Skips one that it does not take."""
    if name == "cpu" and not native.available():
        pytest.skip("the native library is not built")
    backend = BACKENDS.resolve(name)
    taken = [other for other in SPECS.values() if all(getattr(backend.capability, fact) for fact in other.facts)]
    if spec is not None and spec not in taken:
        with pytest.raises(ValueError, match=f"attention backend '{name}' has no"):
            backend([spec], dtype, CPU)
        pytest.skip(f"{name} states that it does not take it")
    return backend(taken, dtype, CPU)


def some_settings(name: str, number: int) -> list[Setting]:
    """A third of the settings for a backend whose kernels are compiled for each type, and a sixth for one of torch's
    operators, which look at no type where they address the cache."""
    parts = 3 if name == "cpu" else 6
    return SETTINGS[number % parts :: parts]


def number_of(name: str, dtype: torch.dtype, shape: str, spec: str) -> int:
    """Of a case among those that share out the settings."""
    return [*SHAPES].index(shape) + [*SPECS].index(spec) + CASES.index((name, dtype))


def tensors_of(spec: AttentionSpec) -> LayerTensors:
    return SINKS if spec.sinks else NO_TENSORS


def make_rows(shape: str, dtype: torch.dtype) -> list[Row]:
    return [
        (make_history(seed, length, HEADS, KV_HEADS, SIZE, dtype), length, queries)
        for seed, (length, queries) in enumerate(SHAPES[shape])
    ]


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_INV_6_every_layout_and_kernel_block_size(name: str, dtype: torch.dtype, shape: str, spec: str) -> None:
    """Unused blocks, slots and table columns are poison. Reproducible backends give the same bits in all settings.

    Every dtype, every shape and every spec meet every layout and every size of blocks: a part of the pairs of those for
    each case, another one for the next.
    """
    backend, rows = make_backend(name, dtype, SPECS[spec]), make_rows(shape, dtype)
    layer = tensors_of(SPECS[spec])
    plain = make_step(rows, PLAIN).run(backend, SPECS[spec], layer)
    assert_near(plain, attend_plainly(rows, SPECS[spec], layer.sinks))
    for setting in some_settings(name, number_of(name, dtype, shape, spec)):
        if takes(name, setting):
            out = make_step(rows, setting, seed=3).run(backend, SPECS[spec], layer)
            if backend.capability.reproducible:
                assert torch.equal(out, plain), setting
            else:
                assert_near(out, plain.double())


@pytest.mark.parametrize("spec", [name for name, spec in SPECS.items() if spec.causal])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_chunks_equal_the_whole_prompt(name: str, dtype: torch.dtype, spec: str) -> None:
    backend, layer = make_backend(name, dtype, SPECS[spec]), tensors_of(SPECS[spec])
    history = make_history(1, 260, HEADS, KV_HEADS, SIZE, dtype)
    setting = Setting("BLHNC", 128, 64) if takes(name, Setting("BLHNC", 128, 64)) else PLAIN
    expected = attend_plainly([(history, 260, 260)], SPECS[spec], layer.sinks)
    position = 0
    for chunk in (1, 15, 50, 62, 100, 32):
        position += chunk
        out = make_step([(history, position, chunk)], setting, seed=chunk).run(backend, SPECS[spec], layer)
        assert_near(out, expected[position - chunk : position])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", ["ragged", "verification", "prefill with context"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_last_tokens_alone(name: str, dtype: torch.dtype, shape: str, spec: str) -> None:
    """As a decoder's last layer has them, beside padding rows."""
    backend, layer = make_backend(name, dtype, SPECS[spec]), tensors_of(SPECS[spec])
    step = make_step(make_rows(shape, dtype), PLAIN)
    expected = step.run(backend, SPECS[spec], layer)[step.inputs.live[0][1:].long() - 1]
    found = step.run_last(backend, SPECS[spec], layer)
    if backend.capability.reproducible:
        assert torch.equal(found, expected)
    else:
        assert_near(found, expected.double())


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_INV_5_padding_rows_change_nothing(name: str, dtype: torch.dtype) -> None:
    """Rows of length 0 without queries, with null blocks, as a padded batch has them."""
    backend, step = make_backend(name, dtype), make_step(make_rows("ragged", dtype), Setting("LBHNC", 128, 64))
    expected = step.run(backend, WINDOW)
    step.inputs.num_rows += 2
    assert torch.equal(step.run(backend, WINDOW), expected)


@pytest.mark.parametrize("spec", ["full", "window and soft cap"])
@pytest.mark.parametrize("shape", ["ragged", "decode"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_M5_6_M5_G6_the_bound_of_lengths_changes_no_bit(name: str, dtype: torch.dtype, shape: str, spec: str) -> None:
    """Block table columns beyond a row's length hold ids that no pool has: nothing reads them, whatever the bound."""
    backend, layer = make_backend(name, dtype, SPECS[spec]), tensors_of(SPECS[spec])
    step = make_step(make_rows(shape, dtype), PLAIN)
    longest, columns = int(step.inputs.seq_lens.max()), step.inputs.block_table.shape[1]
    assert columns * PLAIN.block > longest and int(step.inputs.block_table.max()) > 10**6
    step.inputs.max_seq_len = longest
    expected = step.run(backend, SPECS[spec], layer)
    for bound in (longest + 1, columns * PLAIN.block):
        step.inputs.max_seq_len = bound
        assert torch.equal(step.run(backend, SPECS[spec], layer), expected), bound


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_L3_G4_outputs_do_not_depend_on_where_blocks_lie(name: str, dtype: torch.dtype) -> None:
    backend, rows = make_backend(name, dtype), make_rows("ragged", dtype)
    for setting in (PLAIN, Setting("LBNHC", 128, 64), Setting("BLNHC", 64, 16)):
        if takes(name, setting):
            outs = [make_step(rows, setting, seed=seed).run(backend, WINDOW) for seed in range(4)]
            assert all(torch.equal(out, outs[0]) for out in outs[1:]), setting


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("name", backends_here())
def test_L3_G1_offsets_past_32_bits(name: str, layout: str) -> None:
    """More than 2^31 / (2 * 8 * 128) tokens, the live blocks at the end. Memory that nobody touches is not taken."""
    backend = make_backend(name, torch.bfloat16)
    setting, heads, size = Setting(layout, 64, 16), 8, 128
    spec = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_size=size, scale=size**-0.5)
    rows = [(make_history(seed, n, heads, heads, size, torch.bfloat16), n, 2) for seed, n in enumerate((130, 40))]
    expected = make_step(rows, setting).run(backend, spec)
    try:
        step = make_step(rows, setting, num_blocks=1_100_000 // setting.block)
    except (MemoryError, RuntimeError) as error:
        pytest.skip(f"no address space for the pool: {error}")
    assert int(step.inputs.block_table[0, 0]) * step.kv.stride(0) > 2**31
    assert torch.equal(step.run(backend, spec), expected)


@pytest.mark.parametrize("store", [qk_norm_rope_store, qk_norm_rope_store_eager])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_L3_3_a_store_writes_its_slots_and_no_other_byte(setting: Setting, store) -> None:
    pool = make_pool(setting, 5, KV_HEADS, 2 * SIZE, torch.float32)
    generator = torch.Generator().manual_seed(1)
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=generator))
    expected = pool.buffer.clone()
    tokens, width = 24, (HEADS + 2 * KV_HEADS) * SIZE
    qkv = torch.randn(tokens, width, generator=generator)
    places = torch.randperm(4 * setting.block, generator=generator)[:tokens] + setting.block  # block 0 is nobody's
    block_map = pool.block_maps[0]
    slots = torch.tensor(
        [
            block_map.expand([place // setting.block])[place % setting.block // setting.kernel] * setting.kernel
            + place % setting.kernel
            for place in places.tolist()
        ]
    )
    slots[::5] = -1
    position_0 = torch.zeros(tokens, dtype=torch.int64)  # turns nothing
    store(qkv, position_0, rope_table(SIZE, 4), None, None, 1e-6, HEADS, KV_HEADS, SIZE, pool.views[LAYER], slots)
    key, value = qkv[:, HEADS * SIZE :].view(tokens, 2, KV_HEADS, SIZE).unbind(1)
    fine = (pool.num_pages, 5 * block_map.ratio, KV_HEADS, setting.kernel, 2 * SIZE)
    page = setting.block * KV_HEADS * 2 * SIZE
    part = page // block_map.ratio
    inner = pool.layout.strides(fine)
    layer_stride, block_stride = (page, 3 * page) if pool.layout.block_outermost else (5 * page, page)
    for token, place in enumerate(places.tolist()):
        if slots[token] >= 0:
            block, offset = divmod(place, setting.block)
            start = LAYER * layer_stride + block * block_stride + offset // setting.kernel * part
            for head in range(KV_HEADS):
                at = start + head * inner[2] + offset % setting.kernel * inner[3]
                expected[at : at + 2 * SIZE] = torch.cat([key[token, head], value[token, head]])
    assert torch.equal(pool.buffer, expected)


@pytest.mark.parametrize("store", [qk_norm_rope_store, qk_norm_rope_store_eager])
def test_L3_7_a_store_without_slots_leaves_the_cache_alone(store) -> None:
    pool = make_pool(Setting(block=32), 3, KV_HEADS, 2 * SIZE, torch.float32)
    before = pool.buffer.fill_(3.0).clone()
    qkv = torch.randn(9, (HEADS + 2 * KV_HEADS) * SIZE)
    store(
        qkv,
        torch.arange(9),
        rope_table(SIZE, 9),
        None,
        None,
        1e-6,
        HEADS,
        KV_HEADS,
        SIZE,
        pool.views[LAYER],
        torch.full((9,), -1),
    )
    assert torch.equal(pool.buffer, before)


def _changed(inputs: AttentionInputs, **changes) -> AttentionInputs:
    return dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize("name", backends_here())
def test_inputs_that_do_not_fit_are_refused_by_name(name: str) -> None:
    backend, step = make_backend(name, torch.float32), make_step(make_rows("decode", torch.float32), PLAIN)
    for changes, named in (
        ({"max_seq_len": 16 * 21 + 1}, r"max_seq_len=337 exceeds the 336 tokens that 21 block table columns of 16"),
        ({"num_rows": 8}, r"8 rows with 5 tokens exceed inputs for 7 rows and 5 tokens"),
        ({"num_tokens": 6}, r"5 rows with 6 tokens exceed inputs for 7 rows and 5 tokens"),
    ):
        with pytest.raises(ValueError, match=named):
            backend.prepare(_changed(step.inputs, **changes))
    backend.prepare(step.inputs)
    with pytest.raises(ValueError, match="a cache view of 32-token blocks, inputs for 16-token blocks"):
        backend.run(step.q, torch.zeros(9, KV_HEADS, 32, 2 * SIZE), FULL, torch.empty_like(step.q))
    with pytest.raises(ValueError, match=r"4 queries and 5 outputs are fewer than num_tokens=5"):
        backend.run(step.q[:4], step.kv, FULL, torch.empty_like(step.q))
    backend.run(step.q, step.kv, FULL, torch.empty_like(step.q))


def test_the_first_layer_of_each_pass_stands_for_all() -> None:
    """A look at tensors takes 0.2 us of the host, and a model has many layers; what fitted in one pass says nothing of
    the next one."""
    inputs = make_step(make_rows("decode", torch.float32), PLAIN).inputs
    table = TableContext(NO_BACKEND)
    table.prepare_stores(inputs)
    context = ForwardContext(layers=(), tables=[table], positions=torch.zeros(5), prepared=[inputs])
    q, kv, nothing = torch.empty(5, HEADS, SIZE), torch.empty(9, KV_HEADS, 16, 2 * SIZE), cast(Any, None)
    with forward_context(context):
        inputs.check_call(q, kv, q)
        inputs.check_call(nothing, nothing, nothing)
    with (
        forward_context(context),
        pytest.raises(ValueError, match=r"5 queries and 4 outputs are fewer than num_tokens=5 of the inputs"),
    ):
        inputs.check_call(q, kv, q[:4])


@pytest.mark.parametrize("name", backends_here())
def test_the_parts_of_the_settings_are_whole_for_every_dtype_shape_and_spec(name: str) -> None:
    dtypes = [dtype for own, dtype in CASES if own == name]
    cases = list(itertools.product(dtypes, SHAPES, SPECS))
    for fact in {*dtypes, *SHAPES, *SPECS}:
        met = [some_settings(name, number_of(name, *case)) for case in cases if fact in case]
        assert {setting for some in met for setting in some} == {*SETTINGS}, fact


def test_L3_1_views_that_backends_see_have_blocks_first() -> None:
    for setting in SETTINGS:
        pool = make_pool(setting, 4, KV_HEADS, 2 * SIZE, torch.float32)
        assert pool.views[LAYER].shape[1:] == (KV_HEADS, setting.kernel, 2 * SIZE)
        assert pool.block_view(LAYER).shape[0] == 4


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_latent_attention_reads_its_values_from_its_keys(name: str, dtype: torch.dtype) -> None:
    """One KV head of latent and key; what a layer keeps is [blocks, 1, block_size, latent + key] in every layout."""
    spec = AttentionSpec(num_heads=HEADS, num_kv_heads=1, head_size=40, scale=0.2, value_size=24)
    if not BACKENDS.resolve(name).capability.latent:
        pytest.skip(f"{name} states that it does not take it")
    make_backend(name, dtype)
    backend = BACKENDS.resolve(name)([spec], dtype, CPU)
    rows = []
    for seed, (length, queries) in enumerate(SHAPES["ragged"]):
        history = make_history(seed, length, HEADS, 1, 40, dtype)
        history.kv = history.kv[..., :40]
        rows.append((history, length, queries))
    plain = make_step(rows, PLAIN).run(backend, spec)
    assert_near(plain, attend_plainly(rows, spec))
    for setting in (Setting("LBNHC", 128, 64), Setting("BLHNC", 64, 16)):
        step = make_step(rows, setting, seed=3)
        assert step.kv.shape[1:] == (1, setting.kernel, 40)
        assert torch.equal(step.run(backend, spec), plain)


NARROW = [
    (name, dtype, cache)
    for name, dtype in CASES
    for cache in BACKENDS.resolve(name).capability.cache_dtypes
    if cache.itemsize < dtype.itemsize
]
SCALES = LayerTensors(key_scale=torch.tensor([0.02, 0.05]), value_scale=torch.tensor([0.03, 0.01]))


@pytest.mark.parametrize(("name", "dtype", "cache"), NARROW, ids=str)
@pytest.mark.parametrize("spec", ["full", "window and soft cap", "sinks"])
def test_narrow_caches_with_a_scale_per_head(name: str, dtype: torch.dtype, cache: torch.dtype, spec: str) -> None:
    """What the cache holds, times the head's scale; the same bits in every layout and kernel block size.

    A part of those for each case, another one for the next.
    """
    make_backend(name, dtype)
    setup = dataclasses.replace(NO_SETUP, cache_dtype=cache)
    backend = BACKENDS.resolve(name)([SPECS[spec]], dtype, CPU, setup)
    scales = SCALES if cache in (torch.float8_e4m3fn, torch.int8) else NO_TENSORS
    layer = dataclasses.replace(scales, sinks=tensors_of(SPECS[spec]).sinks)
    rows, number = make_rows("ragged", dtype), NARROW.index((name, dtype, cache)) + [*SPECS].index(spec)
    plain = make_step(rows, PLAIN, cache=cache, scales=scales).run(backend, SPECS[spec], layer)
    assert_near(plain, attend_plainly(as_read(rows, cache, scales), SPECS[spec], layer.sinks))
    for setting in some_settings(name, number):
        if takes(name, setting):
            step = make_step(rows, setting, seed=3, cache=cache, scales=scales)
            out = step.run(backend, SPECS[spec], layer)
            if backend.capability.reproducible:
                assert torch.equal(out, plain), setting
            else:
                assert_near(out, plain.double())


@pytest.mark.parametrize("name", backends_here())
def test_a_cache_type_that_is_not_stated_is_refused(name: str) -> None:
    setup = dataclasses.replace(NO_SETUP, cache_dtype=torch.float64)
    dtype = BACKENDS.resolve(name).capability.dtypes[0]
    with pytest.raises(ValueError, match=f"attention backend '{name}' takes a cache of .*, got float64"):
        BACKENDS.resolve(name)([FULL], dtype, CPU, setup)


def test_canonical_alibi_slopes() -> None:
    """Against transformers' build_alibi_tensor for 8 and 12 heads."""
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(12)[8:] == pytest.approx([2 ** (-0.5 * i) for i in (1, 3, 5, 7)])

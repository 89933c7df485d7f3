"""What every attention backend promises, on a CUDA device: the suite of tests/attention/test_contract.py in full."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from batches import make_history
from contract_rig import SETTINGS, Row, Setting, attend_plainly, backends_here, make_pool, make_step, takes
from octavo.attention.base import BACKENDS, NO_TENSORS, AttentionBackend, LayerTensors, Setup, alibi_slopes
from octavo.cache.specs import AttentionSpec
from octavo.ops.rope import qk_norm_rope_store, rope_table

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HEADS, KV_HEADS, SIZE = 8, 2, 64
FULL = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=0.15)
SPECS = {
    "full": FULL,
    "sliding window": dataclasses.replace(FULL, window=40),
    "window and soft cap": dataclasses.replace(FULL, window=150, soft_cap=15.0),
    "chunked local": dataclasses.replace(FULL, chunk=48),
    "ALiBi": dataclasses.replace(FULL, alibi_slopes=alibi_slopes(HEADS), window=130),
    "sinks": dataclasses.replace(FULL, sinks=True),
    "not causal": dataclasses.replace(FULL, causal=False),
}
SINKS = torch.linspace(-2.0, 3.0, HEADS)
SHAPES: dict[str, list[tuple[int, int]]] = {  # (sequence length, queries) per row
    "ragged": [(90, 1), (64, 40), (3, 3), (700, 130), (17, 1)],
    "decode": [(1, 1), (16, 1), (17, 1), (129, 1), (1300, 1)],
    "verification": [(4, 4), (77, 4), (130, 4), (1030, 4)],
    "prefill with context": [(1200, 44), (129, 1), (256, 128)],
}
PLAIN = Setting()


def _runs(name: str) -> bool:
    """Whether the library that a backend is made of is installed. FlexAttention's own tests compile enough."""
    try:
        BACKENDS.resolve(name)([FULL], torch.bfloat16, DEVICE)
    except ValueError:
        return False
    return name not in ("reference", "flex")


NAMES = [name for name in backends_here("cuda") if _runs(name)]
CASES = [
    (name, dtype)
    for name in NAMES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if dtype in BACKENDS.resolve(name).capability.dtypes
    if name != "flashinfer" or dtype == torch.bfloat16  # it compiles for minutes per dtype
]
LARGE = [Setting("LBHNC", 256, 256), Setting("BLNHC", 512, 256)]  # for backends that take no smaller blocks
FEW_SETTINGS = [Setting(), Setting("BLNHC", 128, 64)]
# Each (spec, dtype, kernel block size, shape) is a kernel to compile: "full" meets all settings, in every dtype.
STEPS = [
    (name, dtype, spec, shape)
    for name, dtype in CASES
    for spec in SPECS
    for shape in SHAPES
    if shape == "ragged" or (dtype == torch.bfloat16 and (spec == "full" or shape != "prefill with context"))
]
CHUNKED = [
    (name, dtype, spec)
    for name, dtype in CASES
    for spec, kind in SPECS.items()
    if kind.causal and (dtype == torch.bfloat16 or spec == "full")
]


def settings_of(name: str, dtype: torch.dtype, spec: str) -> list[Setting]:
    few = FEW_SETTINGS if dtype == torch.bfloat16 else FEW_SETTINGS[1:]
    return [setting for setting in (SETTINGS if spec == "full" else few) if takes(name, setting)] or LARGE


def one_setting(name: str, *settings: Setting) -> Setting:
    """The first that the backend takes."""
    return next(setting for setting in [*settings, *LARGE] if takes(name, setting))


def make_backend(name: str, spec: AttentionSpec, dtype: torch.dtype, setting: Setting, **setup) -> AttentionBackend:
    capability = BACKENDS.resolve(name).capability
    missing = [fact for fact in spec.facts if not getattr(capability, fact)]
    if missing:
        with pytest.raises(ValueError, match=f"attention backend '{name}'"):
            BACKENDS.resolve(name)([spec], dtype, DEVICE)
        pytest.skip(f"{name} states that it has no {missing[0]}")
    limits = Setup(
        max_num_rows=16, max_num_tokens=512, max_model_len=2048, num_blocks=4096, block_size=setting.kernel, **setup
    )
    try:
        return BACKENDS.resolve(name)([spec], dtype, DEVICE, limits)
    except ValueError as error:  # a library may do less than the backend states
        if f"attention backend '{name}' has no" in str(error):
            pytest.skip(str(error))
        raise


def make_rows(shape: str, dtype: torch.dtype) -> list[Row]:
    return [
        (make_history(seed, length, HEADS, KV_HEADS, SIZE, dtype), length, queries)
        for seed, (length, queries) in enumerate(SHAPES[shape])
    ]


def tensors_of(spec: AttentionSpec) -> LayerTensors:
    return LayerTensors(sinks=SINKS.to(DEVICE)) if spec.sinks else NO_TENSORS


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected.to(DEVICE), atol=tolerance, rtol=tolerance)


def assert_same(backend: AttentionBackend, out: torch.Tensor, plain: torch.Tensor, at: object) -> None:
    """The same bits from a backend that is reproducible; from another nearly the same."""
    if backend.capability.reproducible:
        assert torch.equal(out, plain), at
    else:
        assert_near(out, plain.double())


@pytest.mark.parametrize(("name", "dtype", "spec", "shape"), STEPS, ids=str)
def test_INV_6_every_layout_and_kernel_block_size(name: str, dtype: torch.dtype, spec: str, shape: str) -> None:
    """Unused blocks, slots and table columns are poison. Reproducible backends give the same bits in all settings."""
    kind = SPECS[spec]
    layer, rows, plain = tensors_of(kind), make_rows(shape, dtype), None
    expected = attend_plainly(rows, kind, SINKS if kind.sinks else None)
    for setting in settings_of(name, dtype, spec):
        backend = make_backend(name, kind, dtype, setting)
        out = make_step(rows, setting, seed=3, device=DEVICE).run(backend, kind, layer)
        if plain is None:
            plain = out
            assert_near(out, expected)
        assert_same(backend, out, plain, setting)


@pytest.mark.parametrize(("name", "dtype", "spec"), CHUNKED, ids=str)
def test_chunks_and_decode_equal_the_whole_prompt(name: str, dtype: torch.dtype, spec: str) -> None:
    kind, setting = SPECS[spec], one_setting(name, Setting("LBHNC", 128, 64))
    backend, layer = make_backend(name, kind, dtype, setting), tensors_of(kind)
    history = make_history(1, 1100, HEADS, KV_HEADS, SIZE, dtype)
    whole = make_step([(history, 1100, 1100)], setting, device=DEVICE).run(backend, kind, layer)
    assert_near(whole, attend_plainly([(history, 1100, 1100)], kind, SINKS if kind.sinks else None))
    position = 0
    for chunk in (1, 15, 50, 62, 400, 500, 1, 4, 67):
        position += chunk
        out = make_step([(history, position, chunk)], setting, seed=chunk, device=DEVICE).run(backend, kind, layer)
        assert_same(backend, out, whole[position - chunk : position], position)


@pytest.mark.parametrize(("name", "dtype", "spec"), CHUNKED, ids=str)
def test_the_last_tokens_alone(name: str, dtype: torch.dtype, spec: str) -> None:
    """As a decoder's last layer has them, beside padding rows."""
    kind, setting = SPECS[spec], one_setting(name, Setting("LBHNC", 128, 64))
    backend, layer = make_backend(name, kind, dtype, setting), tensors_of(kind)
    for shape in ("ragged", "verification", "prefill with context"):
        step = make_step(make_rows(shape, dtype), setting, device=DEVICE)
        expected = step.run(backend, kind, layer)[step.inputs.live[0][1:].long() - 1]
        assert_same(backend, step.run_last(backend, kind, layer), expected, shape)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_INV_5_and_L3_G4_padding_and_placement_change_nothing(name: str, dtype: torch.dtype) -> None:
    kind = SPECS["full"]
    for setting in (Setting("LBHNC", 128, 64), Setting("BLNHC", 64, 64), *LARGE):
        if takes(name, setting):
            backend, rows = make_backend(name, kind, dtype, setting), make_rows("ragged", dtype)
            outs = []
            for seed in range(3):
                step = make_step(rows, setting, seed=seed, device=DEVICE)
                step.inputs.num_rows += 2 * (seed == 2)
                outs.append(step.run(backend, kind))
            for out in outs[1:]:
                assert_same(backend, out, outs[0], setting)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("name", NAMES)
def test_L3_G1_offsets_past_32_bits(name: str, layout: str) -> None:
    """A pool of more than 2^31 / (2 * 8 * 128) tokens, the live blocks at its end."""
    setting, heads, size = one_setting(name, Setting(layout, 64, 64), Setting(layout, 256, 256)), 8, 128
    spec = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_size=size, scale=size**-0.5)
    rows = [
        (make_history(seed, n, heads, heads, size, torch.bfloat16), n, k) for seed, n, k in ((0, 130, 100), (1, 40, 1))
    ]
    limits = Setup(max_num_rows=8, max_num_tokens=256, max_model_len=512, num_blocks=17_000, block_size=setting.kernel)
    backend = BACKENDS.resolve(name)([spec], torch.bfloat16, DEVICE, limits)
    expected = make_step(rows, setting, device=DEVICE).run(backend, spec)
    step = make_step(rows, setting, num_blocks=1_060_000 // setting.block, device=DEVICE)
    assert int(step.inputs.block_table[0, 0]) * step.kv.stride(0) > 2**31
    assert_same(backend, step.run(backend, spec), expected, setting)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_L3_3_a_store_writes_its_slots_and_no_other_byte(setting: Setting) -> None:
    """And what it wrote is what the CPU's store writes."""
    generator = torch.Generator().manual_seed(1)
    pool = make_pool(setting, 5, KV_HEADS, 2 * SIZE, torch.float32)
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=generator))
    other = make_pool(setting, 5, KV_HEADS, 2 * SIZE, torch.float32, device=DEVICE)
    other.buffer.copy_(pool.buffer)
    qkv = torch.randn(24, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator)
    places = torch.randperm(4 * setting.block, generator=generator)[:24] + setting.block
    kernel_ids = torch.tensor(
        [
            pool.block_maps[0].expand([b])[o // setting.kernel]
            for b, o in (divmod(place, setting.block) for place in places.tolist())
        ]
    )
    slots = kernel_ids * setting.kernel + places % setting.kernel
    slots[::5] = -1
    for target, device in ((pool, torch.device("cpu")), (other, DEVICE)):
        qk_norm_rope_store(
            qkv.to(device),
            torch.zeros(24, dtype=torch.int64, device=device),
            rope_table(SIZE, 4).to(device),
            None,
            None,
            1e-6,
            HEADS,
            KV_HEADS,
            SIZE,
            target.views[1],
            slots.to(device),
        )
    assert torch.equal(other.buffer.cpu(), pool.buffer)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_caches_with_scales_per_head(name: str, stored: torch.dtype) -> None:
    """Stored numbers times the scales, against plain attention over their products."""
    if stored not in BACKENDS.resolve(name).capability.cache_dtypes:
        pytest.skip(f"{name} states that it does not take a cache of {stored}")
    key_scale, value_scale = torch.tensor([0.02, 0.05]), torch.tensor([0.5, 0.03])
    rows, products = [], []
    for history, length, queries in make_rows("ragged", torch.bfloat16):
        kept = (history.kv.float() * 30).round().clamp(-127, 127).to(stored)
        rows.append((dataclasses.replace(history, kv=kept), length, queries))
        factor = torch.cat([key_scale[:, None].expand(-1, SIZE), value_scale[:, None].expand(-1, SIZE)], dim=1)
        products.append((dataclasses.replace(history, kv=kept.float() * factor), length, queries))
    layer = LayerTensors(key_scale=key_scale.to(DEVICE), value_scale=value_scale.to(DEVICE))
    expected, plain = attend_plainly(products, FULL).to(DEVICE), None
    for setting in settings_of(name, torch.bfloat16, "full"):
        backend = make_backend(name, FULL, torch.bfloat16, setting, cache_dtype=stored)
        step = make_step(rows, setting, device=DEVICE)
        assert step.kv.dtype == stored
        out = step.run(backend, FULL, layer)
        assert (out.double() - expected).norm() / expected.norm() < 1e-2
        plain = out if plain is None else plain
        assert_same(backend, out, plain, setting)


@pytest.mark.parametrize("name", NAMES)
def test_contradicting_inputs_are_refused_by_name(name: str) -> None:
    setting = one_setting(name, Setting("LBHNC", 64, 64))
    backend = make_backend(name, FULL, torch.bfloat16, setting)
    step = make_step(make_rows("decode", torch.bfloat16), setting, device=DEVICE)
    with pytest.raises(ValueError, match=r"max_seq_len=9999 exceeds the \d+ tokens"):
        backend.prepare(dataclasses.replace(step.inputs, max_seq_len=9999))
    backend.prepare(step.inputs)
    with pytest.raises(ValueError, match=rf"a cache view of 32-token blocks, inputs for {setting.kernel}-token blocks"):
        backend.run(step.q, torch.zeros(9, KV_HEADS, 32, 2 * SIZE, device=DEVICE), FULL, torch.empty_like(step.q))

"""Loading a model: everything in its place, once, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loading import load_model
from model_rig import Case, Rig
from octavo.checkpoint.arch import Arch, LayerKind
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.ops.gemm import unpack

PROMPT = [5, 100, 42, 7, 9, 150]


@pytest.fixture
def plain(tiny_case: Callable[[str], Case], tmp_path: Path) -> tuple[Arch, dict[str, torch.Tensor], Path]:
    """A small Qwen2 checkpoint as tensors, to be spoiled and saved into a folder."""
    case = tiny_case("qwen2")
    tensors = {}
    for file in case.folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return read_arch(case.folder), tensors, tmp_path


def test_shards_are_many(tiny_case: Callable[[str], Case]) -> None:
    """The parity tests stand for sharded loading only if the checkpoints are sharded."""
    assert len(list(tiny_case("qwen3-moe").folder.glob("*.safetensors"))) > 5


def test_no_torch_parameter_is_left(tiny_case: Callable[[str], Case]) -> None:
    """A weight is stored once, packed; a tied one serves the embedding too."""
    model = tiny_case("qwen3").model
    assert list(model.named_parameters()) == []
    embedding = model.embedding.forward(torch.tensor([3]))
    assert torch.equal(embedding[0], unpack(model.head.packed)[3])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model.norm.weight: expected \[64\], found nothing"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            r"model.norm.weight: expected \[64\], found \[65\]",
        ),
        (
            lambda t: t.update({"model.layers.0.extra": torch.ones(2)}),
            r"model.layers.0.extra: expected nothing, found F32 \[2\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "model.norm.weight: expected one of F32, F16, BF16, F64, found I8",
        ),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), "'model.norm.weight' holds NaN or Inf"),
        (
            lambda t: t["model.layers.1.mlp.up_proj.weight"][3].fill_(-torch.inf),
            "'model.layers.1.mlp.up_proj.weight' holds NaN or Inf",
        ),
    ],
    ids=["missing", "shape", "extra", "dtype", "nan", "inf"],
)
def test_spoiled_weights_are_refused(
    plain: tuple[Arch, dict[str, torch.Tensor], Path],
    spoil: Callable[[dict[str, torch.Tensor]], object],
    message: str,
) -> None:
    arch, tensors, folder = plain
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message) as error:
        load_model(arch, folder, torch.float32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_no_dtype_hides_a_nan(
    plain: tuple[Arch, dict[str, torch.Tensor], Path], dtype: torch.dtype, value: float
) -> None:
    arch, tensors, folder = plain
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["model.embed_tokens.weight"][-1, -1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' holds NaN or Inf"):
        load_model(arch, folder, torch.bfloat16)


def test_a_refusal_lists_the_first_five(plain: tuple[Arch, dict[str, torch.Tensor], Path]) -> None:
    arch, _, folder = plain
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"and [0-9]+ more$") as error:
        load_model(arch, folder, torch.float32)
    assert str(error.value).count("expected") == 5


def test_large_finite_weights_are_not_taken_for_inf(
    plain: tuple[Arch, dict[str, torch.Tensor], Path],
) -> None:
    arch, tensors, folder = plain
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    load_model(arch, folder, torch.float32)


def test_a_leftover_head_of_a_tied_model_is_ignored(
    plain: tuple[Arch, dict[str, torch.Tensor], Path],
) -> None:
    arch, tensors, folder = plain
    assert arch.tied
    save_file({**tensors, "lm_head.weight": torch.zeros(199, 64)}, folder / "model.safetensors")
    assert load_model(arch, folder, torch.float32)


@pytest.mark.parametrize("family", ["deepseek3", "qwen2"])
@pytest.mark.parametrize("place", ["model.layers.{}.", "mtp."], ids=["behind the layers", "under mtp"])
def test_modules_of_multi_token_prediction_are_a_drafters(
    tiny_case: Callable[[str], Case], tmp_path: Path, family: str, place: str
) -> None:
    """Several too. A layer more that is no module is refused, as one within the model's layers is."""
    case = tiny_case(family)
    tensors = {name: each for file in case.folder.glob("*.safetensors") for name, each in load_file(file).items()}
    arch = case.model.arch
    own = "fc" if place == "mtp." else "eh_proj"

    def saved(*names: str) -> None:
        save_file(tensors | {name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")

    places = [place.format(arch.num_layers + number) for number in range(3)]
    saved(*(each + name for each in places for name in (f"{own}.weight", "layers.0.mlp.up_proj.weight")))
    assert load_model(arch, tmp_path, torch.float32)
    for name in ("model.layers.9.mlp.up_proj.weight", "model.layers.0.eh_proj.weight", "mtp.norm.weight"):
        saved(name)
        with pytest.raises(ValueError, match=f"{name}: expected nothing"):
            load_model(arch, tmp_path, torch.float32)


_WHOLE, _TEXT = "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "body", "head", "vision"),
    [
        (_WHOLE, "language_model.model.", "language_model.lm_head.", "vision_tower."),  # until transformers 4.51
        (_WHOLE, "model.language_model.", "lm_head.", "model.vision_tower."),  # from 4.52 on
        (_TEXT, "language_model.model.", "language_model.lm_head.", "vision_tower."),
        (_TEXT, "model.language_model.", "lm_head.", "model.vision_tower."),
        (_TEXT, "model.", "lm_head.", "vision_tower."),
    ],
)
@pytest.mark.parametrize("family", ["gemma3-16", "gemma3-32"])
def test_the_text_half_of_a_vision_checkpoint(
    tiny_case: Callable[[str], Case], tmp_path: Path, name: str, body: str, head: str, vision: str, family: str
) -> None:
    """Under all names that transformers has written, tied and not."""
    case = tiny_case(family)
    tensors = {f"{vision}embeddings": torch.ones(3)}
    for file in case.folder.glob("*.safetensors"):
        for known, tensor in load_file(file).items():
            own = head if known.startswith("lm_head.") else body
            tensors[own + known.removeprefix("lm_head.").removeprefix("model.")] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(dataclasses.replace(case.model.arch, name=name), tmp_path, torch.float32)
    assert torch.equal(Rig(model).run(PROMPT, [6]), Rig(case.model).run(PROMPT, [6]))


def test_a_tensor_under_two_names_is_refused(tiny_case: Callable[[str], Case], tmp_path: Path) -> None:
    tensors = {f"{prefix}norm.weight": torch.ones(64) for prefix in ("model.", "language_model.model.")}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' is there under two names"):
        load_model(tiny_case("gemma3-16").model.arch, tmp_path, torch.float32)


def test_bfloat16_checkpoint_in_float32(plain: tuple[Arch, dict[str, torch.Tensor], Path]) -> None:
    """Weights that stay bfloat16 give the bits of the same weights widened to float32."""
    arch, tensors, folder = plain
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    for name, values in (
        ("narrow", narrow),
        ("wide", {name: tensor.float() for name, tensor in narrow.items()}),
    ):
        (folder / name).mkdir()
        save_file(values, folder / name / "model.safetensors")
    kept, widened = (load_model(arch, folder / name, torch.float32) for name in ("narrow", "wide"))
    assert kept.head.packed.kind.startswith("bfloat16")
    assert torch.equal(Rig(kept).run(PROMPT, [6]), Rig(widened).run(PROMPT, [6]))


def test_bfloat16_activations_stay_near_float32(tiny_case: Callable[[str], Case]) -> None:
    case = tiny_case("gemma3-16")
    model = load_model(read_arch(case.folder), case.folder, torch.bfloat16)
    found = Rig(model, dtype=torch.bfloat16).run(PROMPT, [6])
    assert found.dtype == torch.float32
    assert (found - case.expected(PROMPT)).abs().max() < 0.2


def test_int8_stays_near_float32(tiny_case: Callable[[str], Case]) -> None:
    case = tiny_case("qwen3")
    model = load_model(read_arch(case.folder), case.folder, torch.float32, quantization="int8")
    assert model.head.packed.kind == "int8"
    assert (Rig(model).run(PROMPT, [6]) - case.expected(PROMPT)).abs().max() < 0.2


@pytest.mark.parametrize("family", ["llama", "gemma3-16", "qwen3-moe"])
def test_dummy_weights(tiny_case: Callable[[str], Case], family: str) -> None:
    """Seeded, of the right spread, norms of one, and they need no folder."""
    arch = tiny_case(family).model.arch
    models = [load_model(arch, None, torch.float32, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    heads = [unpack(model.head.packed) for model in models]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(models[0].norm.weight, torch.ones(64))
    assert Rig(models[0]).run(PROMPT, [6]).isfinite().all()


def test_dummy_rows_differ() -> None:
    """Tiling the random block must not make equal rows."""
    kinds = (LayerKind(),)
    arch = Arch(
        name="LlamaForCausalLM",
        dtype="float32",
        vocab_size=5000,
        hidden_size=1024,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_size=32,
        max_position=16,
        norm_eps=1e-6,
        layers=kinds,
    )
    head = unpack(load_model(arch, None, torch.float32, load_format="dummy").head.packed)
    assert head[:, 0].unique().numel() > 4900


def test_max_position_can_be_lowered(tiny_case: Callable[[str], Case]) -> None:
    arch = dataclasses.replace(tiny_case("qwen3").model.arch, max_position=10)
    model = load_model(arch, None, torch.float32, load_format="dummy")
    assert model.layers[0].attention.rotary.cos_sin.shape[0] == 10


@pytest.mark.parametrize(("load_format", "message"), [("pt", "unknown load_format 'pt'"), ("auto", "needs a model")])
def test_bad_load_formats(tiny_case: Callable[[str], Case], load_format: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(tiny_case("qwen3").model.arch, None, torch.float32, load_format=load_format)

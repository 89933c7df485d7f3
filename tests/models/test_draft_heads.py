"""Drafters that read hidden states, against plain float32 loops and transformers' modules: within 1e-4."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from hybrid_configs import HYBRIDS
from hybrid_rig import HybridRig
from loading import load_model
from model_rig import Case, Rig, make_reference
from octavo.attention.base import ForwardContext, Taps, forward_context
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.checkpoint.config_reader.drafters import read_block, read_head
from octavo.checkpoint.drafters import build_drafters, read_drafter
from octavo.checkpoint.loader import fill_model
from octavo.layers.embedding import embed_with_states
from octavo.models import ARCHITECTURES
from octavo.models.drafters import DraftHead
from octavo.ops.inputs.tensors import DraftRows, RowTensors
from octavo.ops.sampling.drafts import draw_drafts_composed

SIZE, HEADS, KV_HEADS, HEAD, INNER, VOCAB, DRAFT_VOCAB = 64, 4, 2, 16, 96, 199, 61
LENGTH = 23
TOLERANCE = 1e-4
HEAD_CONFIG = {
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama of four layers."""
    folder = tmp_path_factory.mktemp("target")
    make_reference("llama").save_pretrained(folder)
    return load_model(read_arch(folder), folder, torch.float32)


def head_weights(prefix: str, in_size: int) -> dict[str, torch.Tensor]:
    """Of one Llama layer."""
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD, in_size),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD, in_size),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD, in_size),
        "self_attn.o_proj.weight": (SIZE, HEADS * HEAD),
        "post_attention_layernorm.weight": (SIZE,),
        "mlp.gate_proj.weight": (INNER, SIZE),
        "mlp.up_proj.weight": (INNER, SIZE),
        "mlp.down_proj.weight": (SIZE, INNER),
    }
    return {prefix + name: random(*shape) for name, shape in shapes.items()}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * torch.randn(shape)


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(folder: Path, method: str, target: Any) -> list[DraftHead]:
    found = build_drafters(read_drafter(folder, method, target.arch), target, torch.float32)
    for one in found:
        fill_model(one, folder)  # type: ignore[arg-type]
    return found


class DraftRig(Rig):
    """A drafter with a cache, run by hand; its context has its own layers."""

    @torch.inference_mode()
    def enter(self, tokens: torch.Tensor, states: torch.Tensor, *, attend: bool = True) -> torch.Tensor:
        """The next entries of one row."""
        chunks = {"row": tokens.tolist()}
        inputs = [self._inputs(group, chunks) for group in range(len(self.groups))]
        start = self.lengths.get("row", 0)
        context = ForwardContext(
            layers=self.layers, tables=self.tables, positions=torch.arange(start, start + len(tokens))
        )
        for table, own in zip(self.tables, inputs, strict=True):
            if attend or self.model.attends_to_store:
                table.prepare(own, for_capture=False)
            else:
                table.prepare_stores(own)
        self.lengths["row"] = start + len(tokens)
        with forward_context(context):
            if attend:
                return self.model.forward(tokens, states)
            self.model.store(tokens, states)
        return states[:0]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attend(weights: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention with rotary positions, one query at a time."""
    q, k, v = (functional.linear(x, weights[f"{prefix}self_attn.{name}_proj.weight"]) for name in "qkv")
    angles = torch.outer(torch.arange(len(x)).float(), 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turn(h: torch.Tensor) -> torch.Tensor:
        left, right = h.unflatten(1, (-1, HEAD)).chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    q, k, v = turn(q), turn(k), v.unflatten(1, (-1, HEAD))
    seen = torch.zeros(len(x), HEADS, HEAD)
    for place in range(len(x)):
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            scores = k[: place + 1, own] @ q[place, head] * HEAD**-0.5
            seen[place, head] = torch.softmax(scores, 0) @ v[: place + 1, own]
    return functional.linear(seen.flatten(1), weights[f"{prefix}self_attn.o_proj.weight"])


def mlp(weights: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    h = norm(x, weights[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (functional.linear(h, weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return functional.linear(functional.silu(gate) * up, weights[f"{prefix}mlp.down_proj.weight"])


def agrees(drafter: Any, tokens: torch.Tensor, states: torch.Tensor, expected: torch.Tensor) -> None:
    """Whole, and a part stored before the rest: the same states."""
    assert expected.abs().max() > 0.5, "states too small to tell right from wrong"
    for backend in ("reference", "cpu"):
        assert (DraftRig(drafter, backend).enter(tokens, states) - expected).abs().max() <= TOLERANCE
        rig = DraftRig(drafter, backend)
        rig.enter(tokens[:17], states[:17], attend=False)
        rest = [rig.enter(tokens[i : i + 1], states[i : i + 1]) for i in range(17, len(tokens))]
        assert (torch.cat(rest) - expected[17:]).abs().max() <= TOLERANCE


def embedded(target: Any, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = target.embedding.forward(tokens)
    return found


def drawn(count: int) -> DraftRows:
    """Drafts of so many rows, greedy ones and others."""
    one = torch.ones(count, dtype=torch.int32)
    token_ids, rows = torch.zeros(count + 1, 8, dtype=torch.int32), torch.arange(count)
    table = RowTensors(token_ids, torch.full((count + 1,), 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    return DraftRows(rows, (one, one), table, 1, (rows % 2).float(), rows, 1.0, VOCAB)


def eagle3_weights(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a head that knows the tokens `ids`, in order."""
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return {
        **head_weights("midlayer.", 2 * SIZE),
        "midlayer.input_layernorm.weight": random(SIZE),
        "midlayer.hidden_norm.weight": random(SIZE),
        "fc.weight": random(SIZE, 3 * SIZE),
        "norm.weight": random(SIZE),
        "lm_head.weight": random(len(ids), SIZE),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": known,
    }


EAGLE3 = {**HEAD_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}


@pytest.mark.parametrize("normed", [False, True], ids=["published", "norm-before-residual"])
def test_eagle3_equals_a_plain_loop(target: Any, tmp_path: Path, normed: bool) -> None:
    torch.manual_seed(3)
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    weights = eagle3_weights(ids)
    folder = write(tmp_path, {**EAGLE3, "norm_before_residual": normed}, weights)
    draft = read_drafter(folder, "eagle3", target.arch)
    assert draft.taps == (2, 2, 1), "near the bottom, the middle and the top of four layers"
    (drafter,) = load(folder, "eagle3", target)
    tokens, taps = torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, 3 * SIZE)
    states = functional.linear(taps, weights["fc.weight"])
    assert (drafter.begin(taps) - states).abs().max() <= TOLERANCE
    h = norm(states, weights["midlayer.hidden_norm.weight"])
    both = torch.cat([norm(embedded(target, tokens), weights["midlayer.input_layernorm.weight"]), h], dim=-1)
    x = (h if normed else states) + attend(weights, "midlayer.", both)
    expected = x + mlp(weights, "midlayer.", x)
    agrees(drafter, tokens, states, expected)
    logits = functional.linear(norm(expected, weights["norm.weight"]), weights["lm_head.weight"])
    found = drafter.logits(expected)
    assert found.dtype == torch.float32
    assert (found - logits).abs().max() <= TOLERANCE
    assert drafter.target_ids is not None and drafter.target_ids.equal(ids)
    ours, theirs = drawn(LENGTH), drawn(LENGTH)
    assert torch.equal(drafter.draw(expected, ours), draw_drafts_composed(found, ids, theirs))
    assert torch.equal(ours.table.token_ids, theirs.table.token_ids) and ours.table.token_ids.any()


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (0, 5000, r"d2t\[0\]=5000 \(place 0 would draft token 5000, the target has tokens 0 to 198"),
        (17, -9000, r"d2t\[17\]=-9000 \(place 17 would draft token -8983, the target has tokens 0 to 198"),
        (60, 139, r"d2t\[60\]=139 \(place 60 would draft token 199, "),
        (3, 2**63 - 1, r"d2t\[3\]=9223372036854775807 "),
        (9, -4, r"d2t\[9\]=-4 \(places 5 and 9 would both draft token 5: each token has one place"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_map_that_leaves_the_vocabulary_is_refused(
    target: Any, tmp_path: Path, place: int, value: int, why: str, dtype: torch.dtype
) -> None:
    """Before a request meets it: it names the file, the entry, its value and the limit."""
    weights = eagle3_weights(torch.arange(DRAFT_VOCAB))
    weights["d2t"][place] = value
    if dtype == torch.int64 or value < 2**31:
        weights["d2t"] = weights["d2t"].to(dtype)
    with pytest.raises(ValueError, match=rf"{tmp_path}/model.safetensors: unsupported {why}"):
        load(write(tmp_path, EAGLE3, weights), "eagle3", target)


@pytest.mark.parametrize(
    ("d2t", "why"),
    [
        (torch.zeros(DRAFT_VOCAB), "d2t: expected one of I64, I32, found F32"),
        (torch.zeros(DRAFT_VOCAB - 1, dtype=torch.int64), r"d2t: expected \[61\], found \[60\]"),
        (None, r"d2t: expected \[61\], found nothing"),
    ],
)
def test_a_map_of_another_form_is_refused(target: Any, tmp_path: Path, d2t: torch.Tensor | None, why: str) -> None:
    weights = eagle3_weights(torch.arange(DRAFT_VOCAB))
    weights = {name: value for name, value in weights.items() if name != "d2t"} | ({} if d2t is None else {"d2t": d2t})
    with pytest.raises(ValueError, match=why):
        load(write(tmp_path, EAGLE3, weights), "eagle3", target)


def test_a_layer_that_declares_integers_says_which_fit() -> None:
    """Values that index something are checked when they are read: on a device they end the engine, or read others'."""
    from octavo.layers.base import Layer
    from octavo.models import drafters

    def below(kind: type[Layer]) -> list[type[Layer]]:
        return [kind, *(each for own in kind.__subclasses__() for each in below(own))]

    for module in pkgutil.iter_modules(drafters.__path__, "octavo.models.drafters."):
        importlib.import_module(module.name)
    for name in ARCHITECTURES:
        ARCHITECTURES.resolve(name)
    own = [kind for kind in below(Layer) if kind.__module__.startswith("octavo.")]
    declares = re.compile(r"self\.declare\([^\n]*torch\.(?:u?int\d+|bool|long)")
    having = [kind for kind in own if declares.search(inspect.getsource(kind))]
    assert [kind.__name__ for kind in having] == ["DraftVocabulary"]
    assert all("fault_of" in vars(kind) for kind in having)


@pytest.mark.parametrize("brings", [False, True], ids=["target's embedding", "own embedding and bias"])
def test_eagle_equals_a_plain_loop(target: Any, tmp_path: Path, brings: bool) -> None:
    torch.manual_seed(4)
    weights = {**head_weights("layers.0.", SIZE), "fc.weight": random(SIZE, 2 * SIZE)}
    if brings:
        weights |= {"embed_tokens.weight": random(VOCAB, SIZE), "fc.bias": 0.1 * torch.randn(SIZE)}
    (drafter,) = load(write(tmp_path, {**HEAD_CONFIG, "architectures": ["LlamaForCausalLM"]}, weights), "eagle", target)
    tokens, states = torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, SIZE)
    words = weights["embed_tokens.weight"][tokens] if brings else embedded(target, tokens)
    x = functional.linear(torch.cat([words, states], dim=-1), weights["fc.weight"], weights.get("fc.bias"))
    x = x + attend(weights, "layers.0.", x)
    expected = x + mlp(weights, "layers.0.", x)
    agrees(drafter, tokens, states, expected)
    assert drafter.logits(expected).equal(target.head.forward(expected))
    assert drafter.begin(states) is states


@pytest.mark.parametrize("family", ["granite", "granite-biased", "gemma3-16"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_reads_the_rows_of_a_scaled_embedding_as_they_are(
    tiny_case: Callable[[str], Case], tmp_path: Path, family: str, method: str
) -> None:
    """As EAGLE's authors and vLLM give a head the table; and the state is the published model's, behind its norm."""
    case = tiny_case(family)
    size, vocab = case.model.arch.hidden_size, case.model.arch.vocab_size
    sizes = {"hidden_size": size, "vocab_size": vocab}
    assert case.model.embedding.scale != 1.0
    names = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
    config = {**HEAD_CONFIG, **sizes, "architectures": [names[method]]}
    (head,) = build_drafters(read_head(config, "config.json", method, case.model.arch, []), case.model, torch.float32)
    tokens, states = torch.randint(vocab, (LENGTH,)), torch.randn(LENGTH, size)
    table = case.reference.get_input_embeddings().weight.detach()
    assert head.embedding.forward(tokens).equal(table[tokens])
    both, own = embed_with_states(head.embedding, tokens, states)
    assert both.equal(torch.cat([table[tokens], states], dim=-1)) and own.equal(states)
    with torch.no_grad():
        expected = case.reference(tokens[None], output_hidden_states=True).hidden_states[-1][0]
    model = types.SimpleNamespace(
        layer_specs=case.model.layer_specs, forward=case.model.forward, logits=lambda hidden: hidden
    )
    found = Rig(model).step({"row": tokens.tolist()})["row"]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert method != "eagle" or head.begin(found) is found


HYBRID = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}


@pytest.mark.parametrize("family", ["falcon-h1", "nemotron-h", "granite4", "jamba", "qwen3-next"])
def test_places_that_a_head_reads_are_counted_in_the_published_models_layers(
    tiny_case: Callable[[str], Case], family: str
) -> None:
    """What enters layer i is transformers' hidden state i, and 0 the embedding, also where a layer is two of ours."""
    case = tiny_case(family)
    arch, count = case.model.arch, len(case.reference.model.layers)
    sizes = {"hidden_size": arch.hidden_size, "vocab_size": arch.vocab_size}
    numbers = list(range(count))
    config = {**HEAD_CONFIG, **sizes, "eagle_config": {"eagle_aux_hidden_state_layer_ids": numbers}}
    draft = read_head(config, "config.json", "eagle3", arch, [])
    tokens = torch.randint(arch.vocab_size, (LENGTH,))
    taps = torch.full((LENGTH, count * arch.hidden_size), torch.nan)
    rig = HybridRig(case.model)
    rig.taps = Taps(draft.taps, taps)
    rig.run(tokens.tolist(), [LENGTH])
    with torch.no_grad():
        expected = case.reference(tokens[None], output_hidden_states=True).hidden_states[:count]
    for number, (own, states) in enumerate(zip(taps.split(arch.hidden_size, 1), expected, strict=True)):
        assert (own * draft.tap_unit - states[0]).abs().max() <= 1e-5 * states.abs().max(), number
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, count]}
    with pytest.raises(ValueError, match=f"the target has {count} layers: numbers from 0 to {count - 1} are needed"):
        read_head(config, "config.json", "eagle3", arch, [])


def test_a_head_reads_the_stream_in_the_published_models_units(target: Any, tmp_path: Path) -> None:
    """Granite's is counted in residual multipliers here, so that its layers are Llama's."""
    write(tmp_path, EAGLE3, eagle3_weights(torch.arange(DRAFT_VOCAB)))
    draft = read_drafter(tmp_path, "eagle3", dataclasses.replace(target.arch, stream_unit=0.25))
    given, found = torch.randn(LENGTH, len(draft.taps) * SIZE), []
    for unit in (draft.tap_unit, 1.0):
        (head,) = build_drafters(dataclasses.replace(draft, tap_unit=unit), target, torch.float32)
        fill_model(head, tmp_path)  # type: ignore[arg-type]
        found.append(head.begin(given / unit))
    assert torch.equal(*found)


def test_a_block_drafters_places_are_counted_so_too(tiny_case: Callable[[str], Case]) -> None:
    """Of its numbers 0 is what the first layer leaves."""
    arch = dataclasses.replace(tiny_case("falcon-h1").model.arch, embedding_scale=1.0)
    config = {**HEAD_CONFIG, "hidden_size": arch.hidden_size, "vocab_size": arch.vocab_size, "mask_token_id": 3}
    config |= {"target_layer_ids": [0, 2], "architectures": ["DFlashDraftModel"]}
    taps = read_block(config, "config.json", arch, 4).taps
    assert taps == tuple((layer + 1) * arch.num_layers // 3 for layer in (0, 2))


@pytest.mark.parametrize("family", ["nemotron-h", "bamba", "jamba", "lfm2", "granite4", "falcon-h1", "mamba2"])
def test_modules_of_families_whose_modules_are_not_read_are_refused_by_name(
    tiny_case: Callable[[str], Case], family: str, tmp_path: Path
) -> None:
    """S.1: a count of modules in a config.json, and random weights, make none of another family's."""
    arch = tiny_case(family).model.arch
    config = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1, "num_hidden_layers": arch.num_published}
    config |= {"hidden_size": arch.hidden_size, "vocab_size": arch.vocab_size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"multi-token prediction of {arch.name} is not read"):
        read_drafter(tmp_path, "mtp", arch, "dummy")


@pytest.mark.parametrize("family", ["deepseek3", "qwen3", "qwen3-moe", "glm4", "qwen3-next", "qwen3.5-moe"])
@pytest.mark.parametrize("under_mtp", [False, True], ids=["behind the layers", "under mtp"])
def test_mtp_equals_transformers(family: str, under_mtp: bool, tmp_path: Path) -> None:
    """A module is one more layer of the target's kind: here one is made of a model that has a layer more."""
    from transformers.modeling_layers import MtpModel

    longer = make_reference(family, num_hidden_layers=3, **(HYBRID if family in HYBRIDS else {}))
    longer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    weights = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(5)
    own = {
        "enorm.weight": random(SIZE),
        "hnorm.weight": random(SIZE),
        "eh_proj.weight": random(SIZE, 2 * SIZE),
        "shared_head.norm.weight": random(SIZE),
    }
    if under_mtp:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        weights = {name.replace("model.layers.2.", "mtp.layers.0."): value for name, value in weights.items()}
        weights |= {f"mtp.{name}.weight": value for name, value in zip(names, own.values(), strict=True)}
    else:
        weights |= {f"model.layers.2.{name}": value for name, value in own.items()}
    for kept in ("layer_types", "mlp_layer_types"):
        if kept in config:
            config[kept] = config[kept][:2]
    write(tmp_path, config, weights)
    arch = read_arch(tmp_path)
    target = load_model(arch, None, torch.float32, load_format="dummy")
    (drafter,) = load(tmp_path, "mtp", target)
    tokens, states = torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, SIZE)

    longer.config.num_mtp_layers = 1
    for kept in ("layer_types", "mlp_layer_types"):
        if getattr(longer.config, kept, None) is not None:
            setattr(longer.config, f"mtp_{kept}", getattr(longer.config, kept)[-1:])
    reference = MtpModel(longer, 1).eval()
    module = reference.layers[0]
    module.mtp_block.load_state_dict(longer.model.layers[2].state_dict())
    with torch.no_grad():
        for part, value in zip(
            (module.enorm, module.hnorm, module.eh_proj, module.post_norm), own.values(), strict=True
        ):
            part.weight.copy_(value)
        positions = torch.arange(LENGTH)[None] + 1
        expected = reference.forward_layer(
            0, states[None], positions, None, inputs_embeds=embedded(target, tokens)[None]
        )
    agrees(drafter, tokens, states, expected[0])
    assert drafter.logits(expected[0]).equal(target.logits(expected[0]))
    assert not drafter.attends_to_store, "a store is a pass that is planned for no attention"

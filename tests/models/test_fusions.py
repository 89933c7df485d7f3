"""A layer's lines: how they are learned, what runs them, and that nothing that does gives other bits than they do."""

from __future__ import annotations

import dataclasses
import json
import random
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import launches
from launches import STEPS, Engine, digests, make_model, pretended
from loading import load_model
from model_rig import FAMILIES, Case, Rig
from octavo.attention.base import NO_TAPS, Taps, current_context, forward_context
from octavo.attention.cpu import CpuBackend
from octavo.attention.paged import PagedBackend
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.layers import fusions
from octavo.layers.attention import Attention
from octavo.layers.base import Layer
from octavo.layers.chain import learn, line
from octavo.layers.decoder import Decoder
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp, UngatedMlp
from octavo.layers.norm import RMSNorm
from octavo.ops import native
from octavo.ops.arrivals import NO_GATES

PROMPT = random.Random(0).choices(range(199), k=120)
# (tokens of each row, whether only last tokens are asked for): prompts, decoding rows, both, chunks, one row
STEP_CHUNKS: list[tuple[dict[str, list[int]], bool]] = [
    ({"a": PROMPT[:1], "b": PROMPT[7:40], "c": PROMPT[50:67]}, False),
    ({"a": PROMPT[1:2], "b": PROMPT[40:41], "c": PROMPT[67:68]}, False),
    ({"a": PROMPT[2:3], "d": PROMPT[80:92], "c": PROMPT[68:73]}, True),
    ({"b": PROMPT[41:42]}, True),
]

pytestmark = pytest.mark.usefixtures("one_thread")


def as_written(model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The model's forward without any fusion: its layers' forwards, one behind the other, of all tokens."""

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, logits = model.embedding.forward(input_ids), current_context().logit_tokens
        for layer in model.layers:
            x = layer.forward(x)
        hidden = model.norm.forward(x)
        return hidden if logits is None else hidden.index_select(0, logits.tokens)

    return forward


def _run(model: Any, backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of all steps, and the cache behind them."""
    rig = Rig(model, backend, dtype)
    return [*(rig.compute(chunks, last=last) for chunks, last in STEP_CHUNKS), *rig.kv]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(found, expected, strict=True))


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_a_model_gives_the_bits_of_its_lines(
    tiny_case: Callable[[str], Case], family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one native call, layer by layer, and over another backend."""
    case = tiny_case(family)
    model = case.model if dtype == torch.float32 else load_model(read_arch(case.folder), case.folder, dtype)
    found = [_run(model, "cpu", dtype)]
    with monkeypatch.context() as patch:
        apart = dataclasses.replace(CpuBackend.capability, paged_operator=False)
        patch.setattr(CpuBackend, "capability", apart)
        found.append(_run(model, "cpu", dtype))
    other = _run(model, "reference", dtype)
    monkeypatch.setattr(model, "forward", as_written(model), raising=False)
    expected = _run(model, "cpu", dtype)
    assert not any(logits.isnan().any() for logits in expected[: len(STEP_CHUNKS)])
    assert all(_same(each, expected) for each in found)
    for few, whole in zip(other, _run(model, "reference", dtype), strict=True):  # its products depend on the batch
        torch.testing.assert_close(few, whole, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0, equal_nan=True)


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_a_gpu_launches_what_was_recorded(family: str) -> None:
    assert digests(family) == json.loads(launches.FILE.read_text())[family]


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_what_a_gpu_runs_gives_the_bits_of_the_lines(family: str) -> None:
    with pretended():
        model = make_model(family)
        plain = SimpleNamespace(arch=model.arch, layer_specs=model.layer_specs, forward=as_written(model))
        for name in ("decode graph of 3", "decode graph of 64", "prompts", "all tokens of prompts"):
            hidden, caches = Engine(plain).run(STEPS[name])
            assert not hidden.isnan().any()
            found, stored = Engine(model).run(STEPS[name])
            assert torch.equal(found, hidden), name
            assert all(map(torch.equal, stored, caches)), name


def test_what_every_token_meets_has_the_same_bits_as_one_expert_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (16, 0):
        monkeypatch.setattr("octavo.layers.moe._MAX_JOINED", most)
        with pretended():
            found.append(Engine(make_model("deepseek3")).run(STEPS["decode graph of 3"]))
            found[-1] += (sum(line.startswith("run_experts") for line in launches.LOG), len(launches.LOG))
    (hidden, caches, runs, fewer), (expected, stored, as_many, more) = found
    assert torch.equal(hidden, expected) and all(map(torch.equal, caches, stored))
    assert runs == as_many and fewer < more


def test_every_row_of_the_table_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended():
        for family in ("qwen3", "gemma3", "qwen3-moe"):
            model = make_model(family)
            expected = [Engine(model).run(STEPS[name])[0] for name in ("decode graph of 3", "prompts")]
            left_out = [(), *(tuple(row for row in fusions.FUSIONS if row is not out) for out in fusions.FUSIONS)]
            for rows in left_out:
                monkeypatch.setattr(fusions, "FUSIONS", rows)
                found = [Engine(model).run(STEPS[name])[0] for name in ("decode graph of 3", "prompts")]
                assert all(map(torch.equal, found, expected)), [row.name for row in rows]
            monkeypatch.undo()


class _Form(Layer):
    """A layer of 8 channels without attention, whose forward is given."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.norm, self.other_norm, self.own = RMSNorm(8, 1e-5), RMSNorm(8, 1e-5), _Double()
        self._forward = forward
        for norm in (self.norm, self.other_norm):
            norm.register_parameter("weight", torch.nn.Parameter(torch.rand(8), requires_grad=False))
            norm.finalize(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it was given."""
        return self._forward(self, x)


class _Double(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice x."""
        return 2 * x


def _one_sum(layer: Any, x: Any) -> Any:
    return layer.own(layer.norm(x)) + x


def _two_sums(layer: Any, x: Any) -> Any:
    x = x + layer.own(x)
    return x + layer.norm(layer.own(x))


NO_CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "two values of one": lambda layer, x: x + layer.own(layer.norm(x)) + layer.own(layer.other_norm(x)),
    "an older stream": lambda layer, x: x + layer.own(x + layer.norm(x)),
    "a factor": lambda layer, x: x + 0.5 * layer.own(x),
    "torch's own": lambda layer, x: x + torch.tanh(layer.own(x)),
    "a method": lambda layer, x: x + layer.own(x).tanh(),
    "a look at shapes": lambda layer, x: x + layer.own(x) if len(x.shape) == 2 else x,
    "a norm at the end": lambda layer, x: layer.norm(x + layer.own(x)),
    "nothing": lambda layer, x: x,
    "a sum with itself": lambda layer, x: x + x,
    "a look at the step": lambda layer, x: x + layer.own(x) * len(current_context().layers),
}


def test_lines_are_learned_of_chains() -> None:
    for forward, kinds in ((_one_sum, ("norm", "own", "add")), (_two_sums, ("own", "add", "own", "norm", "add"))):
        chain = learn(_Form(forward).forward)
        assert chain is not None and chain.kinds == kinds


@pytest.mark.parametrize("name", NO_CHAINS)
def test_what_is_no_chain_has_no_lines(name: str) -> None:
    assert learn(_Form(NO_CHAINS[name]).forward) is None


def test_layers_of_all_forms_follow_each_other() -> None:
    """Chains that begin with a norm, others, and no chains: alone and narrowed to the tokens that give logits."""
    forms = [_one_sum, _two_sums, *NO_CHAINS.values(), _one_sum, _one_sum, _two_sums]
    backend = type("Backend", (), {"capability": CpuBackend.capability})()
    table = SimpleNamespace(inputs=SimpleNamespace(max_query_len=3, apart=False), backend=backend)
    for order in (forms, forms[::-1], [_one_sum], [NO_CHAINS["a factor"]]):
        layers, norm = [_Form(form) for form in order], _Form(_one_sum).norm
        own = [SimpleNamespace(table=table, backend=backend, spec=None, cache=None) for _ in layers]
        decoder, x = Decoder(layers, norm), torch.randn(5, 8)
        for tokens in (None, torch.tensor([1, 4])):
            context: Any = SimpleNamespace(
                layers=own,
                tables=[table],
                for_capture=False,
                warmup_only=False,
                positions=torch.arange(5),
                logit_tokens=None if tokens is None else SimpleNamespace(tokens=tokens),
                taps=NO_TAPS,
                gates=NO_GATES,
                begin=lambda: None,
            )
            with forward_context(context):
                found, expected = decoder.forward(x, context.positions), x
                for layer in layers:
                    expected = layer.forward(expected)
                expected = norm.forward(expected)
            assert torch.equal(found, expected if tokens is None else expected[tokens])


class _Network(Layer):
    """As Nemotron-H has them: a norm and an MLP without gates, or a product."""

    def __init__(self, is_product: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(32, 1e-5)
        self.inner = Linear(32, 32, torch.float32) if is_product else UngatedMlp(32, 64, "relu2", torch.float32)
        for module in self.modules():
            for name, declared in list(module.named_parameters(recurse=False)):
                value = torch.nn.Parameter(torch.randn(declared.shape), requires_grad=False)
                module.register_parameter(name, value)
            if module is not self and isinstance(module, Layer):
                module.finalize(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        return x + self.inner(self.norm(x))


def test_a_last_layer_without_a_mixer_computes_the_tokens_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of its lines, which norms with products and MLPs without gates have."""
    backend = type("Backend", (), {"capability": CpuBackend.capability})()
    table = SimpleNamespace(inputs=SimpleNamespace(max_query_len=3, apart=False), backend=backend)
    layers, x, counts = [_Network(each) for each in (False, True, False)], torch.randn(5, 32), list[int]()
    own = [SimpleNamespace(table=table, backend=backend, spec=None, cache=None) for _ in layers]
    decoder, norm = Decoder(layers, layers[0].norm), layers[0].norm
    product = fusions.activated_linear
    monkeypatch.setattr(fusions, "activated_linear", lambda x, *rest: counts.append(len(x)) or product(x, *rest))
    for tokens in (None, torch.tensor([1, 4])):
        context: Any = SimpleNamespace(
            layers=own,
            tables=[table],
            for_capture=False,
            warmup_only=False,
            positions=torch.arange(5),
            logit_tokens=None if tokens is None else SimpleNamespace(tokens=tokens),
            taps=NO_TAPS,
            gates=NO_GATES,
            begin=lambda: None,
        )
        with forward_context(context):
            found, expected = decoder.forward(x, context.positions), x
            for layer in layers:
                expected = layer.forward(expected)
            expected = norm.forward(expected)
        assert torch.equal(found, expected if tokens is None else expected[tokens])
    assert counts == [5, 2], "of the last layer; the first one's norm is in its product"
    names = [text for _, text in decoder.describe([type(backend)] * 3)]
    assert any("normed_mlp" in text for text in names) and any("normed_linear" in text for text in names)


def test_a_rehearsal_keeps_what_layers_that_it_leaves_out_would_have() -> None:
    """Hidden states that a drafter reads are kept by a kernel, which a start compiles with the others."""
    backend = type("Backend", (), {"capability": CpuBackend.capability})()
    table = SimpleNamespace(inputs=SimpleNamespace(max_query_len=3, apart=False), backend=backend)
    own = [SimpleNamespace(table=table, backend=backend, spec=None, cache=None)]
    for is_rehearsal in (False, True):
        taps = Taps((5, 0), torch.full((5, 16), 7.0))
        context: Any = SimpleNamespace(
            layers=own,
            tables=[table],
            for_capture=False,
            warmup_only=is_rehearsal,
            positions=torch.arange(5),
            logit_tokens=None,
            taps=taps,
            gates=NO_GATES,
            begin=lambda: None,
        )
        with forward_context(context):
            Decoder([_Form(_one_sum)], _Form(_one_sum).norm).forward(torch.randn(5, 8), context.positions)
        kept = (taps.of(5) != 7.0).all(0)
        assert kept[8:].all() and bool(kept[:8].all()) == is_rehearsal  # there is no layer 5


def test_a_class_with_a_forward_of_its_own_is_of_no_kind_that_fusions_know() -> None:
    class Shifted(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Named(RMSNorm):
        pass

    assert (RMSNorm.kind, Shifted.kind, Named.kind) == ("norm", "own", "norm")
    assert Mlp(8, 8, "silu", torch.float32).kind == "mlp" and Mlp(8, 8, "silu", torch.float32, bias=True).kind == "own"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_last_norm_with_a_forward_of_its_own_runs(tiny_case: Callable[[str], Case], backend: str) -> None:
    """Operators know a last norm by its weight: what its class, or this very layer, does otherwise would be lost."""
    case, chunks = tiny_case("llama"), {"a": PROMPT[:20], "b": PROMPT[20:21]}

    class Doubled(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    plain = [Rig(case.model, backend).compute(chunks, last=last) for last in (False, True)]
    for own in ("a class", "this layer"):
        model = load_model(read_arch(case.folder), case.folder, torch.float32)
        if own == "a class":
            model.norm.__class__ = Doubled
        else:
            model.norm.forward = types.MethodType(lambda self, x: RMSNorm.forward(self, x) * 2, model.norm)
        for expected, last in zip(plain, (False, True), strict=True):
            torch.testing.assert_close(Rig(model, backend).compute(chunks, last=last), 2 * expected)
        assert "last norm" not in str(model.describe_layers([CpuBackend] * 4))


@pytest.mark.parametrize("own", ["a model's logits", "a head's class", "this head"])
def test_tokens_are_drawn_from_logits_of_a_familys_own(tiny_case: Callable[[str], Case], own: str) -> None:
    """The head's fused draw knows its product alone."""
    case, hidden = tiny_case("llama"), torch.randn(5, 64)
    model: Any = load_model(read_arch(case.folder), case.folder, torch.float32)
    head, negated = model.head, lambda self, x: -type(case.model.head).forward(self, x)
    if own == "a model's logits":
        model.__class__ = type("Own", (type(model),), {"logits": lambda self, x: -self.head.forward(x)})
    elif own == "a head's class":
        head.__class__ = type("Own", (type(head),), {"forward": negated})
    else:
        head.forward = types.MethodType(negated, head)
    none = torch.zeros(5, dtype=torch.int64)
    tokens, _ = model.draw(hidden, torch.arange(5), torch.zeros(5), none, none)
    assert torch.equal(tokens.long(), case.model.logits(hidden).argmin(1)) and not model.fused_sampling_rows()


def test_another_attention_is_no_standard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are norms of another epsilon: the operators know one."""

    class Turned(Attention):
        @line("rope_store")
        def rope_and_store(self, qkv: torch.Tensor) -> torch.Tensor:
            return super().rope_and_store(-qkv)

    with pretended():
        model, plain = make_model("qwen3"), make_model("qwen3")
        assert fusions.LayerLines(0, plain.layers[0]).standard is not None
        for layer in model.layers:
            layer.attention.__class__ = Turned
        assert fusions.LayerLines(0, model.layers[0]).standard is None
        plain.layers[1].mlp_norm.eps = 0.5
        assert fusions.LayerLines(1, plain.layers[1]).standard is None
        for each in (model, plain):
            own = SimpleNamespace(arch=each.arch, layer_specs=each.layer_specs, forward=as_written(each))
            for name in ("decode graph of 3", "prompts"):
                assert torch.equal(Engine(each).run(STEPS[name])[0], Engine(own).run(STEPS[name])[0])


@pytest.mark.parametrize("name", ["a class of its own", "a bias", "another dtype", "a forward of its own"])
def test_an_mlp_whose_products_are_others_is_no_standard_one(name: str) -> None:
    """The operators take the weights of an MLP's products and ask no layer: what else these do would be lost."""

    class Scaled(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    with pretended():
        model = make_model("qwen3")
        for layer in model.layers:
            down = layer.mlp.down
            if name == "a class of its own":
                down.__class__ = Scaled
            elif name == "a bias":
                down.bias = torch.full((down._rows,), 0.5)
            elif name == "another dtype":
                down.out_dtype = torch.float32
            else:
                layer.mlp_norm.forward = types.MethodType(lambda self, x: RMSNorm.forward(self, x) * 2, layer.mlp_norm)
        assert fusions.LayerLines(0, model.layers[0]).standard is None
        own = SimpleNamespace(arch=model.arch, layer_specs=model.layer_specs, forward=as_written(model))
        if name != "another dtype":  # of which the stream would be
            assert torch.equal(Engine(model).run(STEPS["prompts"])[0], Engine(own).run(STEPS["prompts"])[0])


def test_what_runs_a_layer_can_be_read() -> None:
    """Before weights are there, and of each kind of step."""
    with pretended():
        models = {family: make_model(family) for family in ("qwen3-moe", "olmo3", "qwen3")}
    before = "add norm linear rope_store -> pre_attention; attend -> itself; "
    dense, experts = (
        "linear add norm mlp -> post_attention",
        "linear add norm -> post_attention; own -> itself",
    )
    fused = "add norm linear rope_store attend -> fused_rope_decode; "
    few = "add norm linear rope_store -> pre_attention_of_few; attend -> itself; "
    assert models["qwen3-moe"].describe_layers([PagedBackend] * 4) == [
        ("decode graph", f"layers 0, 2-3: {fused}{experts}"),
        ("decode graph", f"layer 1: {fused}{dense}"),
        ("other steps", f"layers 0, 2-3: {before}{experts}"),
        ("other steps", f"layer 1: {before}{dense}"),
        ("other steps, last layer", f"layer 3: {few}{experts}"),
    ]
    alone = ["linear", "own", "rope_store", "attend", "linear", "norm", "add", "mlp", "norm", "add"]
    text = "layers 0-3: " + "; ".join(f"{kind} -> itself" for kind in alone)
    assert models["olmo3"].describe_layers([CpuBackend] * 4)[0] == ("other steps", text)
    ((step, text),) = models["qwen3"].describe_layers([CpuBackend] * 4)
    assert step == "all steps" and "one native call" in text

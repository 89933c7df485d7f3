"""RL.N4: what a converted model is to its trainer: an ordinary model, but for its bits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import pkgutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from octavo import LLM, rl
from octavo.attention import AttentionMods
from octavo.rl import conversion
from patience import patient
from rl_rig import TINY, num_differing, random_ids, sampled, tiny

SEQUENCES = random_ids(50, 7, 33, vocab_size=4096)


@pytest.fixture(scope="module")
def model() -> Any:
    """octavo-tiny in bfloat16, converted; each test leaves its weights and gradients as they are."""
    return rl.convert(tiny())


@pytest.fixture
def pack() -> rl.Pack:
    return rl.Pack.of(SEQUENCES)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def test_parameters_names_and_modules_stay() -> None:
    before = tiny()
    after = rl.convert(copy.deepcopy(before))
    assert list(before.state_dict()) == list(after.state_dict())
    assert [type(each) for each in before.modules()] == [type(each) for each in after.modules()]
    assert after.lm_head.weight is after.model.embed_tokens.weight


def test_transformers_call_gives_the_same_logits_in_any_padding(model: Any, pack: rl.Pack) -> None:
    with torch.no_grad():
        expected = rl.logprobs(model, pack).logprobs
        width = max(map(len, SEQUENCES))
        for left in (False, True):
            ids, mask = torch.zeros(2, 3, width, dtype=torch.int64)
            for row, sequence in enumerate(SEQUENCES):
                place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
                ids[row, place], mask[row, place] = torch.tensor(sequence), 1
            logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            targets = pack.next_tokens()
            found = rl.token_logprob(logits, targets.clamp(min=0)).logprobs
            assert torch.equal(found[targets >= 0], expected[targets >= 0])
            whole = model(ids, attention_mask=mask).logits
            assert torch.equal(model(ids, attention_mask=mask, logits_to_keep=5).logits, whole[:, -5:])
            places = torch.tensor([3, 1, width - 1, 3])
            assert torch.equal(model(ids, attention_mask=mask, logits_to_keep=places).logits, whole[:, places])
            assert torch.equal(model(ids.int(), attention_mask=mask.int()).logits, whole), "ids may be int32"


def test_a_loss_of_labels_has_gradients(model: Any) -> None:
    ids = torch.tensor([SEQUENCES[2]])
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert [
        torch.equal(a, b) for a, b in zip(model(ids, labels=ids, return_dict=False), (loss, model(ids).logits))
    ] == [True] * 2
    assert float(loss.detach()) > 0 and all(grad.isfinite().all() for grad in _gradients(model).values())


def test_targets_that_nobody_asks_for_give_nothing(model: Any, pack: rl.Pack) -> None:
    targets = pack.next_tokens()
    some = targets.clone()
    some[::3] = rl.NO_TOKEN
    found, whole = (rl.logprobs(model, pack, each) for each in (some, targets))
    assert torch.equal(found.logprobs[some >= 0], whole.logprobs[some >= 0])
    assert not found.logprobs[some < 0].any() and not found.entropy[some < 0].any()


def _count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers' own numbers, whenever one is computed."""
    ran, forward = list[int](), conversion._Layer.__call__

    def count(self: conversion._Layer, x: torch.Tensor, pack: rl.Pack) -> torch.Tensor:
        ran.append(self.index)
        return forward(self, x, pack)

    monkeypatch.setattr(conversion._Layer, "__call__", count)
    return ran


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_RL_N5_checkpointing_keeps_bits_and_gradients(
    model: Any, pack: rl.Pack, monkeypatch: pytest.MonkeyPatch, use_reentrant: bool, every: int
) -> None:
    """As transformers switches it: what a layer keeps is computed again on the way back, in the same bits."""
    expected = rl.logprobs(model, pack).logprobs
    expected.sum().backward()
    gradients, ran = _gradients(model), _count_runs(monkeypatch)
    own: dict[str, Any] = {} if every == 1 else {"every_n_layers": every}  # which not every transformers has
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant}, **own)
    model.train()
    try:
        found = rl.logprobs(model, pack).logprobs
        assert ran == list(range(7))
        found.sum().backward()
        assert ran[7:] == list(range(0, 7, every))[::-1]
    finally:
        model.activation_checkpointing_disable()
        model.eval()
    assert torch.equal(found, expected)
    own = _gradients(model)
    assert all(torch.equal(own[name], gradients[name]) for name in gradients)


def test_RL_N3_gradients_are_the_same_from_run_to_run(model: Any, pack: rl.Pack) -> None:
    runs = []
    for _ in range(2):
        rl.logprobs(model, pack).logprobs.sum().backward()
        runs.append(_gradients(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_autocast_changes_nothing(pack: rl.Pack) -> None:
    """Operators run with their inputs' types, in both directions."""
    model = rl.convert(tiny(torch.float32))
    expected = rl.logprobs(model, pack).logprobs
    expected.sum().backward()
    gradients = _gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = rl.logprobs(model, pack).logprobs
        found.sum().backward()
    assert torch.equal(found, expected)
    own = _gradients(model)
    assert all(torch.equal(own[name], gradients[name]) for name in gradients)


def test_a_default_type_changes_nothing(pack: rl.Pack) -> None:
    """Log-probabilities were rounded to it."""
    model, before = rl.convert(tiny(torch.float32)), torch.get_default_dtype()
    expected = rl.logprobs(model, pack).logprobs
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = rl.logprobs(model, pack).logprobs
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_RL_N5_compile_leaves_the_forward_alone(model: Any, pack: rl.Pack) -> None:
    """Of the whole, and of each layer."""
    with torch.no_grad():
        expected = rl.logprobs(model, pack).logprobs
        assert torch.equal(rl.logprobs(torch.compile(model), pack).logprobs, expected)
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.compile(backend="eager")
    found = rl.logprobs(other, pack).logprobs
    found.sum().backward()
    assert torch.equal(found, expected)


def _to_float32(forward: Any) -> Any:
    """A decorated forward, as Accelerate makes it for mixed precision."""

    @functools.wraps(forward)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*arguments, **keywords)

    return call


def test_RL_N4_a_forward_that_is_wrapped_or_replaced_later_changes_nothing(pack: rl.Pack) -> None:
    """Accelerate wraps a model's forward when it prepares it, and unwraps it to the last decorator; TRL has its own."""
    model = rl.convert(tiny())
    ids = torch.tensor([SEQUENCES[2]])

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return rl.logprobs(model, pack).logprobs, model(ids).logits

    expected = both()
    vars(model)["_original_forward"] = model.forward
    model.forward = types.MethodType(_to_float32(model.forward.__func__), model)
    assert all(map(torch.equal, both(), expected)) and "_original_forward" in vars(model)
    unwrapped = model.forward
    while hasattr(unwrapped, "__wrapped__"):
        unwrapped = unwrapped.__wrapped__
    model.forward = types.MethodType(unwrapped, model)
    assert all(map(torch.equal, both(), expected))
    other = types.MethodType(lambda self, *_, **__: self.model(input_ids=ids, use_cache=False), model)
    model.forward = other
    with torch.no_grad():
        assert torch.equal(rl.logprobs(model, pack).logprobs, expected[0])
        assert model.forward is other, "a trainer's own forward stays where it is"
        with pytest.raises(ValueError, match="takes a Pack, not input_ids, use_cache: call octavo"):
            model(ids)
    del model.forward
    with torch.no_grad():
        assert torch.equal(rl.logprobs(model, pack).logprobs, expected[0])


def test_RL_N4_accelerate_itself(pack: rl.Pack) -> None:
    """prepare and unwrap_model, with mixed precision and without."""
    accelerate = pytest.importorskip("accelerate")
    model = rl.convert(tiny(torch.float32), dtype=torch.bfloat16)
    with torch.no_grad():
        expected = rl.logprobs(model, pack).logprobs
        for precision in ("no", "bf16"):
            accelerate.state.AcceleratorState._reset_state(True)
            accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
            prepared = accelerator.prepare(model)
            assert torch.equal(rl.logprobs(prepared, pack).logprobs, expected)
            plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
            assert torch.equal(rl.logprobs(plain, pack).logprobs, expected)
            logits = plain(torch.tensor([SEQUENCES[1]])).logits
            assert logits.shape == (1, 7, 4096) and logits.dtype == torch.float32


def test_a_copy_has_weights_of_its_own(model: Any, pack: rl.Pack) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        before = rl.logprobs(model, pack).logprobs
        assert torch.equal(rl.logprobs(other, pack).logprobs, before)
        other.model.layers[2].mlp.down_proj.weight.mul_(2)
        assert not torch.equal(rl.logprobs(other, pack).logprobs, before)
        assert torch.equal(rl.logprobs(model, pack).logprobs, before)


def test_a_pickle_of_it_is_refused_with_what_to_save_instead() -> None:
    model = rl.convert(tiny(torch.float32))  # of its own: hooks that others leave cannot be pickled either
    for save in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=r"octavo.rl.convert has converted cannot be pickled: save its weights"):
            save()
    torch.save(model.state_dict(), io.BytesIO())


def test_float32_masters_are_rounded_as_the_engine_rounds_them(tmp_path: Path) -> None:
    """A float32 checkpoint in a bfloat16 engine is a float32 model converted to bfloat16."""
    masters = tiny(torch.float32)
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    masters.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True) as llm:
        sequences, theirs = sampled(llm, random_ids(40, 5, vocab_size=4096))
    rl.convert(masters, dtype=torch.bfloat16)
    pack = rl.Pack.of(sequences)
    found = rl.logprobs(masters, pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    found.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in masters.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float16_parameters_are_widened_or_rounded_as_the_engine_does(tmp_path: Path, dtype: torch.dtype) -> None:
    """A CPU computes nothing in float16: it is refused by the setting that helps, and in the engine's words."""
    tiny(torch.float16).save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype=str(dtype)[6:], skip_tokenizer_init=True) as llm:
        sequences, theirs = sampled(llm, random_ids(40, 5, vocab_size=4096))
    pack = rl.Pack.of(sequences)
    found = rl.logprobs(rl.convert(tiny(torch.float16), dtype=dtype), pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    with pytest.raises(
        ValueError, match=r"dtype of octavo\.rl\.convert: CPU operators take float32 and bfloat16, .*16$"
    ):
        rl.logprobs(rl.convert(tiny(torch.float16)), pack)


def test_attention_mods_are_the_engines() -> None:
    mods = AttentionMods(mask_mod=lambda b, h, q, kv: (q - kv < 9) | (kv < 2), name="sinks and a window")
    with LLM(TINY, dtype="float32", attention_mods=mods) as llm:
        sequences, theirs = sampled(llm, random_ids(30, 12, vocab_size=4096), max_tokens=3)
    model = rl.convert(tiny(torch.float32), attention_mods=mods)
    pack = rl.Pack.of(sequences)
    found = rl.logprobs(model, pack).logprobs
    assert num_differing(pack.split(found), theirs) == 0
    found.sum().backward()
    assert _gradients(model)


def test_what_would_change_bits_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="replaced already"):
        rl.convert(model)
    for field in ("attention_dropout", "residual_dropout", "resid_pdrop", "some_new_dropout"):
        dropping = tiny()
        setattr(dropping.config, field, 0.1)
        with pytest.raises(ValueError, match=rf"{field}=0\.1: .* set model\.config\.{field} = 0\.0 before"):
            rl.convert(dropping.eval())
    with pytest.raises(ValueError, match="does not run Linear"):
        rl.convert(torch.nn.Linear(2, 2))
    adapted = tiny()
    own = adapted.model.layers[1].self_attn
    own.q_proj = torch.nn.Sequential(own.q_proj)
    with pytest.raises(ValueError, match=r"layer 1 has no parameters self_attn\.q_proj\.weight: adapters"):
        rl.convert(adapted)
    beside = tiny()
    beside.model.layers[0].mlp.down_proj.low_rank = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"layer 0 has other parameters mlp\.down_proj\.low_rank: adapters"):
        rl.convert(beside)
    wrapped = tiny()
    apply_activation_checkpointing(wrapped, check_fn=lambda each: each is wrapped.model.layers[2])
    with pytest.raises(ValueError, match="layer 2 is wrapped for checkpointing"):
        rl.convert(wrapped)
    with pytest.raises(ValueError, match="does not take use_cache"):
        model(torch.tensor([[1, 2]]), use_cache=True)
    with pytest.raises(ValueError, match="an engine samples"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    with pytest.raises(ValueError, match="does not take output_hidden_states"):
        model(torch.tensor([[1, 2]]), output_hidden_states=True)
    hooked = tiny()
    hooked.model.layers[4].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layer 4: self_attn has a hook"):
        rl.convert(hooked)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is not converted"):
        rl.logprobs(hooked, rl.Pack.of([[1, 2]]))
    with pytest.raises(ValueError, match=r"ids must lie in 0 \.\. 4095, got 4096"):
        rl.logprobs(model, rl.Pack.of([[1, 2]]), torch.tensor([4096, -1]))
    for support in (torch.ones(1, 7, dtype=torch.bool), torch.tensor([[4096]])):
        with pytest.raises(ValueError, match="support"):
            rl.head_logprob(torch.zeros(1, 4), torch.zeros(4096, 4), torch.tensor([3]), 1.0, support)
    for token, shown in ((4096, r"1 \.\. 4096"), (-1, r"-1 \.\. 1")):
        with pytest.raises(ValueError, match=rf"ids of a Pack must lie in 0 \.\. 4095, got {shown}"):
            rl.logprobs(model, rl.Pack.of([[1, token]]), torch.tensor([1, -1]))
    for asked in (lambda: rl.Pack.of([[1.5, 2]]), lambda: rl.logprobs(model, rl.Pack.of([[1, 2]]), torch.ones(2))):
        with pytest.raises(ValueError, match=r"must be whole numbers, got torch\.float32"):
            asked()
    with pytest.raises(ValueError, match="attention_mask: row 1 has a hole"):
        model(torch.tensor([[1, 2, 3]] * 2), attention_mask=torch.tensor([[0, 1, 1], [1, 0, 1]]))
    with pytest.raises(ValueError, match="position_ids must count"):
        model(torch.tensor([[1, 2]]), position_ids=torch.tensor([[4, 5]]))
    with pytest.raises(ValueError, match="targets must be"):
        rl.logprobs(model, rl.Pack.of([[1, 2]]), torch.tensor([1]))
    with pytest.raises(ValueError, match="lengths alone"):
        rl.logprobs(model, rl.Pack([2]))
    with pytest.raises(ValueError, match="exceeds the 2048 positions"):
        rl.convert(tiny(), max_model_len=4096)


def test_ends_that_a_trainer_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fact of Arch that no end reads, unless it is at its default, and ends that a family made its own."""
    from octavo.checkpoint.arch import Arch
    from octavo.layers.norm import RMSNorm
    from octavo.models.qwen3 import Qwen3ForCausalLM
    from octavo.rl import family

    fields, read = [("logit_offset", float, 0.0)], family.arch_from_config
    wider = dataclasses.make_dataclass("Wider", fields, bases=(Arch,), frozen=True, kw_only=True)
    for offset in (0.0, 0.5):

        def with_offset(*given: Any, offset: float = offset) -> Arch:
            arch = read(*given)
            facts = {field.name: getattr(arch, field.name) for field in dataclasses.fields(arch)}
            return wider(**facts, logit_offset=offset)

        monkeypatch.setattr(family, "arch_from_config", with_offset)
        if offset:
            with pytest.raises(ValueError, match=r"Qwen3ForCausalLM: it does not read logit_offset=0\.5"):
                rl.convert(tiny())
        else:
            rl.convert(tiny())
    monkeypatch.undo()

    class OtherNorm(RMSNorm):
        pass

    class Own(Qwen3ForCausalLM):
        def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
            super().__init__(arch, dtype)
            self.norm = OtherNorm(arch.hidden_size, arch.norm_eps)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden) + 1

    monkeypatch.setattr(type(family.ARCHITECTURES), "resolve", lambda table, name: Own)
    with pytest.raises(ValueError, match="it has a method logits, OtherNorm as norm of its own"):
        rl.convert(tiny())


def test_layers_that_parts_cannot_run_are_refused() -> None:
    from octavo.layers.base import Layer
    from octavo.layers.norm import RMSNorm
    from octavo.rl.decoder import why_not

    class OtherNorm(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Lines(Layer):
        def __init__(self, norm: Layer) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(x)

    class Tangled(Lines):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    assert why_not(Lines(RMSNorm(8, 1e-6))) == ""
    assert "no part with gradients for OtherNorm" in why_not(Lines(OtherNorm(8, 1e-6)))
    assert "Tangled is not written in plain lines" in why_not(Tangled(RMSNorm(8, 1e-6)))


def test_RL_N10_assert_same_says_where_bits_differ(model: Any) -> None:
    def same(sequences: Any) -> list[list[float]]:
        pack = rl.Pack.of(sequences)
        with torch.no_grad():
            return [own[:-1].tolist() for own in pack.split(rl.logprobs(model, pack).logprobs)]

    def other(sequences: Any) -> list[list[float]]:
        found = same(sequences)
        found[1][4] += 1e-3
        return found

    assert rl.assert_same(model, same, SEQUENCES) == 49 + 6 + 32
    assert rl.assert_same(model, same) == rl.assert_same(model, types.SimpleNamespace(score=same)) == 32
    with pytest.raises(rl.DifferenceError, match=r"1 of 87 .* sequence 1, position 5, token") as caught:
        rl.assert_same(model, other, SEQUENCES)
    assert [(each.sequence, each.position) for each in caught.value.differences] == [(1, 5)]
    with pytest.raises(ValueError, match="at least 2 tokens"):
        rl.assert_same(model, same, [[1]])
    with pytest.raises(ConnectionError, match="no server answers"):
        rl.assert_same(model, "http://127.0.0.1:1")


def test_public_names_are_what_they_say_in_any_order_of_first_use() -> None:
    """A name loads its module on first use; a module of the same name would take its place."""
    modules = {module.name for module in pkgutil.iter_modules(rl.__path__)}
    assert not modules & set(rl.__all__)
    program = "from octavo import rl; rl.logprobs; rl.assert_same; assert callable(rl.convert)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patient(120))

"""Under which name a mod's compiled kernel is kept: what changes the name, and what has none."""

from __future__ import annotations

import enum
import functools
import json
import math
import operator
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import octavo.attention as A
from octavo.attention.flex import kernel as flex_kernel
from octavo.attention.flex.key import NotFingerprintable, name_mods
from octavo.attention.mods import AttentionMods, bound, request_field, within_prompt

CPU = torch.device("cpu")
TABLES = {"near": torch.zeros(4, dtype=torch.int32), "far": torch.zeros(4, dtype=torch.int32)}
NEAR, FAR = request_field("near"), request_field("far")
PLAIN = "def mask(b, h, q, k):\n    return (q - k < 5) | (k % 3 == 0)"


def made(source: str, **names: object):
    """What the name `mask` is bound to by a program of a user's."""
    space = {"torch": torch, "math": math, **names}
    exec(textwrap.dedent(source), space)
    return space["mask"]


def name_of(mask, score=None, **mods) -> str:
    with bound(TABLES):
        name, _ = name_mods(AttentionMods(mask_mod=mask, score_mod=score, **mods), CPU)
    return json.dumps(name)


def tensors_of(mask) -> list[torch.Tensor]:
    with bound(TABLES):
        return name_mods(AttentionMods(mask_mod=mask), CPU)[1]


def factory(number, source="lambda b, h, q, k: q - k < number"):
    return eval(source, {"number": number, "torch": torch})


def captured(tensor, other=None):
    return lambda b, h, q, k: (tensor[h] > k) & (tensor[h] > q if other is None else other[h] > q)


def specs(source: str, *values: object):
    """One program for each value of X."""
    return tuple(made(source.replace("X", str(value))) for value in values)


def with_default(number):
    def mask(b, h, q, k, near=number, *, far=number + 1):
        return (q - k < near) | (q - k > far)

    return mask


def test_two_makings_of_one_mod_have_one_name() -> None:
    for mods in (
        lambda: A.rswa(90, "near"),
        lambda: A.and_(A.alibi(6), A.sliding_window(9)),
        lambda: A.prefix_lm("far"),
        lambda: within_prompt(A.prefix_lm("far")),
    ):
        names = {name_of(one.mask_mod, one.score_mod, causal=one.causal) for one in (mods(), mods())}
        assert len(names) == 1
    assert name_of(made(PLAIN)) == name_of(made(PLAIN.replace("mask(", "mask(")))
    assert name_of(captured(torch.zeros(3))) == name_of(captured(torch.ones(3)))  # values are read, not named


CHANGES = {
    "a constant": (made(PLAIN), made(PLAIN.replace("5", "6"))),
    "an operator": (made(PLAIN), made(PLAIN.replace("<", "<="))),
    "a number of another type": (made(PLAIN.replace("5", "1")), made(PLAIN.replace("5", "True"))),
    "a sign of nothing": (made(PLAIN.replace("5", "0.0")), made(PLAIN.replace("5", "-0.0"))),
    "an argument's place": (made(PLAIN), made(PLAIN.replace("b, h, q, k", "b, h, k, q"))),
    "a global": (factory(5), factory(6)),
    "a closure": (A.sliding_window(5).mask_mod, A.sliding_window(6).mask_mod),
    "a default": (with_default(5), with_default(6)),
    "a tuple": tuple(factory((5, near), "lambda b, h, q, k: q < number[0]") for near in (6, 7)),
    "a global's global": specs(
        "near = X\ndef inner(q):\n    return q < near\ndef mask(b, h, q, k):\n    return inner(q)", 1, 2
    ),
    "a function within": specs(
        "def mask(b, h, q, k):\n    def inner(q):\n        return q < X\n    return inner(q)", 1, 2
    ),
    "a global of a function within": tuple(
        made("def mask(b, h, q, k):\n    return (lambda: q < near)()", near=near) for near in (1, 2)
    ),
    "torch's function": tuple(
        made(f"def mask(b, h, q, k):\n    return torch.{name}(q) < k") for name in ("sin", "cos")
    ),
    "a function by another name": tuple(
        made("def mask(b, h, q, k):\n    return f(q) < k", f=f) for f in (torch.sin, torch.cos)
    ),
    "a member of a module": tuple(made(f"def mask(b, h, q, k):\n    return q < math.{name}") for name in ("pi", "e")),
    "a dtype": tuple(made(f"def mask(b, h, q, k):\n    return q.to(torch.{name}) < k") for name in ("int8", "int16")),
    "an argument of a partial": tuple(
        functools.partial(made("def mask(near, b, h, q, k):\n    return q < near"), near) for near in (1, 2)
    ),
    "a request field": (lambda b, h, q, k: k < NEAR[b], lambda b, h, q, k: k < FAR[b]),
    "a tensor's dtype": (captured(torch.zeros(3)), captured(torch.zeros(3, dtype=torch.int32))),
    "a tensor's shape": (captured(torch.zeros(3)), captured(torch.zeros(4))),
    "a tensor's strides": (captured(torch.zeros(3)), captured(torch.zeros(6)[::2])),
    "a tensor's alignment": (captured(torch.zeros(3)), captured(torch.zeros(4)[1:])),
    "which tensor": (captured(torch.zeros(3), torch.zeros(3)), captured(*[torch.zeros(3)] * 2)),
    "an order": tuple(
        functools.reduce(lambda f, g: lambda b, h, q, k: f(b, h, q, k) & ~g(b, h, q, k), pair)
        for pair in ((made(PLAIN), factory(9)), (factory(9), made(PLAIN)))
    ),
    "what a set branch uses": (A.alibi(4).score_mod, A.alibi(5).score_mod),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_kernel_depends_on_changes_its_name(what: str) -> None:
    one, other = CHANGES[what]
    assert name_of(one) != name_of(other)


def test_masks_scores_and_causality_are_told_apart() -> None:
    mask = made(PLAIN)
    names = {name_of(mask), name_of(None, mask), name_of(mask, mask), name_of(mask, causal=False)}
    assert len(names) == 4


def test_tensors_come_in_the_names_order_each_once() -> None:
    first, second = torch.zeros(3), torch.ones(3)
    pairs = (first, second), (second, first)
    assert [[id(t) for t in tensors_of(captured(*pair))] for pair in pairs] == [
        [id(other), id(tensor)] for tensor, other in pairs
    ]  # a closure's names are in order of the alphabet
    assert [id(t) for t in tensors_of(captured(first, first))] == [id(first)]
    fields = tensors_of(lambda b, h, q, k: k < NEAR[b])
    assert [id(t) for t in fields] == [id(t) for t in TABLES.values()]


class Callable:
    def __call__(self, b, h, q, k):
        return q < k


class Level(enum.IntEnum):
    LOW = 1


def with_attribute():
    def mask(b, h, q, k):
        return q < mask.near

    mask.near = 3
    return mask


def counting():
    calls = 0

    def mask(b, h, q, k):
        nonlocal calls
        calls += 1
        return q < calls

    return mask


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    tensor.near = 3
    return tensor


def reads(value):
    return lambda b, h, q, k: q < value[0]


UNNAMED = {
    "a list": (reads([1]), "list"),
    "a dictionary": (reads({0: 1}), "dict"),
    "an array": (reads(np.zeros(1)), "numpy"),
    "a number of a kind of its own": (reads((Level.LOW,)), "Level"),
    "an object": (Callable(), "Callable"),
    "an object's method": (Callable().__call__, "Callable"),
    "a function with attributes": (with_attribute(), "attributes"),
    "a function that counts": (counting(), "sets a name outside"),
    "an import": (made("def mask(b, h, q, k):\n    import os\n    return q < k"), "imports"),
    "a global that is set": (made("def mask(b, h, q, k):\n    global n\n    n = q\n    return q < k"), "sets a name"),
    "a module as a value": (made("def mask(b, h, q, k):\n    return f(torch)", f=made(PLAIN)), "module torch"),
    "reading by name": (made("def mask(b, h, q, k):\n    return getattr(torch, 'sin')(q) < k"), "getattr"),
    "torch's state": (made("def mask(b, h, q, k):\n    return q < torch.get_num_threads()"), "get_num_threads"),
    "a function of numpy": (made("def mask(b, h, q, k):\n    return np.add(q, k) > 3", np=np), "np.add"),
    "a tensor with an attribute": (captured(tagged(torch.zeros(3))), "carries attributes"),
    "a tensor with a history": (captured(torch.zeros(3, requires_grad=True) * 2), "carries attributes"),
    "an attribute that leads on": (made("def mask(b, h, q, k):\n    return q < mask.__globals__['n']"), "__globals__"),
    "a tensor elsewhere": (captured(torch.zeros(3, device="meta")), "a tensor on meta"),
    "an empty tensor": (captured(torch.zeros(0)), "0 elements"),
    "a name that is not there": (made("def mask(b, h, q, k):\n    return q < nowhere"), "nowhere"),
}


@pytest.mark.parametrize("what", UNNAMED)
def test_what_has_no_certain_name_is_refused_by_name(what: str) -> None:
    mask, told = UNNAMED[what]
    with pytest.raises(NotFingerprintable, match=told):
        name_of(mask)


def test_functions_of_their_arguments_alone_have_names() -> None:
    for function in (torch.where, torch.nn.functional.relu, operator.and_, math.floor, max):
        assert name_of(made("def mask(b, h, q, k):\n    return f(q, k)", f=function))


def test_settings_of_torchs_compiler_are_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, options that are not as they come, and torch's modes; where caches lie is not."""
    before, modes = flex_kernel._changed_settings(), flex_kernel._modes()
    config = ModuleType("torch._inductor.config")
    config.emulate, config.compile_threads, config.tile = True, 3, 8
    config._config = {
        name: SimpleNamespace(default=default, alias=None)
        for name, default in {"emulate": False, "compile_threads": 1, "tile": 8}.items()
    }
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    added = {("_inductor", "emulate", "True"), ("environment", "TRITON_F32_DEFAULT", "ieee")}
    assert flex_kernel._changed_settings() - before == added
    with torch.inference_mode():
        assert flex_kernel._modes() != modes
    kept = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert flex_kernel._modes() != modes
    finally:
        torch.set_float32_matmul_precision(kept)
    assert flex_kernel._modes() == modes

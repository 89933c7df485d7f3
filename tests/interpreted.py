"""Runs the checks of a rig under Triton's interpreter, in a process of its own: the interpreter is chosen at import.

A rig is a module of the tests with `INTERPRETED`, a table of name -> check: a function that raises where something does
not hold. Run as a program with the name of a rig, this prints JSON of name -> error text, empty if it holds.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from patience import patient

HERE = Path(__file__).parent
TIMEOUT_S = 280  # on a quiet machine


@functools.cache
def run_rig(rig: ModuleType) -> dict[str, str]:
    """Name of each check -> what it raised, empty if it holds."""
    path = Path(rig.__file__ or "")
    folders = (HERE.parent / "src", HERE, path.parent)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-W", "ignore", __file__, path.stem]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patient(TIMEOUT_S))
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def quicken() -> None:
    """Take out of the interpreter four fifths of its time, and nothing that it checks.

    It patches triton.language at every call of a device function, where once a process is enough; it builds a table at
    every look-up of a type; it computes overflows that it reports to nobody outside of debug mode; it folds by
    exclusive or, as sorting does, element by element in Python; and it makes the type of every value anew, and works
    out of every two operands what they become, also of two of one type and of a number that it has met.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    _share_types(tl.core)
    _share_operands(interpreter)
    interpreter._patch_attr = functools.partial(_call_directly, interpreter.interpreter_semantic)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    look_up, apply_impl, known = interpreter._get_np_dtype, interpreter.ReduceOps.apply_impl, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    def reduce(self, operands):
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return apply_impl(self, operands)
        folded = np.bitwise_xor.reduce(operands[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(folded, operands[0].dtype)

    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, one, other, operation: None
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter._get_np_dtype, interpreter.ReduceOps.apply_impl = np_dtype, reduce


def make_dots_exact() -> None:
    """Sums of `tl.dot` are rounded once, as if they were exact: their bits depend on their terms alone.

    The interpreter's are numpy's, whose library has other sums for other shapes, and for each kind of processor. Here
    each float32 is two numbers of 12 digits, products of which are exact in float64, and so are their sums, but for
    terms of less than 2**-29 of a sum. bfloat16, which the interpreter takes for integers, is read as what it is.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def parts(operand):
        data, dtype = operand.data, operand.dtype.scalar
        if dtype == tl.bfloat16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        elif dtype.primitive_bitwidth == 8:
            data = interpreter._convert_float(data, dtype, tl.float16, None).view(np.float16)
        if data.dtype != np.float32 or not np.isfinite(data).all():
            return [data.astype(np.float64)]
        upper = (data.view(np.uint32) & 0xFFFFF000).view(np.float32)
        return [each.astype(np.float64) for each in (upper, data - upper) if each.any()]

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if not d.dtype.scalar.is_floating():
            return make_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        total = d.data.astype(np.float64)
        for one in parts(a):
            for other in parts(b):
                total += one @ other
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    make_dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = create_dot


def make_sums_of_products_exact() -> None:
    """`tl.fma` of float32 rounds no product, as a GPU's does not, and once in 2^29 the sum twice: as float64 first."""
    import numpy as np
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        if z.data.dtype != np.float32:
            return make_fma(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    make_fma = interpreter.InterpreterBuilder.create_fma
    interpreter.InterpreterBuilder.create_fma = create_fma


def _share_types(core: ModuleType) -> None:
    """A block's type is made once, and what each value of a type says of itself is worked out once."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    same_dtype, same_block = core.dtype.__eq__, core.block_type.__eq__
    types: dict[tuple[int, tuple[int, ...]], object] = {}

    def shared(cls, element_ty, shape):
        key = id(element_ty), tuple(core._unwrap_if_constexpr(size) for size in shape)
        return types.get(key) or types.setdefault(key, object.__new__(cls))  # it holds what the key names

    def init_type(self, element_ty, shape):
        if "name" not in self.__dict__:  # the last that is set: one that is refused is refused again
            make_type(self, element_ty, shape)

    def init_value(self, handle, type):
        known = type.__dict__.get("_of_values")
        if known is None:
            make_value(self, handle, type)
            type._of_values = self.numel, self.dtype, self.shape
            return
        self.handle, self.type = handle, type
        self.numel, self.dtype, self.shape = known

    def with_element_ty(self, scalar_ty):
        known = self.__dict__.setdefault("_with", {})
        return known.get(id(scalar_ty)) or known.setdefault(id(scalar_ty), core.block_type(scalar_ty, self.shape))

    core.block_type.with_element_ty = with_element_ty
    core.dtype.__eq__ = lambda self, other: self is other or same_dtype(self, other)
    core.block_type.__eq__ = lambda self, other: self is other or same_block(self, other)
    core.block_type.__new__ = shared
    core.block_type.__init__, core.tensor.__init__ = init_type, init_value


def _share_operands(interpreter: ModuleType) -> None:
    """Two operands of one type are taken as they are, and a number beside a value of a type is made one once."""
    semantic, tl = interpreter.TritonSemantic, interpreter.tl
    check_types, validate = semantic.binary_op_type_checking_impl, interpreter.TensorHandle.__post_init__
    numbers: dict[tuple[object, ...], object] = {}

    def checked(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, division=False):
        known = None
        if isinstance(lhs, tl.tensor) and not lhs.dtype.is_ptr():
            if isinstance(rhs, tl.tensor):
                if lhs.type is rhs.type and (lhs.dtype.is_int() or not division):
                    return lhs, rhs
            elif isinstance(rhs, int | float):
                known = id(lhs.type), type(rhs), rhs, arithmetic, division
                if known in numbers:
                    return lhs, numbers[known]
        one, other = check_types(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, division)
        if known is not None and one is lhs:
            other.handle.data.flags.writeable = False
            numbers[known] = other  # types are shared, and stay
        return one, other

    def validated(self):
        if self.data.itemsize > 1 and not isinstance(self.dtype, tl.pointer_type):
            validate(self)  # a byte fits everywhere

    semantic.binary_op_type_checking_impl = checked
    interpreter.TensorHandle.__post_init__ = validated


def _call_directly(semantic: object, of: Any, name: str, member: Any, builder: object, scope: Any) -> None:
    """A function of the language is called with the interpreter's semantics, as `_patch_attr` has it."""
    function = getattr(member, "__wrapped__", member)  # without asking at each call whether it is one of a kernel's

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(of, name, call)


def main(rig: str) -> None:
    gc.set_threshold(100_000, 20, 100)  # what torch and the interpreter make is seldom garbage in a cycle
    quicken()
    make_dots_exact()
    make_sums_of_products_exact()
    errors = {}
    for name, check in importlib.import_module(rig).INTERPRETED.items():
        try:
            check()
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1])

"""Makes Triton's interpreter spend less time around the arithmetic of a kernel, and changes none of it.

The interpreter looks through all of ``triton.language`` for functions to replace, at each launch and again at each call of a device
function. It finds out the same about types and shapes at each operation, and computes a check whose result it drops. The tensors of
tests are small: most of a launch goes there. `install` has each done once. Where a part of Triton is not as expected, as in another
version, nothing is replaced, and kernels merely take longer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

SEMANTIC = getattr(interpreter, "interpreter_semantic", None)
# What is replaced, and its arguments.
EXPECTED: list[tuple[Any, str, list[str]]] = [
    (interpreter, "_patch_lang", ["fn"]),
    (interpreter, "_get_np_dtype", ["tt_dtype"]),
    (SEMANTIC, "binary_op_sanitize_overflow_impl", ["lhs", "rhs", "binary_op"]),
    (SEMANTIC, "broadcast_impl_value", ["lhs", "rhs"]),
    (SEMANTIC, "cast", ["input", "dst_ty", "fp_downcast_rounding"]),
    (
        SEMANTIC,
        "binary_op_type_checking_impl",
        ["lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"],
    ),
    (tl.core, "_unwrap_if_constexpr", ["o"]),
    (TensorHandle, "__init__", ["self", "data", "dtype", "attr"]),
    (tl.block_type, "__init__", ["self", "element_ty", "shape"]),
    (tl.tensor, "__init__", ["self", "handle", "type"]),
]
Values = list[Callable[..., Any]]
_originals: Values = []  # while they are replaced


def is_expected() -> bool:
    """Whether this version of Triton has what `install` replaces and what the replacements read."""
    try:
        block = tl.tensor(None, tl.block_type(tl.float32, [2, 4]))
        return (
            all(list(inspect.signature(getattr(owner, name)).parameters) == arguments for owner, name, arguments in EXPECTED)
            and set(vars(block)) == {"handle", "type", "dtype", "shape", "numel"}
            and set(vars(block.type)) == {"element_ty", "shape", "numel", "name"}
            and (block.type.shape.values, block.type.name) == ([2, 4], f"<{block.type.shape}, fp32>")
            and interpreter._LangPatchScope()._changes == []
            and interpreter.interpreter_builder.options.debug in (False, True)
        )
    except (AttributeError, TypeError, ValueError):
        return False


def install() -> bool:
    """Replace the slow parts of the interpreter. Returns whether they are replaced."""
    if not _originals and is_expected():
        values = [_Language(), _numpy_dtypes(), _overflow_check(), _broadcasting(), _casting(), _operands(), _unwrapping(), _handles()]
        _originals.extend(_exchange([*values, _block_types(), _tensors()]))
    return is_installed()


def is_installed() -> bool:
    """Whether they are replaced."""
    return bool(_originals)


@contextmanager
def uninstalled() -> Iterator[None]:
    """Triton's own interpreter, as long as the context lasts."""
    replaced = _exchange(_originals)
    try:
        yield
    finally:
        _exchange(replaced)


def _exchange(values: Values) -> Values:
    """Set these in the order of `EXPECTED`; returns the values before."""
    before = []
    for (owner, name, _), value in zip(EXPECTED, values, strict=True):
        before.append(getattr(owner, name))
        setattr(owner, name, value)
    return before


class _Language:
    """For ``_patch_lang``, which puts interpreted functions into ``triton.language`` and returns the scope that takes them out.

    They are the same each time: Triton's own function makes them once. Each launch sets them. Device functions, for which Triton
    makes them again, find them there.
    """

    def __init__(self) -> None:
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        made = [(owner, name, _called_directly(vars(owner)[name])) for owner, name, _ in scope._changes]
        scope.restore()
        self.made, self.scope = list({(id(owner), name): (owner, name, value) for owner, name, value in made}.values()), scope

    def __call__(self, fn: Any) -> Any:
        if not self.scope._changes:
            for change in self.made:
                self.scope.set_attr(*change)
        return self.scope  # whose `restore`, at the end of a launch, also of one that raises, empties it


def _called_directly(patched: Any) -> Any:
    """A patched function without what is called around it: it exchanges the semantic, and a builtin looks whether it has one."""
    function = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
    while getattr(function, "__code__", None) is _BUILTIN:
        function = function.__wrapped__
    if function is None:
        return patched

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = SEMANTIC
        return function(*args, **kwargs)

    return call


_BUILTIN = tl.core.builtin(lambda: None).__code__


def _numpy_dtypes() -> Callable[..., Any]:
    """For ``_get_np_dtype``, which makes a table of all dtypes to look one up."""
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.name
        if name not in known:
            known[name] = find(tt_dtype)
        return known[name]

    return get_np_dtype


def _overflow_check() -> Callable[..., None]:
    """For the check of integers for overflow, which computes in int64 what only a debug mode then asserts."""
    check, options = SEMANTIC.binary_op_sanitize_overflow_impl, interpreter.interpreter_builder.options

    def check_in_debug_mode(lhs: Any, rhs: Any, binary_op: Any) -> None:
        if options.debug:
            check(lhs, rhs, binary_op)

    return check_in_debug_mode


def _broadcasting() -> Callable[..., Any]:
    """For ``broadcast_impl_value``, which compares shapes size by size: once for two shapes."""
    broadcast = SEMANTIC.broadcast_impl_value
    known = dict[tuple[int, int], Any]()  # by the shapes' identities, the shape of the result

    def filled(operand: Any, shape: Any) -> Any:
        handle, is_block = operand.handle, operand.type.is_block()
        if is_block and operand.type.shape is shape:
            return operand
        # A comparison's data are of another dtype than its handle, which Triton converts in scalars alone.
        data = np.full(shape.values, handle.data, handle.data.dtype if is_block else interpreter._get_np_dtype(handle.dtype))
        return tl.tensor(TensorHandle(data, handle.dtype.scalar), tl.block_type(operand.dtype, shape))

    def broadcast_once(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (filled(lhs, right.shape), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, filled(rhs, left.shape)
        if left.shape is right.shape:
            return lhs, rhs
        key = id(left.shape), id(right.shape)
        if key not in known:
            known[key] = broadcast(lhs, rhs)[0].type.shape
        return filled(lhs, known[key]), filled(rhs, known[key])

    return broadcast_once


def _casting() -> Callable[..., Any]:
    """For ``cast``, which asks for one kind of types after the other: between those that NumPy has, it comes to this."""
    cast, plain = SEMANTIC.cast, {f"{kind}{bits}" for kind in ("int", "uint", "fp") for bits in (8, 16, 32, 64)} - {"fp8", "fp16"}

    def cast_plainly(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source.name not in plain or target.name not in plain or fp_downcast_rounding is not None:
            return cast(input, dst_ty, fp_downcast_rounding)
        if source.name == target.name:
            return input
        handle = TensorHandle(input.handle.data.astype(interpreter._get_np_dtype(target)), target)
        return tl.tensor(handle, tl.block_type(target, input.type.shape) if input.type.is_block() else target)

    return cast_plainly


class _Converted(NamedTuple):
    """What an operand becomes: a tensor one of dtype, if it is not one already, a number the scalar of these data."""

    dtype: Any
    data: Any = None


def _operands() -> Callable[..., Any]:
    """For the conversion of an operation's operands, which finds the common type anew: once for two dtypes, or a dtype and a number."""
    convert = SEMANTIC.binary_op_type_checking_impl
    known = dict[tuple[Any, ...], tuple[_Converted, _Converted]]()

    def key_of(operand: Any) -> Any:
        # Of zeros, the sign is in the text alone.
        return operand.dtype.name if type(operand) is tl.tensor else (type(operand), str(operand))

    def scalar(operand: Any) -> Any:
        if type(operand) is not tl.tensor:
            return operand
        return tl.tensor(TensorHandle(np.ones(1, interpreter._get_np_dtype(operand.dtype)), operand.dtype), operand.dtype)

    def converted(operand: Any, found: Any) -> _Converted:
        if type(operand) is not tl.tensor:
            return _Converted(found.dtype, found.handle.data)
        return _Converted(None if found.dtype == operand.dtype else found.dtype)

    def applied(operand: Any, to: _Converted) -> Any:
        if to.data is not None:
            return tl.tensor(TensorHandle(to.data, to.dtype), to.dtype)
        return operand if to.dtype is None else SEMANTIC.cast(operand, to.dtype)

    def convert_once(lhs: Any, rhs: Any, *options: bool, **named: bool) -> Any:
        key = key_of(lhs), key_of(rhs), options, tuple(named.items())
        if key not in known:
            found = convert(scalar(lhs), scalar(rhs), *options, **named)
            known[key] = converted(lhs, found[0]), converted(rhs, found[1])
        left, right = known[key]
        return SEMANTIC.broadcast_impl_value(applied(lhs, left), applied(rhs, right))

    return convert_once


def _unwrapping() -> Callable[..., Any]:
    """For the function that looks for constants in whatever an operation is given."""
    unwrap, plain = tl.core._unwrap_if_constexpr, {tl.tensor, int, float, bool, str, type(None)}
    return lambda o: o if type(o) in plain else unwrap(o)


def _handles() -> Callable[..., None]:
    """For the initialiser of handles, which compares sizes of elements: it is called where the size is another than a dtype's first."""
    initialise, known = TensorHandle.__init__, dict[tuple[str, Any], bool]()

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        key = dtype.name, data.dtype
        if key not in known:
            initialise(self, data, dtype)
            known[key] = True
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return init


class _Shape(NamedTuple):
    """What types and tensors of one shape share."""

    sizes: Any  # of a type
    numel: int
    name: str  # of a type, as far as it is the shape's
    constants: tuple[Any, ...]  # of a tensor
    size: Any


_shapes: dict[tuple[int, ...], _Shape] = {}
_by_identity: dict[int, _Shape] = {}  # of the shapes' sizes: equal ones are one object


def _shape_of(sizes: Any) -> _Shape | None:
    """The shape, if there was a type or tensor of it before."""
    return _by_identity.get(id(sizes)) or _shapes.get(tuple([size.value if isinstance(size, tl.constexpr) else size for size in sizes]))


def _block_types() -> Callable[..., None]:
    """For the initialiser of block types, which checks a shape and prints it: once for each shape, which types then share."""
    initialise, tensor = tl.block_type.__init__, tl.tensor.__init__

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        known = _shape_of(shape)
        if known is None:
            initialise(self, element_ty, shape)
            made = object.__new__(tl.tensor)
            tensor(made, None, self)
            known = _Shape(self.shape, self.numel, f"<{self.shape}, ", made.shape, made.numel)
            _shapes[tuple(self.shape.values)] = _by_identity[id(self.shape)] = known
        self.element_ty = element_ty
        self.shape, self.numel = known.sizes, known.numel
        self.name = f"{known.name}{element_ty}>"

    return init


def _tensors() -> Callable[..., None]:
    """For the initialiser of tensors, which wraps each size as a constant: once for each shape."""
    initialise = tl.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        known = _by_identity.get(id(type.shape)) if type.is_block() else SCALAR
        if known is None:
            initialise(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known.constants, known.size

    scalar = tl.tensor(None, tl.int32)
    SCALAR = _Shape(None, 1, "", scalar.shape, scalar.numel)
    return init

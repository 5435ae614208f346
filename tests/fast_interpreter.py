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
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

SEMANTIC = getattr(interpreter, "interpreter_semantic", None)
# What is replaced, and its arguments.
EXPECTED: list[tuple[Any, str, list[str]]] = [
    (interpreter, "_patch_lang", ["fn"]),
    (interpreter, "_get_np_dtype", ["tt_dtype"]),
    (SEMANTIC, "binary_op_sanitize_overflow_impl", ["lhs", "rhs", "binary_op"]),
    (SEMANTIC, "broadcast_impl_value", ["lhs", "rhs"]),
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
        values = [_Language(), _numpy_dtypes(), _overflow_check(), _broadcasting(), _block_types(), _tensors()]
        _originals.extend(_exchange(values))
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
        made = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
        scope.restore()
        self.made, self.scope = list({(id(owner), name): (owner, name, value) for owner, name, value in made}.values()), scope

    def __call__(self, fn: Any) -> Any:
        if not self.scope._changes:
            for change in self.made:
                self.scope.set_attr(*change)
        return self.scope  # whose `restore`, at the end of a launch, also of one that raises, empties it


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
    """For ``broadcast_impl_value``, which compares shapes by their sizes. `_block_types` has equal shapes be one object."""
    broadcast = SEMANTIC.broadcast_impl_value

    def broadcast_unless_equal(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(lhs, rhs)

    return broadcast_unless_equal


def _block_types() -> Callable[..., None]:
    """For the initialiser of block types, which checks a shape and prints it: once for each shape, which types then share."""
    initialise, known = tl.block_type.__init__, dict[tuple[Any, ...], tuple[Any, int, str]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if key not in known:
            initialise(self, element_ty, shape)
            known[key] = self.shape, self.numel, f"<{self.shape}, "
        self.element_ty = element_ty
        self.shape, self.numel, start = known[key]
        self.name = f"{start}{element_ty}>"

    return init


def _tensors() -> Callable[..., None]:
    """For the initialiser of tensors, which wraps each size as a constant: once for each shape."""
    initialise, known = tl.tensor.__init__, dict[tuple[int, ...], tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            initialise(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return init

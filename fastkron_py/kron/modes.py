"""Dimensions of a tensor contracted by matrices: `mode_matmul`, `khatri_rao_matmul`, and products with identities among the factors.

Neighbours in memory that have factors are one Kronecker product. An integer n among the factors is the identity I_n, which takes
no multiply and no memory: ``(I_a (x) F (x) I_b) x`` is one mode of x viewed as ``[a, P, b]``, so identities become dimensions of x next to
which the other factors are multiplied where they stand.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kron import operator
from fastkron_py.kron.checks import Factor, broadcast_batch, is_identity, result_shape, shape_of
from fastkron_py.kron.torch_steps import PLAIN, Epilogue
from fastkron_py.runtime.arrays import find_bridge, through_bridge
from fastkron_py.runtime.backend import backend_of_call, requested_backend
from fastkron_py.runtime.call_cache import CACHE
from fastkron_py.runtime.checks import HALF_DTYPES, check_precision, check_tensor
from fastkron_py.runtime.eager import takes_fast_path
from fastkron_py.runtime.errors import type_error, type_name, value_error
from fastkron_py.runtime.precision import autocast_dtype, autocasted

if TYPE_CHECKING:
    from fastkron_py.kron.api import ArrayT

_MATRIX: Final = 2  # dimensions


def mode_matmul(
    x: ArrayT,
    factors: Mapping[Any, ArrayT],
    *,
    sizes: Mapping[Any, Sequence[int]] | None = None,
    precision: str | None = None,
) -> ArrayT:
    """Multiply dimensions of x by matrices: the n-mode product ``x x_1 F1^T x_2 F2^T ...`` of tensor decompositions.

    A factor ``[P, Q]`` at dim contracts dimension dim, of size P, and leaves Q elements there:
    ``torch.einsum("aPb,PQ->aQb", x, F)`` for an x of three dimensions and dim 1. Dimensions that are neighbours in memory are multiplied
    as one Kronecker product. Modes are read in place: an x whose dimensions are permuted is not copied, and the result has the same
    permutation in memory. See Kolda and
    Bader, "Tensor decompositions and applications", SIAM Review 51, 2009, section 2.5.

    Args:
        x: ``[*]``, of any number of dimensions. A torch tensor, or a NumPy or CuPy array, of a dtype of `kron_matmul`.
        factors: matrices ``[P, Q]`` by dimension; negative dimensions count from the end. Of x's array type, dtype and device. A tuple
            of dimensions, neighbours or not, is one dimension of the product of their sizes, the first one slowest. Dimensions that are
            no neighbours in memory take a copy of x. ``[*batch, P, Q]`` has a matrix for each index of x's first dimensions, which then
            have no factors; a batch dimension may be 1.
        sizes: of the result's dimensions for tuples, whose product is Q, by the same tuples; those of x where there are none.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        x's shape with each dim's P replaced by Q, of x's array type and dtype; x itself where there are no factors.

    Raises:
        TypeError: factors is no mapping, a dimension is no integer, or arrays of different types or dtypes.
        ValueError: a dimension out of range or given twice, a factor that is no matrix or has another number of rows, batch dimensions
            that x does not begin with or that have factors, a tuple's factor that is not square and has no sizes of that product, devices
            that differ, or an unknown precision.

    Example:
        >>> image = torch.randn(3, 64, 48)
        >>> rows, columns = torch.randn(64, 32), torch.randn(48, 24)
        >>> mode_matmul(image, {-2: rows, -1: columns}).shape
        torch.Size([3, 32, 24])
    """
    key: Hashable = None
    if sizes is None and type(factors) is dict and factors and not torch.compiler.is_compiling():
        given, key = (x, *factors.values()), ("mode_matmul", precision, *factors, *map(type, factors))  # 1.0 is no dimension, and equals 1
        entry = CACHE.find(key, given)
        if entry is not None:
            return entry.call(given, entry.options)
    check_precision(precision)
    if not isinstance(factors, Mapping):
        raise type_error("factors", "a mapping of dimensions to matrices", type_name(factors))
    keys, matrices = list(factors), list(factors.values())
    names = [f"factors[{key!r}]" for key in keys]
    tuples, of_tuples = [k for k in keys if isinstance(k, tuple)], sizes if sizes is not None else {}
    if any([k not in tuples for k in of_tuples]):
        raise value_error("sizes", "tuples of dimensions that factors has", list(of_tuples))
    if isinstance(x, Tensor):
        if tuples:
            return _multiply_tuples(x, keys, matrices, of_tuples, precision)  # type: ignore[return-value]
        return _multiply(x, keys, matrices, precision, key)  # type: ignore[return-value]
    bridge = find_bridge([x, *matrices], ["x", *names])
    with bridge.context():
        loaded = [bridge.load(f, name) for f, name in zip(matrices, names, strict=True)]
        found = mode_matmul(bridge.load(x, "x"), dict(zip(keys, loaded, strict=True)), sizes=sizes, precision=precision)
        return bridge.give_back(found)


def _multiply(x: Tensor, keys: list[Any], matrices: list[Any], precision: str | None, key: Hashable = None) -> Tensor:
    """The product of tensors, kept by this key if there is one and it is one run of a tensor in its own order."""
    check_tensor("x", x, x, "x")
    if not keys:
        return x
    key = None if autocast_dtype(x) is not None else key  # which does not tell autocast's dtype
    x, matrices, _ = autocasted(x, matrices, None)
    of = {_dimension(key, x, keys): matrix for key, matrix in zip(keys, matrices, strict=True)}
    if len(of) < len(keys):
        raise value_error("factors", "each dimension once", f"dimensions {keys} of an x with {x.ndim} dimensions")
    for named, dim, matrix in zip(keys, of, matrices, strict=True):
        _check_matrix(matrix, x, [dim], f"factors[{named}]", f" (`x.shape[{named}]`)")
    batch = max([m.ndim for m in matrices]) - _MATRIX
    if batch > min(of):
        raise value_error("factors", f"dimensions from {batch} on, behind those of batches of matrices", f"dimensions {keys}")
    for dim, m in of.items():
        of[dim] = m if m.ndim == _MATRIX else m.unflatten(-3, (m.shape[-3], *[1] * (batch + _MATRIX - m.ndim)))
    order = _memory_order(x, batch)
    runs = _runs([[of[dim]] if dim in of else [] for dim in order[batch:]], batch)
    y = _multiply_runs(x.permute(order), runs, batch, precision, PLAIN).permute([order.index(dim) for dim in range(x.ndim)])
    is_one = key is not None and not batch and len(runs) == 1 and x.is_contiguous() and list(of) == sorted(of)
    if is_one and takes_fast_path((x, *matrices)):
        _, (packed, _, shape), left = _contraction(x.shape, runs[0], 0)
        _keep(key, (x, *matrices), packed, shape, left, (1.0, 0.0, precision, requested_backend(), left))
    return y


def _multiply_tuples(x: Tensor, keys: list[Any], matrices: list[Any], sizes: Mapping[Any, Sequence[int]], precision: str | None) -> Tensor:
    """The product of tensors, where some keys are tuples: with these one after the other, then with the others."""
    check_tensor("x", x, x, "x")
    dims = [[_dimension(d, x, keys) for d in (k if isinstance(k, tuple) else (k,))] for k in keys]
    named = [d for of_key in dims for d in of_key]
    if len(set(named)) < len(named) or not all(dims):
        raise value_error("factors", "each dimension once", f"dimensions {keys} of an x with {x.ndim} dimensions")
    for k, of_key, matrix in zip(keys, dims, matrices, strict=True):
        if isinstance(k, tuple):
            x = _multiply_tuple(x, of_key, matrix, sizes.get(k), f"factors[{k}]", precision)
    others = [(d[0], m) for k, d, m in zip(keys, dims, matrices, strict=True) if not isinstance(k, tuple)]
    return _multiply(x, [d for d, _ in others], [m for _, m in others], precision)


def _multiply_tuple(x: Tensor, dims: list[int], matrix: Any, columns: Any, name: str, precision: str | None) -> Tensor:
    """The product with a matrix over several dimensions, which are brought together where the last of them in memory is."""
    given = [x.shape[d] for d in dims]
    _check_matrix(matrix, x, dims, name, f", the product of x's sizes {given}")
    columns = given if columns is None else list(columns)
    if len(columns) != len(dims) or math.prod(columns) != matrix.shape[-1]:
        raise value_error("sizes", f"{len(dims)} sizes, whose product is the {matrix.shape[-1]} columns of {name}", columns)
    batch = matrix.ndim - _MATRIX
    order = _memory_order(x, batch)
    last = max(order.index(d) for d in dims)
    before, after = ([d for d in part if d not in dims] for part in (order[:last], order[last:]))
    moved = [*before, *dims, *after]
    around = [[x.shape[d] for d in part] for part in (before, after)]
    flat = x.permute(moved).reshape(*around[0][:batch], math.prod(around[0][batch:]), math.prod(given), math.prod(around[1]))
    y = _multiply(flat, [batch + 1], [matrix], precision).reshape([*around[0], *columns, *around[1]])
    found: Tensor = y.permute([moved.index(d) for d in range(x.ndim)])
    return found


def _keep(
    key: Hashable, given: tuple[Tensor, ...], packed: Sequence[int], shape: Sequence[int], turns: bool, options: tuple[Any, ...]
) -> None:
    """Keep a call by its key: its tensors go to the operator's own call, which was kept before.

    Args:
        key: of the call.
        given: its tensors: x and the factors.
        packed: the shape in which the operator has x.
        shape: of the result.
        turns: whether the operator has the factors transposed.
        options: of the operator.
    """

    def operands(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return given[0].reshape(packed), *_on_side(given[1:], turns)

    entry = operator.kron_matmul.entry((*operands(given), None), options)
    if entry is not None:
        inner = entry.call
        CACHE.keep(
            key, given, entry.program, lambda given, options: inner(operands(given), options).reshape(shape), entry.options, entry.operator
        )


def _dimension(key: Any, x: Tensor, keys: list[Any]) -> int:
    """The dimension that a key names, from 0 on."""
    try:
        dim = index(key)
    except TypeError:
        raise type_error("factors", "integers as dimensions", f"{keys}") from None
    if not -x.ndim <= dim < x.ndim:
        raise value_error("factors", f"dimensions from {-x.ndim} to {x.ndim - 1}, as x has", key)
    return dim % x.ndim


def _check_matrix(matrix: Any, x: Tensor, dims: Sequence[int], name: str, what: str) -> None:
    """Raise TypeError or ValueError unless a factor is a matrix, or a batch of them, for these dimensions of x."""
    check_tensor(name, matrix, x, "x")
    rows, shape = math.prod([x.shape[d] for d in dims]), tuple(matrix.shape)
    if len(shape) < _MATRIX or shape[-2] != rows:
        raise value_error(name, f"a matrix with {rows} rows{what}", f"shape {shape}")
    batch = shape[:-2]
    if len(batch) > min(dims) or any([n not in (1, m) for n, m in zip(batch, x.shape, strict=False)]):
        first = tuple(x.shape[: min(dims)])
        raise value_error(name, f"batch dimensions as x begins with, {first}, and none that have factors", f"shape {shape}")


def _memory_order(x: Tensor, batch: int = 0) -> list[int]:
    """The dimensions from the slowest in memory to the fastest, where x without gaps has another order and this number of first ones."""
    given = list(range(x.ndim))
    if torch.compiler.is_compiling() or x.is_contiguous():
        return given
    strides = tuple(x.stride())
    order = sorted(given, key=lambda dim: (-strides[dim], dim))
    return order if order[:batch] == given[:batch] and x.permute(order).is_contiguous() else given


# ---- identities ------------------------------------------------------------------------------------


def multiply(x: Tensor, factors: Sequence[Factor], left: bool, precision: str | None, epilogue: Epilogue, key: Hashable = None) -> Tensor:
    """``alpha * x @ (F1 (x) ... (x) FN) + beta * z``, or with the product to the left of x.

    Args:
        x: ``[*batch, M, K]``, or ``[*batch, K, M]`` where the product is left of it.
        factors: ``[*batch_i, P_i, Q_i]`` and integers.
        left: the form.
        precision: of float32 products.
        epilogue: applied to the result; z broadcasts to it.
        key: by which the call is kept, if it takes one product.

    Returns:
        ``[*batch, M, N]`` or ``[*batch, N, M]``, contiguous.
    """
    parts, (alpha, beta, z) = _parts(factors, left), epilogue
    shape = result_shape(tuple(x.shape), [shape_of(f) for f in factors], left=left)
    z = None if z is None else z.expand(shape)
    if not any([isinstance(part, list) for part in parts]):
        return _scaled(x, alpha, beta, z)
    ranks = [f.ndim for f in factors if isinstance(f, Tensor)]
    batch, axis = max(x.ndim, *ranks) - 2, -2 if left else -1

    def split(t: Tensor, side: int) -> Tensor:
        """With a dimension for each part, whose matrices have the size of this side there."""
        sizes = [math.prod([f.shape[side] for f in part]) if isinstance(part, list) else part for part in parts]
        found: Tensor = t.reshape(*[1] * (batch + 2 - t.ndim), *t.shape).unflatten(axis, sizes)
        return found

    of: list[list[Tensor]] = [part if isinstance(part, list) else [] for part in parts]
    epilogue, operand = Epilogue(alpha, beta, None if z is None else split(z, -1)), split(x, -2)
    runs = _runs([*of, []] if left else [[], *of], batch)
    y = _multiply_runs(operand, runs, batch, precision, epilogue).reshape(shape)
    given = (x, *[f for f in factors if isinstance(f, Tensor)])
    is_one = z is None and len(runs) == 1 and not runs[0].is_batched
    if key is not None and is_one and x.is_contiguous() and takes_fast_path(given):
        _, (packed, _, _), aside = _contraction(operand.shape, runs[0], 0)
        _keep(key, given, packed, shape, aside != left, (alpha, 0.0, precision, requested_backend(), aside))
    return y


def merged(factors: Sequence[Any]) -> list[Any]:
    """The factors with neighbouring identities as one, and without I_1; one factor at least is left.

    Args:
        factors: integers for identities; anything else is a matrix.
    """
    found: list[Any] = []
    for f in factors:
        if not is_identity(f):
            found.append(f)
        elif found and is_identity(found[-1]):
            found[-1] *= f
        elif f != 1:
            found.append(f)
    return found or [1]


def filled(factors: Sequence[Any], matrices: Iterable[Any]) -> list[Any]:
    """The factors with other matrices in place of theirs, one after the other; identities stay."""
    left_over = iter(matrices)
    return [f if is_identity(f) else next(left_over) for f in factors]


def _parts(factors: Sequence[Factor], left: bool) -> list[int | list[Tensor]]:
    """Runs of matrices, as they multiply from the right, and the sizes of the identities between them."""
    parts: list[int | list[Tensor]] = []
    for f in merged(factors):
        if is_identity(f):
            parts.append(f)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(f.mT if left else f)
        else:
            parts.append([f.mT if left else f])
    return parts


def _scaled(x: Tensor, alpha: float, beta: float, z: Tensor | None) -> Tensor:
    """``alpha * x + beta * z``, rounded once."""
    if z is None:
        return x.clone(memory_format=torch.contiguous_format) if alpha == 1 else (x * alpha).contiguous()
    if x.dtype in HALF_DTYPES:
        return torch.add(x.float() * alpha, z.float(), alpha=beta).to(x.dtype).contiguous()
    return torch.add(x * alpha, z, alpha=beta).contiguous()


class Columns(NamedTuple):
    """Identities as further columns: what acts on each column of x alone needs the other factors only.

    Attributes:
        sizes: of all factors.
        kept: the factors that are no identities, by index.
    """

    sizes: list[int]
    kept: list[int]

    @classmethod
    def of(cls, factors: Sequence[Factor]) -> Columns:
        """Those of square factors."""
        return cls([shape_of(f)[-1] for f in factors], [i for i, f in enumerate(factors) if isinstance(f, Tensor)])

    @property
    def width(self) -> int:
        """Columns for each column of x."""
        return math.prod([size for i, size in enumerate(self.sizes) if i not in self.kept])

    def _order(self, batch: int) -> list[int]:
        """The dimensions ``[*batch, *sizes, M]`` with identities before M."""
        moved = [i for i in range(len(self.sizes)) if i not in self.kept]
        return [*range(batch), *[batch + i for i in (*self.kept, *moved, len(self.sizes))]]

    def pack(self, x: Tensor) -> Tensor:
        """``[*batch, n, M]`` as ``[*batch, n / width, width * M]``."""
        if len(self.kept) == len(self.sizes):
            return x
        batch = x.shape[:-2]
        rows = math.prod([self.sizes[i] for i in self.kept])
        modes: Tensor = x.unflatten(-2, self.sizes)
        return modes.permute(self._order(len(batch))).reshape(*batch, rows, self.width * x.shape[-1])

    def unpack(self, y: Tensor, columns: int) -> Tensor:
        """``[*batch, n / width, width * M]`` as ``[*batch, n, M]``, of M columns."""
        if len(self.kept) == len(self.sizes):
            return y
        batch = y.shape[:-2]
        order = self._order(len(batch))
        shape = (*batch, *self.sizes, columns)
        found = y.reshape([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
        return found.reshape(*batch, math.prod(self.sizes), columns)


# ---- runs ------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Dimensions start to stop of a tensor, and the factors ``[*batch_i, P_i, Q_i]`` that contract them."""

    start: int
    stop: int
    factors: list[Tensor]

    @property
    def growth(self) -> float:
        """Elements of the result for each of the operand."""
        return math.prod([f.shape[-1] for f in self.factors]) / max(1, math.prod([f.shape[-2] for f in self.factors]))

    @property
    def is_batched(self) -> bool:
        """Whether a factor has batch dimensions."""
        return any([f.ndim > _MATRIX for f in self.factors])


def _multiply_runs(x: Tensor, runs: Sequence[Run], batch: int, precision: str | None, epilogue: Epilogue) -> Tensor:
    """Multiply runs of ``[*batch, *dims]``; those that shrink x come first, and the epilogue, whose z has the result's shape, last."""
    *others, last = _by_growth(runs)
    for run in others:
        x = _contract(x, run, batch, precision, PLAIN)
    return _contract(x, last, batch, precision, epilogue)


def _runs(of: Sequence[Sequence[Tensor]], batch: int) -> list[Run]:
    """Neighbours that have factors."""
    found: list[Run] = []
    for dim, factors in enumerate(of, start=batch):
        if factors and found and found[-1].stop == dim:
            found[-1] = Run(found[-1].start, dim + 1, [*found[-1].factors, *factors])
        elif factors:
            found.append(Run(dim, dim + 1, list(factors)))
    return found


def _by_growth(runs: Sequence[Run]) -> list[Run]:
    """The runs in the order of their growth, by comparisons: Dynamo cannot sort by sizes that it does not know."""
    ordered: list[Run] = []
    for run in runs:
        ordered.insert(len([1 for other in ordered if other.growth <= run.growth]), run)
    return ordered


def _contraction(shape: Sequence[int], run: Run, batch: int) -> tuple[int, tuple[list[int], list[int], list[int]], bool]:
    """One run of an operand of this shape as a product of matrices.

    Returns:
        The number of batch dimensions that stay; behind these, the shapes of the operand's matrices, of the result's, and of the result;
        whether the run is multiplied from the left: it is not last.
    """
    own = batch if run.is_batched else 0  # for factors without batches, those of x are rows
    rows, after, sizes = shape[own : run.start], shape[run.stop :], [f.shape[-1] for f in run.factors]
    height, width = math.prod(rows), math.prod(after)
    left, outer = width != 1, math.prod(sizes)
    before, behind = [] if left and not own and height == 1 else [height], [width] if left else []
    modes = [outer] if run.stop - run.start == 1 else sizes
    packed = [*before, math.prod(shape[run.start : run.stop]), *behind]
    return own, (packed, [*before, outer, *behind], [*rows, *modes, *after]), left


def _on_side(factors: Sequence[Tensor], left: bool) -> Sequence[Tensor]:
    """The factors as they multiply from the left, or as they are."""
    return [f.mT.unsqueeze(-3) if f.ndim > _MATRIX else f.mT for f in factors] if left else factors


def _contract(x: Tensor, run: Run, batch: int, precision: str | None, epilogue: Epilogue) -> Tensor:
    """Multiply one run: from the right where it is last, else from the left, with the dimensions before it as rows."""
    own, (packed, packed_result, shape), left = _contraction(x.shape, run, batch)
    x, (alpha, beta, z) = x.reshape(*x.shape[:own], *packed), epilogue
    z = None if z is None else z.reshape(*z.shape[:own], *packed_result)
    y: Tensor = operator.kron_matmul(x, _on_side(run.factors, left), z, alpha, beta, precision, backend_of_call(), left)
    return y.reshape(*y.shape[:own], *shape)


# ---- row-wise Kronecker (Khatri-Rao) products, as tensor-product splines have them, one mode after the other ----------------------


def khatri_rao_matmul(matrices: Sequence[ArrayT], coefficients: ArrayT, *, transpose: bool = False, precision: str | None = None) -> ArrayT:
    """Multiply a row-wise Kronecker product ``X``, whose row i is ``x1[i] (x) ... (x) xN[i]``, by coefficients, without building X.

    Such are the design matrices of tensor-product splines and of products of features: ``X @ c`` evaluates ``n`` points, and ``X^T @ y``
    with ``transpose=True`` is the other product that least squares and their gradients need. X has ``n P_1 ... P_N`` elements. Here the
    largest intermediate has ``n P_2 ... P_N`` for each column, so the first matrix is best the one with most columns. Intermediates are
    rounded to the dtype.

    Args:
        matrices: ``[*batch, n, P_i]`` each, with n rows in all. torch tensors, or NumPy or CuPy arrays, of a dtype of `kron_matmul`.
        coefficients: ``[*batch, P_1 ... P_N, Q]``, or ``[P_1 ... P_N]`` for one column; with transpose ``[*batch, n, Q]`` or ``[n]``. Of
            the matrices' array type, dtype and device. Batches broadcast.
        transpose: whether to multiply by ``X^T``.
        precision: of float32 products, as in `kron_matmul`.

    Returns:
        ``[*batch, n, Q]``, or ``[*batch, P_1 ... P_N, Q]`` with transpose; without Q where coefficients are a vector.

    Raises:
        TypeError: matrices is no sequence, or arrays of different types or dtypes.
        ValueError: no matrices, one of fewer than two dimensions or with another number of rows, coefficients that do not fit, batches that
            do not broadcast, devices that differ, or an unknown precision.

    Example:
        >>> of_x, of_y = torch.rand(1000, 12), torch.rand(1000, 10)  # basis functions at 1000 points
        >>> khatri_rao_matmul([of_x, of_y], torch.randn(120)).shape
        torch.Size([1000])
    """
    check_precision(precision)
    if not isinstance(matrices, Sequence):
        raise type_error("matrices", "a sequence of matrices", type_name(matrices))
    if not matrices:
        raise value_error("matrices", "at least one matrix", "none")
    given, names = [*matrices, coefficients], [*[f"matrices[{i}]" for i in range(len(matrices))], "coefficients"]
    if all([isinstance(a, Tensor) for a in given]):
        return _multiply_rows(given, names, transpose, precision)  # type: ignore[arg-type, return-value]
    arrays = dict(zip(names, given, strict=True))
    return through_bridge(arrays, lambda loaded: _multiply_rows([*loaded.values()], names, transpose, precision))


def _multiply_rows(given: list[Tensor], names: list[str], transpose: bool, precision: str | None) -> Tensor:
    """The product of tensors, the last of which are the coefficients."""
    *xs, c = given
    for x, name in zip([*xs, c], names, strict=True):
        check_tensor(name, x, xs[0], names[0])
    for x, name in zip(xs, names, strict=False):
        if x.ndim < 2 or x.shape[-2] != xs[0].shape[-2 if xs[0].ndim > 1 else -1]:
            rows = f"a matrix with {xs[0].shape[-2]} rows, as {names[0]}" if xs[0].ndim > 1 else "a matrix"
            raise value_error(name, rows, f"shape {tuple(x.shape)}")
    n, sizes = xs[0].shape[-2], [x.shape[-1] for x in xs]
    inner = n if transpose else math.prod(sizes)
    is_vector = c.ndim == 1
    if c.ndim == 0 or c.shape[-1 if is_vector else -2] != inner:
        what = "the number of rows" if transpose else "the product of the matrices' columns"
        raise value_error("coefficients", f"[{inner}] or [*batch, {inner}, Q], {what}", f"shape {tuple(c.shape)}")
    y = c.unsqueeze(-1) if is_vector else c
    batch = broadcast_batch([tuple(t.shape[:-2]) for t in (*xs, y)], "matrices, coefficients")
    first, *others = [x.expand(*batch, *x.shape[-2:]) if x.ndim > 2 else x.reshape(*[1] * len(batch), *x.shape) for x in xs]
    y, columns, dim = y.expand(*batch, *y.shape[-2:]), y.shape[-1], len(batch)
    behind = [math.prod(sizes[i + 1 :]) * columns for i in range(len(sizes))]  # elements that follow each mode
    if transpose:
        for x, width in reversed(list(zip(others, behind[1:], strict=True))):
            y = mode_matmul(y.reshape(*batch, n, 1, width), {dim + 1: x.unsqueeze(-2)}, precision=precision)
        y = mode_matmul(y.reshape(*batch, n, behind[0]), {dim: first}, precision=precision)
    else:
        y = mode_matmul(y.reshape(*batch, sizes[0], behind[0]), {dim: first.mT}, precision=precision)
        for x, size, width in zip(others, sizes[1:], behind[1:], strict=True):
            y = mode_matmul(y.reshape(*batch, n, size, width), {dim + 1: x.unsqueeze(-1)}, precision=precision)
    y = y.reshape(*batch, math.prod(sizes) if transpose else n, columns)
    return y.squeeze(-1) if is_vector else y

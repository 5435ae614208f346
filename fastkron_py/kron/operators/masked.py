"""`MaskedKroneckerProduct`: some rows and columns of a Kronecker product, as a grid with holes has them, as a lazy linear operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fastkron_py.kron.checks import broadcast_batch
from fastkron_py.kron.operators.krylov import Iterations
from fastkron_py.kron.operators.lanczos import Probes, estimate_of_points
from fastkron_py.kron.operators.lazy import LazyOperator, check_arrays
from fastkron_py.kron.operators.plus_diagonal import KroneckerPlusDiagonal
from fastkron_py.kron.operators.shifted import EQUAL
from fastkron_py.kron.operators.solvable import Determinant, Solvable
from fastkron_py.kron.points import Points, gathered, scattered
from fastkron_py.runtime.arrays import find_bridge, plain_tensor
from fastkron_py.runtime.errors import type_error, type_name, value_error

_EXPECTED = "a bool mask or indices, of one dimension"


def kept_points(given: Any, size: int, name: str, device: torch.device) -> Points:
    """The points, on the device, of a bool mask ``[size]`` or of indices ``[m]``, which keep their order.

    Raises:
        TypeError: neither bools nor integers.
        ValueError: a mask of another size or without a true element, indices out of range, none or one twice, more than one dimension, or
            another device.
    """
    try:
        index: Tensor = given if isinstance(given, Tensor) else plain_tensor(given).to(device)
    except (TypeError, ValueError, RuntimeError):
        raise type_error(name, _EXPECTED, type_name(given)) from None
    if index.ndim != 1:
        raise value_error(name, _EXPECTED, f"shape {tuple(index.shape)}")
    if index.device != device:
        raise value_error(name, f"the factors' device {device}", index.device)
    if index.dtype == torch.bool:
        if index.shape[0] != size:
            raise value_error(name, f"a mask of size {size}, the product's", f"size {index.shape[0]}")
        index = index.nonzero().squeeze(-1)
    if index.numel() == 0:
        raise value_error(name, "at least one point", "none")
    if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise type_error(name, "bools or signed integers", index.dtype)
    least, most = (int(bound) for bound in index.aminmax())
    if least < 0 or most >= size:
        raise value_error(name, f"indices from 0 to {size - 1}", least if least < 0 else most)
    if index.unique().numel() < index.numel():
        raise value_error(name, "each index once", f"{index.numel() - index.unique().numel()} indices that were there before")
    return Points.of(index.to(torch.int64, copy=True), size)  # a later change of the argument shall not change the operator


def masked(product: LazyOperator, rows: Any, columns: Any) -> MaskedKroneckerProduct:
    """These rows and columns of a Kronecker product, as `KroneckerProduct.masked` takes them."""
    if rows is None and columns is None:
        raise value_error("rows, columns", "a mask or indices for one of them at least", "None for both")
    label, first = product._first
    device = find_bridge([first], [label]).load(first, label).device
    p, q = product.shape[-2:]
    of_rows = None if rows is None else kept_points(rows, p, "rows", device)
    if columns is rows and p == q:
        return MaskedKroneckerProduct(product, of_rows, of_rows)
    return MaskedKroneckerProduct(product, of_rows, None if columns is None else kept_points(columns, q, "columns", device))


def _median(s: Tensor) -> Tensor:
    """``[*batch, 1]``, without derivatives."""
    ordered = s.detach().real.sort(-1).values  # torch's median on a GPU is not deterministic
    return ordered[..., (s.shape[-1] - 1) // 2, None].to(s.dtype)


class MaskedKroneckerProduct(Solvable):
    """``A = K[rows][:, columns]`` of a Kronecker product K, or of K and a diagonal matrix; made by `KroneckerProduct.masked`.

    ``A @ x`` and ``x @ A`` put x on the whole grid, multiply with K and take the points that are kept. Nothing of A is built. Gradients
    reach factors, diagonal and operands through everything here.

    `solve` goes by conjugate gradients, for an A that is Hermitian and positive definite. Their preconditioner is the inverse of the whole
    ``K + D'``, taken on the points that are kept, where D' is a Kronecker product of diagonals near to D. Estimates of `logdet` begin with
    the determinant of the whole grid, which is exact where D has equal elements: only what the points that are left out change is
    estimated, in few steps where they are scattered. `inv_quad_logdet` without probes goes by a Cholesky factor.

    Attributes:
        rows: int64 indices ``[m]`` of K's rows; None for all.
        columns: int64 indices of K's columns; None for all.
        convergence: how the last solve by iterations ended, those of backward passes included; None before.
        standard_error: of the last determinant that was estimated, ``[*batch]``; None before.

    Example:
        >>> x = torch.linspace(0, 1, 30)
        >>> line = torch.exp(-20 * (x - x[:, None]) ** 2)
        >>> measured = torch.rand(30 * 30) < 0.8  # a grid with holes
        >>> A = KroneckerProduct([line, line]).masked(rows=measured, columns=measured).add_diagonal(0.1)
        >>> y = A.solve(torch.ones(A.shape[-1]))
    """

    _SIZE = "the number of points that are kept"

    def __init__(self, whole: LazyOperator, rows: Points | None, columns: Points | None, s: Any = None) -> None:
        self._without_s, self._s, self._factors = whole, s, whole.factors
        device = whole.device if isinstance(whole._first[1], Tensor) else None  # indices follow the factors
        self._rows = rows if rows is None or device is None else rows.to(device)
        self._columns = self._rows if columns is rows else columns if columns is None or device is None else columns.to(device)
        self.rows = None if self._rows is None else self._rows.index
        self.columns = None if self._columns is None else self._columns.index
        batch, (p, q) = whole.shape[:-2], whole.shape[-2:]
        batch = batch if s is None else broadcast_batch([batch, tuple(s.shape[:-1])], "factors, s")
        self._shape = (*batch, p if self.rows is None else self.rows.shape[0], q if self.columns is None else self.columns.shape[0])

    # ---- properties --------------------------------------------------------------------------

    @property
    def _arrays(self) -> Sequence[Any]:
        return (*self._without_s._arrays, *([] if self._s is None else [self._s]))

    @property
    def _names(self) -> list[str]:
        return [*self._without_s._names, *([] if self._s is None else ["s"])]

    def _with(self, arrays: Sequence[Any]) -> MaskedKroneckerProduct:
        of_whole, s = (arrays, None) if self._s is None else (arrays[:-1], arrays[-1])
        return MaskedKroneckerProduct(self._without_s._with(of_whole), self._rows, self._columns, s)

    def _whole(self, elsewhere: Callable[[Tensor], Tensor] = lambda s: s.new_zeros(1)) -> Any:
        """The matrix on the whole grid; s has a function of itself elsewhere, which preconditioners read."""
        whole: Any = self._without_s
        if self._s is None:
            return whole
        (label, first), (index, _), size = self._first, self._indices(), whole.shape[-1]

        def spread(t: list[Any]) -> Tensor:
            s = t[1]
            found: Tensor = elsewhere(s).expand(*s.shape[:-1], size).index_copy(-1, index, s)
            return found

        return whole.add_diagonal(self._on_tensors(spread, [first, self._s], [label, "s"]))

    def __repr__(self) -> str:
        p, q = self._without_s.shape[-2:]
        return self._shown("(x)", f", of {p} x {q}")

    @property
    def mT(self) -> MaskedKroneckerProduct:  # noqa: N802
        """The transpose of the matrix, or of each matrix of the batch; a view."""
        return MaskedKroneckerProduct(self._without_s.mT, self._columns, self._rows, self._s)

    def conj(self) -> MaskedKroneckerProduct:
        """The complex conjugate; of real factors a view."""
        return MaskedKroneckerProduct(self._without_s.conj(), self._rows, self._columns, None if self._s is None else self._s.conj())

    def _scaled(self, function: Callable[[Any], Any]) -> MaskedKroneckerProduct:
        s = None if self._s is None else function(self._s)
        return MaskedKroneckerProduct(self._without_s._scaled(function), self._rows, self._columns, s)

    # ---- products -----------------------------------------------------------------------------

    def _multiply(self, x: Any, left: bool) -> Any:
        source, target = (self._columns, self._rows) if left else (self._rows, self._columns)
        inner = self._shape[-1 if left else -2]

        def product(t: list[Any]) -> Tensor:
            *own, x = t
            dim = -2 if left and x.ndim > 1 else -1
            if x.ndim == 0 or x.shape[dim] != inner:
                raise value_error("x", f"dimension {dim} of size {inner}, the number of points that are kept", f"shape {tuple(x.shape)}")
            whole = self._with(own)._whole()
            x = scattered(x, source, dim)
            return gathered(whole @ x if left else x @ whole, target, dim)

        return self._on_tensors(product, [*self._arrays, x], [*self._names, "x"])

    # ---- linear algebra -----------------------------------------------------------------------

    def _elements(self, rows: Tensor, columns: Tensor) -> Any:
        own, others = self._indices()
        return self._whole()._elements(own[rows], others[columns])

    def _indices(self) -> tuple[Tensor, Tensor]:
        """The rows and columns that are kept."""
        p, q = self._without_s.shape[-2:]
        device = next(i.device for i in (self.rows, self.columns) if i is not None)
        rows = torch.arange(p, device=device) if self.rows is None else self.rows
        return rows, torch.arange(q, device=device) if self.columns is None else self.columns

    def _dense(self) -> Any:
        rows, columns = self._indices()
        return self._whole()._elements(rows[:, None], columns)

    def diagonal(self) -> Any:
        """The elements ``A[i, i]``, ``[*batch, min(rows, columns)]``."""
        rows, columns = self._indices()
        count = min(self._shape[-2:])
        return self._whole()._elements(rows[:count], columns[:count])

    def trace(self) -> Any:
        """The sum of the diagonal, ``[*batch]``."""
        if self._shape[-1] != self._shape[-2]:
            raise value_error("rows, columns", "as many of each for trace", f"shape {self._shape}")
        return self.diagonal().sum(-1)

    def _points(self, what: str) -> Points:
        """Rows and columns, which have to be the same points."""
        rows, columns = self.rows, self.columns
        if rows is None or columns is None or not (rows is columns or torch.equal(rows, columns)):
            raise value_error("rows, columns", f"the same points for {what}, in the same order", "different ones")
        p, q = self._without_s.shape[-2:]
        if p != q:
            raise value_error("factors", f"a square product for {what}", f"shape {self._without_s.shape}")
        return self._rows  # type: ignore[return-value]

    def add_diagonal(self, s: Any) -> MaskedKroneckerProduct:
        """``A + D`` for a diagonal D on the points that are kept.

        Args:
            s: D's diagonal: a number or a 0-dimensional tensor, for ``s * I``; ``[*batch, 1]``, one for each matrix of a batch; or
                ``[m]`` or ``[*batch, m]``, one for each point. Of the factors' array type, dtype and device.

        Raises:
            TypeError: s of another type or dtype, complex where the factors are real, or a diagonal was added before.
            ValueError: rows and columns that are not the same points, K that is not square, or s that does not fit or is not finite.

        Example:
            >>> K = KroneckerProduct([torch.eye(4) + 1, torch.eye(5)])
            >>> A = K.masked(rows=torch.arange(7), columns=torch.arange(7)).add_diagonal(torch.rand(7))
        """
        self._points("add_diagonal")
        whole: Any = self._without_s
        if self._s is not None or not hasattr(whole, "add_diagonal"):
            raise type_error("s", "the only diagonal that is added: sum them before", "a second one")
        if isinstance(s, Sequence | LazyOperator):
            raise type_error("s", "a number or an array", type_name(s))
        if getattr(s, "ndim", 0) and s.shape[-1] != 1:
            label, first = self._first
            check_arrays([first, s], [label, "s"])
            if s.shape[-1] != self._shape[-1]:
                raise value_error("s", f"a vector [{self._shape[-1]}] or [*batch, 1]", f"shape {tuple(s.shape)}")
            return MaskedKroneckerProduct(whole, self._rows, self._columns, s)
        return MaskedKroneckerProduct(whole.add_diagonal(s), self._rows, self._columns)

    def _check(self, what: str) -> None:
        self._points(what)

    def _solution(self, basis: None, b: Tensor, how: Iterations) -> Tensor:
        points, whole, given = self._points("solve"), self._plus(), how.preconditioner

        def on_grid(r: Tensor) -> Tensor:
            return scattered(given(gathered(r, points, -2)), points, -2)  # type: ignore[operator]

        inside = points.is_kept[:, None]
        if how.mask is not None:
            inside = inside.new_zeros(*how.mask.shape[:-2], *inside.shape).index_copy(-2, points.index, how.mask)
        how = how._replace(mask=inside, preconditioner=on_grid if callable(given) else given)
        whole._check("solve")
        return gathered(whole._solution(None, scattered(b, points, -2), how), points, -2)

    def _slogdet(self, basis: None, probes: Probes | None) -> Determinant:
        if probes is None:
            return self._dense_slogdet("matrices of some points")
        whole = self._plus()
        value, error = estimate_of_points(whole._shifted(identities=whole._form == EQUAL), self._points("a determinant"), probes)
        return torch.ones_like(value, dtype=self.dtype), value, error

    def _inv_quad_logdet(self, own: Any, b: Tensor, how: Iterations, probes: Probes | None) -> tuple[Tensor, Tensor]:
        if probes is not None:
            total, logdet = super()._inv_quad_logdet(own, b, how, probes)
            return total, logdet.real if logdet.is_complex() else logdet
        own._check_dense("matrices of some points")
        try:
            lower = torch.linalg.cholesky(own._dense())
        except LinAlgError:
            raise value_error("factors, s", "a positive definite matrix", "one that has no Cholesky factor") from None
        half = torch.linalg.solve_triangular(lower, b, upper=False)
        return (half.abs() ** 2).sum((-2, -1)), 2 * lower.diagonal(dim1=-2, dim2=-1).real.log().sum(-1)

    def sample(self, sample_shape: Sequence[int] = (), *, generator: torch.Generator | None = None) -> Any:
        """Normal vectors of mean 0 and covariance A: points of those of the whole grid, as `KroneckerPlusDiagonal.sample`.

        Args:
            sample_shape: of independent samples.
            generator: of the random numbers.

        Returns:
            ``[*sample_shape, *batch, m]``.

        Raises:
            TypeError: as of `KroneckerPlusDiagonal.sample`.
            ValueError: as of `KroneckerPlusDiagonal.sample`, or rows and columns that are not the same points.
        """
        return self._on_own(
            "sample", lambda own: gathered(own._plus().sample(sample_shape, generator=generator), own._points("sample"), -1)
        )

    def _plus(self) -> KroneckerPlusDiagonal:
        """The whole matrix, as a product plus a diagonal."""
        whole = self._whole(_median)
        found: KroneckerPlusDiagonal = whole if isinstance(whole, KroneckerPlusDiagonal) else whole.add_diagonal(0.0)
        return found

"""The kernel of CPUs: all factors of a stage on a few rows or columns at a time, which stay in cache. The only file that imports numba.

All of it is one product, ``y[i, j] = sum over p of scalar[i, p] * vector[p, j]``, written with LLVM's vectors: rows of 16 or 8 elements
are loaded, each is multiplied by a scalar that is broadcast, and up to 8 x 2 vectors of sums stay in registers. A mode that others follow
in memory takes the factor's elements as scalars and x's as vectors. The last mode takes x's as scalars and the factor's rows as vectors. So
nothing is transposed. Widths that are no multiple of a vector have masked loads and stores.

A sum is a chain of fused multiply-adds in the order of p, or several of 256 terms that are added up, whatever the units are: results
depend neither on threads nor on the sizes of units. No flag lets LLVM reorder sums or assume that numbers are finite.

Functions take addresses and strides in elements as int64. Their argument ``kind`` is a pointer whose type says in which type they compute.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastkron_py.kron.cpu.layout import BFLOAT16, FACTOR, FORM, HEAD, STEP

INDEX = ir.IntType(64)
SINGLE, DOUBLE = types.CPointer(types.float32), types.CPointer(types.float64)
HAS_512_BITS = bool(binding.get_host_cpu_features().get("avx512f"))
VECTOR_BYTES = 64 if HAS_512_BITS else 32
TERMS = 256  # of sums that are added up: longer ones would round more, and their vectors leave the first level of cache
ROWS = 8 if HAS_512_BITS else 4  # of sums, in 32 or 16 registers


# ---- LLVM's vectors --------------------------------------------------------------------------------


def _scalar(kind: Any) -> Any:
    return ir.FloatType() if kind == SINGLE else ir.DoubleType()


def _bytes(kind: Any) -> int:
    return 4 if kind == SINGLE else 8


def _constant(number: int) -> Any:
    return ir.Constant(INDEX, number)


class _Vectors:
    """Builds code on vectors of a scalar type; with a width, only of their first elements."""

    def __init__(self, builder: Any, kind: Any, lanes: int, width: Any = None) -> None:
        self.builder, self.scalar, self.lanes, self.align = builder, _scalar(kind), lanes, _bytes(kind)
        self.type = ir.VectorType(self.scalar, lanes)
        self.suffix = f"v{lanes}{'f32' if kind == SINGLE else 'f64'}"
        lane = ir.Constant(ir.VectorType(INDEX, lanes), list(range(lanes)))
        self.mask = None if width is None else builder.icmp_signed("<", lane, self.splat(width, INDEX))

    def splat(self, value: Any, scalar: Any = None) -> Any:
        undefined = ir.Constant(ir.VectorType(scalar or self.scalar, self.lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), None))

    def _call(self, name: str, result: Any, arguments: list[Any]) -> Any:
        called = ir.FunctionType(result, [a.type for a in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, called, f"llvm.{name}"), arguments)

    def load(self, address: Any) -> Any:
        pointer = self.builder.bitcast(address, self.type.as_pointer())
        if self.mask is None:
            return self.builder.load(pointer, align=self.align)
        arguments = [pointer, ir.Constant(ir.IntType(32), self.align), self.mask, ir.Constant(self.type, None)]
        return self._call(f"masked.load.{self.suffix}.p0", self.type, arguments)

    def store(self, value: Any, address: Any) -> None:
        pointer = self.builder.bitcast(address, self.type.as_pointer())
        if self.mask is None:
            self.builder.store(value, pointer, align=self.align)
        else:
            arguments = [value, pointer, ir.Constant(ir.IntType(32), self.align), self.mask]
            self._call(f"masked.store.{self.suffix}.p0", ir.VoidType(), arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._call(f"fma.{self.suffix}", self.type, [a, b, c])


def _block(rows: int, vectors: int, share: int, is_masked: bool) -> Any:
    """The product in registers: rows scalars by this number of vectors, for each of terms; written, or added to what is there.

    Args:
        rows: of sums.
        vectors: in a row.
        share: of a vector register that a vector takes, 1 or 2 for a half.
        is_masked: whether only the first width elements are loaded and stored.
    """

    @intrinsic
    def block(typing: Any, kind: Any, s: Any, si: Any, sp: Any, v: Any, vp: Any, y: Any, yi: Any, terms: Any, width: Any, adds: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, s, si, sp, v, vp, y, yi, terms, width, adds = args
            lanes = VECTOR_BYTES // share // _bytes(kind)
            code = _Vectors(builder, kind, lanes, width if is_masked else None)

            def at(address: Any, offset: Any) -> Any:
                return builder.gep(builder.inttoptr(address, code.scalar.as_pointer()), [offset])

            sums = [cgutils.alloca_once(builder, code.type) for _ in range(rows * vectors)]
            for total in sums:
                builder.store(ir.Constant(code.type, None), total)
            starts = [builder.mul(_constant(i), si) for i in range(rows)]
            with cgutils.for_range(builder, terms) as loop:
                vector, scalar = builder.mul(loop.index, vp), builder.mul(loop.index, sp)
                loaded = [code.load(at(v, builder.add(vector, _constant(j * lanes)))) for j in range(vectors)]
                for i, start in enumerate(starts):
                    factor = code.splat(builder.load(at(s, builder.add(start, scalar))))
                    for value, total in zip(loaded, sums[i * vectors : (i + 1) * vectors], strict=True):
                        builder.store(code.fma(factor, value, builder.load(total)), total)
            places = [at(y, builder.add(builder.mul(_constant(i), yi), _constant(j * lanes))) for i in range(rows) for j in range(vectors)]
            with builder.if_then(adds):
                for total, place in zip(sums, places, strict=True):
                    builder.store(builder.fadd(code.load(place), builder.load(total)), total)
            for total, place in zip(sums, places, strict=True):
                code.store(builder.load(total), place)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 9, types.boolean), codegen

    return block


@intrinsic
def _claim(typing: Any, pointer: Any, index: Any) -> Any:
    """Adds 1 to an integer that threads share, and returns what it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), _constant(1), "monotonic")

    return types.int64(pointer, types.int64), codegen


@intrinsic
def _size(typing: Any, kind: Any) -> Any:
    """Bytes of an element."""
    return types.int64(kind), lambda context, builder, signature, args: _constant(_bytes(kind))


def _cast(value: Any, builder: Any, result: Any) -> Any:
    return value if value.type == result else (builder.fpext if result == ir.DoubleType() else builder.fptrunc)(value, result)


@intrinsic
def _load(typing: Any, kind: Any, address: Any) -> Any:
    """An element."""
    return kind.dtype(kind, types.int64), lambda _, builder, signature, args: builder.load(
        builder.inttoptr(args[1], _scalar(kind).as_pointer()), align=_bytes(kind)
    )


@intrinsic
def _store(typing: Any, kind: Any, address: Any, value: Any) -> Any:
    """Writes an element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.inttoptr(args[1], _scalar(kind).as_pointer()), align=_bytes(kind))
        return context.get_dummy_value()

    return types.void(kind, types.int64, kind.dtype), codegen


@intrinsic
def _load_16(typing: Any, kind: Any, address: Any, is_bfloat: Any) -> Any:
    """An element of float16 or of bfloat16, widened."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(builder.inttoptr(args[1], ir.IntType(16).as_pointer()), align=2)
        brain = builder.bitcast(builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16)), ir.FloatType())
        half = builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        return _cast(builder.select(args[2], brain, half), builder, _scalar(kind))

    return kind.dtype(kind, types.int64, types.boolean), codegen


@intrinsic
def _store_16(typing: Any, kind: Any, address: Any, value: Any, is_bfloat: Any) -> Any:
    """Writes an element as float16 or as bfloat16, rounded to nearest, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, value = ir.IntType(32), _cast(args[2], builder, ir.FloatType())
        bits, sixteen = builder.bitcast(value, word), ir.Constant(word, 16)
        tie = builder.and_(builder.lshr(bits, sixteen), ir.Constant(word, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(tie, ir.Constant(word, 0x7FFF))), sixteen)
        quiet = builder.or_(builder.lshr(bits, sixteen), ir.Constant(word, 0x40))
        brain = builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), ir.IntType(16))
        half = builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        builder.store(builder.select(args[3], brain, half), builder.inttoptr(args[1], ir.IntType(16).as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(kind, types.int64, kind.dtype, types.boolean), codegen


# ---- one product of any size -----------------------------------------------------------------------


def _columns(vectors: int, share: int, is_masked: bool) -> Any:
    """The product of all rows by the vectors of some columns."""
    block_rows = ROWS
    full, four, two, one = (_block(rows, vectors, share, is_masked) for rows in (ROWS, 4, 2, 1))

    @numba.njit(error_model="numpy")
    def columns(kind, s, si, sp, v, vp, y, yi, rows, terms, width, adds):
        step, line, i = si * _size(kind), yi * _size(kind), 0
        while i + block_rows <= rows:
            full(kind, s + i * step, si, sp, v, vp, y + i * line, yi, terms, width, adds)
            i += block_rows
        if i + 4 <= rows:
            four(kind, s + i * step, si, sp, v, vp, y + i * line, yi, terms, width, adds)
            i += 4
        if i + 2 <= rows:
            two(kind, s + i * step, si, sp, v, vp, y + i * line, yi, terms, width, adds)
            i += 2
        if i < rows:
            one(kind, s + i * step, si, sp, v, vp, y + i * line, yi, terms, width, adds)

    return columns


_pair, _single, _narrow = _columns(2, 1, False), _columns(1, 1, True), _columns(1, 2, True)


@numba.njit(error_model="numpy")
def _product(kind, s, si, sp, v, vp, y, yi, rows, terms, width):
    """``y[i, j] = sum over p of s[i, p] * v[p, j]``, in blocks of terms whose vectors stay in the first level of cache while rows pass."""
    size = _size(kind)
    lanes = VECTOR_BYTES // size
    for first in range(0, terms, TERMS):
        here, adds = min(TERMS, terms - first), first > 0
        u, w, z, left = s + first * sp * size, v + first * vp * size, y, width
        while left > 0:
            if left >= 2 * lanes:
                _pair(kind, u, si, sp, w, vp, z, yi, rows, here, left, adds)
                done = 2 * lanes
            elif 2 * left > lanes:
                _single(kind, u, si, sp, w, vp, z, yi, rows, here, left, adds)
                done = lanes
            else:
                _narrow(kind, u, si, sp, w, vp, z, yi, rows, here, left, adds)
                done = left
            w, z, left = w + done * size, z + done * size, left - done


@numba.njit(error_model="numpy")
def _step(kind, f, fp, fq, P, Q, before, after, src, src_row, src_k, dst, dst_row, dst_k, rows, columns, is_last):
    """A factor ``[P, Q]`` on its mode of rows ``[before, P, after, columns]``; src_k and dst_k are the strides of their modes' elements.

    is_last: whether no elements follow those of the mode, in x as a whole, not only in a unit of one column.
    """
    size = _size(kind)
    if is_last:
        if rows == 1 or (src_row == before * P and dst_row == before * Q):
            _product(kind, src, P, 1, f, fp, dst, Q, rows * before, P, Q)
        else:
            for row in range(rows):
                _product(kind, src + row * src_row * size, P, 1, f, fp, dst + row * dst_row * size, Q, before, P, Q)
        return
    pieces, width = (1, after * columns) if src_k == columns and dst_k == columns else (after, columns)
    for row in range(rows):
        for b in range(before):
            u, w = src + (row * src_row + b * P * after * src_k) * size, dst + (row * dst_row + b * Q * after * dst_k) * size
            for a in range(pieces):
                _product(kind, f, fq, fp, u + a * src_k * size, after * src_k, w + a * dst_k * size, after * dst_k, Q, P, width)


@numba.njit(error_model="numpy")
def _widen(kind, src, row_stride, k_stride, dst, rows, length, columns, is_bfloat):
    """``[rows, length, columns]`` of a half type to contiguous elements."""
    size = _size(kind)
    for row in range(rows):
        for k in range(length):
            u = src + (row * row_stride + k * k_stride) * 2
            for j in range(columns):
                _store(kind, dst + j * size, _load_16(kind, u + j * 2, is_bfloat))
            dst += columns * size


@numba.njit(error_model="numpy")
def _round(kind, src, dst, row_stride, k_stride, rows, length, columns, is_bfloat):
    """The reverse."""
    size = _size(kind)
    for row in range(rows):
        for k in range(length):
            w = dst + (row * row_stride + k * k_stride) * 2
            for j in range(columns):
                _store_16(kind, w + j * 2, _load(kind, src + j * size), is_bfloat)
            src += columns * size


# ---- what is called from C: integers as `layout` describes them -------------------------------------


def stage(p, kind):
    """One thread's part of a stage: it claims units, and takes each through all steps in two buffers."""
    size = _size(kind)
    x, x_group, x_row, x_k, x_kind = p[2], p[3], p[4], p[5], p[6]
    y, y_group, y_row, y_k, y_kind = p[7], p[8], p[9], p[10], p[11]
    L, R, length, width, rows_most, columns_most = p[12], p[13], p[14], p[15], p[16], p[17]
    units, blocks, chunks, steps = p[18], p[19], p[20], p[21]
    x_size, y_size = 2 if x_kind else size, 2 if y_kind else size
    buffer = p[23]
    first = p[22] + _claim(p, 1) * 2 * buffer
    unit = _claim(p, 0)
    while unit < units:
        group, rest = unit // (blocks * chunks), unit % (blocks * chunks)
        row, column = rest // chunks * rows_most, rest % chunks * columns_most
        rows, columns = min(rows_most, L - row), min(columns_most, R - column)
        src, src_row, src_k, which = x + (group * x_group + row * x_row + column) * x_size, x_row, x_k, 0
        target = y + (group * y_group + row * y_row + column) * y_size
        if x_kind:
            _widen(kind, src, x_row, x_k, first, rows, length, columns, x_kind == BFLOAT16)
            src, src_row, src_k, which = first, length * columns, columns, 1
        for i in range(steps):
            o = HEAD + STEP * i
            f, fp, fq, P, Q, before, after = p[o] + group * p[o + 1] * size, p[o + 2], p[o + 3], p[o + 4], p[o + 5], p[o + 6], p[o + 7]
            if i == steps - 1 and not y_kind:
                dst, dst_row, dst_k = target, y_row, y_k
            else:
                dst, dst_row, dst_k = first + which * buffer, before * Q * after * columns, columns
            _step(kind, f, fp, fq, P, Q, before, after, src, src_row, src_k, dst, dst_row, dst_k, rows, columns, after * R == 1)
            src, src_row, src_k, which = dst, dst_row, dst_k, 1 - which
        if y_kind:
            _round(kind, src, target, y_row, y_k, rows, width, columns, y_kind == BFLOAT16)
        unit = _claim(p, 0)


@numba.njit(error_model="numpy")
def _element(kind, address, offset, element):
    """An element of a factor."""
    if element:
        return _load_16(kind, address + offset * 2, element == BFLOAT16)
    return _load(kind, address + offset * _size(kind))


def form(p, kind):
    """Writes matrices, each the Kronecker product of two factors times a scalar, or of one with the scalar alone."""
    size = _size(kind)
    for m in range(p[0]):
        o = 1 + m * FORM
        dst, groups, scale = p[o], p[o + 1], _scale(kind, p, o + 2)
        a, ag, ap, aq, aP, aQ, a_kind = p[o + 3], p[o + 4], p[o + 5], p[o + 6], p[o + 7], p[o + 8], p[o + 9]
        o += FACTOR
        b, bg, bp, bq, bP, bQ, b_kind = p[o + 3], p[o + 4], p[o + 5], p[o + 6], p[o + 7], p[o + 8], p[o + 9]
        for g in range(groups):
            for i in range(aP):
                for k in range(bP):
                    for j in range(aQ):
                        e = scale * _element(kind, a, g * ag + i * ap + j * aq, a_kind) if a else scale
                        for n in range(bQ):
                            _store(kind, dst + n * size, e * _element(kind, b, g * bg + k * bp + n * bq, b_kind))
                        dst += bQ * size


@intrinsic
def _scale(typing: Any, kind: Any, pointer: Any, index: Any) -> Any:
    """An integer's bits as a float64, in the type of the computation."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(builder.gep(args[1], [args[2]]), ir.DoubleType().as_pointer())
        return _cast(builder.load(address), builder, _scalar(kind))

    return kind.dtype(kind, pointer, types.int64), codegen


def compiled(function: Any, itemsize: int) -> Any:
    """`stage` or `form` in float32 or float64, from numba's cache on disk if it is there; ``address`` is that of a C function."""
    signature = types.void(types.CPointer(types.int64), SINGLE if itemsize == 4 else DOUBLE)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is nowhere to write
        return numba.cfunc(signature, error_model="numpy")(function)

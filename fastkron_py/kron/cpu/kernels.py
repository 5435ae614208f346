"""The kernel of CPUs: all factors of a stage on a few rows or columns at a time, which stay in cache. The only file that imports numba.

Nearly all of it is one product, ``y[i, j] = sum over p of scalar[i, p] * vector[p, j]``, written with LLVM's vectors: rows of 16 or 8
elements are loaded, each is multiplied by a scalar that is broadcast, and up to 8 x 2 vectors of sums stay in registers. A mode that others
follow in memory takes the factor's elements as scalars and x's as vectors. The last mode takes x's as scalars and the factor's rows as
vectors. So nothing is transposed. Widths that are no multiple of a vector have masked loads and stores. The gradient of the last mode's
factor is such a product, too; that of another one has dot products of vectors.

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

from fastkron_py.kron.cpu.layout import BFLOAT16, FORM, HEAD, SAME, SPLIT, STEP, SUM

INDEX = ir.IntType(64)
SINGLE, DOUBLE = types.CPointer(types.float32), types.CPointer(types.float64)
HAS_512_BITS = bool(binding.get_host_cpu_features().get("avx512f"))
VECTOR_BYTES = 64 if HAS_512_BITS else 32
TERMS = 256  # of sums that are added up: longer ones would round more, and their vectors leave the first level of cache
PACKED_ROWS = 64  # of scalars at least, for which vectors that lie apart are copied side by side: else their places in L1 and pages collide
PACKED_BYTES = 1 << 15  # from the first one to the last, at least
NEAR_BYTES, FAR_BYTES = 1 << 15, 1 << 18  # of vectors, or rows of a result, in the first level of cache; of results in the second one
ROWS = 8 if HAS_512_BITS else 4  # of sums, in 32 or 16 registers


# ---- LLVM's vectors --------------------------------------------------------------------------------


def _scalar(kind: Any) -> Any:
    return ir.IntType(16) if kind is None else ir.FloatType() if kind == SINGLE else ir.DoubleType()


def _bytes(kind: Any) -> int:
    return 2 if kind is None else 4 if kind == SINGLE else 8


def _constant(number: int) -> Any:
    return ir.Constant(INDEX, number)


class _Vectors:
    """Builds code on vectors of a scalar type, or of 16 bits; with a width, only of their first elements."""

    def __init__(self, builder: Any, kind: Any, lanes: int, width: Any = None) -> None:
        self.builder, self.scalar, self.lanes, self.align = builder, _scalar(kind), lanes, _bytes(kind)
        self.type = ir.VectorType(self.scalar, lanes)
        self.suffix = f"v{lanes}{'i16' if kind is None else 'f32' if kind == SINGLE else 'f64'}"
        lane = ir.Constant(ir.VectorType(INDEX, lanes), list(range(lanes)))
        self.mask = None if width is None else builder.icmp_signed("<", lane, self.splat(width, INDEX))

    def splat(self, value: Any, scalar: Any = None) -> Any:
        undefined = ir.Constant(ir.VectorType(scalar or self.scalar, self.lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), None))

    def _call(self, name: str, result: Any, arguments: list[Any]) -> Any:
        called = ir.FunctionType(result, [a.type for a in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, called, f"llvm.{name}"), arguments)

    def of(self, scalar: Any) -> Any:
        """Vectors of another type."""
        return ir.VectorType(scalar, self.lanes)

    def constant(self, number: int, scalar: Any) -> Any:
        return ir.Constant(self.of(scalar), [number] * self.lanes)

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


DOTS = (4 if HAS_512_BITS else 2), 4  # by how many: their sums fill whole vectors


def _sums_of_lanes(code: _Vectors, vectors: list[Any]) -> list[Any]:
    """The sum of each vector's elements, in the order of the vectors, as the elements of fewer ones."""
    builder, lanes, distance = code.builder, code.lanes, 1
    while distance < lanes:
        halves = [[lane // (2 * distance) * 2 * distance + lane % distance + h * distance for lane in range(lanes)] for h in (0, 1)]
        from_second = [lanes * (lane // distance % 2) for lane in range(lanes)]
        picks = [ir.Constant(ir.VectorType(ir.IntType(32), lanes), [a + b for a, b in zip(h, from_second, strict=True)]) for h in halves]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*[builder.shuffle_vector(a, b, pick) for pick in picks]) for a, b in pairs]
        distance *= 2
    return vectors


@intrinsic
def _dots(
    typing: Any, kind: Any, x: Any, x0: Any, x1: Any, xp: Any, g: Any, g0: Any, g1: Any, gq: Any,
    y: Any, yp: Any, P: Any, Q: Any, n0: Any, n1: Any, width: Any, adds: Any,
) -> Any:  # fmt: skip
    """``y[p, q] = sum over n0, n1 and j of x[n0, n1, p, j] * g[n0, n1, q, j]`` of few p and q, in registers; P and Q are those left."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, x0, x1, xp, g, g0, g1, gq, y, yp, p_left, q_left, n0, n1, width, adds = args
        lanes, (rows, columns) = VECTOR_BYTES // _bytes(kind), DOTS
        code = _Vectors(builder, kind, lanes)

        def least(value: Any, most: int) -> Any:
            return builder.select(builder.icmp_signed("<", value, _constant(most)), value, _constant(most))

        def clamped(index: int, left: Any) -> Any:  # what is beyond the end is computed twice, and not stored
            return least(builder.sub(left, _constant(1)), index)

        def at(address: Any, *offsets: Any) -> Any:
            pointer = builder.inttoptr(address, code.scalar.as_pointer())
            for offset in offsets:
                pointer = builder.gep(pointer, [offset])
            return pointer

        sums = [cgutils.alloca_once(builder, code.type) for _ in range(rows * columns)]
        for total in sums:
            builder.store(ir.Constant(code.type, None), total)
        u = [builder.mul(clamped(i, p_left), xp) for i in range(rows)]
        v = [builder.mul(clamped(j, q_left), gq) for j in range(columns)]
        whole = builder.and_(width, _constant(-lanes))
        rest = builder.sub(width, whole)

        def add(code: _Vectors, x_offset: Any, g_offset: Any) -> None:
            left = [code.load(at(x, x_offset, start)) for start in u]
            right = [code.load(at(g, g_offset, start)) for start in v]
            for total, (a, b) in zip(sums, [(a, b) for a in left for b in right], strict=True):
                builder.store(code.fma(a, b, builder.load(total)), total)

        with cgutils.for_range(builder, n0) as outer, cgutils.for_range(builder, n1) as inner:
            x_start = builder.add(builder.mul(outer.index, x0), builder.mul(inner.index, x1))
            g_start = builder.add(builder.mul(outer.index, g0), builder.mul(inner.index, g1))
            with cgutils.for_range(builder, builder.sdiv(width, _constant(lanes))) as loop:
                offset = builder.mul(loop.index, _constant(lanes))
                add(code, builder.add(x_start, offset), builder.add(g_start, offset))
            with builder.if_then(builder.icmp_signed(">", rest, _constant(0))):
                add(_Vectors(builder, kind, lanes, rest), builder.add(x_start, whole), builder.add(g_start, whole))
        found = _sums_of_lanes(code, [builder.load(total) for total in sums])
        row = _Vectors(builder, kind, columns, least(q_left, columns))
        for i in range(rows):
            first = i * columns % lanes
            pick = ir.Constant(ir.VectorType(ir.IntType(32), columns), list(range(first, first + columns)))
            vector = found[i * columns // lanes]
            with builder.if_then(builder.icmp_signed(">", p_left, _constant(i))):
                part, place = builder.shuffle_vector(vector, vector, pick), at(y, builder.mul(_constant(i), yp))
                row.store(builder.fadd(part, builder.select(adds, row.load(place), ir.Constant(row.type, None))), place)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 15, types.boolean), codegen


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
    is_wide = getattr(result, "element", result) == ir.DoubleType()
    return value if value.type == result else (builder.fpext if is_wide else builder.fptrunc)(value, result)


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
def _read_vector(typing: Any, kind: Any, source: Any, target: Any, width: Any, element: Any) -> Any:
    """Copies the first width elements of a vector; those of a half type are widened."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, target, width, element = args
        wide, half = (_Vectors(builder, k, VECTOR_BYTES // _bytes(kind), width) for k in (kind, None))
        target = builder.inttoptr(target, wide.scalar.as_pointer())
        with builder.if_else(builder.icmp_signed("==", element, _constant(SAME))) as (same, other):
            with same:
                wide.store(wide.load(builder.inttoptr(source, wide.scalar.as_pointer())), target)
            with other:
                bits = half.load(builder.inttoptr(source, half.scalar.as_pointer()))
                word = ir.VectorType(ir.IntType(32), wide.lanes)
                brain = builder.bitcast(builder.shl(builder.zext(bits, word), half.constant(16, ir.IntType(32))), half.of(ir.FloatType()))
                value = builder.fpext(builder.bitcast(bits, half.of(ir.HalfType())), half.of(ir.FloatType()))
                is_brain = builder.icmp_signed("==", element, _constant(BFLOAT16))
                wide.store(_cast(builder.select(is_brain, brain, value), builder, wide.type), target)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), codegen


@intrinsic
def _write_vector(typing: Any, kind: Any, source: Any, target: Any, width: Any, element: Any) -> Any:
    """Writes the first width elements of a vector as float16 or as bfloat16, rounded to nearest, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, target, width, element = args
        wide, half = (_Vectors(builder, k, VECTOR_BYTES // _bytes(kind), width) for k in (kind, None))
        word = ir.IntType(32)
        value = _cast(wide.load(builder.inttoptr(source, wide.scalar.as_pointer())), builder, half.of(ir.FloatType()))
        bits, sixteen = builder.bitcast(value, half.of(word)), half.constant(16, word)
        tie = builder.and_(builder.lshr(bits, sixteen), half.constant(1, word))
        rounded = builder.lshr(builder.add(bits, builder.add(tie, half.constant(0x7FFF, word))), sixteen)
        quiet = builder.or_(builder.lshr(bits, sixteen), half.constant(0x40, word))
        brain = builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), half.type)
        found = builder.bitcast(builder.fptrunc(value, half.of(ir.HalfType())), half.type)
        is_brain = builder.icmp_signed("==", element, _constant(BFLOAT16))
        half.store(builder.select(is_brain, brain, found), builder.inttoptr(target, half.scalar.as_pointer()))
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), codegen


@intrinsic
def _panel(typing: Any, kind: Any) -> Any:
    """The address of memory for `TERMS` rows of two vectors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.VectorType(ir.IntType(8), VECTOR_BYTES), size=2 * TERMS)
        memory.align = VECTOR_BYTES
        return builder.ptrtoint(memory, INDEX)

    return types.int64(kind), codegen


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
def _convert(kind, apart, row_stride, k_stride, dense, rows, length, columns, element, is_read):
    """``[rows, length, columns]`` of a kind of elements to contiguous ones, or the reverse, to a half type."""
    size, width = _size(kind), 2 if element else _size(kind)
    lanes = VECTOR_BYTES // size
    if k_stride == columns:  # columns lie in one line
        length, columns = 1, length * columns
    for row in range(rows):
        for k in range(length):
            u = apart + (row * row_stride + k * k_stride) * width
            for j in range(0, columns, lanes):
                if is_read:
                    _read_vector(kind, u + j * width, dense + j * size, columns - j, element)
                else:
                    _write_vector(kind, dense + j * size, u + j * width, columns - j, element)
            dense += columns * size


@numba.njit(error_model="numpy")
def _product(kind, s, si, sp, v, vp, y, yi, rows, terms, width, adds_all):
    """``y[i, j] = sum over p of s[i, p] * v[p, j]``, in blocks of terms whose vectors stay in the first level of cache while rows pass."""
    size = _size(kind)
    lanes, panel = VECTOR_BYTES // size, _panel(kind)
    for first in range(0, terms, TERMS):
        here, adds = min(TERMS, terms - first), adds_all or first > 0
        is_packed = rows >= PACKED_ROWS and here * vp * size > PACKED_BYTES
        # Of a result that leaves the second level of cache, rows are written whole, if all vectors stay in the first one.
        is_far = rows * yi * size > FAR_BYTES and here * width * size <= NEAR_BYTES and not is_packed
        most = max(NEAR_BYTES // (width * size) // ROWS, 1) * ROWS if is_far else rows
        row = 0
        while row < rows:  # a range would divide
            u, w, z, left = s + (first * sp + row * si) * size, v + first * vp * size, y + row * yi * size, width
            some = min(most, rows - row)
            while left > 0:
                near, stride, done = w, vp, 2 * lanes if left >= 2 * lanes else lanes
                if is_packed and left >= done:
                    _convert(kind, w, 0, vp, panel, 1, here, done, SAME, True)
                    near, stride = panel, done
                if left >= 2 * lanes:
                    _pair(kind, u, si, sp, near, stride, z, yi, some, here, left, adds)
                elif 2 * left > lanes:
                    _single(kind, u, si, sp, near, stride, z, yi, some, here, left, adds)
                else:
                    _narrow(kind, u, si, sp, near, stride, z, yi, some, here, left, adds)
                w, z, left = w + done * size, z + done * size, left - done
            row += most


@numba.njit(error_model="numpy")
def _turn(kind, many, few, source, target, rows, before):
    """Copies a mode and the few elements that follow it, ``[rows, before, many, few]``.

    source, target: address, strides of rows, of the many and of the few.
    """
    size, (src, src_row, src_many, src_few), (dst, dst_row, dst_many, dst_few) = _size(kind), source, target
    for row in range(rows):
        for b in range(before):
            for i in range(few):
                u = src + (row * src_row + b * many * few + i * src_few) * size
                w = dst + (row * dst_row + b * many * few + i * dst_few) * size
                for _ in range(many):
                    _store(kind, w, _load(kind, u))
                    u, w = u + src_many * size, w + dst_many * size


@numba.njit(error_model="numpy")
def _step(kind, matrix, before, after, source, target, rows, columns, is_last, turned):
    """A matrix on its mode of rows ``[before, P, after, columns]``.

    matrix: address, strides of P and Q, and P and Q.
    source, target: address, strides of rows and of the elements of a row.
    is_last: whether no elements follow those of the mode, in x as a whole, not only in a unit of one column.
    turned: scratch memory of operand and result, for products by the matrix's rows where few elements follow; or zeros.
    """
    size, (f, fp, fq, P, Q), (src, src_row, src_k), (dst, dst_row, dst_k) = _size(kind), matrix, source, target
    if is_last:
        if src_row == before * P and dst_row == before * Q:
            rows, before = 1, rows * before
        for row in range(rows):
            _product(kind, src + row * src_row * size, P, 1, f, fp, dst + row * dst_row * size, Q, before, P, Q, False)
    elif turned[0]:
        (u, w), few = turned, after * columns
        _turn(kind, P, few, (src, src_row, few, 1), (u, before * P * few, 1, P), rows, before)
        _product(kind, u, P, 1, f, fp, w, Q, rows * before * few, P, Q, False)
        _turn(kind, Q, few, (w, before * Q * few, 1, Q), (dst, dst_row, few, 1), rows, before)
    else:
        pieces, width = (1, after * columns) if src_k == columns and dst_k == columns else (after, columns)
        for row in range(rows):
            for b in range(before):
                u, w = src + (row * src_row + b * P * after * src_k) * size, dst + (row * dst_row + b * Q * after * dst_k) * size
                for a in range(pieces):
                    _product(kind, f, fq, fp, u + a * src_k * size, after * src_k, w + a * dst_k * size, after * dst_k, Q, P, width, False)


@numba.njit(error_model="numpy")
def _gradient(kind, read, written, before, after, y, rows, is_last, turned, adds):
    """Of a step's factor, ``y [P, Q]``, from what the step read and the gradient of what it wrote; written to y, or added to it.

    read, written: address, stride of rows, and P or Q of ``[rows, before, P or Q, after]``, where after counts the columns, too; the other
    way round, y is ``[Q, P]``.
    turned: as of the step.
    """
    size, (src, src_row, P), (g, g_row, Q) = _size(kind), read, written
    if turned[0]:
        u, w = turned
        _turn(kind, P, after, (src, src_row, after, 1), (u, before * P * after, 1, P), rows, before)
        _turn(kind, Q, after, (g, g_row, after, 1), (w, before * Q * after, 1, Q), rows, before)
        _product(kind, u, 1, P, w, Q, y, Q, P, rows * before * after, Q, adds)
    elif not is_last:
        for i in range(0, P, DOTS[0]):
            for j in range(0, Q, DOTS[1]):
                u, w, z = src + i * after * size, g + j * after * size, y + (i * Q + j) * size
                _dots(kind, u, src_row, P * after, after, w, g_row, Q * after, after, z, Q, P - i, Q - j, rows, before, after, adds)
    else:
        if src_row == before * P and g_row == before * Q:
            rows, before = 1, rows * before
        for row in range(rows):
            _product(kind, src + row * src_row * size, 1, P, g + row * g_row * size, Q, y, Q, P, before, Q, adds or row > 0)


# ---- what is called from C: integers as `layout` describes them -------------------------------------


def stage(p, kind):
    """One thread's part of a stage: it claims units, and takes each through all steps in buffers."""
    size = _size(kind)
    x, x_group, x_row, x_k, x_kind = p[2], p[3], p[4], p[5], p[6]
    y, y_group, y_row, y_k, y_kind = p[7], p[8], p[9], p[10], p[11]
    L, R, length, width, rows_most, columns_most = p[12], p[13], p[14], p[15], p[16], p[17]
    groups, units, parts, chunks, steps, reads = p[18], p[19], p[20], p[21], p[22], p[23]
    buffer, slots, g_kind = p[25], p[26], p[31]
    x_size, y_size, g_size = 2 if x_kind else size, 2 if y_kind else size, 2 if g_kind else size
    is_gradient = p[27] != 0
    is_whole = is_gradient or p[HEAD + 13] != 0  # gradients and turned products read columns without gaps
    first = p[24] + _claim(p, 1) * (slots + 2) * buffer
    operand, product = first + slots * buffer, first + (slots + 1) * buffer
    part = _claim(p, 0)
    while part < groups * parts:
        group, sums = part // parts, p[32] + part * p[33] * size
        begin, end = part % parts * units // parts, (part % parts + 1) * units // parts
        for unit in range(begin, end):
            row, column = unit // chunks * rows_most, unit % chunks * columns_most
            rows, columns = min(rows_most, L - row), min(columns_most, R - column)
            given = x + (group * x_group + row * x_row + column) * x_size, x_row, x_k
            result = y + (group * y_group + row * y_row + column) * y_size, y_row, y_k
            if x_kind or (is_whole and x_k != columns):
                _convert(kind, given[0], x_row, x_k, first, rows, length, columns, x_kind, True)
                given = first, length * columns, columns
            source = given
            for i in range(reads):
                o = HEAD + STEP * i
                P, Q, before, after = p[o + 4], p[o + 5], p[o + 6], p[o + 7]
                matrix = p[o] + group * p[o + 1] * size, p[o + 2], p[o + 3], P, Q
                target = first + (i + 1) % slots * buffer, before * Q * after * columns, columns
                target = result if i == steps - 1 and not y_kind else target
                turned = operand * p[o + 13], product * p[o + 13]
                _step(kind, matrix, before, after, source, target, rows, columns, after * R == 1, turned)
                source = target
            length_out = width
            if is_gradient:
                source = p[27] + (group * p[28] + row * p[29] + column) * g_size, p[29], p[30]
                length_out = length
                if g_kind or p[30] != columns:
                    copy = first + steps * buffer
                    _convert(kind, source[0], p[29], p[30], copy, rows, width, columns, g_kind, True)
                    source = copy, width * columns, columns
                for i in range(steps - 1, -1, -1):
                    o = HEAD + STEP * i
                    P, Q, before, after = p[o + 4], p[o + 5], p[o + 6], p[o + 7]
                    turned = operand * p[o + 13], product * p[o + 13]
                    if p[o + 12] >= 0:
                        v = (given[0], given[1], P) if i == 0 else (first + i * buffer, before * P * after * columns, P)
                        w, z, adds = (source[0], source[1], Q), sums + p[o + 12] * size, unit > begin
                        v, w = (w, v) if p[o + 14] else (v, w)
                        _gradient(kind, v, w, before, after * columns, z, rows, after * R == 1, turned, adds)
                    if p[o + 8] == 0:
                        break
                    matrix = p[o + 8] + group * p[o + 9] * size, p[o + 10], p[o + 11], Q, P
                    target = first + (steps + (steps - i) % 2) * buffer, before * P * after * columns, columns
                    target = result if i == 0 and not y_kind else target
                    _step(kind, matrix, before, after, source, target, rows, columns, after * R == 1, turned)
                    source = target
            if y_kind:
                _convert(kind, result[0], y_row, y_k, source[0], rows, length_out, columns, y_kind, False)
        part = _claim(p, 0)


def form(p, kind):
    """Writes matrices: a Kronecker product of two factors times a scalar, a factor times the scalar, or one of a half type, widened."""
    size = _size(kind)
    for m in range(p[0]):
        o = 1 + m * FORM
        dst, groups, scale, b_kind = p[o], p[o + 1], _scale(kind, p, o + 2), p[o + 3]
        a, ag, ap, aq, aP, aQ = p[o + 4], p[o + 5], p[o + 6], p[o + 7], p[o + 8], p[o + 9]
        b, bg, bp, bq, bP, bQ = p[o + 10], p[o + 11], p[o + 12], p[o + 13], p[o + 14], p[o + 15]
        for g in range(groups):
            if b_kind:
                _convert(kind, b + g * bg * 2, bp, bq, dst, bP, bQ, 1, b_kind, True)
                dst += bP * bQ * size
                continue
            for i in range(aP):
                for k in range(bP):
                    for j in range(aQ):
                        e = scale * _load(kind, a + (g * ag + i * ap + j * aq) * size) if a else scale
                        for n in range(bQ):
                            _store(kind, dst + n * size, e * _load(kind, b + (g * bg + k * bp + n * bq) * size))
                        dst += bQ * size


def split(p, kind):
    """Adds up the parts of the gradients of matrices, and writes those of the matrices' factors."""
    size, scale, o = _size(kind), p[2], 3
    _store(kind, scale, _scale(kind, p, 1))
    for _ in range(p[0]):
        total, source, groups, parts, stride, count = p[o], p[o + 1], p[o + 2], p[o + 3], p[o + 4], p[o + 5]
        for g in range(groups):
            _product(kind, scale, 0, 0, source + g * parts * stride * size, stride, total + g * count * size, 0, 1, parts, count, False)
        tp, tq, factors = p[o + 6], p[o + 7], p[o + 8]
        o += SUM
        for _ in range(factors):
            a, ag, ap, aq, A, B = p[o], p[o + 1], p[o + 2], p[o + 3], p[o + 4], p[o + 5]
            f, fg, fp, fq, P, Q = p[o + 6], p[o + 7], p[o + 8], p[o + 9], p[o + 10], p[o + 11]
            df, dp, dq, rest = p[o + 12], p[o + 13], p[o + 14], p[o + 15]
            for g in range(groups):
                t = total + g * A * P * B * Q * size
                if df:
                    for k in range(P):
                        for n in range(Q):
                            value = _load(kind, scale) * 0
                            for i in range(A):
                                for j in range(B):
                                    e = _load(kind, t + ((i * P + k) * tp + (j * Q + n) * tq) * size)
                                    value += e * _load(kind, a + (g * ag + i * ap + j * aq) * size) if a else e
                            _store(kind, df + (g * P * Q + k * dp + n * dq) * size, value)
                if rest:
                    for i in range(A):
                        for j in range(B):
                            value = _load(kind, scale) * 0
                            for k in range(P):
                                for n in range(Q):
                                    e = _load(kind, t + ((i * P + k) * tp + (j * Q + n) * tq) * size)
                                    value += e * _load(kind, f + (g * fg + k * fp + n * fq) * size)
                            _store(kind, rest + (g * A * B + i * B + j) * size, value)
            total, tp, tq = rest, B, 1
            o += SPLIT


@intrinsic
def _scale(typing: Any, kind: Any, pointer: Any, index: Any) -> Any:
    """An integer's bits as a float64, in the type of the computation."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(builder.gep(args[1], [args[2]]), ir.DoubleType().as_pointer())
        return _cast(builder.load(address), builder, _scalar(kind))

    return kind.dtype(kind, pointer, types.int64), codegen


def compiled(function: Any, itemsize: int) -> Any:
    """`stage`, `form` or `split` in float32 or float64, from numba's cache on disk if it is there; ``address`` is that of a C function."""
    signature = types.void(types.CPointer(types.int64), SINGLE if itemsize == 4 else DOUBLE)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is nowhere to write
        return numba.cfunc(signature, error_model="numpy")(function)

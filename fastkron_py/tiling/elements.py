"""Device functions for tiles of real or complex elements.

A tile ``[M, N]`` of complex elements is held as real numbers ``[M, 2 * N]``: each element's real part and, right after it, its imaginary
part. The product with a complex matrix ``[N, Q]`` is then a real product, with a matrix ``[2 * N, 2 * Q]``
(`tiling.addresses.load_factor`). PARTS is the real numbers of an element: 1 or 2.

Addresses count words. A complex number of two float32 is one word of 64 bits: a load of neighbours is as wide as it is for real numbers.
One of two float64 is two words.
"""

import triton
import triton.language as tl


@triton.jit
def words(ptr, PARTS: tl.constexpr):
    """The pointer to words of a pointer to real numbers."""
    if PARTS == 2 and ptr.dtype.element_ty == tl.float32:
        return ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    else:
        return ptr


@triton.jit
def _transposed(tile, TRANSPOSED: tl.constexpr):
    return tl.trans(tile) if TRANSPOSED else tile


@triton.jit
def load_parts(pointers, mask, TRANSPOSED: tl.constexpr = False):
    """(real, imaginary) parts of complex elements, 0 outside of the mask.

    TRANSPOSED: neighbours of the first dimension, not of the last one, are neighbours in memory. The compiler does not see that of elements
    of two words, and gives neighbouring threads neighbours of the last dimension.
    """
    if pointers.dtype.element_ty == tl.int64:
        pair = tl.load(pointers, mask=mask, other=0)
        real = pair.to(tl.int32).to(tl.float32, bitcast=True)
        return real, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        pointers, mask = _transposed(pointers, TRANSPOSED), _transposed(mask, TRANSPOSED)
        real, imaginary = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + 1, mask=mask, other=0.0)
        return _transposed(real, TRANSPOSED), _transposed(imaginary, TRANSPOSED)


@triton.jit
def joined(real, imaginary):
    """``[M, 2 * N]`` of parts ``[M, N]``; ``[L, M, 2 * N]`` of ``[L, M, N]``."""
    pairs = tl.join(real, imaginary)
    if len(real.shape) == 3:
        return tl.reshape(pairs, (real.shape[0], real.shape[1], 2 * real.shape[2]))
    else:
        return tl.reshape(pairs, (real.shape[0], 2 * real.shape[1]))


@triton.jit
def separated(tile):
    """The (real, imaginary) parts of a tile."""
    if len(tile.shape) == 3:
        return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2] // 2, 2)))
    else:
        return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))


@triton.jit
def load_elements(pointers, mask, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Tile ``[M, PARTS * N]`` of the elements at pointers ``[M, N]``, 0 outside of the mask; TRANSPOSED as in `load_parts`."""
    if PARTS == 1:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        real, imaginary = load_parts(pointers, mask, TRANSPOSED)
        return joined(real, imaginary)


@triton.jit
def store_elements(pointers, tile, mask, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Store a tile ``[M, PARTS * N]`` to pointers ``[M, N]``, rounded to the type that is there; TRANSPOSED as in `load_parts`."""
    if PARTS == 1:
        tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=mask)
    else:
        real, imaginary = separated(tile)
        if pointers.dtype.element_ty == tl.int64:
            low = real.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            high = imaginary.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32
            tl.store(pointers, low | high, mask=mask)
        else:
            pointers, mask = _transposed(pointers, TRANSPOSED), _transposed(mask, TRANSPOSED)
            tl.store(pointers, _transposed(real, TRANSPOSED).to(pointers.dtype.element_ty), mask=mask)
            tl.store(pointers + 1, _transposed(imaginary, TRANSPOSED).to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def extracted(products, PARTS: tl.constexpr):
    """The complex ``u^H g`` as ``[P, 2 * Q]``, of the products ``[2 * P, 2 * Q]`` of all parts of u and g; real ones as they are."""
    if PARTS == 1:
        return products
    else:
        P: tl.constexpr = products.shape[0] // 2
        Q: tl.constexpr = products.shape[1] // 2
        first, second = tl.split(tl.permute(tl.reshape(products, (P, 2, Q, 2)), (0, 2, 3, 1)))  # by the part of u: [P, Q, part of g]
        real_real, real_imaginary = tl.split(first)
        imaginary_real, imaginary_imaginary = tl.split(second)
        return joined(real_real + imaginary_imaginary, real_imaginary - imaginary_real)


@triton.jit
def swapped(tile, M: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr):
    """``[M, FIRST, LAST]`` elements as ``[M, LAST, FIRST]``."""
    if PARTS == 1:
        return tl.permute(tl.reshape(tile, (M, FIRST, LAST)), (0, 2, 1))
    else:
        t = tl.permute(tl.reshape(tile, (M, FIRST, LAST, PARTS)), (0, 2, 1, 3))
        return tl.reshape(t, (M, LAST, FIRST * PARTS))

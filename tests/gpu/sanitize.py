"""Run the kernels of each public function once, forward and backward, on small odd shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py [WORD ...]

or with racecheck, which takes minutes. Without the caching allocator each tensor is an allocation of its own, so that an access past its
end is seen. With words it makes only calls that have one of them in their name, and with ``--forward`` none backward: gradients take
products of cuBLAS, in whose kernels racecheck reports hundreds of hazards. In kernels with warp specialisation (Gluon) it reports the
mailbox by which warps are told their part; a barrier of all warps is between its write and its read.

Each result is compared with that of the same call in float64 on the CPU, where torch computes and no kernel takes part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import fastkron_py as fk

HALF, SINGLE, COMPLEX = torch.bfloat16, torch.float32, torch.complex64
# Of the result's largest element: these are not tests of accuracy.
TOLERANCES = {HALF: 0.03, torch.float16: 0.01, SINGLE: 1e-4, COMPLEX: 1e-4, torch.float64: 1e-10}


class Verb(NamedTuple):
    """A call on tensors of these shapes.

    Attributes:
        name: as it is shown.
        call: from the tensors to the result.
        shapes: of the tensors.
        dtypes: that it is made in.
        gradients: whether it has any.
    """

    name: str
    call: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[torch.dtype] = (HALF, SINGLE)
    gradients: bool = True


def _product(x: Tensor, *factors: Tensor) -> Tensor:
    return fk.kron_matmul(x, factors)


def _transposed(x: Tensor, *factors: Tensor) -> Tensor:
    return fk.kron_matmul(x.mT.contiguous().mT, [f.mT.contiguous().mT for f in factors])


def _left(x: Tensor, *factors: Tensor) -> Tensor:
    return fk.kron_matmul_left(factors, x)


def _shifted(x: Tensor, z: Tensor, *factors: Tensor) -> Tensor:
    return fk.kron_matmul(x, factors, alpha=0.5, beta=2.0, z=z)


def _quantized(x: Tensor, a: Tensor, b: Tensor, dtype: Any) -> Tensor:
    return fk.kron_quantize(x, [a, b], dtype).dequantize()


def _rotated(x: Tensor, *weight: Tensor, order: int, dtype: Any, **options: Any) -> Tensor:
    if weight:
        options["prologue"] = "rms_norm", weight[0], 1e-5
    width = x.shape[1] // (2 if options.get("prologue") == ("swiglu",) else 1)
    return fk.kron_quantize(x, [width // order, fk.Hadamard(order, order**-0.5)], dtype, **options).dequantize()


def _modes(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return fk.mode_matmul(x, {1: a, 3: b})


def _adapter(x: Tensor, base: Tensor, w1: Tensor, *w2: Tensor) -> Tensor:
    return fk.lokr_linear(x, w1, w2 if len(w2) == 2 else w2[0], base=base, scale=0.5)


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    return fk.gated_linear(x, weight)


def _gated_saving_nothing(x: Tensor, weight: Tensor) -> Tensor:
    return fk.gated_linear(x, weight, backward="recompute")


def _rational(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return fk.rational(x, a, b / 8)


def _normalized(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return fk.functional.layer_norm_rational(x, weight, bias, a, b / 8)


def _kan(x: Tensor, coefficients: Tensor) -> Tensor:
    return fk.poly_kan(x, coefficients)


# One of each path: a chain of equal steps, neighbours multiplied out, tiles of 4, 8 and 16 warps, a single wide factor with a loop over P
# and Q, unequal and rectangular ones, widths of 1, remainders everywhere; more tiles and rows than programs.
ODD = [
    *((rows, ((p, p),) * n) for rows, p, n in ((3, 8, 3), (5, 2, 7), (3, 13, 2), (17, 32, 2), (1, 32, 3), (2, 4, 7), (3, 67, 1))),
    *((rows, ((p, p),) * n) for rows, p, n in ((2, 130, 1), (1, 255, 1), (1, 16, 5), (140, 128, 2), (300, 32, 3), (140, 16, 4))),
    (17, ((2, 2), (64, 64))),
    (3, ((64, 64), (3, 2))),
    (7, ((2, 3), (5, 2), (6, 4))),
    (5, ((1, 3), (11, 1), (1, 2), (4, 5))),
]


def shapes(rows: int, sizes: Sequence[tuple[int, int]], form: str) -> list[tuple[int, ...]]:
    """Of x, z and the factors, as a form takes them."""
    inner, outer = (math.prod(side) for side in zip(*sizes, strict=True))
    if form == "left":
        return [(inner, rows), *[(q, p) for p, q in sizes]]
    return [(rows, inner), *([(rows, outer)] if form == "with z" else []), *sizes]


VERBS = [
    *(
        Verb(f"hadamard {n}", fk.hadamard, [(37, n)], (HALF, torch.float16, SINGLE, torch.float64))
        for n in (64, 96, 1024, 5120, 11008, 14336, 16384, 32768)
    ),
    *(
        Verb(f"quantize {p},{q} {dtype}", partial(_quantized, dtype=dtype), [(300, p * q), (p, p), (q, q)], (HALF,), False)
        for p, q in ((64, 64), (86, 128), (172, 64), (30, 17))
        for dtype in (torch.int8, torch.float8_e4m3fn, "int4")
    ),
    *(
        Verb(
            f"quantize rotation {order} of {shapes[0][1]}, {dtype} {options}",
            partial(_rotated, order=order, dtype=dtype, **options),
            shapes,
        )._replace(dtypes=(HALF, torch.float16), gradients=False)
        for order, shapes, dtype, options in (
            (256, [(37, 3840)], torch.int8, {}),
            (256, [(5, 10240)], "int4", {}),
            (1024, [(37, 3072)], torch.float8_e4m3fn, {}),
            (128, [(37, 128)], torch.float8_e4m3fn, {}),
            (64, [(37, 192)], torch.int8, {"group_size": 32, "scale_format": "e8m0"}),
            (512, [(37, 1536)], torch.float4_e2m1fn_x2, {"group_size": 32, "scale_format": "e8m0"}),
            (128, [(37, 384)], torch.float4_e2m1fn_x2, {}),
            (256, [(37, 2 * 768)], torch.int8, {"prologue": ("swiglu",)}),
            (256, [(37, 768), (768,)], torch.int8, {}),
            (12, [(37, 96)], torch.int8, {"group_size": 32}),
        )
    ),
    *(
        Verb(f"kron {'x'.join(map(str, sizes))}", _product, [(rows, p), *[(s, s) for s in sizes]], (HALF, torch.float16, SINGLE))
        for rows, p, sizes in (
            (300, 4096, (64, 64)),
            (70, 32768, (32, 32, 32)),
            (70, 65536, (16, 16, 16, 16)),
            (70, 32768, (8, 8, 8, 8, 8)),
            (300, 86 * 128, (86, 128)),
            (300, 40 * 37, (40, 37)),
            (70, 64 * 4 * 64, (64, 4, 64)),
            (300, 172 * 64, (172, 64)),
            (130, 128 * 128, (128, 128)),
            (130, 256 * 256, (256, 256)),
            (300, 8 * 512, (8, 512)),
            (33, 301 * 40, (301, 40)),
        )
    ),
    *(
        Verb(f"small factors {'x'.join(map(str, sizes))}", _product, [(rows, p), *[(s, s) for s in sizes]], (SINGLE, torch.float64))
        for rows, p, sizes in ((301, 4096, (4,) * 6), (301, 512, (2,) * 9), (300, 4096, (8,) * 4), (301, 1024, (8, 4, 8, 4)))
    ),
    *(
        Verb(f"odd {form} {rows} {sizes}", call, shapes(rows, sizes, form), (torch.float16, HALF, SINGLE, torch.float64))
        for rows, sizes in ODD
        for form, call in (("right", _product), ("left", _left), ("with z", _shifted))
    ),
    Verb("batches", _product, [(2, 5, 15), (2, 5, 3), (2, 3, 5)]),
    Verb("batches of wide factors", _product, [(2, 1, 3, 210), (3, 70, 3), (3, 3, 70)]),
    Verb("transposed in memory", _transposed, [(17, 32 * 30), (32, 13), (30, 7)], (torch.float16, HALF, SINGLE, torch.float64)),
    Verb("left 256", _left, [(256 * 130, 24), (256, 256), (130, 130)]),
    Verb("kron with z", _shifted, [(65, 300 * 20), (65, 300 * 20), (300, 300), (20, 20)]),
    Verb("kron pair with z", _shifted, [(300, 86 * 128), (300, 86 * 128), (86, 86), (128, 128)], (HALF, torch.float16)),
    Verb("complex gates", _product, [(3, 2**10), *[(2, 2)] * 10], (COMPLEX,)),
    Verb("complex modes", _modes, [(3, 20, 5, 70), (20, 30), (70, 11)], (COMPLEX, SINGLE, HALF)),
    Verb("lokr whole", _adapter, [(130, 8 * 96), (130, 8 * 288), (8, 8), (288, 96)]),
    Verb("lokr pair", _adapter, [(130, 8 * 96), (130, 8 * 288), (8, 8), (288, 32), (32, 96)]),
    Verb("gated", _gated, [(200, 136), (2 * 264, 136)]),
    Verb("gated, recomputed", _gated_saving_nothing, [(200, 136), (2 * 264, 136)]),
    Verb("rational", _rational, [(70, 264), (8, 6), (8, 4)]),
    Verb("layer norm and rational", _normalized, [(70, 264), (264,), (264,), (8, 6), (8, 4)]),
    Verb("kan", _kan, [(200, 136), (5, 200, 136)]),
    Verb("kan of odd widths", _kan, [(129, 37), (4, 131, 37)], (SINGLE,)),
]


def drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Of variance about 1 over the size of a matrix, so that results are of about 1."""
    found = []
    for number, shape in enumerate(shapes):
        t = torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        found.append((t / shape[-1] ** 0.5 if number else t).to(dtype))
    return found


def gradients(call: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """Of all tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        return list(torch.autograd.grad(call(*leaves), leaves, dy))


def compare(verb: Verb, dtype: torch.dtype, backward: bool) -> None:
    """The verb on the GPU beside the verb in float64 on the CPU."""
    tensors = drawn(verb.shapes, dtype)
    wide = [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in tensors]
    on_gpu = [t.cuda() for t in tensors]
    got, want = [verb.call(*on_gpu)], [verb.call(*wide)]
    if verb.gradients and backward:
        dy = torch.randn_like(want[0]).to(dtype)
        got += gradients(verb.call, on_gpu, dy.cuda())
        want += gradients(verb.call, wide, dy.to(want[0].dtype))
    # A value in 4 bits is known to a seventh of its row's largest, and a half type's rounding moves it by one step.
    tolerance = 0.35 if "float4" in verb.name else 0.2 if "int4" in verb.name else 0.1 if "quantize" in verb.name else TOLERANCES[dtype]
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        error = float((a.cpu().to(b.dtype) - b).abs().max() / b.abs().max())
        if not error <= tolerance:
            raise AssertionError(f"{verb.name} {dtype}: result {number} is wrong by {error:.2g}")


def main(arguments: Sequence[str]) -> None:
    """All calls that are asked for."""
    torch.manual_seed(0)
    words = [word for word in arguments if word != "--forward"]
    for verb in VERBS:
        if words and not any(word in verb.name for word in words):
            continue
        for dtype in verb.dtypes:
            compare(verb, dtype, "--forward" not in arguments)
            print(verb.name, str(dtype).removeprefix("torch."), flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])

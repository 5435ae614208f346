"""Programs of 3,000 problems on GPUs that are not there, as text: what a change of the planner must leave alone, or explain.

    python -m benchmarks.kron.golden --out old.json                  # of one revision
    python -m benchmarks.kron.golden --compare old.json              # of this one: how many differ, and the first few
    TRITON_INTERPRET=1 python -m benchmarks.kron.golden --write      # accept: the hashes that tests/kron/plan/test_golden.py compares

A problem's text holds each launch's kernels, grids, arguments, operands and scalars, each call of torch, and all buffers. It says nothing
of how the planner came to it, so that the planner can be rewritten.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.kron.programs import pretending
from fastkron_py.runtime import gpu as gpus

HASHES: Final = Path(__file__).parents[2] / "tests/kron/plan/golden.json"
EACH: Final = 273  # problems of a kind
GPUS: Final = (
    *[gpus.HOPPER] * 4,
    gpus.AMPERE,
    gpus.AMPERE_RTX,
    gpus.ADA,
    gpus.BLACKWELL,
    gpus.BLACKWELL_RTX,
    gpus.AMD,
)
REAL: Final = ("float32", "float32", "float64", "bfloat16", "float16")
COMPLEX: Final = ("complex64", "complex128")
MOST_ELEMENTS: Final = 1 << 26  # of a tensor; most problems have far fewer

Problem = dict[str, Any]


# ---- problems --------------------------------------------------------------------------------------


def _width(random_: random.Random) -> int:
    """A size of a factor: half of them powers of two, as users have them."""
    if random_.random() < 0.5:
        return 1 << random_.randint(1, 8)
    return int(math.exp(random_.uniform(math.log(1), math.log(600))))


def _sizes(random_: random.Random, most: int = 6) -> tuple[list[int], list[int]]:
    """Rows and columns of the factors."""
    count = random_.randint(1, most)
    kind = random_.random()
    if kind < 0.35:  # equal and square
        ps = [_width(random_)] * count
        return ps, list(ps)
    ps = [_width(random_) for _ in range(count)]
    return ps, list(ps) if kind < 0.65 else [_width(random_) for _ in range(count)]


def _problem(random_: random.Random, dtypes: Sequence[str], most: int = 6) -> Problem:
    """Sizes of one product, drawn until they fit."""
    dtype, left, gpu = random_.choice(dtypes), random_.random() < 0.4, random_.randrange(len(GPUS))
    precision = "high" if dtype in ("float32", "complex64") and random_.random() < 0.15 else "highest"
    alpha = random_.choice((1.0, 1.0, 0.5))
    while True:
        ps, qs = _sizes(random_, most)
        rows = int(math.exp(random_.uniform(0, math.log(20000))))
        widest = max(math.prod(qs[i:]) * math.prod(ps[:i]) for i in range(len(ps) + 1))
        if rows * max(widest, math.prod(ps)) <= MOST_ELEMENTS:
            break
    return {"rows": rows, "ps": ps, "qs": qs, "dtype": dtype, "left": left, "precision": precision, "alpha": alpha, "gpu": gpu}


def _empty(shape: Sequence[int], dtype: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype))


def _operands(p: Problem, batch: Sequence[int] = (), factor_batch: Sequence[int] = ()) -> tuple[Tensor, list[Tensor], tuple[int, ...]]:
    """(x, factors, the result's shape)."""
    inner, outer = math.prod(p["ps"]), math.prod(p["qs"])
    shape, result = ((inner, p["rows"]), (outer, p["rows"])) if p["left"] else ((p["rows"], inner), (p["rows"], outer))
    factors = [_empty((*factor_batch, *((q, r) if p["left"] else (r, q))), p["dtype"]) for r, q in zip(p["ps"], p["qs"], strict=True)]
    return _empty((*batch, *shape), p["dtype"]), factors, (*batch, *result)


def _forward(p: Problem, random_: random.Random) -> Iterator[Any]:
    from fastkron_py.kron import operator

    x, factors, _ = _operands(p)
    yield operator.forward([x, *factors, None], (p["alpha"], 0.0, p["precision"], "triton", p["left"]))


def _transposed(p: Problem, random_: random.Random) -> Iterator[Any]:
    """x and factors that are transposed in memory, as a backward pass and users have them."""
    from fastkron_py.kron import operator

    x, factors, _ = _operands(p)
    x, factors = x.mT.contiguous().mT, [f.mT.contiguous().mT for f in factors]
    yield operator.forward([x, *factors, None], (p["alpha"], 0.0, p["precision"], "triton", p["left"]))


def _backward(p: Problem, random_: random.Random) -> Iterator[Any]:
    from fastkron_py.kron import operator

    x, factors, result = _operands(p)
    made = operator.forward([x, *factors, None], (p["alpha"], 0.0, p["precision"], "triton", p["left"]), saves=True)
    between = None
    if made.saved:
        yield made
    needs = [random_.random() < 0.8 for _ in factors]
    options = (random_.random() < 0.8, needs, p["alpha"], p["precision"], "triton", p["left"])
    yield operator.gradients([_empty(result, p["dtype"]), x, *factors, between], options)


def _added(p: Problem, random_: random.Random) -> Iterator[Any]:
    from fastkron_py.kron import operator

    x, factors, result = _operands(p)
    z = _empty(result, p["dtype"])
    z = z[:1].expand(result) if random_.random() < 0.3 else z
    yield operator.forward([x, *factors, z], (p["alpha"], 0.5, p["precision"], "triton", p["left"]))


def _scaled(p: Problem, random_: random.Random) -> Iterator[Any]:
    from fastkron_py.kron import operator

    x, factors, result = _operands(p)
    z = _empty((result[0], 1), p["dtype"])
    yield operator.scaled([x, *factors, z], (random_.random() < 0.5, p["precision"], "triton", p["left"]))


def _complex(p: Problem, random_: random.Random) -> Iterator[Any]:
    yield from _forward(p, random_)
    yield from _backward(p, random_)


def _batched(p: Problem, random_: random.Random) -> Iterator[Any]:
    from fastkron_py.kron import operator

    batch = random_.choice(((3,), (2, 2), (1,)))
    x, factors, _ = _operands({**p, "rows": max(1, p["rows"] // 4)}, batch, batch if random_.random() < 0.6 else ())
    yield operator.forward([x, *factors, None], (p["alpha"], 0.0, p["precision"], "triton", p["left"]))


def _in_the_middle(p: Problem, random_: random.Random) -> Iterator[Any]:
    """Dimensions before and after the factors': identities, and `mode_matmul`."""
    from fastkron_py.kron import operator

    before = random_.randint(2, 40)
    x, factors, _ = _operands({**p, "left": True, "rows": max(2, p["rows"] // before)}, (before,))
    yield operator.forward([x, *factors, None], (p["alpha"], 0.0, p["precision"], "triton", True))


def _quantized(p: Problem, random_: random.Random) -> Iterator[Any]:
    from fastkron_py.kron import quantize

    qs = [*p["qs"][:-1], p["qs"][-1] + p["qs"][-1] % 2]
    p = {**p, "left": False, "qs": qs}
    x, factors, _ = _operands(p)
    kind = random_.choice(("int8", "float8_e4m3fn", "int4"))
    yield quantize.program([x, *factors], (1.0 / 127, 1.0, 1, 1, 0, kind, "float32", "", 0.0, p["precision"], "triton"))


def _hadamard(p: Problem, random_: random.Random) -> Iterator[Any]:
    from fastkron_py.kron import hadamard

    bits = random_.randint(1, 15)
    rows = min(p["rows"], MOST_ELEMENTS >> bits)
    x = _empty((rows, 1 << bits), p["dtype"])
    yield hadamard.program([x, None], (0.5, 1, bits, "triton"))


def _in_blocks(p: Problem, random_: random.Random) -> Iterator[Any]:
    """Blocks of columns, as ranks have them."""
    from fastkron_py.kron import into

    parts = random_.choice((2, 4))
    p = {**p, "left": False, "ps": [4 * q for q in p["ps"][:3]], "qs": [4 * q for q in p["qs"][:3]], "rows": max(1, p["rows"] >> 6)}
    dtype = getattr(torch, p["dtype"])
    # Not by its cache, whose device is that of other GPUs too.
    able = into.planned_in_blocks.__wrapped__(tuple(p["ps"]), tuple(p["qs"]), parts, dtype, torch.device("cpu"))
    columns = math.prod(p["ps"]), math.prod(p["qs"])
    if max(columns) * p["rows"] > MOST_ELEMENTS:
        return
    counts = [parts if is_able else 1 for is_able in able]
    x, y = ([_empty((p["rows"], n // c), p["dtype"]) for _ in range(c)] for n, c in zip(columns, counts, strict=True))
    factors = [_empty(shape, p["dtype"]) for shape in zip(p["ps"], p["qs"], strict=True)]
    yield into._program((*x, *factors, *y), (counts[0], counts[1]), p["alpha"], p["precision"])


def _powers_of_two(p: Problem, random_: random.Random) -> Iterator[Any]:
    """Gradients of float32 factors of 8 to 128 rows and columns on a Hopper GPU, as register-resident fusion takes them."""
    count = random_.randint(1, 3)
    ps = [random_.choice((8, 16, 32))] * count if random_.random() < 0.6 else [1 << random_.randint(2, 7) for _ in range(count)]
    qs = list(ps) if random_.random() < 0.7 else [1 << random_.randint(3, 7) for _ in range(count)]
    rows = max(1, MOST_ELEMENTS // max(math.prod(ps), math.prod(qs)) >> random_.randint(3, 8))
    with pretending(gpus.HOPPER):
        yield from _backward({**p, "ps": ps, "qs": qs, "rows": rows, "left": random_.random() < 0.4}, random_)


KINDS: Final[dict[str, tuple[Sequence[str], Callable[[Problem, random.Random], Iterator[Any]]]]] = {
    "forward": (REAL, _forward),
    "transposed": (REAL, _transposed),
    "backward": (REAL, _backward),
    "added": (REAL, _added),
    "scaled": (REAL, _scaled),
    "complex": (COMPLEX, _complex),
    "batched": (REAL, _batched),
    "in the middle": (REAL, _in_the_middle),
    "quantized": (("float32", "bfloat16", "float16"), _quantized),
    "hadamard": (REAL, _hadamard),
    "in blocks": (REAL, _in_blocks),
    "powers of two": (("float32",), _powers_of_two),
}


# ---- texts -----------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A value of a launch as text that says what it is, and nothing of where it is in memory."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if callable(value):  # by its own name, so that code may move
        return getattr(value, "__name__", type(value).__name__)
    if hasattr(value, "__dataclass_fields__"):
        return [type(value).__name__, _plain(asdict(value))]
    return str(value)


def text_of(program: Any) -> list[Any]:
    """All that a program does."""
    steps = []
    for step in program._steps:
        launches = getattr(step.run, "configs", None)
        run = _plain(step.run) if launches is None else [_plain(config) for config in launches]
        around = (step.operands, step.scalars, step.results, step.makes, step.shifts, step.tuples, step.drops)
        descriptors = [(d.number, d.source, _plain(d.template), d.other) for d in step.descriptors]
        steps.append([run, _plain(around), _plain(descriptors)])
    return [steps, _plain(program._pool), _plain(program._results), _plain((program._aligned, program._orders))]


def built() -> Iterator[tuple[str, Problem, Iterator[Any]]]:
    """(kind, sizes, programs) of each problem; programs are built as they are asked for, until the next problem is."""
    for kind, (dtypes, build) in KINDS.items():
        random_ = random.Random(f"{kind} 1")
        for _ in range(EACH):
            p = _problem(random_, dtypes)
            with pretending(GPUS[p["gpu"]]):
                yield kind, p, build(p, random_)


def problems() -> Iterator[tuple[str, Problem, list[Any]]]:
    """(kind, sizes, text) of each problem."""
    for kind, p, programs in built():
        yield kind, p, [text_of(made) for made in programs]


def texts() -> dict[str, list[Any]]:
    """Each problem's text, by kind and sizes."""
    return {f"{i} {kind} {p}": text for i, (kind, p, text) in enumerate(problems())}


def hashes() -> dict[str, str]:
    """One hash for each kind."""
    found = {kind: hashlib.sha256() for kind in KINDS}
    for kind, p, text in problems():
        found[kind].update(json.dumps([p, text]).encode())
    return {kind: made.hexdigest()[:16] for kind, made in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the texts or the hashes, or print what differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kron.golden", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all texts there")
    parser.add_argument("--compare", type=Path, help="texts of another revision")
    parser.add_argument("--write", action="store_true", help="write the hashes that the test compares")
    options = parser.parse_args(arguments)
    if options.write:
        HASHES.write_text(json.dumps(hashes(), indent=1) + "\n")
    if options.out:
        options.out.write_text(json.dumps(texts()))
    if options.compare:
        old, new = json.loads(options.compare.read_text()), json.loads(json.dumps(texts()))
        differing = [label for label, text in old.items() if new.get(label) != text]
        print(f"{len(differing)} of {len(old)} programs differ")
        for label in differing[:20]:
            print(label, json.dumps(old[label])[:2000], json.dumps(new.get(label))[:2000], sep="\n    ")


if __name__ == "__main__":
    main()

"""Plants faults in a copy of the library, one after the other, and tells which of them the tests find.

    python tests/planted_faults.py                  all of them, those that `make test` runs of the tests that a fault names
    python tests/planted_faults.py --only stride    those whose text holds a word
    python tests/planted_faults.py --json out.json  also written as JSON
    python tests/planted_faults.py --workers 16     as many at a time, each in a copy of its own
    python tests/planted_faults.py --check          only whether each one's code is still there, once

A fault that no test finds shows what the tests do not hold. Run it before tests are deleted and afterwards: what was found is to be found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CONTRACTS = "tests/contracts"
TREES = ("fastkron_py", "distributed", "integrations", "tests", "benchmarks", "docs", "examples", "hub")


class Fault(NamedTuple):
    """Code that is replaced, once, in a file, and the tests that look after it, in the order in which they run."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]


KRON_CONTRACTS = "tests/contracts -k 'kron_ or mode_matmul or Kronecker'"
KRON = (
    KRON_CONTRACTS,
    "tests/kron/test_matmul.py",
    "tests/kron/test_gradients.py",
    "tests/kron/test_forward.py",
    "tests/kron/test_backward.py",
)
DERIVED = (KRON_CONTRACTS, "tests/kron/test_gradients.py", "tests/kron/test_transforms.py")
COMPLEX = (KRON_CONTRACTS, "tests/kron/test_complex.py", "tests/kron/test_matmul.py")
VERBS = ("tests/runtime/test_other_calls.py",)
CACHED = (
    "tests/runtime/test_cache.py",
    "tests/runtime/test_operator.py",
    "tests/runtime/test_program.py",
    *VERBS,
    CONTRACTS,
    "tests/kron/test_cached.py",
)
OUT = ("tests/adapters/test_out.py", "tests/kron/test_hadamard.py")
SLICED = "fastkron_py/kron/kernels/sliced_multiply.py"
DERIVATIVES = "fastkron_py/kron/operator.py"
CALLS = "fastkron_py/runtime/call_cache.py"
RANKS = ("tests/distributed/test_kron_matmul.py", "tests/distributed/test_operators.py")
PULL = ("tests/distributed/transport/test_pull.py",)
SLOTS = "distributed/transport/peer_memory.py"

FAULTS = [
    # Calls that are kept.
    Fault(CALLS, "and (enabled is None or enabled == _is_grad_enabled())", "and True", CACHED),
    Fault(CALLS, "tensors[0].shape, settings())\n            entries", "tensors[0].shape)\n            entries", CACHED),
    Fault(CALLS, "full = (key, settings())", "full = key", CACHED),
    Fault(CALLS, "(t.shape, t.stride(), t.dtype, t.data_ptr() & 15 == 0)", "(t.shape, t.dtype, t.data_ptr() & 15 == 0)", CACHED),
    Fault(CALLS, "if entries is None or _is_watching() or", "if entries is None or", CACHED),
    Fault(CALLS, "if check(*tensors) and (", "if True and (", CACHED),
    Fault(
        "fastkron_py/runtime/operator.py", "given[index] = (options[index] == 1.0) - (options[index] == 0.0)", "given[index] = 0", CACHED
    ),
    Fault("fastkron_py/runtime/operator.py", "*given, *[i for i, t in enumerate(tensors) if t is None]", "*given", CACHED),
    Fault(
        "fastkron_py/runtime/program.py", "if order_of(given[second].data_ptr()", "if False and order_of(given[second].data_ptr()", CACHED
    ),
    Fault("fastkron_py/runtime/program.py", "in step.drops if number", "in step.drops[:0] if number", CACHED),
    Fault("fastkron_py/rational/api.py", 'call_key("rational", x, version,', 'call_key("rational", x, "B",', VERBS),
    Fault("fastkron_py/gated/api.py", '"gated", activation, layout, backward,', '"gated", "silu", layout, backward,', VERBS),
    Fault("fastkron_py/kan/api.py", '"poly_kan", basis, normalization, evaluation,', '"poly_kan", basis, normalization, "",', VERBS),
    # Results in given memory.
    Fault(
        "fastkron_py/adapters/operator.py",
        "    increment_version(out)",
        "    pass",
        ("tests/adapters/test_out.py", "tests/contracts -k lokr", "tests/adapters/test_lokr_linear.py"),
    ),
    Fault("fastkron_py/kron/hadamard.py", "    increment_version(out)", "    pass", ("tests/kron/test_hadamard.py",)),
    Fault(
        "fastkron_py/runtime/checks.py",
        "!= memory for t in tensors",
        "!= 0 for t in tensors",
        OUT,
    ),
    Fault("fastkron_py/runtime/checks.py", "not out.is_contiguous() or", "", OUT),
    Fault(
        "fastkron_py/kron/into.py",
        "[t.resolve_conj().resolve_neg() for t in given]",
        "[t for t in given]",
        ("tests/kron/test_into.py",),
    ),
    Fault("fastkron_py/runtime/arrays.py", "not array.dtype.isnative or ", "", ("tests/kron/test_arrays.py", "tests/contracts -k order")),
    # The multiply.
    Fault(SLICED, "for first_p in range(0, P, BLOCK_P)", "for first_p in range(0, P - BLOCK_P + 1, BLOCK_P)", KRON),
    Fault(
        SLICED,
        "t = tl.where(tl.arange(0, P_PAD)[None, :] < P, t, 0.0)",
        "t = t",
        ("tests/kron/test_forward.py",),
    ),
    Fault(
        "fastkron_py/kron/kernels/epilogues.py",
        "(real * c + imaginary * d) / square",
        "(real * c - imaginary * d) / square",
        ("tests/kron/test_scaled.py", "tests/kron/operators/test_plus_diagonal.py"),
    ),
    Fault(SLICED, "mask = mask_s[:, None] & (q < Q)", "mask = mask_s[:, None] & (q < BLOCK_Q)", KRON),
    Fault("fastkron_py/kron/kernels/narrow.py", "acc += u * g", "acc = u * g", ("tests/kron/test_narrow.py",)),
    Fault(
        "fastkron_py/kron/kernels/gradients.py",
        "imaginary * f_real - real * f_imaginary",
        "imaginary * f_real + real * f_imaginary",
        COMPLEX,
    ),
    Fault("fastkron_py/kron/modes.py", "found[-1] *= f", "found[-1] = f", ("tests/kron/test_identity.py", KRON_CONTRACTS)),
    Fault(
        "fastkron_py/kron/modes.py",
        "parts[-1].append(f.mT if left else f)",
        "parts[-1].append(f)",
        ("tests/kron/test_identity.py", KRON_CONTRACTS),
    ),
    Fault(DERIVATIVES, "others, _replaced(needs, i, False), options", "others, needs, options", DERIVED),
    Fault(DERIVATIVES, "i, t), _replaced(needs, i, False), options", "i, t), needs, options", DERIVED),
    Fault(
        DERIVATIVES,
        "_plus(total, product(_replaced(operands, i, t), options))",
        "_plus(total, product(_replaced(operands, i, t), (1.0, *options[1:])))",
        DERIVED,
    ),
    Fault("fastkron_py/kron/modes.py", "[order.index(dim) for dim in range(x.ndim)]", "order", ("tests/kron/test_mode_matmul.py",)),
    Fault("fastkron_py/kron/canonical.py", "for i in others]\n", "for i in range(len(factors))]\n", ("tests/kron/test_units.py",)),
    Fault(
        "fastkron_py/kron/gradients.py",
        "need_between = need_x or any(need_factors[first])",
        "need_between = need_x",
        ("tests/kron/test_saved_intermediate.py",),
    ),
    Fault(
        "fastkron_py/kron/operators/algebra.py",
        "dense, terms(own, units)",
        "dense, terms(own, ())",
        ("tests/kron/operators/test_methods.py", "tests/kron/operators/test_kronecker_sum.py"),
    ),
    Fault(
        "fastkron_py/kron/operators/matrix_function.py",
        "scaled(g, values.conj())",
        "scaled(g, values)",
        ("tests/kron/operators/test_matrix_function.py",),
    ),
    Fault(
        "fastkron_py/kron/operators/masked.py",
        "columns is rows and p == q",
        "columns is not None and p == q",
        ("tests/kron/operators/test_masked.py",),
    ),
    # Rounded rows.
    Fault("fastkron_py/kron/kernels/rotate.py", "    both ^= both >> 1\n", "", ("tests/kron/test_quantize.py -k groups",)),
    Fault(
        "fastkron_py/kron/kernels/rotate.py",
        "for c in tl.static_range(CHUNKS):\n        w = sums[c]",
        "for c in tl.static_range(CHUNKS - 1):\n        w = sums[c]",
        ("tests/kron/test_quantize.py -k groups",),
    ),
    Fault(
        "fastkron_py/kron/kernels/rotate.py",
        "largest * tl.abs(scalar(unit, tl.float32))",
        "largest * scalar(unit, tl.float32)",
        ("tests/kron/test_quantize.py -k groups",),
    ),
    Fault(
        "fastkron_py/kron/kernels/quantize.py",
        "largest = tl.maximum(largest, largest_by_row(y))",
        "largest = largest_by_row(y)",
        ("tests/kron/test_quantize.py",),
    ),
    Fault(
        "fastkron_py/kron/kernels/quantize.py",
        "tl.where(largest == 0, 1.0, scale)",
        "tl.where(largest == 0, 2.0, scale)",
        ("tests/kron/test_quantize.py",),
    ),
    Fault(
        "fastkron_py/kron/kernels/rotate.py",
        "tl.where(bits < INFINITY, z, 0.0)",
        "z",
        ("tests/kron/test_quantize.py -k finite",),
    ),
    Fault(
        "fastkron_py/kron/kernels/quantize.py",
        "tl.where(most < 2, 0, tl.where(most < 4, 2, 4))",
        "tl.where(most < 2, 0, 2)",
        ("tests/kron/test_quantize.py -k formats",),
    ),
    Fault(
        "fastkron_py/kron/quantize.py",
        "with torch.no_grad(), without_autocast(x.device):",
        "with torch.no_grad():",
        ("tests/kron/test_quantize.py -k autocast",),
    ),
    # Rational functions.
    Fault(
        "fastkron_py/rational/denominators/built_in.py",
        "return q, dq * sign, slopes",
        "return q, dq, slopes",
        (
            "tests/contracts -k rational",
            "tests/rational/test_operators.py",
            "tests/rational/test_denominators.py",
            "tests/rational/test_layer_norm.py",
        ),
    ),
    Fault(
        "fastkron_py/rational/denominators/built_in.py",
        "return v, with_sign(v, x)",
        "return v, v",
        ("tests/rational/test_api.py", "tests/contracts -k rational", "tests/rational/test_denominators.py"),
    ),
    Fault(
        "fastkron_py/rational/program.py",
        "[*found, da, db]",
        "[*found, db, da]",
        (
            "tests/contracts -k rational",
            "tests/rational/test_operators.py",
            "tests/rational/test_denominators.py",
            "tests/rational/test_layer_norm.py",
        ),
    ),
    Fault(
        "fastkron_py/rational/torch_backend.py",
        "of_groups = [[c if c.shape[0] == 1 else c[g] for c in one] for one in columns]",
        "of_groups = [[c if c.shape[0] == 1 else c[: g.stop - g.start] for c in one] for one in columns]",
        ("tests/rational/test_torch_blocks.py",),
    ),
    # Gated layers.
    Fault(
        "fastkron_py/gated/torch_backend.py",
        "in row_slices(x, 2 * hidden, PRODUCT_ROWS):",
        "in row_slices(x, 2 * hidden, PRODUCT_ROWS)[:-1]:",
        ("tests/gated/test_torch_slices.py",),
    ),
    Fault("fastkron_py/nn/gated.py", '"bias": self.up_gate_bias,', '"bias": None,', ("tests/nn/test_gated.py",)),
    Fault(
        "fastkron_py/gated/activations/built_in.py",
        "return s + s * (x * (1 - s))\n\n\ndef _silu_host",
        "return s + s * (x * (1 + s))\n\n\ndef _silu_host",
        ("tests/contracts -k 'gated or Gated'", "tests/gated/test_activations.py", "tests/gated/test_api.py"),
    ),
    Fault(
        "fastkron_py/gated/activations/built_in.py",
        "s = torch.sigmoid(x)\n    return s + s",
        "s = torch.sigmoid(x)\n    return s - s",
        ("tests/contracts -k 'gated or Gated'", "tests/gated/test_activations.py", "tests/gated/test_api.py"),
    ),
    Fault(
        "fastkron_py/tiling/gemm.py",
        "bias + c * step, mask",
        "bias + c, mask",
        ("tests/contracts -k 'gated or Gated'", "tests/gated/test_api.py", "tests/tiling/test_gemm.py"),
    ),
    # Polynomial layers.
    Fault(
        "fastkron_py/kan/torch_backend.py",
        "in row_slices(x, columns, PRODUCT_ROWS):",
        "in row_slices(x, columns, PRODUCT_ROWS)[:-1]:",
        ("tests/kan/test_api.py",),
    ),
    Fault(
        "fastkron_py/kan/normalizers.py",
        "return tl.where((x > 1) | (x < -1), 0.0, x * 0 + 1)",
        "return tl.where((x > 1) & (x < -1), 0.0, x * 0 + 1)",
        ("tests/kan/test_bases.py",),
    ),
    Fault(
        "fastkron_py/kan/launches.py",
        "bias = None if bias is None else build.contiguous(bias)",
        "pass",
        ("tests/contracts -k 'kan or KAN'", "tests/kan/test_api.py"),
    ),
    Fault(
        "fastkron_py/kan/kernels/gradients.py",
        "basis_value(state, tl.minimum(d, BASIS[TERMS_AT] - 1), table_ptr, BASIS) * parts",
        "basis_value(state, d, table_ptr, BASIS) * parts",
        ("tests/contracts -k 'kan or KAN'", "tests/kan/test_bases.py", "tests/kan/test_api.py", "tests/kan/test_operators.py"),
    ),
    Fault(
        "fastkron_py/kan/kernels/gradients.py",
        "acc *= BASIS[7](",
        "acc += 0 * BASIS[7](",
        ("tests/contracts -k 'kan or KAN'", "tests/kan/test_bases.py", "tests/kan/test_api.py", "tests/kan/test_operators.py"),
    ),
    Fault(
        "fastkron_py/kan/bases/polynomials.py",
        "constant(t, 0.0), constant(t, -1.0)",
        "constant(t, 0.0), constant(t, 1.0)",
        ("tests/contracts -k 'kan or KAN'", "tests/kan/test_bases.py", "tests/kan/test_api.py", "tests/kan/test_operators.py"),
    ),
    Fault("fastkron_py/nn/running_range.py", "if is_second_run():", "if False:", ("tests/nn/test_poly_kan_range.py",)),
    Fault("fastkron_py/nn/running_range.py", "return after, after", "return running, after", ("tests/nn/test_poly_kan_range.py",)),
    # Adapters and layers.
    Fault("fastkron_py/adapters/adapter.py", "row_mask.square() * kron", "row_mask * kron", ("tests/adapters/test_norms.py",)),
    Fault(
        "fastkron_py/adapters/api.py",
        "beta = 0.0 if base is None else 1.0",
        "beta = 0.0 if base is None else 0.5",
        ("tests/adapters/test_out.py", "tests/contracts -k lokr", "tests/adapters/test_lokr_linear.py"),
    ),
    # Ranks.
    Fault("distributed/replicated.py", "flat /= dist.get_world_size(group)", "pass", RANKS),
    Fault(
        "distributed/replicated.py",
        "[torch.float32 if p.dtype in HALF_DTYPES else p.dtype for p in parts]",
        "[p.dtype for p in parts]",
        RANKS,
    ),
    Fault("distributed/pipeline.py", "torch._foreach_add_(found, gradients)", "found[:] = gradients", RANKS),
    Fault(
        "distributed/transport/packed.py",
        "return part, local.view(rows, s, g, q).permute(2, 0, 3, 1)",
        "return part, local.view(rows, g, s, q).permute(1, 0, 3, 2)",
        RANKS,
    ),
    Fault(SLOTS, "        self._flags.meet(stream, 2 * slot + 1)", "        pass", PULL),
    Fault(SLOTS, "            stream.wait_event(ready)", "            pass", PULL),
    Fault(SLOTS, "torch.cuda.current_stream(self._index).wait_event(self._free[slot])", "pass", PULL),
    # Products on CPUs, long sums, sums of columns.
    Fault(
        "fastkron_py/tiling/torch_products.py",
        "slice(i, i + 1) for i in range(whole, count)",
        "slice(i, i + 1) for i in range(whole, count - 1)",
        ("tests/tiling/test_batch_parts.py",),
    ),
    Fault("fastkron_py/tiling/torch_products.py", "    if cut.rest:\n", "    if False:\n", ("tests/tiling/test_long_products.py",)),
    Fault("fastkron_py/tiling/torch_products.py", "if whole < t.shape[0]:", "if False:", ("tests/tiling/test_reductions.py",)),
    # Other libraries.
    Fault(
        "integrations/gpytorch/interpolation.py",
        "torch.arange(0, blocks * grid, grid,",
        "0 * torch.arange(0, blocks * grid, grid,",
        ("tests/integrations/test_interpolation.py",),
    ),
    Fault(
        "integrations/gpytorch/products.py",
        "y = y * parts.scale",
        "pass",
        ("tests/integrations/test_operator.py", "tests/integrations/test_products.py"),
    ),
    Fault(
        "integrations/peft.py",
        "if layer.disable_adapters or layer.merged:",
        "if layer.disable_adapters:",
        ("tests/integrations/test_peft.py",),
    ),
    Fault(
        "integrations/peft.py",
        "return rate > 0 and bool(drawn <= rate)",
        "return rate > 0 and bool(drawn > rate)",
        ("tests/integrations/test_peft.py",),
    ),
]


def missing(fault: Fault) -> str | None:
    """Why a fault cannot be planted, or None."""
    text = (ROOT / fault.path).read_text()
    count = text.count(fault.old)
    return None if count == 1 else f"{count} times in {fault.path}: {fault.old!r}"


def copy_of_library(folder: Path) -> None:
    """All that the tests need."""
    for name in TREES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)


def first_failure(tests: str, folder: Path) -> str | None:
    """The first of some tests that fails in a folder; None if all pass, or none is chosen."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not full", *shlex.split(tests)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (0, 5):
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [done.stdout[-200:]])[0]


def outcome(fault: Fault, folder: Path) -> tuple[str, float, str]:
    """("killed" or "survived", seconds, the first test that fails); "unknown" where that test fails without the fault, too."""
    path = folder / fault.path
    text, start = path.read_text(), time.perf_counter()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        for tests in [t for t in fault.tests if (folder / t.split()[0]).exists()]:
            failed = first_failure(tests, folder)
            if failed is not None:
                path.write_text(text)
                names = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", failed)  # a case's name may hold spaces
                without = first_failure(shlex.quote(names[0]), folder) if names else None
                return "killed" if without is None else "unknown", time.perf_counter() - start, failed
        return "survived", time.perf_counter() - start, ""
    finally:
        path.write_text(text)


def planted(faults: Sequence[Fault], workers: int) -> Iterator[tuple[Fault, tuple[str, float, str]]]:
    """Each fault's outcome, as it comes; workers plant one at a time, each in a copy of its own."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        folders: Queue[Path] = Queue()
        for i in range(workers):
            copy_of_library(Path(name) / str(i))
            folders.put(Path(name) / str(i))

        def run(fault: Fault) -> tuple[Fault, tuple[str, float, str]]:
            folder = folders.get()
            try:
                return fault, outcome(fault, folder)
            finally:
                folders.put(folder)

        for done in as_completed([pool.submit(run, fault) for fault in faults]):
            yield done.result()


def main() -> int:
    """Plant, run, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose path or code holds this")
    parser.add_argument("--workers", type=int, default=1, help="that plant faults at a time")
    parser.add_argument("--json", type=Path, help="also write the table there")
    parser.add_argument("--check", action="store_true", help="only whether each fault's code is there")
    arguments = parser.parse_args()
    chosen = [f for f in FAULTS if arguments.only in f.path or arguments.only in f.old]
    gone = [text for f in chosen if (text := missing(f))]
    print(*gone, sep="\n")
    if arguments.check:
        return bool(gone)
    rows = []
    for fault, (status, seconds, test) in planted([f for f in chosen if not missing(f)], arguments.workers):
        rows.append({"path": fault.path, "old": fault.old, "new": fault.new, "outcome": status, "seconds": round(seconds), "test": test})
        print(f"{len(rows):3} {status:8} {seconds:5.0f} s  {fault.path}: {fault.old.strip()[:60]!r} {test[:100]}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))
    counts = Counter([row["outcome"] for row in rows])
    print(", ".join([f"{counts[status]} {status}" for status in ("killed", "survived", "unknown")]) + f", {len(gone)} not planted")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A quantum Fourier transform, gate by gate: every layer of the circuit is one `mode_matmul`. Checked against torch.fft.

Gates act on neighbouring qubits only (Fowler, Devitt and Hollenberg, "Implementation of Shor's algorithm on a linear nearest neighbour
qubit array", 2004): a qubit takes a Hadamard gate, then passes all others, and each time both take a controlled phase and are swapped.
2 n - 1 layers of gates that meet no qubit twice do all of it, and leave the qubits in the order of the transform.

Usage: python examples/quantum.py [--qubits 24] [--device cpu|cuda] [--picture FILE].
"""

from __future__ import annotations

import argparse
import cmath
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastkron_py import mode_matmul

QUBITS = {"cuda": 24, "cpu": 18}
PERIOD = 12  # of the state that the picture transforms


class Gate(NamedTuple):
    """A matrix ``[2, 2]`` or ``[4, 4]`` on one qubit, or on it and the next one."""

    qubit: int
    matrix: Tensor

    @property
    def qubits(self) -> int:
        """Their number."""
        return int(math.log2(self.matrix.shape[0]))


Layer = list[Gate]  # of neighbours, in order
Way = Callable[[Tensor, Layer, int], Tensor]


def circuit(n: int, device: torch.device) -> list[Layer]:
    """The layers of a quantum Fourier transform of n qubits."""
    hadamard = torch.tensor([[1, 1], [1, -1]], dtype=torch.complex64, device=device) / math.sqrt(2)
    layers: list[Layer] = [[] for _ in range(2 * n - 1)]
    for i in reversed(range(n)):
        layers[2 * i].append(Gate(0, hadamard))
        for j in range(1, n - i):
            phase = cmath.exp(1j * math.pi / 2**j)
            swap = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, phase]], dtype=torch.complex64, device=device)
            layers[2 * i + j].append(Gate(j - 1, swap))
    return layers


def by_mode_matmul(state: Tensor, layer: Layer, n: int) -> Tensor:
    """All gates of a layer at once: each is a matrix along a dimension of 2 or 4."""
    first, last = layer[0], layer[-1]
    sizes = [2**first.qubit, *[2**g.qubits for g in layer], 2 ** (n - last.qubit - last.qubits)]
    return mode_matmul(state.view(sizes), {d: g.matrix for d, g in enumerate(layer, start=1)})


def by_bmm(state: Tensor, layer: Layer, n: int) -> Tensor:
    """One gate after the other, whose qubits are permuted to the end, and back."""
    for qubit, matrix in layer:
        moved = state.reshape(2**qubit, matrix.shape[0], -1).permute(0, 2, 1)
        rows = moved.reshape(1, -1, matrix.shape[0])  # a batch of one: many batches of few rows take longer
        state = rows.bmm(matrix[None]).view(moved.shape).permute(0, 2, 1)
    return state


def by_einsum(state: Tensor, layer: Layer, n: int) -> Tensor:
    """One gate after the other."""
    for qubit, matrix in layer:
        state = torch.einsum("apb,pq->aqb", state.reshape(2**qubit, matrix.shape[0], -1), matrix)
    return state


WAYS: dict[str, Way] = {"mode_matmul": by_mode_matmul, "permute + bmm": by_bmm, "einsum": by_einsum}


def run(state: Tensor, layers: list[Layer], n: int, way: Way) -> Tensor:
    """The state ``[2**n]`` after all layers."""
    for layer in layers:
        state = way(state, layer, n)
    return state.reshape(-1)


def seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """The time of a call, after one that is not timed."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    finish()
    begin = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - begin


def draw(path: Path, layers: list[Layer], n: int, times: dict[str, float], device: torch.device) -> None:
    """The circuit, the transform of a periodic state, the times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained", width_ratios=(4, 4, 3))
    for t, layer in enumerate(layers):
        for gate in layer:
            left.plot([t] * gate.qubits, range(gate.qubit, gate.qubit + gate.qubits), "o-", color=f"C{2 - gate.qubits}", markersize=3)
    left.set(title=f"{sum(map(len, layers))} gates in {len(layers)} layers", xlabel="layer", ylabel="qubit")
    left.invert_yaxis()
    left.yaxis.get_major_locator().set_params(integer=True)
    state = torch.zeros(2**n, dtype=torch.complex64, device=device)
    state[::PERIOD] = 1
    found = run(state / state.norm(), layers, n, by_mode_matmul).abs().square()
    bins = found.view(-1, max(1, 2**n // 512)).sum(1).cpu()
    middle.plot(torch.arange(len(bins)) / len(bins), bins)
    middle.set(title=f"transform of a state of period {PERIOD}", xlabel=f"k / 2^{n}", ylabel="probability")
    right.barh(list(times), [1e3 * s for s in times.values()], color=["C0", "0.6", "0.6"])
    right.invert_yaxis()
    right.set(title=f"milliseconds, {n} qubits, {device.type}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")


def main() -> None:
    """Transform a random state in three ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--qubits", type=int, help="of the state: by default 24 on a GPU and 18 on a CPU")
    parser.add_argument("--picture", type=Path, help="where to draw the result (needs matplotlib)")
    options = parser.parse_args()
    device, n = options.device, options.qubits or QUBITS[options.device.type]
    layers = circuit(n, device)
    state = torch.randn(2**n, dtype=torch.complex64, device=device)
    expected = torch.fft.ifft(state, norm="ortho")  # whose sign of the exponent is the quantum transform's
    print(f"{n} qubits: {sum(map(len, layers))} gates in {len(layers)} layers")
    times = {}
    for name, way in WAYS.items():
        error = float((run(state, layers, n, way) - expected).norm() / expected.norm())
        times[name] = seconds(lambda way=way: run(state, layers, n, way), device)
        print(f"{name:>14}: {1e3 * times[name]:9.2f} ms, error {error:.1e}")
    if options.picture:
        draw(options.picture, layers, n, times, device)


if __name__ == "__main__":
    main()

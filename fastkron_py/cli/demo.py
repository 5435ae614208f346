"""The demo: a photograph blurred, compressed and transformed by Kronecker products, checked against SciPy, and drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastkron_py import kron_matmul, kron_matmul_left
from fastkron_py.cli.display import bytes_text, device_name, seconds_text
from fastkron_py.cli.measure import best_seconds, peak_bytes
from fastkron_py.runtime.errors import value_error

SIGMA: Final = 4.0  # of the blur, in pixels
KEEP: Final = 0.05  # share of the DCT coefficients that compression keeps
PATCH: Final = 64  # side of the patch on which the dense product is affordable
STACK_BYTES: Final = 2**27  # of the pictures that a GPU blurs in one call; one picture takes it less time than a launch
FLOAT64_LIMIT: Final = 1e-12  # relative errors against SciPy in float64; rounding alone stays below 1e-14
FLOAT32_LIMIT: Final = 1e-6
INK: Final = "#1f2933"
MUTED: Final = "#7b8794"
COLOURS: Final = {"dense": "#cbd2d9", "loop": "#9fb3c8", "fastkron_py": "#d64545"}
LABELS: Final = {"dense": "dense matrix", "loop": "matmul + transpose", "fastkron_py": "fastkron_py"}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """A result compared with a reference that knows no Kronecker products."""

    what: str
    against: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its limit; NaN is not."""
        return self.error <= self.limit


@dataclass(frozen=True)
class Cost:
    """Time and memory of one method on pictures of one size; None where it was not run."""

    method: str
    pictures: int
    height: int
    width: int
    seconds: float | None
    memory_bytes: int

    @property
    def problem(self) -> str:
        """The pictures, as tables and bars name them."""
        return (f"{self.pictures} of " if self.pictures > 1 else "") + f"{self.height} x {self.width}"


@dataclass
class Demo:
    """Pictures ``[H, W, 3]``, spectra ``[H, W]``, checks and costs, filled in step by step."""

    image: Array
    device: torch.device
    blurred: Array = field(init=False)
    compressed: Array = field(init=False)
    dct: Array = field(init=False)
    walsh: Array = field(init=False)
    checks: list[Check] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each step with its description, in order."""
        yield "Gaussian blur, B_h (x) B_w", self.blur
        yield "DCT compression, D_h (x) D_w and back", self.compress
        yield "Walsh-Hadamard transform, factors of 2 x 2", self.walsh_hadamard
        yield f"Time and memory on {PATCH} x {PATCH}", lambda: self.compare(PATCH, PATCH)
        height, width, channels = self.image.shape
        yield "Time and memory on the whole picture", lambda: self.compare(height, width)
        stack = STACK_BYTES // (4 * height * width * channels)
        if self.device.type == "cuda" and stack > 1:
            yield f"Time and memory on {stack} pictures", lambda: self.compare(height, width, stack)

    def blur(self) -> None:
        """Blur with the channels as rows: ``x [3, H*W] @ (B_h (x) B_w)^T``."""
        from scipy import ndimage

        height, width, channels = self.image.shape
        factors = [self._to_device(blur_matrix(n, SIGMA).T) for n in (height, width)]
        x = self._to_device(self.image.transpose(2, 0, 1).reshape(channels, -1))
        expected = ndimage.gaussian_filter(self.image, SIGMA, mode="reflect", axes=(0, 1))
        for name, dtype, limit in (("float32", torch.float32, FLOAT32_LIMIT), ("float64", torch.float64, FLOAT64_LIMIT)):
            y = kron_matmul(x.to(dtype), [f.to(dtype) for f in factors])
            self.blurred = _to_numpy(y).reshape(channels, height, width).transpose(1, 2, 0)
            self._check(f"blur, {name}", "scipy.ndimage.gaussian_filter", self.blurred, expected, limit)

    def compress(self) -> None:
        """Keep the largest coefficients of ``(D_h (x) D_w) @ x [H*W, 3]``, and go back with transposed factors."""
        from scipy import fft

        height, width, channels = self.image.shape
        factors = [self._to_device(dct_matrix(n)) for n in (height, width)]
        coefficients = kron_matmul_left(factors, self._to_device(self.image.reshape(-1, channels)))
        spectrum = _to_numpy(coefficients).reshape(self.image.shape)
        expected = fft.dctn(self.image, type=2, norm="ortho", axes=(0, 1))
        self._check("DCT-II, float64", "scipy.fft.dctn", spectrum, expected, FLOAT64_LIMIT)

        count = math.ceil(KEEP * coefficients.numel())
        threshold = coefficients.abs().flatten().topk(count).values[-1]
        kept = torch.where(coefficients.abs() >= threshold, coefficients, 0)
        self.compressed = _to_numpy(kron_matmul_left([f.mT for f in factors], kept)).reshape(self.image.shape)
        expected = fft.idctn(_to_numpy(kept).reshape(self.image.shape), type=2, norm="ortho", axes=(0, 1))
        self._check("inverse DCT, float64", "scipy.fft.idctn", self.compressed, expected, FLOAT64_LIMIT)
        self.dct = np.abs(spectrum).mean(axis=2)

    def walsh_hadamard(self) -> None:
        """Transform the largest crop with sides 2^k by as many factors [[1, 1], [1, -1]] as its sides have bits."""
        from scipy.linalg import hadamard

        butterfly = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device=self.device)
        bits = min(5, *(n.bit_length() - 1 for n in self.image.shape[:2]))
        patch = self._crop(bits, bits).reshape(-1, self.image.shape[2])
        y = kron_matmul_left([butterfly] * (2 * bits), self._to_device(patch))
        self._check(f"{2 * bits} factors, float64", "scipy.linalg.hadamard", _to_numpy(y), hadamard(4**bits) @ patch, FLOAT64_LIMIT)

        high, wide = (n.bit_length() - 1 for n in self.image.shape[:2])
        crop = self._crop(high, wide)
        x = self._to_device(crop.reshape(-1, self.image.shape[2]))
        spectrum = kron_matmul_left([butterfly] * (high + wide), x)
        back = kron_matmul_left([butterfly] * (high + wide), spectrum) / x.shape[0]
        self._check(f"{high + wide} factors, twice", "the picture itself", _to_numpy(back), crop.reshape(x.shape), FLOAT64_LIMIT)
        self.walsh = _sequency(np.abs(_to_numpy(spectrum)).mean(axis=1).reshape(crop.shape[:2]))

    def compare(self, height: int, width: int, pictures: int = 1) -> None:
        """Blur ``[pictures*3, height*width]`` in float32 by each method; the dense product only of a patch."""
        x = torch.rand(pictures * self.image.shape[2], height * width, device=self.device)
        factors = [self._to_device(blur_matrix(n, SIGMA).T).float() for n in (height, width)]
        held = sum(4 * f.numel() for f in factors)
        dense = partial(torch.matmul, x, torch.kron(*factors)) if height * width <= PATCH * PATCH else None
        methods: list[tuple[str, int, Callable[[], Tensor] | None]] = [
            ("dense", 4 * (height * width) ** 2, dense),
            ("loop", held, lambda: matmul_transpose_loop(x, factors)),
            ("fastkron_py", held, lambda: kron_matmul(x, factors)),
        ]
        for method, operator_bytes, call in methods:
            seconds = None if call is None else best_seconds(call, self.device)
            memory = operator_bytes + (0 if call is None else peak_bytes(call, self.device))
            self.costs.append(Cost(method, pictures, height, width, seconds, memory))

    def _crop(self, high_bits: int, wide_bits: int) -> Array:
        """The central crop with these powers of two as its sides."""
        high, wide = 2**high_bits, 2**wide_bits
        top, left = (self.image.shape[0] - high) // 2, (self.image.shape[1] - wide) // 2
        return self.image[top : top + high, left : left + wide]

    def _check(self, what: str, against: str, got: Array, expected: Array, limit: float) -> None:
        error = float(np.linalg.norm(got - expected) / (np.linalg.norm(expected) or 1.0))  # a black picture's is 0
        self.checks.append(Check(what, against, error, limit))

    def _to_device(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _to_numpy(t: Tensor) -> Array:
    return np.asarray(t.double().cpu())


def blur_matrix(n: int, sigma: float) -> Array:
    """One-dimensional Gaussian blur as a matrix ``[n, n]``, the signal mirrored at its ends."""
    radius = int(4 * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    position = (np.arange(n)[:, None] + offsets) % (2 * n)  # [n, taps] in the signal followed by its mirror image
    matrix = np.zeros((n, n))
    np.add.at(matrix, (np.arange(n)[:, None], np.minimum(position, 2 * n - 1 - position)), weights)
    return matrix


def dct_matrix(n: int) -> Array:
    """The orthonormal DCT-II as a matrix ``[n, n]``: row k is the k-th cosine."""
    k, i = np.arange(n)[:, None], np.arange(n)
    quarter_turns = k * (2 * i + 1) % (4 * n)  # of n parts each; reduced as integers, which keeps cos exact to rounding
    matrix: Array = np.sqrt(2 / n) * np.cos(np.pi / (2 * n) * quarter_turns)
    matrix[0] /= np.sqrt(2)
    return matrix


def matmul_transpose_loop(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """The product without a library: a matmul and a transposing copy for each factor. x ``[M, K]``."""
    rows = x.shape[0]
    for f in reversed(factors):
        x = (x.reshape(-1, f.shape[0]) @ f).reshape(rows, -1, f.shape[1]).mT.reshape(rows, -1)
    return x


def _sequency(spectrum: Array) -> Array:
    """Order a Walsh-Hadamard spectrum by sign changes along both axes, so that neighbours are similar."""
    for axis in (0, 1):
        bits = spectrum.shape[axis].bit_length() - 1
        gray = [i ^ (i >> 1) for i in range(2**bits)]
        order = [int(f"{g:0{bits}b}"[::-1], 2) if bits else 0 for g in gray]
        spectrum = np.take(spectrum, order, axis=axis)
    return spectrum


def photograph(name: str, size: int = 0) -> Array:
    """A colour picture ``[H, W, 3]`` in 0..1.

    Args:
        name: of a picture inside scikit-image's wheel, such as "chelsea.png", or a path.
        size: crop to at most this many pixels a side, around the centre; 0 takes the whole picture.

    Raises:
        ValueError: there is no such picture, it is none, or fewer than 2 pixels high or wide.
    """
    from PIL import Image

    inside: Any = files("skimage") / "data" / name
    source = inside if inside.is_file() else Path(name)
    if not source.is_file():
        raise value_error("image", "a path, or a picture that ships with scikit-image, like chelsea.png", name)
    try:
        with source.open("rb") as stream:
            pixels: Array = np.asarray(Image.open(stream).convert("RGB"), dtype=np.float64) / 255
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow calls a broken PNG a SyntaxError
        raise value_error("image", "a picture that Pillow can read", f"{name} ({error})") from error
    if size:
        top, left = (max(0, (n - size) // 2) for n in pixels.shape[:2])
        pixels = pixels[top : top + size, left : left + size]
    if min(pixels.shape[:2]) < 2:
        raise value_error("size", "at least 2 pixels a side", f"{pixels.shape[0]} x {pixels.shape[1]}")
    return pixels


# ---- the picture --------------------------------------------------------------------------------


def picture_file(path: Path) -> Path:
    """The file that a picture goes to: the path, or demo.png in it where it is a folder or has no suffix.

    Raises:
        ValueError: Matplotlib writes no files with this suffix.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if path.is_dir() or not path.suffix:
        return path / "demo.png"
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise value_error("out", f"a folder or a file that ends with one of .{', .'.join(sorted(known))}", path)
    return path


def draw(demo: Demo, path: Path) -> None:
    """Write original, blur, compression, both spectra and the costs to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height, width, _ = demo.image.shape
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.02, wspace=0.03)
    figure = Figure(figsize=(13.2, 0.8 + 8.8 * height / width + 0.6), dpi=120, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    dense = bytes_text(4 * (height * width) ** 2)
    headline = f"Kronecker products on a photograph of {height} × {width} pixels. The dense matrix would take {dense}."
    figure.suptitle(headline, x=0.01, ha="left", fontsize=14, color=INK, fontweight="bold")
    axes = figure.subplots(2, 3)
    sides = rf"_{{{height}}} \otimes {{}}", rf"_{{{width}}}"
    _show(axes[0, 0], demo.image, "Original", f"{height} × {width}")
    _show(axes[0, 1], demo.blurred, "Gaussian blur", rf"$B{sides[0]}B{sides[1]}$, $\sigma$ = {SIGMA:g}")
    _show(axes[0, 2], demo.compressed, f"{KEEP:.0%} of the coefficients", rf"$D^T{sides[0]}D^T{sides[1]}$")
    _show(axes[1, 0], demo.dct, "DCT coefficients", rf"$D{sides[0]}D{sides[1]}$", height / width)
    bits = sum(n.bit_length() - 1 for n in demo.walsh.shape)
    _show(axes[1, 1], demo.walsh, "Walsh-Hadamard coefficients", rf"{bits} factors $H_2$", height / width)
    _costs(axes[1, 2], demo, height / width)
    figure.savefig(path)


def _show(axes: Any, picture: Array, title: str, subtitle: str, shape: float | None = None) -> None:
    """A picture ``[H, W, 3]``, or a spectrum ``[H, W]`` in decibels in a box of the given shape."""
    if picture.ndim == 3:
        axes.imshow(np.clip(picture, 0, 1), interpolation="lanczos")
    else:
        decibels = 20 * np.log10(np.maximum(picture, picture.max() * 1e-8))
        low, high = np.percentile(decibels, [2, 99.8])
        axes.imshow(decibels, cmap="magma", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_box_aspect(shape)
    _title(axes, title, subtitle)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def _title(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold", pad=7)
    axes.set_title(subtitle, loc="right", fontsize=10, color=MUTED, pad=7)


def _costs(axes: Any, demo: Demo, shape: float) -> None:
    """Bars of time and memory, one panel each, on logarithmic scales."""
    device = "CPU" if demo.device.type == "cpu" else device_name(demo.device)
    _title(axes, "Cost of the blur", f"float32, {device}")
    axes.set_box_aspect(shape)
    axes.axis("off")
    panels = [axes.inset_axes((left, 0, 0.46, 1)) for left in (0.0, 0.54)]
    _bars(panels[0], "Time", demo.costs, [c.seconds for c in demo.costs], seconds_text)
    _bars(panels[1], "Memory", demo.costs, [float(c.memory_bytes) for c in demo.costs], bytes_text)


def _bars(axes: Any, title: str, costs: Sequence[Cost], values: Sequence[float | None], text: Callable[[float], str]) -> None:
    known = [v for v in values if v is not None]
    low, high = min(known) / 3, max(known)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.15)
    y, problem = -0.2, ""
    for cost, value in zip(costs, values, strict=True):
        if problem != cost.problem:
            problem = cost.problem
            axes.text(low, y, f"{title}, {problem.replace('x', '×')} pixels", fontsize=8.5, color=MUTED, va="bottom", fontweight="bold")
            y += 0.75
        ran = cost.seconds is not None
        shown = "not built" if value is None else text(value) + ("" if ran else ", not built")
        axes.text(low, y - 0.28, f"{LABELS[cost.method]}: {shown}", fontsize=8, color=INK, va="bottom")
        if value is not None:
            style = {"color": COLOURS[cost.method]} if ran else {"color": "white", "edgecolor": "#9aa5b1", "hatch": "////", "lw": 0.8}
            axes.barh(y, value - low, left=low, height=0.42, **style)
        y += 1.15
    axes.set_ylim(y - 0.6, -0.6)
    axes.axis("off")

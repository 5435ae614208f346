"""Which of 13 photographs a line of 512 pixels is from, told by its spectrum: a KAN [257, 128, 128, 13] of degree 15.

Stands in for the paper's VoiceBank-DEMAND (257 bins of a spectrum, 13 kinds of noise, the same degree). The photographs, of textures,
cells, the moon and others, come with scikit-image.
Usage: python examples/kan/scan_lines.py [--quick] [--paper] [--device cpu|cuda] [--seeds N] [--picture FILE].
"""

from __future__ import annotations

import torch
from common import Networks, Pair, arguments, compare, data_file, settings, share_wrong, standardize, supervised, to_device, write_results
from pictures import draw_curves, pyplot, save
from torch import Tensor

PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "cell.png",
    "coffee.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
LENGTH = 512
BAND, MARGIN = 32, 4  # lines that go into the same part, and how many of them are left out at either end: neighbours look alike


def lines_of(name: str) -> Tensor:
    """The lines of a photograph in bands, ``[bands, lines, 512]``, grey."""
    image = torch.as_tensor(pyplot().imread(data_file("skimage", f"data/{name}")).copy()).float()
    if image.max() > 1:
        image = image / 255
    grey = image[..., :3].mean(-1) if image.ndim == 3 else image
    pieces = [grey[:, i : i + LENGTH] for i in range(0, grey.shape[1] - LENGTH + 1, LENGTH)]
    bands = [piece[i + MARGIN : i + BAND - MARGIN] for piece in pieces for i in range(0, len(piece) - BAND + 1, BAND)]
    return torch.stack(bands)


def spectra(lines: Tensor) -> Tensor:
    """Log power of 257 frequencies of lines ``[n, 512]`` without their mean, under a Hann window."""
    lines = (lines - lines.mean(1, keepdim=True)) * torch.hann_window(LENGTH)
    return torch.log(1e-4 + torch.fft.rfft(lines).abs().square())


def read() -> list[Pair]:
    """Three fifths of the bands to train, a fifth to validate, a fifth to test: spectra ``[n, 257]`` and numbers of photographs."""
    generator = torch.Generator().manual_seed(0)
    parts: list[list[Pair]] = [[], [], []]
    for label, name in enumerate(PHOTOGRAPHS):
        bands = lines_of(name)
        order = torch.randperm(len(bands), generator=generator)
        for part, chosen in zip(parts, order.tensor_split([round(0.6 * len(bands)), round(0.8 * len(bands))]), strict=True):
            x = spectra(bands[chosen].flatten(0, 1))
            part.append((x, torch.full((len(x),), label)))
    joined = [(torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts]
    orders = [torch.randperm(len(y), generator=generator) for _, y in joined]
    return [(x[order], y[order]) for (x, y), order in zip(joined, orders, strict=True)]


def main() -> None:
    """Train, and draw how the answers are spread."""
    options = arguments(__doc__ or "", "scan_lines")
    parts = to_device(standardize(read()), options)
    hidden = 8 if options.quick else 512 if options.paper else 128
    networks = Networks((257, hidden, hidden, 13), 15, options.power)
    problem = supervised("Scan lines", "test error", parts, torch.nn.functional.cross_entropy, share_wrong, batch=64, as_percent=True)
    results = compare(problem, networks, settings(options, epochs=20, rates=(3e-4, 1e-4, 1e-3)))

    figure, axes = pyplot().subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    draw_curves(axes, results, "wrong answers")
    model, (x, y) = results[0].model, parts[2]
    assert model is not None
    with torch.no_grad():
        answers = model(x).argmax(1)
    names = [name.partition(".")[0].partition("_")[0] for name in PHOTOGRAPHS]
    shares = torch.zeros(13, 13)
    for label, answer in zip(y.tolist(), answers.tolist(), strict=True):
        shares[label, answer] += 1
    drawn = axes[2].imshow((shares / shares.sum(1, keepdim=True).clamp(min=1)).numpy(), cmap="Blues", vmin=0, vmax=1)
    axes[2].set(xticks=range(13), yticks=range(13), yticklabels=names, ylabel="photograph", title="KAN's answers, test")
    axes[2].set_xticks(range(13), names, rotation=90)
    axes[2].tick_params(labelsize=7)
    figure.colorbar(drawn, ax=axes[2])
    save(figure, options.picture)
    if options.results:
        write_results(options.results, problem, results)


if __name__ == "__main__":
    main()

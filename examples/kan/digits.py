"""Classification of handwritten digits by a KAN [64, 256, 256, 10] of degree 8, beside an MLP of equal size and plain torch.

Stands in for the paper's Speech Commands (40 features, 12 words, the same hidden widths and degree). 1,797 images of 8 x 8 pixels that
come with scikit-learn. Usage: python examples/kan/digits.py [--quick] [--device cpu|cuda] [--seeds N] [--picture FILE].
"""

from __future__ import annotations

import torch
from common import Networks, arguments, compare, settings, share_wrong, split, standardize, supervised, to_device, write_results
from pictures import draw_curves, pyplot, save
from sklearn.datasets import load_digits


def main() -> None:
    """Train on three fifths of the images, choose by a fifth, test on a fifth."""
    options = arguments(__doc__ or "", "digits")
    images, labels = load_digits(return_X_y=True)
    parts = to_device(standardize(split(torch.tensor(images, dtype=torch.float32), torch.tensor(labels))), options)
    hidden = 8 if options.quick else 256
    networks = Networks((64, hidden, hidden, 10), 8, options.power)
    problem = supervised("Digits", "test error", parts, torch.nn.functional.cross_entropy, share_wrong, batch=128, as_percent=True)
    results = compare(problem, networks, settings(options, epochs=40, rates=(1e-3, 3e-4, 3e-3)))

    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    draw_curves(axes, results, "wrong answers")
    model, (x, y) = results[0].model, parts[2]
    assert model is not None
    with torch.no_grad():
        answers = model(x).argmax(1)
    confusion = torch.zeros(10, 10)
    for label, answer in zip(y.tolist(), answers.tolist(), strict=True):
        confusion[label, answer] += label != answer
    drawn = axes[2].imshow(confusion.numpy(), cmap="Blues")
    axes[2].set(xlabel="KAN's answer", ylabel="digit", title="wrong answers, test", xticks=range(10), yticks=range(10))
    figure.colorbar(drawn, ax=axes[2])
    save(figure, options.picture)
    if options.results:
        write_results(options.results, problem, results)


if __name__ == "__main__":
    main()

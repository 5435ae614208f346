"""Models that are trained side by side: loss curves, how far they drift from the first contender's, and the memory of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import Call
from fastkron_py.cli.measure import peak_bytes

STEPS = 50  # of the loss curve
WARM_UP = 10  # steps in which the learning rate rises to its full height
FALL = 0.9  # the last loss beside the first, at most: else there was nothing to compare
# Of the loss, at any of the steps. In bfloat16 runs that round differently drift apart: on CPUs, at widths of 256 to 1024 and as many
# tokens for each word of the vocabulary, the two controls of `gated_llama` by 3e-4 to 9e-4 from the model as it comes, up and gate
# swapped by 2e-2, and silu's slope without its second term by 3e-3. So little only because the task is learned from the first step on:
# with a vocabulary of 4096 and no warm-up the loss stood still for 33 steps, and from there on any two runs went ways of their own.
# In float32 runs agree to 2e-7, and up and gate swapped differ by 2e-3.
TOLERANCES = {"bfloat16": 2e-3, "float32": 1e-4}


@dataclass
class TrainingProblem(ABC):
    """Batches for the steps of a training, and the curves that contenders found.

    Attributes:
        stock: the contender that the others are compared with.
        learning_rate: after the steps in which it rises.
        device: of the batches and the model.
        curves: ``[STEPS]`` losses, by contender.
        memory: bytes that a step of the first contender holds at most, once that is known.
    """

    stock: str
    learning_rate: float
    device: torch.device
    curves: dict[str, Tensor] = field(default_factory=dict, init=False)
    memory: int | None = field(default=None, init=False)

    @abstractmethod
    def loss(self, model: nn.Module, number: int, is_reversed: bool) -> Tensor:
        """Of a step's batch, which may be the other way round."""


Make = Callable[[Any], nn.Module]
"""From a problem to a model in training mode, with the same weights at every call."""


def training_step(problem: TrainingProblem, model: nn.Module, is_reversed: bool = False) -> Callable[[int], Tensor]:
    """A step of AdamW on a step's batch, which returns the loss. Gradients are let go at its end."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=problem.learning_rate, fused=problem.device.type == "cuda")

    def step(number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = problem.learning_rate * min(1.0, (number + 1) / WARM_UP)
        with torch.enable_grad():
            loss = problem.loss(model, number % STEPS, is_reversed)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def trained(name: str, make: Make, is_reversed: bool = False) -> Callable[[Any], Call]:
    """The loss curve of a model, taken once; then a call is one more step.

    Args:
        name: of the contender.
        make: the model.
        is_reversed: whether each batch is the other way round: sums over it are rounded differently.
    """

    def prepare(problem: TrainingProblem) -> Call:
        step = training_step(problem, make(problem), is_reversed)
        problem.curves[name] = curve = torch.stack([step(i) for i in range(STEPS)]).double().cpu()

        def call() -> Tensor:
            step(0)
            return curve

        return call

    return prepare


def drift(problem: TrainingProblem, curve: Tensor) -> Tensor:
    """``[STEPS]`` differences from the losses of the first contender, beside those."""
    expected = problem.curves[problem.stock]
    return ((curve - expected) / expected).abs()


def check(problem: TrainingProblem, curve: Tensor) -> float:
    """The largest difference between losses; NaN where the first contender has not learned."""
    expected = problem.curves[problem.stock]
    if not float(expected[-1]) < FALL * float(expected[0]):
        return float("nan")
    return float(drift(problem, curve).max())


def unit_bytes(make: Make) -> Callable[[TrainingProblem], int]:
    """The most that a step holds beyond weights and the optimizer's state, of a model that memory is told in multiples of."""

    def found(problem: TrainingProblem) -> int:
        if problem.memory is None:
            step = training_step(problem, make(problem))
            step(0)  # which makes the optimizer's state
            problem.memory = peak_bytes(lambda: step(0), problem.device)
        return problem.memory

    return found


def details(problem: TrainingProblem) -> dict[str, Any]:
    """The loss curves, how far each is from the first contender's and at which step, and the bytes that memory is told in multiples of."""
    drifts = {name: drift(problem, curve) for name, curve in problem.curves.items()} if problem.stock in problem.curves else {}
    return {
        "curves": {name: curve.tolist() for name, curve in problem.curves.items()},
        "drifts": {name: {"largest": float(d.max()), "step": int(d.argmax()), "last": float(d[-1])} for name, d in drifts.items()},
        "unit_bytes": problem.memory,
    }

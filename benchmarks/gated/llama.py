"""Training a small Llama of Hugging Face Transformers, as it comes and with `use_fastkron`: loss curves, time and memory of a step."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import missing, tf32
from benchmarks.registry import Benchmark, Case, Contender, register
from benchmarks.training import STEPS, TOLERANCES, Make, TrainingProblem, check, details, trained, unit_bytes

SUCCESSORS = 4  # of each token, so that there is something to learn: from log(vocabulary) down to log(4)
STOCK = "transformers"
REORDERED = "transformers, units reordered"
ROUNDED_ONCE = "transformers, rounded once"


@dataclass
class LlamaProblem(TrainingProblem):
    """Token sequences of a random walk, and a configuration.

    Attributes:
        config: of `transformers.LlamaConfig`.
        tokens: ``[STEPS, B, S]``, a batch for each step.
        dtype: of weights and activations.
    """

    config: dict[str, Any]
    tokens: Tensor
    dtype: torch.dtype

    def model(self) -> nn.Module:
        """With seeded weights."""
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**self.config)
        with torch.device(self.device):
            made: nn.Module = transformers.LlamaForCausalLM(config)
        return made.to(self.dtype).train()

    def loss(self, model: nn.Module, number: int, is_reversed: bool) -> Tensor:
        """Of the next token."""
        tokens = self.tokens[number].flip(0) if is_reversed else self.tokens[number]
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss


def _obstacle(device: torch.device) -> str | None:
    return missing("transformers")


def _walk(vocabulary: int, steps: int, batch: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    successors = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=generator)
    tokens = torch.empty(steps, batch, length, dtype=torch.int64)
    tokens[..., 0] = torch.randint(vocabulary, (steps, batch), generator=generator)
    for i in range(1, length):
        chosen = torch.randint(SUCCESSORS, (steps, batch), generator=generator)
        tokens[..., i] = successors[tokens[..., i - 1], chosen]
    return tokens.to(device)


def inputs(parameters: Mapping[str, Any], device: torch.device) -> LlamaProblem:
    """The same tokens and weights for all contenders."""
    return LlamaProblem(STOCK, parameters["learning_rate"], device, **llama_of(parameters, device))


def llama_of(parameters: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The attributes of a `LlamaProblem` that are its own."""
    config = {
        "hidden_size": parameters["width"],
        "intermediate_size": parameters["hidden"],
        "num_hidden_layers": parameters["layers"],
        "num_attention_heads": parameters["heads"],
        "num_key_value_heads": max(1, parameters["heads"] // 4),
        "vocab_size": parameters["vocabulary"],
        "max_position_embeddings": parameters["length"],
        "use_cache": False,
    }
    tokens = _walk(parameters["vocabulary"], STEPS, parameters["batch"], parameters["length"], device)
    return {"config": config, "tokens": tokens, "dtype": getattr(torch, parameters["dtype"])}


def reorder(model: nn.Module) -> None:
    """Put the hidden units of every MLP in another order: the same function, whose sums are rounded differently."""
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[operator,union-attr]
            mlp: Any = layer.mlp
            order = torch.arange(mlp.up_proj.weight.shape[0], device=mlp.up_proj.weight.device).flip(0)
            mlp.gate_proj.weight.copy_(mlp.gate_proj.weight[order])
            mlp.up_proj.weight.copy_(mlp.up_proj.weight[order])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])


class _RoundedOnce(torch.autograd.Function):
    """silu(x gate^T) * (x up^T), of x ``[..., K]`` and weights ``[H, K]``, with products that are not rounded to bfloat16 before the gate.

    Gradients of both products are rounded once, too. Nothing of this library is in it: another layer that rounds where ours does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, up)
        wide_gate, wide_up = _wide(x, gate), _wide(x, up)
        return (torch.nn.functional.silu(wide_gate) * wide_up).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, up = ctx.saved_tensors
        wide_gate, wide_up = _wide(x, gate), _wide(x, up)
        s, wide = torch.sigmoid(wide_gate), dy.float()
        dgate = (wide * wide_up * s * (1 + wide_gate * (1 - s))).to(x.dtype)
        dup = (wide * wide_gate * s).to(x.dtype)
        rows = x.flatten(0, -2)
        return dgate @ gate + dup @ up, dgate.flatten(0, -2).mT @ rows, dup.flatten(0, -2).mT @ rows


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    """x's product with a weight in float32, by TF32 on a GPU: exact products of bfloat16 numbers."""
    with tf32() if x.dtype == torch.bfloat16 else contextlib.nullcontext():
        return torch.nn.functional.linear(x.float(), weight.float())


def round_once(model: nn.Module) -> None:
    """Let every MLP round its gated result, and neither projection."""

    def forward(mlp: Any, x: Tensor) -> Tensor:
        y: Tensor = mlp.down_proj(_RoundedOnce.apply(x, mlp.gate_proj.weight, mlp.up_proj.weight))  # type: ignore[no-untyped-call]
        return y

    for layer in model.model.layers:  # type: ignore[operator,union-attr]
        layer.mlp.forward = partial(forward, layer.mlp)


def _patch(backward: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        importlib.import_module("fastkron_py.integrations.transformers").use_fastkron(model, backward=backward)

    return change


def _changed(change: Callable[[nn.Module], None]) -> Make:
    def make(problem: LlamaProblem) -> nn.Module:
        model = problem.model()
        change(model)
        return model

    return make


def _contender(name: str, make: Make, **options: Any) -> Contender:
    return Contender(name, trained(name, make), obstacle=_obstacle, **options)


def case(label: str, dtype: str, quick: bool, learning_rate: float, **sizes: int) -> Case:
    """A row."""
    tokens = sizes["batch"] * sizes["length"]
    flops = 6 * tokens * sizes["layers"] * 3 * sizes["width"] * sizes["hidden"]  # of the MLPs alone
    parameters = {**sizes, "dtype": dtype, "learning_rate": learning_rate}
    return Case(label, parameters, dtype, TOLERANCES[dtype], flops=flops, quick=quick)


LARGE = {"width": 2048, "hidden": 8192, "layers": 8, "heads": 16, "vocabulary": 512, "batch": 4, "length": 2048}
SMALL = {"width": 64, "hidden": 160, "layers": 2, "heads": 4, "vocabulary": 32, "batch": 4, "length": 32}

register(
    Benchmark(
        name="gated_llama",
        description="A training step of a Hugging Face Llama, its MLPs replaced or not: time, memory, and 50 steps' losses.",
        device="cuda",
        cases=[
            case("8 layers of width 2048, 4 x 2048 tokens", "bfloat16", False, 1e-4, **LARGE),
            case("2 layers of width 64, 4 x 32 tokens", "float32", True, 3e-4, **SMALL),
        ],
        contenders=[
            _contender("fastkron_py, save", _changed(_patch("save")), is_ours=True),
            _contender("fastkron_py, recompute", _changed(_patch("recompute")), is_ours=True),
            _contender(ROUNDED_ONCE, _changed(round_once)),
            _contender(REORDERED, _changed(reorder)),
            _contender(STOCK, LlamaProblem.model),
        ],
        inputs=inputs,
        check=check,
        baseline=STOCK,
        peers_first=True,
        unit_bytes=unit_bytes(LlamaProblem.model),
        details=details,
        notes=(
            "A step: forward, backward and AdamW; attention is torch's. Errors: the largest relative difference of the losses of 50 steps.",
            "Reordered: the same model, each MLP's hidden units the other way round. Rounded once: projections reach the gate in float32.",
            "So far apart are runs that only round differently. How far each run is from the model as it comes, and where: in the JSON.",
            "x: memory at most beside the model's as it comes, beyond weights and the optimizer's state. FLOPs are those of the MLPs.",
        ),
    )
)

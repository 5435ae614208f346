"""Prefill and training of decoder layers of Hugging Face models, as they come, compiled, with Liger's SwiGLU and with `use_fastkron`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import kernels_need_cuda, missing
from benchmarks.registry import Benchmark, Call, Case, Contender, register

LAYERS = 2
COMPILE_SECONDS = 240.0
TOLERANCES = {"bfloat16": 3e-2, "float32": 1e-4}  # of results and gradients after two layers, against float64
STOCK = "transformers"
# (family, width, hidden, heads, heads of keys and values): Llama 3.1 8B, Qwen2.5 7B, Phi-4; and one for CPUs.
SIZES = {
    "Llama 8B": ("Llama", 4096, 14336, 32, 8),
    "Qwen2.5 7B": ("Qwen2", 3584, 18944, 28, 4),
    "Phi-4": ("Phi3", 5120, 17920, 40, 10),
    "small": ("Phi3", 64, 160, 4, 2),
}
Change = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Problem:
    """Embeddings ``[1, S, D]`` ~ N(0, 1) as the input of a model of two layers, and, for a training step, the result's gradient."""

    family: str
    config: dict[str, Any]
    x: Tensor
    dy: Tensor | None

    def model(self) -> nn.Module:
        """With seeded weights."""
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.family}Config")(**self.config)
        with torch.device(self.x.device):
            made: nn.Module = getattr(transformers, f"{self.family}Model")(config)
        return made.to(self.x.dtype).train(self.dy is not None)

    @cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """What `call` gives, in float64."""
        wide = Problem(self.family, self.config, self.x.detach().double(), None if self.dy is None else self.dy.double())
        model = self.model().double()  # the rounded weights
        return tuple([t.detach() for t in call(wide, model)()])


def call(problem: Problem, model: nn.Module) -> Call:
    """The result; of a training step also the gradients of x and of the first layer's down projection. All weights get gradients."""
    x, dy = problem.x.detach().requires_grad_(problem.dy is not None), problem.dy

    def prefill() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (model(inputs_embeds=x, use_cache=False).last_hidden_state,)

    def step() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y = model(inputs_embeds=x, use_cache=False).last_hidden_state
            parameters = {name: p for name, p in model.named_parameters() if "embed_tokens" not in name}
            dx, *gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
        down = next(g for name, g in zip(parameters, gradients, strict=True) if name.endswith("layers.0.mlp.down_proj.weight"))
        return y, dx, down

    return prefill if dy is None else step


def check(problem: Problem, found: tuple[Tensor, ...]) -> float:
    """The largest relative Frobenius error."""
    return max([float((t.detach().double() - e).norm() / e.norm()) for t, e in zip(found, problem.expected, strict=True)])


def inputs(parameters: Mapping[str, Any], device: torch.device) -> Problem:
    """The same numbers for all contenders."""
    family, width, hidden, heads, kv_heads = SIZES[parameters["model"]]
    config = {"hidden_size": width, "intermediate_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"num_hidden_layers": LAYERS, "vocab_size": 128, "max_position_embeddings": parameters["tokens"]}
    config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "sdpa"}
    generator = torch.Generator(device=device).manual_seed(0)
    shape, dtype = (1, parameters["tokens"], width), getattr(torch, parameters["dtype"])
    x, dy = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
    return Problem(family, config, x, dy if parameters["training"] else None)


# ---- contenders --------------------------------------------------------------------------------


def _patched(backward: str) -> Change:
    def change(model: nn.Module) -> None:
        importlib.import_module("fastkron_py.integrations.transformers").use_fastkron(model, backward=backward)

    return change


def _with_liger(model: nn.Module) -> None:
    """Its MLPs alone, as `liger_kernel`'s patches of whole models set them."""
    liger = importlib.import_module("liger_kernel.transformers.swiglu")
    for layer in model.layers:  # type: ignore[union-attr]
        mlp: Any = layer.mlp
        kind = liger.LigerPhi3SwiGLUMLP if hasattr(mlp, "gate_up_proj") else liger.LigerSwiGLUMLP
        mlp.forward = partial(kind.forward, mlp)


def _unchanged(model: nn.Module) -> None:
    pass


def _contender(name: str, change: Change, *, compiled: bool = False, needs: str = "transformers", **options: Any) -> Contender:
    def prepare(problem: Problem) -> Call:
        model = problem.model()
        change(model)
        if compiled:
            torch.compiler.reset()
            model.compile(dynamic=False)
        return call(problem, model)

    def obstacle(device: torch.device) -> str | None:
        return missing("transformers") or missing(needs) or (kernels_need_cuda(device) if needs == "liger_kernel" else None)

    return Contender(name, prepare, obstacle=obstacle, seconds=COMPILE_SECONDS if compiled else 60.0, **options)


CONTENDERS = [
    _contender("fastkron_py, save", _patched("save"), is_ours=True),
    _contender("fastkron_py, recompute", _patched("recompute"), is_ours=True),
    _contender("fastkron_py, save, torch.compile", _patched("save"), compiled=True, is_ours=True),
    _contender("Liger's SwiGLU", _with_liger, needs="liger_kernel"),
    _contender("torch.compile", _unchanged, compiled=True),
    _contender(STOCK, _unchanged),
]


def case(model: str, tokens: int, dtype: str, training: bool, quick: bool = False) -> Case:
    """A row."""
    _, width, hidden, *_ = SIZES[model]
    return Case(
        label=f"{model}, {tokens} tokens, {'training' if training else 'prefill'}",
        parameters={"model": model, "tokens": tokens, "dtype": dtype, "training": training},
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
        flops=2 * tokens * 3 * width * hidden * LAYERS * (3 if training else 1),  # of the MLPs alone
        quick=quick,
    )


register(
    Benchmark(
        name="gated_models",
        description="Two decoder layers of Hugging Face models, prefill and a training step: time, and peak memory beside one projection.",
        device="cuda",
        cases=[
            *[case(m, 4096, "bfloat16", training) for m in list(SIZES)[:3] for training in (False, True)],
            *[case("small", 64, "float32", training, quick=True) for training in (False, True)],
        ],
        contenders=CONTENDERS,
        inputs=inputs,
        check=check,
        baseline=STOCK,
        unit_bytes=lambda problem: problem.x.shape[1] * problem.config["intermediate_size"] * problem.x.element_size(),
        notes=(
            "A training step is forward and backward, without an optimizer; attention is torch's. FLOPs are those of the MLPs.",
            "Peak memory is the most that a call holds beyond weights and x; gradients are among it.",
        ),
    )
)

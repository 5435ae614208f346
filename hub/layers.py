"""Layers that `kernels.kernelize` puts in place of a model's own. They have no state: only ``forward`` is taken over."""

from typing import Any

from torch import Tensor, nn

from fastkron_py.gated.api import gated_mlp


def _forward(mlp: Any, x: Tensor, activation: str) -> Tensor:
    up, gate, down = mlp.up_proj, mlp.gate_proj, mlp.down_proj
    bias = None if up.bias is None else (up.bias, gate.bias)
    return gated_mlp(x, (up.weight, gate.weight), down.weight, bias=bias, down_bias=down.bias, activation=activation)


class SwiGLUMLP(nn.Module):
    """``down_proj(up_proj(x) * silu(gate_proj(x)))``, as in Llama, Mistral and Qwen."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return _forward(self, x, "silu")


class GeGLUMLP(nn.Module):
    """``down_proj(up_proj(x) * gelu(gate_proj(x)))`` with GELU's tanh form, as in Gemma."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return _forward(self, x, "gelu_tanh")

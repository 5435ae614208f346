"""Compile the gated layers' launches for an H100 on a machine that has none; a line of JSON for each kernel.

Run in a process of its own, without TRITON_INTERPRET: Triton decides at import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from compile_for_h100 import H100, compile_only, resources
from triton.runtime import driver

# name: (rows, hidden, in, activation, layout, dtype, precision, descriptors)
PROBLEMS: dict[str, tuple[int, int, int, str, str, torch.dtype, str, bool]] = {
    "8B": (4096, 14336, 4096, "silu", "interleaved", torch.bfloat16, "highest", True),
    "8B stacked": (4096, 14336, 4096, "silu", "stacked", torch.bfloat16, "highest", True),
    "two launches": (512, 14336, 4096, "silu", "interleaved", torch.bfloat16, "highest", True),
    "constants": (512, 2880, 2880, "clamped_swiglu", "stacked", torch.bfloat16, "highest", True),
    "one token": (1, 14336, 4096, "silu", "interleaved", torch.bfloat16, "highest", True),
    "TF32": (4096, 4096, 1024, "gelu_tanh", "interleaved", torch.float32, "high", True),
    "three passes": (4096, 1024, 512, "silu", "stacked", torch.float32, "highest", True),
    "ragged, by pointers": (1000, 500, 300, "gelu", "stacked", torch.float32, "highest", False),
}


@triton.jit
def _make_silu(a, k, K, tensors, PARAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    x = a.to(tl.float32)
    return x / (1 + tl.exp(-x))


@triton.jit
def _clipped(t, column, columns, tensors, PARAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(t, -PARAMS[0]), PARAMS[0])


def main() -> None:
    driver.set_active(H100())
    current = ""

    def describe(kernel: str, compiled: Any, options: dict[str, Any]) -> dict[str, Any]:
        epilogue = options.get("EPILOGUE")
        found = {"problem": current, "epilogue": epilogue.__name__ if epilogue else "", "warps": compiled.metadata.num_warps}
        ptx = compiled.asm["ptx"]
        # Where in the text: of the wait for the launch ahead, and of the last store; -1 for none.
        found |= {"early": options.get("EARLY"), "wait": ptx.rfind("griddepcontrol.wait"), "store": ptx.rfind("cp.async.bulk.tensor")}
        return {**found, "lets next": "griddepcontrol.launch_dependents" in ptx, **resources(compiled.asm["cubin"])}

    compile_only(describe)
    from fastkron_py.gated import launches as triton_gated
    from fastkron_py.gated.activations.registry import activation_names, find_activation
    from fastkron_py.runtime import device as devices
    from fastkron_py.runtime.builder import Builder
    from fastkron_py.runtime.gpu import HOPPER
    from fastkron_py.tiling.gemm import epilogue_plain
    from fastkron_py.tiling.gemm_launch import Gemm, add_gemm

    def run(add: Callable[..., Any], *given: Any, **more: Any) -> None:
        """Build and run the program of one function's launches on tensors."""
        build = Builder(given)
        add(build, *build.inputs, **more)
        build.program([])([t for t in given if t is not None])

    def forward(build: Builder, *wide: Any, **given: Any) -> None:
        triton_gated.add_forward(build, wide, **given)

    def recomputed(build: Builder, dy: Any, *wide: Any, **given: Any) -> None:
        triton_gated.add_recomputed_gradients(build, dy, wide, **given)

    for name, (rows, hidden, depth, activation, layout, dtype, precision, descriptors) in PROBLEMS.items():
        current = name
        gpu = replace(HOPPER, has_descriptors=descriptors)
        devices.gpu_of = lambda device, gpu=gpu: gpu  # type: ignore[assignment, misc]
        x, dy = torch.empty(rows, depth, dtype=dtype), torch.empty(rows, hidden, dtype=dtype)
        weight = torch.empty(2 * hidden, depth, dtype=dtype)
        weight = weight if layout == "interleaved" else weight.view(2, hidden, depth)
        chosen, bias = triton_gated.Options(activation, layout, precision, "triton"), torch.empty(weight.shape[:-1], dtype=dtype)
        run(forward, x, weight, None, None, options=chosen)
        run(forward, x, weight, None, bias, options=chosen, saving=True)
        if name == "8B stacked":  # a bias for each row
            run(forward, x, weight, None, torch.empty(rows, 2, hidden, dtype=dtype), options=chosen, saving=True)
        run(recomputed, dy, x, weight, None, None, options=chosen)
        run(recomputed, dy, x, weight, None, None, options=chosen, again=True)
        run(triton_gated.add_stored_gradients, dy, torch.empty(rows, 2 * hidden, dtype=dtype), options=chosen, in_place=True, again=True)
    devices.gpu_of = lambda device: HOPPER  # type: ignore[assignment]
    x, weight = torch.empty(512, 4096, dtype=torch.bfloat16), torch.empty(28672, 4096, dtype=torch.bfloat16)
    for activation in (name for name in activation_names() if find_activation(name).allows_overlap):
        current = f"beside, {activation}"
        run(forward, x, weight, None, None, options=triton_gated.Options(activation, "interleaved", "highest", "triton"))
    current = "a linear layer"
    x, weight = torch.empty(4096, 1024, dtype=torch.bfloat16), torch.empty(4096, 1024, dtype=torch.bfloat16)
    call = Gemm(epilogue_plain, prologue=_make_silu, value=_clipped, params=(3.0,))
    run(lambda build, *given: add_gemm(build, *given[:3], call, given[3]), x, weight, None, torch.empty(4096, 4096, dtype=torch.bfloat16))


if __name__ == "__main__":
    main()

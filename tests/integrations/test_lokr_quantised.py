"""LoKr layers around linear layers that bitsandbytes, torchao and quanto have quantised, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastkron_py.nn import LoKrLinear, load_lokr, lokr_state
from fastkron_py.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore")


def of_torchao(config: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=Exception)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(64, 128))
    quantization.quantize_(model, getattr(quantization, config)())
    return model[0]


def of_quanto(weights: str) -> Any:
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed", exc_type=Exception)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(64, 128))
    quanto.quantize(model, weights=getattr(quanto, weights))
    quanto.freeze(model)
    return model[0]


def of_bitsandbytes(kind: str) -> Any:
    modules = pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes is not installed", exc_type=Exception)  # type: ignore[arg-type]
    plain = nn.Linear(64, 128)
    made = (
        modules.Linear4bit(64, 128, compute_dtype=torch.float32)
        if kind == "4bit"
        else modules.Linear8bitLt(64, 128, has_fp16_weights=False)
    )
    made.load_state_dict(plain.state_dict())
    return made.to("cpu")


BASES: dict[str, Callable[[], Any]] = {
    "torchao_int8": lambda: of_torchao("Int8WeightOnlyConfig"),
    "torchao_float8": lambda: of_torchao("Float8WeightOnlyConfig"),
    "quanto_int8": lambda: of_quanto("qint8"),
    "quanto_int4": lambda: of_quanto("qint4"),
    "quanto_float8": lambda: of_quanto("qfloat8"),
    "bitsandbytes_4bit": lambda: of_bitsandbytes("4bit"),
    "bitsandbytes_8bit": lambda: of_bitsandbytes("8bit"),
}


@pytest.mark.parametrize("name", BASES)
def test_quantised_by_another_library(name: str) -> None:
    base = BASES[name]()
    layer = LoKrLinear.from_linear(base, 2, alpha=3.0)
    own = [p for n, p in layer.named_parameters() if n.startswith("lokr")]
    for p in own:
        nn.init.normal_(p, std=0.3)
    x = torch.randn(5, 64)
    w1, w2 = layer.adapter().w1.expanded().left.double(), layer.adapter().w2.expanded().double()
    want = base(x).detach().double() + layer.scale * x.double() @ torch.kron(w1, w2).mT.detach()
    for got in (layer(x), torch.no_grad()(layer)(x)):
        assert_close(got.detach(), want, steps=8)
    layer(x).square().sum().backward()
    assert all([p.grad is not None for p in own])
    assert layer.weight is base.weight
    for refused in (layer.merge, lambda: LoKrLinear.from_linear(base, 2, weight_decompose=True)):
        with pytest.raises(
            TypeError, match=r"^base_layer.weight: expected a floating-point parameter, .*dequantize the layer first.*; got"
        ):
            refused()
    model: Any = nn.ModuleDict({"q": base})
    assert load_lokr(model, lokr_state(nn.ModuleDict({"q": layer}))) == ("q",)
    assert_close(model["q"](x).detach(), want, steps=8)

"""GroupRational and GRKAN: what they begin as, fit to, keep and draw; variances that are kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from rational_cases import VERSIONS, WITHOUT_NOISE

from fastkron_py import backend, reference
from fastkron_py.nn import GRKAN, GroupRational
from fastkron_py.nn.rational_fit import FUNCTIONS, initial

# docs/guides/rational.md has the same table: largest errors on [-3, 3] at degrees (5, 4), rounded up.
ERRORS = {
    "identity": (0, 0, 0, 0),
    "relu": (1.4e-2, 1.4e-2, 1.5e-2, 1.4e-2),
    "leaky_relu": (1.3e-2, 1.3e-2, 1.3e-2, 1.3e-2),
    "gelu": (1.3e-2, 4.5e-4, 4.5e-4, 4.5e-4),
    "swish": (4.7e-7, 4.7e-7, 4.7e-7, 4.7e-7),
    "tanh": (1.5e-6, 1.5e-6, 1.5e-6, 1.5e-6),
    "sigmoid": (2e-9, 2e-9, 2e-9, 2e-9),
    "geglu": (1.6e-3, 1.4e-3, 8.4e-4, 8.4e-4),
    "swishglu": (7.5e-5, 7.5e-5, 8.1e-6, 8.1e-6),
}


def test_the_table_fits_each_version() -> None:
    """On ten times as many points as it was fitted on, by the reference; and Q has no pole there."""
    for version, name in product(WITHOUT_NOISE, FUNCTIONS):
        found = initial(name, (5, 4), version)
        x = torch.linspace(-3, 3, 10_001, dtype=torch.float64)
        y = reference.rational(x[:, None], found.a[None], found.b[None], version=version)[:, 0]
        error = float((y - FUNCTIONS[name](x)).abs().max())
        assert error <= ERRORS[name][WITHOUT_NOISE.index(version)] * 1.01 + 1e-15, (name, version)
        assert error == pytest.approx(found.error, rel=0.02, abs=1e-15), (name, version)


def test_the_identity_is_exact_and_can_learn(device: torch.device) -> None:
    for version in VERSIONS:
        act = GroupRational(8, 2, version=version, init="identity", device=device, dtype=torch.float64).eval()
        x = torch.randn(50, 8, device=device, dtype=torch.float64)
        y = act(x)
        assert float((y - x).detach().abs().max()) < 2e-14
        y.square().sum().backward()
        assert act.denominator.grad is not None
        assert bool((act.denominator.grad[:, 1] != 0).all())


@pytest.mark.parametrize("degrees", [(3, 2), (1, 1), pytest.param((7, 6), marks=pytest.mark.full)], ids=str)
def test_other_degrees_are_fitted_on_the_spot(degrees: tuple[int, int]) -> None:
    act = GroupRational(4, 2, degrees, init="swish", dtype=torch.float64)
    assert act.numerator.shape == (2, degrees[0] + 1)
    assert act.denominator.shape == (2, degrees[1])
    x = torch.linspace(-3, 3, 500, dtype=torch.float64)
    error = float((act.functions(x)[:, 0] - torch.nn.functional.silu(x)).abs().max())
    assert error < {(3, 2): 4e-3, (7, 6): 1e-6, (1, 1): 0.8}[degrees]


@pytest.mark.parametrize("version", ["C", pytest.param("A", marks=pytest.mark.full)])
def test_fit(version: str, device: torch.device) -> None:
    act = GroupRational(6, 3, version=version, device=device)
    error = act.fit(torch.cos, (-2.0, 2.0))
    x = torch.linspace(-2, 2, 777, dtype=torch.float64)
    found = act.functions(x)
    assert found.shape == (777, 3)
    assert error < 1e-4
    assert float((found - x.cos()[:, None]).abs().max()) <= error + 1e-6  # coefficients are float32
    y = act(x[:, None].expand(-1, 6).to(device, torch.float32))
    assert float((y.detach().cpu() - x.cos()[:, None]).abs().max()) <= error + 2e-6


def test_version_d_is_noisy_while_training_only(device: torch.device) -> None:
    act = GroupRational(8, 2, version="D", noise=0.5, device=device)
    x = torch.ones(3, 8, device=device)
    assert not torch.equal(act(x), act(x))
    act.eval()
    assert torch.equal(act(x), act(x))


def test_reset_and_repr() -> None:
    act = GroupRational(8, 2, init="relu", share_numerator=True)
    before = {k: v.clone() for k, v in act.state_dict().items()}
    with torch.no_grad():
        act.numerator.zero_()
        act.denominator.zero_()
    act.reset_parameters()
    assert all(torch.equal(v, before[k]) for k, v in act.state_dict().items())
    assert repr(act) == "GroupRational(8, num_groups=2, degrees=(5, 4), version='B', init='relu', share_numerator=True)"
    assert repr(GroupRational(8, 8, version="D")) == "GroupRational(8, num_groups=8, degrees=(5, 4), version='D', init='swish', noise=0.1)"


def test_plot() -> None:
    pytest.importorskip("matplotlib")
    act = GroupRational(8, 4, init="gelu")
    ax = act.plot(interval=(-2, 2), points=11)
    lines = ax.get_lines()
    assert len(lines) == 4
    x = torch.linspace(-2, 2, 11, dtype=torch.float64)
    for group, line in enumerate(lines):
        assert torch.equal(torch.as_tensor(line.get_ydata()), act.functions(x)[:, group])
    assert act.plot(ax) is ax
    assert len(ax.get_lines()) == 8


def test_functions_are_evaluated_whatever_backend_and_device_are_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton refuses tensors on the CPU outside of its interpreter."""
    act = GroupRational(8, 2, init="relu")
    x, expected, gain = torch.linspace(-1, 1, 5), act.functions(torch.linspace(-1, 1, 5)), act.gain()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with backend("triton"), torch.device("meta"):
        assert torch.equal(act.functions(x), expected)
        assert act.gain() == gain
        pytest.importorskip("matplotlib")
        assert len(act.plot(points=3).get_lines()) == 2


def test_symbolic_traces() -> None:
    """A function that fuses is one node; shapes are checked when the graph runs."""
    layer = GRKAN(8, 16, num_groups=4)
    traced, x = torch.fx.symbolic_trace(layer), torch.randn(3, 8)
    torch.testing.assert_close(traced(x), layer(x))
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 8\]; got shape \(3, 16\)"):
        traced(torch.randn(3, 16))


# ---- GRKAN -----------------------------------------------------------------------------------


def test_variance_is_kept() -> None:
    """Each linear layer's output has second moment 1 for a standard normal input of the function before it."""
    for version, init in product(["A", "B", "C"], [("identity", "swish"), ("identity", "gelu"), ("tanh", "relu"), ("swish", "sigmoid")]):
        layer = GRKAN(256, 512, 384, version=version, init=init)
        for act, linear in ((layer.act1, layer.fc1), (layer.act2, layer.fc2)):
            y = linear(act(torch.randn(2000, linear.in_features)))
            # A function's mean meets each output's weights once for all samples: 384 outputs leave 7 % to chance.
            assert float(y.detach().square().mean()) == pytest.approx(1.0, abs=0.22), (version, init)
            assert not bool(linear.bias.any())
        with torch.no_grad():
            hidden = layer.fc1(layer.act1(torch.randn(2000, 256)))
            assert float(hidden.var()) == pytest.approx(1.0, abs=0.22)


# ---- refusals --------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "groups": (lambda: GroupRational(10, 4), ValueError, "num_groups: expected a divisor of num_features, 10; got 4"),
    "no groups": (lambda: GroupRational(8, 0), ValueError, "num_groups: expected a positive integer; got 0"),
    "features": (lambda: GroupRational("8"), TypeError, "num_features: expected a positive integer; got str"),  # type: ignore[arg-type]
    "degrees": (lambda: GroupRational(8, degrees=(17, 4)), ValueError, r"degrees: expected m from 0 to 16 .*; got \(17, 4\)"),
    "one degree": (lambda: GroupRational(8, degrees=5), TypeError, r"degrees: expected a pair \(m, n\); got 5"),  # type: ignore[arg-type]
    "version": (lambda: GroupRational(8, version="X"), ValueError, "version: expected one of A, B, C, D, N; got 'X'"),
    "init": (lambda: GroupRational(8, init="softplus"), ValueError, "init: expected one of identity, relu, .*; got 'softplus'"),
    "init of another type": (lambda: GroupRational(8, init=None), TypeError, "init: expected one of .*; got None"),  # type: ignore[arg-type]
    "noise": (lambda: GroupRational(8, noise=2), ValueError, "noise: expected a number from 0 to 1; got 2"),
    "x": (lambda: GroupRational(8)(torch.ones(2, 6)), ValueError, r"x: expected shape \[..., 8\]; got shape \(2, 6\)"),
    "interval": (lambda: GroupRational(8).fit(torch.sin, (1.0, -1.0)), ValueError, "interval: expected"),
    "function": (lambda: GroupRational(8).fit(torch.log), ValueError, "function: expected finite values"),
    "dropout": (lambda: GRKAN(8, dropout=1.5), ValueError, "dropout: expected a probability; got 1.5"),
    "inits": (lambda: GRKAN(8, init="swish"), TypeError, "init: expected a pair of names"),  # type: ignore[arg-type]
    "interval of another type": (lambda: GroupRational(8).fit(torch.sin, 3), TypeError, "interval: expected .*; got 3"),  # type: ignore[arg-type]
    "end of another type": (lambda: GroupRational(8).fit(torch.sin, (0, "1")), TypeError, "interval: expected"),  # type: ignore[arg-type]
    "no function": (lambda: GroupRational(8).fit(3), TypeError, "function: expected a function of a tensor; got int"),  # type: ignore[arg-type]
    "plotted interval": (lambda: GroupRational(8).plot(interval=3), TypeError, "interval: expected"),  # type: ignore[arg-type]
    "plotted points": (lambda: GroupRational(8).plot(points=0), ValueError, "points: expected a positive integer; got 0"),
    "points": (lambda: GroupRational(8).functions(torch.ones(2, 2)), ValueError, r"x: expected shape \[points\]; got shape \(2, 2\)"),
    "share_numerator": (lambda: GroupRational(8, share_numerator="x"), TypeError, "share_numerator: expected True or False; got str"),  # type: ignore[arg-type]
    "dtype": (lambda: GroupRational(8, dtype=torch.int32), TypeError, "dtype: expected one of float16, .*; got torch.int32"),
    "bias": (lambda: GRKAN(8, bias="x"), TypeError, "bias: expected True or False; got str"),  # type: ignore[arg-type]
    "dropout of another type": (lambda: GRKAN(8, dropout="x"), TypeError, "dropout: expected a probability; got str"),  # type: ignore[arg-type]
    "hidden": (lambda: GRKAN(8, 12), ValueError, "num_groups: expected a divisor of num_features, 12; got 8"),
}


def test_refused() -> None:
    for call, error, message in BAD.values():
        with pytest.raises(error, match=message):
            call()


def test_layers_made_on_the_meta_device_leave_later_ones_their_table() -> None:
    with torch.device("meta"):
        assert GRKAN(16, num_groups=4).fc1.weight.is_meta
    assert GRKAN(16, num_groups=4)(torch.randn(2, 16)).isfinite().all()

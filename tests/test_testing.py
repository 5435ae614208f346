"""`assert_close` has to pass what is right and to catch what is wrong: most of these are negative controls."""

import math

import pytest
import torch

import fastkron_py
from fastkron_py.reference import kron_dense
from fastkron_py.testing import assert_close, tolerances

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]


def wide(t):
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


@pytest.fixture(params=[*REAL, *COMPLEX], ids=lambda d: str(d).removeprefix("torch."))
def case(request):
    """(result, reference, factors, x): 100 x 250 elements, each the sum of 60 products, rounded once."""
    return make_case(request.param, 100)


def make_case(dtype, rows):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 60, generator=generator, dtype=torch.float64).to(dtype)
    factors = [torch.randn(p, q, generator=generator, dtype=torch.float64).to(dtype) for p, q in [(3, 5), (4, 5), (5, 10)]]
    expected = wide(x) @ kron_dense([wide(f) for f in factors])
    return expected.to(dtype), expected, factors, x


def test_rounding_once_passes(case):
    actual, expected, _, _ = case
    assert_close(actual, expected)
    assert_close(actual, expected, steps=3)
    assert_close(actual.clone(), actual)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_the_bound_is_not_far_above_the_rounding(dtype):
    """Ten times the bound's error is refused, a tenth passes: the bounds mean what they say."""
    rms, largest = tolerances(dtype)
    assert largest == 4 * rms
    expected = torch.rand(1000, dtype=torch.float64) + 1
    exact = expected.to(dtype)
    noise = torch.where(torch.rand(1000) < 0.5, -1.0, 1.0).double()
    assert_close(exact, exact.double() * (1 + 0.1 * rms * noise))
    with pytest.raises(AssertionError, match="RMS error"):
        assert_close(exact, exact.double() * (1 + 10 * rms * noise))


@pytest.mark.parametrize(("dtype", "at"), [(torch.float32, (0, 0)), (torch.float64, (399, 249)), (torch.bfloat16, (123, 45))], ids=str)
def test_one_wrong_element_among_a_hundred_thousand_is_caught(dtype, at):
    actual, expected, _, _ = make_case(dtype, 400)
    wrong = actual.clone()
    wrong[at] += 0.3 * expected.abs().max().item()
    with pytest.raises(AssertionError) as error:
        assert_close(wrong, expected, steps=3)
    assert f"at {at}" in str(error.value)
    assert "1 of 100000 elements" in str(error.value)


def test_an_error_everywhere_is_caught_by_the_rms_bound():
    expected = torch.ones(1000, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"RMS error     2\.98e-06, allowed 1e-06"):
        assert_close((expected * (1 + 3e-6)).float(), expected, max_tol=1e-5)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_specials_have_to_stand_at_the_same_places(case, special):
    actual, expected, _, _ = case
    wrong, right = actual.clone(), expected.clone()
    wrong[7, 8] = special
    with pytest.raises(AssertionError, match=r"at \(7, 8\)"):
        assert_close(wrong, expected)
    right[7, 8] = special
    with pytest.raises(AssertionError, match=r"at \(7, 8\)"):
        assert_close(actual, right)
    assert_close(wrong, right)
    if abs(special) > 0:  # an infinity, of the other sign
        right[7, 8] = -special
        with pytest.raises(AssertionError, match="infinity of this sign"):
            assert_close(wrong, right)


def test_shapes_and_dtypes_have_to_agree():
    t = torch.ones(3, 4)
    with pytest.raises(AssertionError, match=r"shape \(3, 4\), but the reference has \(4, 3\)"):
        assert_close(t, t.T)
    with pytest.raises(AssertionError, match=r"shape \(3, 4\)"):
        assert_close(t, torch.ones(1, 4))  # no broadcasting
    for actual, expected in [(t, t.half()), (t, t.to(torch.complex128)), (t.to(torch.complex64), t.double()), (t.double(), t)]:
        with pytest.raises(AssertionError, match="cannot be compared"):
            assert_close(actual, expected)
    with pytest.raises(ValueError, match=r"actual: expected a floating-point or complex dtype; got torch\.int64"):
        assert_close(t.long(), t.long())
    with pytest.raises(ValueError, match="steps: expected at least 1; got 0"):
        assert_close(t, t, steps=0)


def test_a_zero_reference_allows_nothing():
    zero = torch.zeros(4, dtype=torch.float64)
    assert_close(zero.float(), zero)
    with pytest.raises(AssertionError, match="the reference is zero"):
        assert_close(zero.float() + 1e-20, zero)


def test_magnitude_judges_each_element_by_its_own_terms():
    """1e6 beside 1: an error of 1e-3 in the small element hides behind the large one, unless magnitude is given."""
    expected = torch.tensor([1e6, 1.0], dtype=torch.float64)
    actual = expected.float()
    actual[1] += 1e-3
    assert_close(actual, expected)
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        assert_close(actual, expected, magnitude=expected)
    # Cancellation: 1e6 - 1e6 + 1 in float32 may be off by 1e6 times the bound, and magnitude knows.
    assert_close(actual[1:], expected[1:], magnitude=torch.tensor([1e6]), rms_tol=math.inf)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close(actual[1:], expected[1:])


def test_half_results_below_the_normal_range():
    """float16 has a spacing of 6e-8 below 6e-5: rounding there is not relative any more."""
    expected = torch.rand(1000, dtype=torch.float64) * 1e-6
    assert_close(expected.half(), expected)
    with pytest.raises(AssertionError, match="largest error"):
        assert_close((expected + 1e-6).half(), expected)


def test_empty_and_scalar_results():
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.float64))
    assert_close(torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64))
    with pytest.raises(AssertionError, match=r"at \(\): 2.0 instead of 3.0"):
        assert_close(torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64))


def test_submodule_is_found_without_importing_it():
    assert fastkron_py.testing.assert_close is assert_close
    with pytest.raises(AttributeError, match="module 'fastkron_py' has no attribute 'testin'"):
        _ = fastkron_py.testin

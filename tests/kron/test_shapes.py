"""The shape rules against torch's own: a batched matmul with the dense product has the shape they promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkron_py.kron.checks import broadcast_batch, check_factor_shapes, result_shape
from fastkron_py.reference import kron_dense

batches = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3).map(tuple)
sizes = st.integers(0, 4)


@settings(max_examples=100)
@given(st.lists(batches, max_size=4))
def test_batches_broadcast_as_torch_does(drawn):
    try:
        expected = tuple(torch.broadcast_shapes(*drawn))
    except RuntimeError:
        with pytest.raises(ValueError, match="x: expected batch dimensions that broadcast; got "):
            broadcast_batch(drawn, "x")
    else:
        assert broadcast_batch(drawn, "x") == expected


@settings(max_examples=100)
@given(batches, sizes, st.lists(st.tuples(batches, sizes, sizes), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_result_shape_is_that_of_matmul_on_meta_tensors(batch, m, factors, left, vector):
    matrices = [(*b, p, q) for b, p, q in factors]
    k = math.prod(s[-1 if left else -2] for s in matrices)
    x = (k,) if vector else (*batch, k, m) if left else (*batch, m, k)
    try:
        dense = kron_dense([torch.empty(s, device="meta") for s in matrices])
        xt = torch.empty(x, device="meta")
        expected = tuple((dense @ xt if left else xt @ dense).shape)
    except RuntimeError:  # batches that do not broadcast
        with pytest.raises(ValueError, match="broadcast"):
            result_shape(x, matrices, left=left)
    else:
        assert result_shape(x, matrices, left=left) == expected
    wrong = (*x[:-2], k + 1, m) if left and not vector else (*x[:-1], k + 1)
    with pytest.raises(ValueError, match=f"got size {k + 1} in shape"):
        result_shape(wrong, matrices, left=left)


def test_errors_use_the_callers_names():
    with pytest.raises(ValueError, match=r"^a: .* of size 12 = 3 \* 4, the product of the rows of bs; got size 11 in shape \(2, 11\)$"):
        result_shape((2, 11), [(3, 3), (4, 4)], names=("a", "bs"))
    with pytest.raises(ValueError, match=r"^bs: expected at least one factor; got an empty sequence$"):
        check_factor_shapes([], "bs")
    with pytest.raises(ValueError, match=r"^bs\[1\]: expected a matrix \[P, Q\] or a batch \[\*batch, P, Q\]; got shape \(4,\)$"):
        check_factor_shapes([(3, 3), (4,)], "bs")


def test_sizes_may_be_beyond_64_bits():
    assert result_shape((8**40,), [(8, 9)] * 40) == (9**40,)

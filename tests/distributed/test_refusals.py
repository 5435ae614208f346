"""What ranks refuse: one error on every rank, with the same message, whether all have a wrong argument or one alone; and none waits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from products import random
from rank_pool import RankPool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fastkron_py.distributed import KroneckerProduct, KroneckerSum, Plan, Problem, ProcessGrid, kron_matmul
from fastkron_py.distributed.failures import rank_text

SIZES = (4, 5, 3)
N = math.prod(SIZES)


def ones(grid: ProcessGrid, *shape: int) -> torch.Tensor:
    """This rank's block."""
    return torch.ones(shape, dtype=torch.float64)[grid.block(shape)].to(grid.device)


class Given:
    """Good operands of one rank: blocks of x ``[8, N]`` and b ``[N, 4]``, and factors that are positive definite."""

    def __init__(self) -> None:
        self.grid = ProcessGrid((dist.get_world_size() // 2, 2))
        device = self.grid.device
        roots = [random(p, p, seed=p) for p in SIZES]
        self.factors = [(r @ r.mT / len(r) + torch.eye(len(r), dtype=r.dtype)).to(device) for r in roots]
        self.x, self.b = ones(self.grid, 8, N), ones(self.grid, N, 4)
        self.mask, self.power = self.b[:, 0] > 0, 2

    def changed(self, i: int, factor: Any) -> list[Any]:
        """The factors with another one."""
        return [*self.factors[:i], factor, *self.factors[i + 1 :]]

    def plan(self, transport: str = "packed", grid: tuple[int, int] | None = None) -> Any:
        return Plan(Problem(8, SIZES, SIZES, torch.float64), grid or self.grid.shape, (), 1, transport)


def verb(make: Callable[..., Any], method: str = "", **names: str) -> Callable[..., Any]:
    """A call of good operands, some of them replaced; of a function, or of a method of what it returns.

    Args:
        make: called with `Given`'s factors, and with those of its arguments that `factors`, `masses` and `s` are.
        method: called with the others.
        names: `Given`'s operands that the method takes.
    """

    def call(g: Given, **changes: Any) -> Any:
        own = {name: changes.pop(name) for name in ("masses", "s") if name in changes}
        made = make(g, changes.pop("factors", g.factors), **own)
        return getattr(made, method)(**{name: getattr(g, own) for name, own in names.items()} | changes) if method else made

    return call


def multiplied(g: Given, **changes: Any) -> Any:
    return kron_matmul(**{"x": g.x, "factors": g.factors, "grid": g.grid} | changes)


def product(g: Given, factors: Any) -> Any:
    return KroneckerProduct(factors, grid=g.grid)


def shifted(g: Given, factors: Any, s: Any = 0.1) -> Any:
    return KroneckerProduct(factors, grid=g.grid).add_diagonal(s)


def total(g: Given, factors: Any, masses: Any = None) -> Any:
    return KroneckerSum(factors, masses=masses, grid=g.grid)


def of_mesh(g: Given, other: bool = False) -> Any:
    grid = ProcessGrid((dist.get_world_size(), 1))
    part = DTensor.from_local(g.b, (grid if other else g.grid).mesh, [Shard(0), Shard(1)], run_check=False)
    return product(g, g.factors) @ part


VERBS: dict[str, Callable[..., Any]] = {
    "kron_matmul": multiplied,
    "by plan": lambda g, **changes: multiplied(g, **{"plan": g.plan()} | changes),
    "K": verb(product),
    "K @ DTensor": of_mesh,
    "K.solve": verb(product, "solve", b="b"),
    "K.matrix_power": verb(product, "matrix_power", n="power"),
    "A.logdet": verb(shifted, "logdet"),
    "A @": verb(shifted, "__matmul__", x="b"),
    "A.solve": verb(shifted, "solve", b="b"),
    "A.solve, masked": verb(shifted, "solve", b="b", mask="mask"),
    "S": verb(total),
    "S.solve": verb(total, "solve", b="b"),
    "S.slogdet": verb(total, "slogdet"),
    "S @": verb(total, "__matmul__", x="b"),
    "S.expm": verb(total, "expm"),
    "S.expm_multiply": verb(total, "expm_multiply", x="b"),
    "grid": lambda g, **changes: ProcessGrid(**changes),
    "scatter": lambda g, whole=None: g.grid.scatter(torch.ones(4, 2, device=g.grid.device) if whole is None else whole),
    "gather": lambda g, block=None: g.grid.gather(torch.ones(2, 2, device=g.grid.device) if block is None else block),
    "barrier": lambda g, instead=None: instead or g.grid.barrier(),
}


class Case(NamedTuple):
    """A call with wrong arguments.

    Attributes:
        verb: the call.
        changes: the wrong arguments, of `Given`.
        kind: of the error.
        message: how it begins; three dots stand for anything.
        who: "one" rank alone, whose number the message has at its end; "all"; or "another", where ranks differ.
    """

    verb: str
    changes: Mapping[str, Callable[[Given], Any]]
    kind: str
    message: str
    who: tuple[str, ...]

    @classmethod
    def of(cls, verb: str, error: str, who: tuple[str, ...] = ("one", "all"), /, **changes: Callable[[Given], Any]) -> Case:
        """With kind and message in one text."""
        return cls(verb, changes, *error.split(": ", 1), who)


SAME = ": expected the same on every rank; got "
NO_SIZE = "expected a matrix with rows and columns, or a positive integer n for the identity I_n; got 0"
DEFINITE = "factors, s: expected a positive definite K + diag(s) and preconditioner"
FINITE = "b: expected finite numbers; got NaN or an infinity"
DTYPES = "float32, float64, complex64, complex128"
ALL, ANOTHER = ("all",), ("another",)


def with_last(t: torch.Tensor, value: float) -> torch.Tensor:
    t = t.clone()
    t[-1, -1] = value
    return t


def replicated(g: Given) -> DTensor:
    return distribute_tensor(g.x.new_zeros(8, N), g.grid.mesh, [Replicate(), Shard(1)])


CASES = [
    # Products.
    Case.of(
        "kron_matmul",
        "ValueError: x: expected as many rows on all ranks of a row of the grid; got ... on rank",
        ANOTHER,
        x=lambda g: g.x[:-1],
    ),
    Case.of(
        "kron_matmul",
        "ValueError: x: expected this rank's block of 30 columns (block ... of 2; 60 columns in total); got shape (..., 29)",
        x=lambda g: g.x[:, :-1],
    ),
    Case.of(
        "kron_matmul",
        "ValueError: x: ...60 columns in total); got shape (..., 60). Did you pass the full tensor?",
        x=lambda g: g.x.repeat(1, 2),
    ),
    Case.of("kron_matmul", "ValueError: x: expected a matrix; got shape", x=lambda g: g.x[0]),
    Case.of(
        "kron_matmul",
        f"ValueError: dtype of x{SAME}...float64... on rank...float32",
        ANOTHER,
        x=lambda g: g.x.float(),
        factors=lambda g: [f.float() for f in g.factors],
    ),
    Case.of(
        "kron_matmul",
        "ValueError: x: expected a tensor on the grid's device",
        x=lambda g: g.x.to("meta"),
        factors=lambda g: [f.to("meta") for f in g.factors],
    ),
    Case.of(
        "kron_matmul",
        "ValueError: x: expected a matrix placed [Shard(0), Shard(1)]; ...got (Replicate(), Shard(dim=1))",
        ALL,
        x=replicated,
        grid=lambda g: None,
    ),
    Case.of("kron_matmul", "ValueError: grid: expected a ProcessGrid, unless x is a DTensor; got None", ALL, grid=lambda g: None),
    Case.of(
        "kron_matmul",
        "TypeError: factors[1]: expected x's dtype torch.float64; got torch.float32",
        factors=lambda g: g.changed(1, g.factors[1].float()),
    ),
    Case.of("kron_matmul", f"ValueError: shapes of factors{SAME}", ANOTHER, factors=lambda g: [torch.kron(*g.factors[:2]), g.factors[2]]),
    Case.of(
        "kron_matmul",
        "ValueError: factors[0]: expected a matrix with rows and columns, without batch dimensions; got shape (3, 4, 4)",
        factors=lambda g: g.changed(0, g.factors[0].expand(3, 4, 4)),
    ),
    Case.of(
        "kron_matmul",
        "ValueError: factors[2]: expected a matrix with rows and columns, ...got shape (3, 0)",
        factors=lambda g: g.changed(2, g.factors[2][:, :0]),
    ),
    Case.of("kron_matmul", "ValueError: x: expected ", factors=lambda g: g.changed(0, 8)),
    Case.of("kron_matmul", f'ValueError: alpha{SAME}"1.0" on rank...; "2.0" on rank', ANOTHER, alpha=lambda g: 2.0),
    Case.of("kron_matmul", f"ValueError: arguments that need gradients{SAME}", ANOTHER, x=lambda g: g.x.requires_grad_()),
    Case.of("kron_matmul", f'ValueError: reduction{SAME}"sum" on rank...; "mean" on rank', ANOTHER, reduction=lambda g: "mean"),
    Case.of("kron_matmul", "ValueError: reduction: expected one of sum, mean; got 'max'", reduction=lambda g: "max"),
    Case.of(
        "kron_matmul", "ValueError: z: expected this rank's block of the result's shape, since beta is not 0; got None", beta=lambda g: 1.0
    ),
    Case.of(
        "kron_matmul",
        "ValueError: z: expected this rank's block of the result, (..., 30); got shape (..., 29)",
        beta=lambda g: 1.0,
        z=lambda g: g.x[:, 1:],
    ),
    Case.of(
        "kron_matmul",
        "ValueError: plan: expected a plan for factors (4, 5, 3) x (4, 5, 3), left=False, on a ... x 2 grid; got one for",
        plan=lambda g: g.plan(grid=(dist.get_world_size(), 1)),
    ),
    Case.of(
        "by plan",
        "ValueError: plan: expected a plan for factors (4, 5, 3) x (4, 5, 3) with identities (1,), ",
        factors=lambda g: g.changed(1, 5),
    ),
    Case.of("by plan", f"ValueError: plan{SAME}...packed... on rank...peer memory", ANOTHER, plan=lambda g: g.plan("peer memory")),
    # Factors of products and operators.
    *[
        Case.of(name, f"{kind}: {message}", factors=lambda g, i=i, factor=factor: g.changed(i, factor))
        for name in ("kron_matmul", "K", "S")
        for i, factor, kind, message in (
            (0, 0, "ValueError", f"factors[0]: {NO_SIZE}"),
            (2, -4, "ValueError", "factors[2]: expected a matrix, or an integer n of 0 or more for the identity I_n; got -4"),
            (0, True, "TypeError", "factors[0]: expected a matrix, or an integer n for the identity I_n; got bool"),
            (0, 4.0, "TypeError", "factors[0]: expected a torch tensor"),
        )
    ],
    Case.of(
        "K",
        "ValueError: factors: expected at least one matrix, whose dtype and device the operator has; got identities",
        factors=lambda g: list(SIZES),
    ),
    Case.of(
        "K", "ValueError: factors: expected matrices without batch dimensions; got shape (1, 4, 4)", factors=lambda g: [g.factors[0][None]]
    ),
    Case.of(
        "K",
        "TypeError: factors[1]: expected factors[0]'s dtype torch.float32; got torch.float64",
        factors=lambda g: g.changed(0, g.factors[0].float()),
    ),
    Case.of("K", "ValueError: factors: expected tensors on the grid's device c", factors=lambda g: [f.to("meta") for f in g.factors]),
    Case.of(
        "S",
        "ValueError: factors[0]: expected a square matrix for a Kronecker sum; got shape (3, 4)",
        factors=lambda g: g.changed(0, g.factors[0][:-1]),
    ),
    Case.of("S", f"ValueError: dtype of factors{SAME}", ANOTHER, factors=lambda g: [f.half() for f in g.factors]),
    Case.of("S", "ValueError: masses: expected 3 matrices, one for each factor; got 2", masses=lambda g: g.factors[:2]),
    Case.of(
        "S", "ValueError: masses[0]: expected a matrix [4, 4], as factors[0]; got shape (5, 5)", masses=lambda g: g.changed(0, g.factors[1])
    ),
    Case.of("S", f"ValueError: masses[0]: {NO_SIZE}", masses=lambda g: g.changed(0, 0)),
    # Products and functions of sums.
    Case.of("K @ DTensor", "ValueError: x: expected a DTensor on a mesh of ranks [[", other=lambda g: True),
    Case.of("S @", "ValueError: x: expected ", x=lambda g: g.b[1:]),
    Case.of(
        "S @",
        "TypeError: x: expected a block or a DTensor: a Kronecker sum times an operator is neither a sum nor a product; got",
        ALL,
        x=lambda g: total(g, g.factors),
    ),
    Case.of("S.expm_multiply", "TypeError: t: expected a number or a 0-dimensional floating-point tensor; got str", t=lambda g: "1"),
    Case.of(
        "S.expm_multiply",
        "ValueError: masses: expected none for expm: give factors Mi^-1 Ai, the generator of M u' = S u",
        ALL,
        masses=lambda g: g.factors,
    ),
    Case.of(
        "S.slogdet",
        f"TypeError: factors: expected a dtype among {DTYPES} for eigenvectors; got torch.float16",
        ALL,
        factors=lambda g: [f.half() for f in g.factors],
    ),
    # Solves.
    *[
        Case.of(name, f"{kind}: {message}", b=value)
        for name in ("A.solve", "S.solve")
        for value, kind, message in (
            (lambda g: g.b[1:], "ValueError", "b: expected a matrix with "),
            (lambda g: g.b.float(), "TypeError", "b: expected the factors' dtype torch.float64; got torch.float32"),
        )
    ],
    Case.of("K.solve", "_LinAlgError: factors[0] of shape (4, 4): linalg.inv: ", factors=lambda g: g.changed(0, 0 * g.factors[0])),
    Case.of("S.solve", f"ValueError: arguments that need gradients{SAME}", ANOTHER, b=lambda g: g.b.requires_grad_()),
    Case.of(
        "S.solve",
        "_LinAlgError: factors: expected an invertible matrix for solve; got eigenvalues of 0 to 0 in absolute value",
        ALL,
        factors=lambda g: [0 * f for f in g.factors],
    ),
    Case.of(
        "S.solve",
        "ValueError: masses[0]: expected a positive definite matrix; got one that has no Cholesky decomposition",
        ALL,
        masses=lambda g: g.changed(0, -g.factors[0]),
    ),
    Case.of("A.solve", "TypeError: s: expected a number or a 0-dimensional floating-point tensor; got str", s=lambda g: "0.1"),
    Case.of(
        "A.solve",
        "ValueError: s: expected one number over a grid (operator.local.add_diagonal works on whole matrices",
        s=lambda g: g.b[:, 0],
    ),
    Case.of("A.solve, masked", "TypeError: mask: expected a tensor of bool; got torch.int32", mask=lambda g: g.mask.int()),
    Case.of("A.solve, masked", "ValueError: tolerance: expected a finite number, 0 or more; got -1.0", tolerance=lambda g: -1.0),
    Case.of("A.solve, masked", "TypeError: max_iterations: expected an integer; got float", max_iterations=lambda g: 1.5),
    Case.of("A.solve, masked", "TypeError: preconditioner: expected True, False or a function; got str", preconditioner=lambda g: "eigh"),
    Case.of(
        "A.solve, masked",
        "ValueError: factors[0]: expected a symmetric matrix for conjugate gradients; got one that ",
        factors=lambda g: g.changed(0, g.factors[0].triu()),
    ),
    # Numbers that differ.
    *[
        Case.of(name, f'ValueError: s{SAME}"0.1" on rank...; "3.0" on rank 1', ANOTHER, s=lambda g: 3.0)
        for name in ("A.solve", "A.solve, masked", "A.logdet")
    ],
    Case.of("A @", f'ValueError: beta{SAME}"0.1" on rank...; "3.0" on rank 1', ANOTHER, s=lambda g: 3.0),
    Case.of("K.matrix_power", f'ValueError: arguments{SAME}["2"] on rank...; ["3"] on rank 1', ANOTHER, n=lambda g: 3),
    Case.of("S.expm", f'ValueError: arguments{SAME}["1.0"] on rank...; ["3.0"] on rank 1', ANOTHER, t=lambda g: 3.0),
    Case.of("S.expm_multiply", f'ValueError: arguments{SAME}["1.0"] on rank...; ["3.0"] on rank 1', ANOTHER, t=lambda g: 3.0),
    # Conjugate gradients that cannot go on.
    Case.of("A.solve, masked", f"ValueError: {DEFINITE}", ALL, factors=lambda g: g.changed(0, -g.factors[0])),
    Case.of(
        "A.solve, masked", f"ValueError: {DEFINITE}", ALL, factors=lambda g: g.changed(0, -g.factors[0]), preconditioner=lambda g: False
    ),
    Case.of("A.solve, masked", f"ValueError: {DEFINITE}", ALL, preconditioner=lambda g: lambda r: -r),
    Case.of(
        "A.solve, masked", f"ValueError: {DEFINITE}", ALL, preconditioner=lambda g: lambda r: r * (math.nan if dist.get_rank() == 1 else 1)
    ),
    *[
        Case.of("A.solve, masked", f"ValueError: {FINITE}", ANOTHER, b=lambda g, value=value: with_last(g.b, value))
        for value in (math.nan, math.inf)
    ],
    Case.of("A.solve, masked", f"ValueError: {FINITE}", ALL, b=lambda g: g.b * math.nan),
    # Grids.
    Case.of("grid", "ValueError: shape: expected GM * GK = ..., the number of ranks; got 3 * 5 = 15", shape=lambda g: (3, 5)),
    Case.of("grid", "ValueError: shape: expected two positive numbers, GM and GK; got (-1, -4)", shape=lambda g: (-1, -4)),
    Case.of("grid", "ValueError: shape: expected two positive numbers, GM and GK; got (4,)", shape=lambda g: (4,)),
    Case.of("grid", "TypeError: shape: expected (GM, GK), a DeviceMesh or None; got int", shape=lambda g: 4),
    Case.of("grid", "TypeError: shape: expected (GM, GK), a DeviceMesh or None; got (2, 2.0)", shape=lambda g: (2, 2.0)),
    Case.of("grid", f"ValueError: shape{SAME}[..., 1] on ...; [1, ...] on rank 1", ANOTHER, shape=lambda g: (1, dist.get_world_size())),
    Case.of("grid", "ValueError: device: expected cuda or cpu; got meta", device=lambda g: "meta"),
    Case.of("grid", "TypeError: device: expected a torch device, its name or None; got int", device=lambda g: 0),
    Case.of("grid", "TypeError: check_factors: expected True, False or None; got int", check_factors=lambda g: 1),
    Case.of("grid", f"ValueError: check_factors{SAME}false on rank...; true on rank 1", ANOTHER, check_factors=lambda g: True),
    Case.of("scatter", f"ValueError: shape of whole{SAME}[4, 2] on rank", ANOTHER, whole=lambda g: torch.ones(5, 2, device=g.grid.device)),
    Case.of("scatter", "TypeError: whole: expected a torch tensor; got list", whole=lambda g: [1.0]),
    Case.of("gather", f"ValueError: dtype of block{SAME}", ANOTHER, block=lambda g: torch.ones(2, 2, device=g.grid.device).double()),
    Case.of("gather", "ValueError: block: expected blocks of a matrix", ANOTHER, block=lambda g: torch.ones(4, 2, device=g.grid.device)),
    Case.of(
        "barrier",
        f'ValueError: call{SAME}"ProcessGrid.barrier" on rank...; "KroneckerProduct" on rank 1',
        ANOTHER,
        instead=lambda g: product(g, g.factors),
    ),
]


def refused(i: int, who: str) -> None:
    """The call, with wrong arguments on rank 1 or on all."""
    case, g = CASES[i], Given()
    wrong = who == "all" or dist.get_rank() == 1
    VERBS[case.verb](g, **({name: make(g) for name, make in case.changes.items()} if wrong else {}))


@pytest.mark.parametrize("who", ["one", "all", "another"])
def test_every_rank_raises_the_same(ranks: RankPool, who: str) -> None:
    for i, case in enumerate(CASES):
        if who in case.who:
            outcomes = ranks.outcomes(refused, i, who)
            assert [o.error for o in outcomes] == [case.kind] * len(outcomes), (case, outcomes[0].trace)
            assert len({o.message for o in outcomes}) == 1, case
            assert re.match(re.escape(case.message).replace(re.escape("..."), ".*"), outcomes[0].message), (case, outcomes[0].message)
            assert outcomes[0].message.endswith("(on rank 1)") == (who == "one"), outcomes[0].message


def on_grids(call, odd_mesh=False):
    """Odd ranks have another grid of the same ranks than even ones."""
    size, odd = dist.get_world_size(), dist.get_rank() % 2
    one = ProcessGrid((size // 2, 2))
    table = torch.arange(size).view(2, -1).mT.contiguous() if odd_mesh else torch.arange(size).view(-1, 2)
    other = ProcessGrid((1, size)) if not odd_mesh else ProcessGrid(DeviceMesh(one.device.type, table))
    operators = [KroneckerProduct(Given().factors, grid=grid) for grid in (one, other)]
    grid, operator = (other, operators[1]) if odd else (one, operators[0])
    if call == "kron_matmul":
        kron_matmul(ones(grid, 8, N), Given().factors, grid=grid)
    if call == "whole":  # odd ranks' blocks do not fit the even ones' grid either
        kron_matmul(torch.ones(8, N, dtype=torch.float64, device=grid.device), Given().factors, grid=grid)
    if call == "KroneckerProduct":
        KroneckerProduct(Given().factors, grid=grid)
    if call == "solve":
        operator.solve(ones(grid, N, 8))
    if call == "solve with a shift":
        operator.add_diagonal(0.5).solve(ones(grid, N, 8))
    if call == "logdet":
        operator.add_diagonal(0.5).logdet()


@pytest.mark.parametrize("call", ["kron_matmul", "whole", "KroneckerProduct", "solve", "solve with a shift", "logdet"])
def test_other_grids_of_the_same_ranks(ranks: RankPool, call: str) -> None:
    even, odd = (rank_text(range(start, ranks.world_size, 2)) for start in (0, 1))
    layouts = f"{ranks.world_size // 2} x 2 on {even}; 1 x {ranks.world_size} on {odd}"
    for outcome in ranks.outcomes(on_grids, call):
        assert outcome.error == "ValueError", outcome.trace
        assert outcome.message == f"grid: expected the same on every rank; got {layouts}"


def test_ranks_in_another_order(ranks: RankPool) -> None:
    for outcome in ranks.outcomes(on_grids, "kron_matmul", odd_mesh=True):
        assert outcome.error == "ValueError", outcome.trace
        assert f"on {rank_text(range(0, ranks.world_size, 2))}; " in outcome.message
        assert " of a mesh on " in outcome.message


def without_gradients(what):
    """Rank 1 alone is under no_grad."""
    grid = ProcessGrid((dist.get_world_size(), 1))
    own = [f.requires_grad_(what == "needed") for f in Given().factors]
    K, S, b = KroneckerProduct(own, grid=grid), KroneckerSum([2 * f for f in own], grid=grid), ones(grid, N, 2)
    with torch.set_grad_enabled(dist.get_rank() != 1):
        return [K @ b, K.solve(b), K.add_diagonal(1.0).solve(b), K.logdet(), S @ b, S.solve(b), S.logdet(), S.expm_multiply(b)]


def test_no_grad_on_one_rank(ranks: RankPool) -> None:
    ranks.run(without_gradients, "not needed")
    for outcome in ranks.outcomes(without_gradients, "needed"):
        assert outcome.error == "ValueError", outcome.trace
        assert outcome.message.startswith("arguments that need gradients: expected the same on every rank; got ")

"""What each family of kernels, and each special case within one, is worth: its lines, modelled gain and measured gain. Needs no GPU.

    TRITON_INTERPRET=1 python -m benchmarks.kron.ablation                           # a Markdown table of all parts
    TRITON_INTERPRET=1 python -m benchmarks.kron.ablation --part slice_pair tile    # of those whose names begin so

The benchmarks' rows and the golden problems are planned without the part. The modelled gain is the device's time without it over that with
it, where plans change. The measured gain is of single launches, those of benchmarks/results/calibration_h100.csv: of all that compute the
same, the time of the fastest one that is left over that of the fastest one, where these differ.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final
from unittest.mock import patch

from benchmarks.kron import calibrate
from benchmarks.kron.choices import golden, named
from benchmarks.kron.programs import pretending
from fastkron_py.kron import families, planner
from fastkron_py.kron.families import fragments, fragments_gradients, slice_pair, tile, tile_gradients, torch_products, wgmma, whole_row
from fastkron_py.kron.plan import gradients as plans

KRON: Final = Path(planner.__file__).parent
MEASURED: Final = Path(__file__).parents[1] / "results/calibration_h100.csv"

Patches = list[tuple[Any, str, Any]]  # what leaves a part out: (module, name, value)


def _without(family: Any, is_left_out: Callable[[Any, Any], bool] = lambda asked, offer: True, name: str = "offers") -> Patches:
    """A family without some of its offers, by the segment or the group that they are for."""
    made = getattr(family, name)

    def offers(asked: Any) -> Any:
        found = made(asked)
        return found if isinstance(found, str) else [offer for offer in found if not is_left_out(asked, offer)] or "is left out"

    return [(family, name, offers)]


def _no_gradients(family: Any, *sections: str) -> Patches:
    return _without(family, lambda group, offer: not sections or offer.prices in sections, "gradient_offers")


def _sides(offer: Any) -> list[int]:
    return [side for step in offer.launch.steps for side in (step.p, step.q)]


_FRAGMENTS: Final = "families/fragments.py hopper/multiply.py hopper/tile.py"
_BACKWARD: Final = "families/fragments_gradients.py hopper/backward.py"
_PAIRS: Final = "hopper/backward.py:pair,_times,_permuted,_store families/fragments_gradients.py:pair,side,permutation,constant"
# The files of `kron`, and functions whose names hold a word, that serve a part alone; and what leaves it out.
PARTS: Final[dict[str, tuple[str, Patches]]] = {
    "narrow": ("families/narrow.py kernels/narrow.py", _without(families.narrow) + _no_gradients(families.narrow)),
    "narrow: gradients": ("families/narrow.py:gradient kernels/narrow.py:bwd", _no_gradients(families.narrow)),
    "small_factors": ("families/butterfly.py:small,group kernels/butterfly.py:small,part,join,column,_times", _without(families.butterfly)),
    "fragments": (f"{_FRAGMENTS} {_BACKWARD}", _without(fragments) + _no_gradients(fragments_gradients)),
    "fragments: half types": ("", _without(fragments, lambda s, offer: s.problem.itemsize == 2)),
    "fragments: one step": ("", _without(fragments, lambda s, offer: len(offer.launch.steps) == 1)),
    "fragments: steps over 64": ("hopper/tile.py:fetch,buffer", _without(fragments, lambda s, offer: max(_sides(offer)) > 64)),
    "fragments: padded steps": ("", _without(fragments, lambda s, offer: fragments.Chain.of(offer.launch.steps).is_padded)),
    "fragments: products by warps": ("hopper/multiply.py:warp", [(fragments, "WARP_WIDTH", 0)]),
    "fragments: balanced neighbours": ("plan/steps.py:balanced", [(fragments, "balanced", lambda ps, qs, count: (0, len(ps)))]),
    "fragments: gradients": (_BACKWARD, _no_gradients(fragments_gradients)),
    "fragments: gradients of pairs": (_PAIRS, _no_gradients(fragments_gradients, "fragments_pair_gradients")),
    "fragments: gradients without dx": ("", _no_gradients(fragments_gradients, "fragments_factor_gradients")),
    "fragments: neighbours of 8": ("", [(fragments_gradients, "NARROW", -1)]),
    "slice_pair": ("families/slice_pair.py kernels/row_pair.py", _without(slice_pair)),
    "slice_pair: three steps": ("families/slice_pair.py:triple,turns", _without(slice_pair, lambda s, offer: len(offer.launch.steps) > 2)),
    "slice_pair: steps over 128": ("", _without(slice_pair, lambda s, offer: max(_sides(offer)) > 128)),
    "slice_pair: four stages": ("", [(slice_pair, "OF", slice_pair.OF._replace(small_slice=0, small_tile=0, most_stages=3))]),
    "slice_pair: two warps": ("", [(slice_pair, "OF", slice_pair.OF._replace(least_of_two=1 << 30, narrow_tile=1 << 30))]),
    "whole_row": ("families/whole_row.py hopper/whole_row.py", _without(whole_row)),
    "whole_row: steps of 64": ("", _without(whole_row, lambda s, offer: max(_sides(offer)) > 32)),
    "whole_row: steps of 8": ("hopper/whole_row.py:paired", _without(whole_row, lambda s, offer: min(_sides(offer)) < 16)),
    "wgmma": ("families/wgmma.py hopper/wide.py", _without(wgmma) + _no_gradients(wgmma)),
    "wgmma: products of half types": ("", _without(wgmma, lambda s, offer: s.problem.itemsize == 2)),
    "wgmma: gradients": ("families/wgmma.py:gradient", _no_gradients(wgmma)),
    "torch_products: matmul": ("families/torch_products.py:matmul", _without(torch_products, lambda s, o: o.launch.config == "matmul")),
    "torch_products: copying": (
        "families/torch_products.py:copy kernels/matmul_step.py",
        _without(torch_products, lambda s, o: o.launch.config == "copying"),
    ),
    "torch_products: gemm": (
        "families/torch_products.py:gemm matmul_step.py:gemm",
        _without(torch_products, lambda s, o: o.launch.config == "gemm"),
    ),
    "torch_products: copying gradients": ("", _no_gradients(torch_products, "copying_gradients")),
    "tile: chains": ("families/tile.py:chain kernels/sliced_multiply.py:fused", _without(tile, lambda s, o: len(o.launch.steps) > 1)),
    "tile: complex merges": ("", [(tile, "COMPLEX_MERGES", (tile.CHAIN_WIDTH,))]),
    "tile: fused gradients": (
        "kernels/gradients.py:fused,last,add,store,valid",
        _no_gradients(tile_gradients, "tile_gradients", "tile_chain_gradients"),
    ),
    "planner: in place": ("planner.py:stay,in_place,repriced", [(planner, "_may_stay", lambda problem: False)]),
    "planner: orders": ("planner.py:repriced", [(planner, "OF", planner.OF._replace(most_ordered=0))]),
    "planner: ties to earlier families": ("", [(planner, "OF", planner.OF._replace(tie=-1.0)), (planner, "MICROSECOND", 0.0)]),
    "gradients: groups of two": ("", [(plans, "_candidates", lambda *of, made=plans._candidates: [g for g in made(*of) if g[0] == g[1]])]),
    "gradients: orders": ("plan/gradients.py:order", [(plans, "_orders", lambda groups, of: [(plans.seconds(groups, of), [*groups])])]),
    "gradients: saved intermediates": ("plan/gradients.py:cut gradients.py:saved,saving,cut", [(plans, "find_cut", lambda problem: None)]),
}


def lines_of(code: str) -> tuple[int, int]:
    """Lines and files of a part's code."""
    found = dict[Path, set[int]]()
    for file, _, words in [each.partition(":") for each in code.split()]:
        tree, mine = ast.parse((KRON / file).read_text(encoding="utf-8")), found.setdefault(KRON / file, set())
        for node in tree.body:
            if any([word in getattr(node, "name", "" if words else "all").lower() for word in words.split(",")]):
                mine.update(range(node.lineno - len(getattr(node, "decorator_list", ())), (node.end_lineno or 0) + 1))
    return sum(map(len, found.values())), len(found)


def planned(problem: Any) -> tuple[float, Any]:
    """Modelled seconds on the device, and the plan; of a backward pass with those of its multiply. Infinity if no family can multiply."""
    if isinstance(problem, tuple):
        cut = plans.find_cut(problem[1])
        passes = [problem[1]] if cut is None else [cut.first, cut.second]
        return sum(map(plans.both_passes, passes)), [plans.gradient_plan(each) for each in passes]
    try:
        made = planner.plan(replace(problem, counts_host=False))
    except ValueError:
        return float("inf"), None
    return made.seconds, (made.launches, made.transposed)


def is_offered(row: calibrate.Row) -> bool:
    """Whether a family offers a measured launch."""
    if row.is_gradient:
        found = [bids for bids in families.gradient_offers(calibrate.group_of(row)).values() if not isinstance(bids, str)]
        return any([bid.prices == row.family for bids in found for bid in bids])
    return calibrate.offer_of(row) is not None


@contextmanager
def left_out(patches: Patches) -> Iterator[None]:
    """Plan without a part inside the block, on an H100 that is not there; what was planned before is forgotten, and so is what is then."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("fastkron_py.kron")]:
            for function in [made for made in vars(sys.modules[name]).values() if hasattr(made, "cache_clear")]:
                function.cache_clear()

    with ExitStack() as stack, pretending():
        for change in patches:
            stack.enter_context(patch.object(*change))
        forget()
        yield
        forget()


def summary(losses: dict[str, float], count: int) -> str:
    """How many of count changed, their mean loss, and the largest one."""
    name = max(losses, key=losses.__getitem__, default="")
    return f"{len(losses)} of {count} | " + (f"{geometric_mean(losses.values()):.3f} | {losses[name]:.2f} {name}" if losses else "|")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kron.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="*", default=[""], help="what the names of the parts begin with")
    wanted, rows, measured = tuple(parser.parse_args(arguments).part), [dict(named()), dict(golden())], defaultdict[Any, list[Any]](list)
    problems = dict.fromkeys([problem for of in rows for found in of.values() for problem in found])
    with left_out([]):
        old = {problem: planned(problem) for problem in problems}
        for row in filter(is_offered, calibrate.read(MEASURED)):
            measured[row.task].append(row)
    print(
        "| part | lines, files |" + "".join([f" {of} | mean | largest |" for of in ("benchmarks", "golden problems", "measured launches")])
    )
    print("| --- " * 11 + "|")
    for part, (code, patches) in PARTS.items():
        if not part.startswith(wanted):
            continue
        with left_out(patches):
            new = {problem: planned(problem) for problem in problems}
            left = {task: min([row.us for row in launches if is_offered(row)], default=0.0) for task, launches in measured.items()}
        shown = []
        for of in rows:
            changed = {name: found for name, found in of.items() if any([old[p] != new[p] for p in found])}
            losses = {name: sum([new[p][0] for p in found]) / sum([old[p][0] for p in found]) for name, found in changed.items()}
            shown.append(summary(losses, len(of)))
        best = {task: min([row.us for row in launches]) for task, launches in measured.items()}
        slower = {" ".join(map(str, task)): us / best[task] for task, us in left.items() if us > best[task]}
        counts = "" if not code else "{} in {}".format(*lines_of(code))
        print(f"| {part} | {counts} | {' | '.join([*shown, summary(slower, len(best))])} |", flush=True)


if __name__ == "__main__":
    main()

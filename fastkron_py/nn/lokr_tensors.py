"""One adapter as the tensors of a file: its rank and scale, and its rows or columns cut for several layers or joined for one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from fastkron_py.adapters.factor import product
from fastkron_py.runtime.errors import value_error

Tensors = Mapping[str, Tensor]
MAX_TERMS: Final = 8  # of a part whose rows do not begin with rows of w1: each term takes the time of an adapter


def holder(tensors: Tensors, factor: int, rows: bool) -> tuple[str, int]:
    """The tensor, and its dimension behind those of terms, that has the rows or the columns of w1 or w2."""
    whole = f"lokr_w{factor}"
    if whole in tensors:
        return whole, 0 if rows else 1
    is_turned = factor == 2 and "lokr_t2" in tensors  # Tucker's left matrix is [rank, out2]
    return (f"{whole}_a", 1 if is_turned else 0) if rows else (f"{whole}_b", 1)


def sizes_of(tensors: Tensors, rows: bool) -> tuple[int, int]:
    """Rows, or columns, of w1 and of w2, of each term; columns of a convolution's pair are in2 * pixels."""
    terms = tensors[holder(tensors, 1, True)[0]].ndim - 2
    first, second = (tensors[name].shape[terms + dim] for name, dim in (holder(tensors, factor, rows) for factor in (1, 2)))
    return first, second


def scaled(tensors: Tensors, scale: float) -> dict[str, Tensor]:
    """The tensors, with the scale in w1."""
    name = holder(tensors, 1, True)[0]
    return {**tensors, name: tensors[name] * scale}


def rank_of(tensors: Tensors) -> int | None:
    """The rank of the pairs; None of two whole factors.

    Raises:
        ValueError: two pairs of different ranks.
    """
    terms = tensors[holder(tensors, 1, True)[0]].ndim - 2
    ranks = {name: tensors[name].shape[terms] for name in ("lokr_w1_b", "lokr_w2_b") if name in tensors}
    if len(set(ranks.values())) > 1:
        raise value_error(
            "lokr_w1_b and lokr_w2_b", "one rank, which alpha is divided by", f"ranks {ranks['lokr_w1_b']}, {ranks['lokr_w2_b']}"
        )
    return next(iter(ranks.values()), None)


def whole(tensors: Tensors, name: str) -> Tensor:
    """``lokr_w1`` as a matrix, or ``lokr_w2``, which of a convolution is whatever there is."""
    return tensors[name] if name in tensors else product(tensors[f"{name}_a"], tensors[f"{name}_b"])


# ---- cutting ---------------------------------------------------------------------------------------


def cut_rows(tensors: Tensors, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Adapters whose rows, one after the other, are the adapter's.

    Parts that begin with rows of w1 get these rows. Others are sums: w2 is cut into ``terms`` equal pieces, and each term has a piece and
    the rows of w1 that meet it. Sizes are rows of each part.

    Raises:
        ValueError: a part that would be a sum of too many terms, or one of a convolution or of a decomposed weight.
    """
    name1, (name2, dim) = holder(tensors, 1, True)[0], holder(tensors, 2, True)
    out1, out2 = sizes_of(tensors, rows=True)
    if all([size % out2 == 0 for size in sizes]):
        parts = [{**tensors, name1: rows} for rows in tensors[name1].split([size // out2 for size in sizes])]
    elif out1 == 1:
        parts = [{**tensors, name2: rows} for rows in tensors[name2].split(list(sizes), dim)]
    else:
        parts = _sums(tensors, sizes)
    if "dora_scale" in tensors:
        magnitudes = tensors["dora_scale"]
        if magnitudes.shape[0] == 1:
            raise value_error(
                "dora_scale", "magnitudes of outputs, to be cut for several layers", f"shape {tuple(magnitudes.shape)}, of inputs"
            )
        parts = [{**part, "dora_scale": rows} for part, rows in zip(parts, magnitudes.split(list(sizes)), strict=True)]
    return parts


def _sums(tensors: Tensors, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    name1, name2 = (holder(tensors, factor, True)[0] for factor in (1, 2))
    out1, out2 = sizes_of(tensors, rows=True)
    piece = math.gcd(out2, *sizes)
    terms = out2 // piece
    if terms > MAX_TERMS or tensors[name1].ndim + tensors[name2].ndim > 4 or {"lokr_t2", "dora_scale"} & tensors.keys():
        expected = f"rows that are multiples of {out2}, the rows of w2, or a linear layer's sum of at most {MAX_TERMS} terms, undecomposed"
        raise value_error(
            "parts", f"{expected} (fuse the model's layers, or merge the adapter with the whole layer)", f"{list(sizes)} rows"
        )
    rows = tensors[name1].repeat_interleave(terms, 0)  # row i * terms + t meets piece t of w2
    meets = torch.eye(terms, dtype=rows.dtype, device=rows.device).repeat(1, out1)
    rows = rows * meets.unsqueeze(2)  # [terms, out1 * terms, ...]
    same = {name: t.expand(terms, -1, -1) if name.startswith("lokr_") else t for name, t in tensors.items()}
    same[name2] = tensors[name2].unflatten(0, (terms, piece))
    return [{**same, name1: part} for part in rows.split([size // piece for size in sizes], 1)]


def cut_columns(tensors: Tensors, parts: int) -> list[dict[str, Tensor]]:
    """Adapters whose columns, one after the other, are the adapter's, in equal parts: their results on parts of x add up.

    Raises:
        ValueError: columns of w1 that the parts cannot share, or magnitudes, which are those of whole rows.
    """
    name1, name2 = (holder(tensors, factor, False)[0] for factor in (1, 2))
    in1, in2 = sizes_of(tensors, rows=False)
    if "dora_scale" in tensors:
        raise value_error("dora_scale", "none in a layer whose inputs are split: its norms need all of them", "one")
    if in1 % parts == 0:
        return [{**tensors, name1: columns} for columns in tensors[name1].chunk(parts, 1)]
    if in1 == 1 and in2 % parts == 0:
        return [{**tensors, name2: columns} for columns in tensors[name2].chunk(parts, 1)]
    raise value_error("columns of w1", f"a multiple of {parts}, the number of parts", in1)


# ---- joining ---------------------------------------------------------------------------------------


def join_rows(parts: Sequence[Tensors | None], sizes: Sequence[int]) -> dict[str, Tensor]:
    """One adapter whose rows are those of the parts, one after the other: a sum with a term for each part.

    Parts have the scale in w1, and this many rows each; None has no adapter.

    Raises:
        ValueError: parts of other sizes, convolutions, decomposed weights.
    """
    found = [part for part in parts if part is not None]
    if any(["dora_scale" in part or "lokr_t2" in part or whole(part, "lokr_w2").ndim > 2 for part in found]):
        raise value_error("parts", "adapters of linear layers without dora_scale, to be joined for one layer", "others")
    shapes = {(whole(part, "lokr_w1").shape[1], *whole(part, "lokr_w2").shape) for part in found}
    if len(shapes) > 1:
        raise value_error("parts", "adapters of one size of w2, to be joined for one layer", f"sizes {sorted(shapes)}")
    out2 = whole(found[0], "lokr_w2").shape[0]
    if any([size % out2 for size in sizes]):
        raise value_error("parts", f"rows that are multiples of {out2}, the rows of w2", f"{list(sizes)} rows")
    rows = [size // out2 for size in sizes]
    w1 = whole(found[0], "lokr_w1").new_zeros(len(found), sum(rows), whole(found[0], "lokr_w1").shape[1])
    for term, i in enumerate([i for i, part in enumerate(parts) if part is not None]):
        w1[term, sum(rows[:i]) : sum(rows[: i + 1])] = whole(found[term], "lokr_w1")
    if len({tuple(part["lokr_w2_b"].shape) if "lokr_w2_b" in part else None for part in found}) == 1 and "lokr_w2_b" in found[0]:
        return {"lokr_w1": w1, **{name: torch.stack([part[name] for part in found]) for name in ("lokr_w2_a", "lokr_w2_b")}}
    return {"lokr_w1": w1, "lokr_w2": torch.stack([whole(part, "lokr_w2") for part in found])}

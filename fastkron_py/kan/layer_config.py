"""The arguments of a polynomial KAN layer that are no tensors: basis, parameters, normalisation, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastkron_py.kan.bases.registry import Basis, find_basis
from fastkron_py.kan.bases.table import TABLE_DERIVATIVE_MAKER, TABLE_MAKER, basis_table, table_derivatives, table_values
from fastkron_py.kan.normalizers import NORMALIZERS, Normalizer
from fastkron_py.runtime.precision import wide_dtype


class DeviceBasis(NamedTuple):
    """A basis as kernels take it: constants, its prologue of values or of derivatives, and the normaliser's value and slope."""

    terms: int
    first: int  # degree in the product
    params: tuple[float, ...] | tuple[int]
    start: Any
    step: Any
    value: Any
    norm: Any
    slope: Any

    @property
    def cache_key(self) -> str:
        """The key by which Triton keeps compiled kernels: of the functions' code, where a tuple's text has their names alone."""
        return str([getattr(each, "cache_key", each) for each in self])


class LayerConfig(NamedTuple):
    """Checked arguments; terms are degree + 1, and a table_size of 0 means the recurrence."""

    basis: str
    parameters: tuple[float, ...]
    terms: int
    normalization: str
    table_size: int

    @property
    def found(self) -> Basis:
        """The basis."""
        return find_basis(self.basis)

    @property
    def first(self) -> int:
        """The first degree of a product from which a constant is taken out."""
        return int(self.found.has_constant)

    @property
    def normalizer(self) -> Normalizer:
        """The normalisation."""
        return NORMALIZERS[self.normalization]

    @property
    def constants(self) -> tuple[float, ...] | tuple[int]:
        """The prologue's PARAMS."""
        return (self.table_size,) if self.table_size else (*self.found.constants, *self.parameters)

    @property
    def prologues(self) -> tuple[Any, Any]:
        """The device's functions for values and for derivatives, as of `Basis`; None of a basis that torch evaluates."""
        return (TABLE_MAKER, TABLE_DERIVATIVE_MAKER) if self.table_size else (self.found.value_prologue, self.found.derivative_prologue)

    @property
    def has_prologue(self) -> bool:
        """Whether the basis can be evaluated by a kernel."""
        return None not in self.prologues

    def table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Samples of the basis's values ``[terms, table_size]``, which kernels read, in float64 for that and else float32."""
        return basis_table(self.found, self.terms, self.parameters, self.table_size, wide_dtype(dtype), device)

    def values(self, t: Tensor) -> Iterator[Tensor]:
        """B_d(t) in torch, degree by degree, for normalised arguments."""
        if self.table_size:
            return table_values(t, self.table(t.dtype, t.device))
        return self.found.values(t, self.terms, self.parameters)

    def derivatives(self, t: Tensor) -> Iterator[Tensor]:
        """B_d'(t) in torch, degree by degree."""
        if self.table_size:
            return table_derivatives(t, self.table(t.dtype, t.device))
        return self.found.derivatives(t, self.terms, self.parameters)


def describe(basis: str, parameters: tuple[float, ...]) -> str:
    """A basis and its parameters in one word, as the operators take them."""
    return ":".join([basis, *map(repr, parameters)])


@lru_cache(maxsize=1024)
def layer_config(description: str, terms: int, normalization: str, table_size: int) -> LayerConfig:
    """The layer config of operators' arguments."""
    name, *parameters = description.split(":")
    return LayerConfig(name, tuple(map(float, parameters)), terms, normalization, table_size)

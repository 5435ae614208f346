"""`LoKrLinear` and `LoKrConv2d`: layers with a low-rank Kronecker adapter, whose weight is never built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkron_py.nn.lokr_base import LoKrLayer, LoKrOptions
from fastkron_py.runtime.checks import check_positive, check_type
from fastkron_py.runtime.errors import type_error, type_name, value_error


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base_layer, name), doc=f"The base layer's {name}.")


class LoKrLinear(LoKrLayer):
    """A linear layer with a LoKr adapter: ``base_layer(x) + alpha / rank * x @ kron(w1, w2).T``.

    The base layer is frozen. The adapter is 0 at first. Its parameters and their sizes are those of LyCORIS and PEFT (Yeh et al.,
    "Navigating Text-To-Image Customization", ICLR 2024): w1 ``[out1, in1]`` and w2 ``[out2, in2]``, where w2 is a pair of rank
    ``rank`` if that is below half of its larger side.

    Args:
        in_features: of x.
        out_features: of the result.
        rank: of w2, and with decompose_both of w1.
        factor: the first size of both factorisations, or a bound of it where it does not divide; -1 splits near the square root.
        decompose_both: make w1 a pair too, where rank is below half of its larger side.
        alpha: the product is scaled by ``alpha / rank``; None is rank.
        dropout: of the adapter's result.
        rank_dropout: probability with which an output gets nothing from the adapter in a forward pass.
        rank_dropout_scale: divide the others by their share.
        module_dropout: probability with which the whole adapter is left out of a forward pass.
        weight_decompose: scale the outputs of the adapted weight to trained magnitudes, which are the base weight's norms at first
            (DoRA). The base layer's weight is one of floating point, and there are no other dropout rates than module_dropout.
        wd_on_out: False scales the inputs.
        terms: of a sum of Kronecker products, each with its own w1 and w2; 1 is LoKr.
        bias: of the base layer.
        device: of all parameters.
        dtype: of the base layer.
        adapter_dtype: of the adapter's parameters; None is the base layer's dtype, and float32 for a half dtype.

    Shape:
        x ``[*, in_features]`` to ``[*, out_features]``.

    Attributes:
        base_layer: an `nn.Linear`, or a layer like it.
        lokr_w1: ``[out1, in1]``, or None, with ``lokr_w1_a [out1, rank]`` and ``lokr_w1_b [rank, in1]``.
        lokr_w2: ``[out2, in2]``, or None, with ``lokr_w2_a [out2, rank]`` and ``lokr_w2_b [rank, in2]``. Several terms are the first
            dimension of all of these.
        dora_scale: the magnitudes, ``[out, 1]`` or ``[1, in]``, or None.
        alpha: a buffer, float32 in a layer of any dtype. A compiled graph has its number as a constant.
        weight: of the whole layer, built at each reading.
        bias: of the base layer.
        is_merged: whether an adapter is part of the base layer's weight; a state of the other kind is rejected.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a size below 1, a rate outside ``[0, 1]``.

    Example:
        >>> layer = LoKrLinear(64, 128, rank=4)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 128])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        factor: int = -1,
        decompose_both: bool = False,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        rank_dropout: float = 0.0,
        rank_dropout_scale: bool = False,
        module_dropout: float = 0.0,
        weight_decompose: bool = False,
        wd_on_out: bool = True,
        terms: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        adapter_dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_positive(name, size)
        rates = (dropout, rank_dropout, rank_dropout_scale, module_dropout)
        options = LoKrOptions(rank, factor, decompose_both, alpha, *rates, False, weight_decompose, wd_on_out, terms).checked()
        base = nn.Linear(in_features, out_features, bias, device, dtype)
        super().__init__(base, (out_features, in_features), options, adapter_dtype)

    @classmethod
    def from_linear(cls, layer: Any, rank: int, *, adapter_dtype: torch.dtype | None = None, **options: Any) -> LoKrLinear:
        """An adapted layer around a layer, which is frozen and not copied.

        Args:
            layer: an `nn.Linear`, or a module like it that has in_features and out_features: its weight may be quantised or packed.
            rank: as in the class.
            adapter_dtype: as in the class.
            **options: factor, decompose_both, alpha, the dropout rates, weight_decompose, wd_on_out and terms.

        Raises:
            TypeError: no such layer, or an unknown option.
            ValueError: options outside their range.

        Example:
            >>> LoKrLinear.from_linear(torch.nn.Linear(64, 128), rank=4, alpha=8)(torch.randn(3, 64)).shape
            torch.Size([3, 128])
        """
        return cls.around(layer, LoKrOptions(rank, **options), adapter_dtype)

    @classmethod
    def _shape_of(cls, layer: Any) -> tuple[int, ...]:
        names = ("out_features", "in_features")
        if not isinstance(layer, nn.Module) or not all([hasattr(layer, name) for name in names]):
            raise type_error("layer", "an nn.Linear, or a module with in_features and out_features", type_name(layer))
        return tuple([check_positive(f"layer.{name}", getattr(layer, name)) for name in names])

    in_features, out_features = _of_base("in_features"), _of_base("out_features")


class LoKrConv2d(LoKrLayer):
    """A convolution with a LoKr adapter: ``base_layer(x) + alpha / rank * conv(x, kron(w1, w2))``, w2 a small kernel.

    w2 convolves each of in1 groups of channels, and w1 mixes the groups. Arguments that are not named here are those of `LoKrLinear`.

    Args:
        in_channels: of x.
        out_channels: of the result.
        kernel_size: an integer or a pair.
        rank: of w2, and with decompose_both of w1.
        factor: as in `LoKrLinear`.
        decompose_both: as in `LoKrLinear`.
        stride: as in `torch.nn.Conv2d`.
        padding: as in `torch.nn.Conv2d`.
        dilation: as in `torch.nn.Conv2d`.
        bias: of the base layer.
        device: of all parameters.
        dtype: of the base layer.
        adapter_dtype: as in `LoKrLinear`.
        **options: alpha, the dropout rates, weight_decompose and wd_on_out of `LoKrLinear`; and use_tucker: factorise a w2 of more than
            one pixel as a core ``[rank, rank, *kernel_size]`` with a matrix on either side.

    Shape:
        x ``[N, in_channels, H, W]`` to ``[N, out_channels, H', W']``, or both without N.

    Attributes:
        base_layer: an `nn.Conv2d`.
        lokr_w2: ``[out2, in2, *kernel_size]``; or None, with ``lokr_w2_a [out2, rank]`` and ``lokr_w2_b [rank, in2 * pixels]``; in
            Tucker's form ``lokr_t2 [rank, rank, *kernel_size]``, ``lokr_w2_a [rank, out2]`` and ``lokr_w2_b [rank, in2]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a size below 1, a rate outside ``[0, 1]``.

    Example:
        >>> layer = LoKrConv2d(16, 32, 3, rank=2, padding=1)
        >>> layer(torch.randn(2, 16, 8, 8)).shape
        torch.Size([2, 32, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        rank: int,
        factor: int = -1,
        decompose_both: bool = False,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        adapter_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        for name, size in (("in_channels", in_channels), ("out_channels", out_channels)):
            check_positive(name, size)
        given = LoKrOptions(rank, factor, decompose_both, **options).checked()
        base = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, dilation, bias=bias, device=device, dtype=dtype)
        super().__init__(base, base.weight.shape, given, adapter_dtype)

    @classmethod
    def from_conv(cls, layer: nn.Conv2d, rank: int, *, adapter_dtype: torch.dtype | None = None, **options: Any) -> LoKrConv2d:
        """An adapted layer around a convolution, which is frozen and not copied.

        Args:
            layer: an `nn.Conv2d` of one group that pads with zeros.
            rank: as in the class.
            adapter_dtype: as in the class.
            **options: factor, decompose_both, use_tucker, alpha, the dropout rates, weight_decompose and wd_on_out.

        Raises:
            TypeError: no `nn.Conv2d`, or an unknown option.
            ValueError: more than one group, other padding, or options outside their range.

        Example:
            >>> LoKrConv2d.from_conv(torch.nn.Conv2d(16, 32, 3), rank=2)(torch.randn(2, 16, 8, 8)).shape
            torch.Size([2, 32, 6, 6])
        """
        return cls.around(layer, LoKrOptions(rank, **options), adapter_dtype)

    @classmethod
    def _shape_of(cls, layer: Any) -> tuple[int, ...]:
        check_type("layer", layer, nn.Conv2d, "an nn.Conv2d")
        if layer.groups != 1:
            raise value_error("layer", "a convolution of one group", f"groups={layer.groups}")
        if layer.padding_mode != "zeros":
            raise value_error("layer", "padding_mode 'zeros'", repr(layer.padding_mode))
        return tuple(layer.weight.shape)

    kernel_size = _of_base("kernel_size")
    in_channels, out_channels, groups = _of_base("in_channels"), _of_base("out_channels"), _of_base("groups")
    stride, padding, dilation, padding_mode = (_of_base(name) for name in ("stride", "padding", "dilation", "padding_mode"))

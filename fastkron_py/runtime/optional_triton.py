"""Triton for modules whose host's halves are used where it is not installed too."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:

    class triton:  # type: ignore[no-redef] # noqa: N801
        """Stands for Triton where it is not installed: device functions are defined and never called."""

        @staticmethod
        def jit(function: Any) -> Any:
            """Leave a function as it is."""
            return function

    class tl:  # type: ignore[no-redef] # noqa: N801
        """The names of Triton that this package's modules use when they are imported."""

        constexpr: Any = staticmethod(lambda value: value)


__all__ = ["tl", "triton"]

"""NumPy and CuPy arrays in, arrays of the same library out: views of one memory, never a copy where a view will do.

`find_bridge` names the library that all arguments share. Its bridge loads them as torch tensors, gives
results back, and has the context (device, stream) in which all of that has to happen. Neither NumPy,
CuPy nor array-api-compat is imported before an argument that is not a torch tensor comes.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.utils.dlpack
from torch import Tensor

from fastkron_py.runtime.eager import without_autocast
from fastkron_py.runtime.errors import type_error, type_name

DTYPES: Final = ("float16", "float32", "float64", "complex64", "complex128")
ACCEPTED: Final = "a torch tensor, a NumPy array or a CuPy array"


class Bridge:
    """Converts one library's arrays to torch tensors and back. This one is torch's own: nothing to do."""

    noun = "a torch tensor"

    def load(self, array: Any, name: str) -> Any:
        """View an array as a tensor; name is the argument's, for errors."""
        return array

    def give_back(self, t: Tensor) -> Any:
        """Turn a result into an array of the caller's library, sharing its memory."""
        return t

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where loading, computing and giving back happen."""
        return contextlib.nullcontext()


class _NumpyBridge(Bridge):
    noun = "a NumPy array"

    def __init__(self) -> None:
        self._read_only: set[int] = set()  # addresses of memory that was loaded, and that results shall not be written through

    def load(self, array: Any, name: str) -> Tensor:
        import numpy

        # A subclass means something by being one (a mask, a unit, matrix algebra), which would be lost.
        if type(array) not in (numpy.ndarray, numpy.memmap):
            raise type_error(name, "a plain numpy.ndarray", type_name(array))
        _check_dtype(array, name)
        item = array.itemsize
        copied = not array.dtype.isnative or not array.flags.aligned or any(s < 0 or s % item for s in array.strides)
        if copied:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        elif not array.flags.writeable:
            t = torch.from_numpy(numpy.asarray(_ReadOnly(array)))
            self._read_only.add(t.untyped_storage().data_ptr())
            return t
        return torch.from_numpy(array)

    def give_back(self, t: Tensor) -> Any:
        t = t.detach().resolve_conj().resolve_neg()
        array = t.numpy()
        if t.untyped_storage().data_ptr() in self._read_only:
            array.flags.writeable = False
        return array[()] if array.ndim == 0 else array  # a scalar, as from numpy.trace

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with _dtypes_without_torch(), without_autocast(torch.device("cpu")):  # NumPy has no bfloat16 to give back
            yield


class _ReadOnly:
    """Presents a read-only array as a writable one, because torch warns of the others.

    Operators only read their inputs, `_NumpyBridge.give_back` has views of it read-only again, and this object keeps its memory alive.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class _CupyBridge(Bridge):
    """Runs on CuPy's current stream of the arrays' device, so that nobody has to wait for anybody.

    Memory is returned in stream order on both sides: an input may be freed as soon as its reader is
    enqueued, and a result may be used as soon as its writer is, on that stream.
    """

    noun = "a CuPy array"

    def __init__(self, array: Any) -> None:
        self._cupy: Any = sys.modules["cupy"]
        self._device = int(array.device.id)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        if not torch.cuda.is_available():
            raise RuntimeError("CuPy arrays need a torch that can use the GPU; torch.cuda.is_available() is False")
        with self._cupy.cuda.Device(self._device):
            current = self._cupy.cuda.get_current_stream()  # held until the end: the handle must stay valid
            handle = int(current.ptr)
            # 0 and 1 are CUDA's names of the legacy default stream, which torch knows as its default stream.
            stream = torch.cuda.default_stream(self._device) if handle in (0, 1) else torch.cuda.ExternalStream(handle, device=self._device)
            no_autocast = without_autocast(torch.device("cuda"))
            with torch.cuda.device(self._device), torch.cuda.stream(stream), no_autocast, _dtypes_without_torch():
                yield

    def load(self, array: Any, name: str) -> Tensor:
        _check_dtype(array, name)
        if array.size == 0:
            return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=f"cuda:{int(array.device.id)}")
        if any(s < 0 for s in array.strides):
            array = array.copy(order="C")
        # -1: both sides use one stream, so there is nothing to wait for.
        return torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))

    def give_back(self, t: Tensor) -> Any:
        t = t.detach().resolve_conj().resolve_neg()
        if t.numel() == 0:
            return self._cupy.empty(tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        return self._cupy.from_dlpack(_SameStream(t))


class _SameStream:
    """Exports a tensor by DLPack without waiting, whichever stream the consumer names."""

    def __init__(self, t: Tensor) -> None:
        self._tensor = t

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.__dlpack__(stream=-1)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._tensor.__dlpack_device__()


def plain_tensor(given: Any) -> Tensor:
    """A tensor of any array or sequence; NumPy arrays, of any strides and byte order and of Python's numbers too, are copied."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(given, numpy.ndarray):
        given = given.tolist() if given.dtype.hasobject else numpy.array(given, given.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(given)


@contextlib.contextmanager
def _dtypes_without_torch() -> Iterator[None]:
    """Errors call dtypes by the names that all libraries give them."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.args = tuple([re.sub(r"\btorch\.(?=(b?float|complex|u?int)\d)", "", a) if isinstance(a, str) else a for a in error.args])
        raise


def _check_dtype(array: Any, name: str) -> None:
    if array.dtype.name not in DTYPES:
        raise type_error(name, "a dtype among " + ", ".join(DTYPES), f"an array of {array.dtype}")


def _bridge(array: Any) -> Bridge | None:
    """The bridge of an array's library; None for any other value."""
    if isinstance(array, Tensor):
        return Bridge()
    from array_api_compat import is_cupy_array, is_numpy_array

    if is_numpy_array(array):
        return _NumpyBridge()
    return _CupyBridge(array) if is_cupy_array(array) else None


def through_bridge(arrays: Mapping[str, Any], call: Callable[[dict[str, Tensor]], Tensor], scalars: Mapping[str, Any] | None = None) -> Any:
    """A function's result on arrays of one library, in that library's own kind.

    Args:
        arrays: by their names in errors; the first decides on the library.
        call: from torch tensors by the same names.
        scalars: arguments that may not be tensors here, by name.

    Raises:
        TypeError: as `find_bridge`, or a scalar that is a tensor.
    """
    bridge = find_bridge(list(arrays.values()), list(arrays))
    for name, scalar in (scalars or {}).items():
        if isinstance(scalar, Tensor):
            raise type_error(name, f"a number, since {next(iter(arrays))} is {bridge.noun}", "a torch tensor")
    with bridge.context():
        return bridge.give_back(call({name: bridge.load(array, name) for name, array in arrays.items()}))


def find_bridge(arrays: Sequence[Any], names: Sequence[str]) -> Bridge:
    """The bridge of the library that all arrays come from.

    Args:
        arrays: the arguments; the first decides.
        names: how they are called in errors.

    Raises:
        TypeError: an argument is no array of a known library, or they come from different ones.
    """
    first = _bridge(arrays[0])
    if first is None:
        raise type_error(names[0], ACCEPTED, type_name(arrays[0]))
    for array, name in zip(arrays[1:], names[1:], strict=True):
        if type(_bridge(array)) is not type(first):
            raise type_error(name, f"{first.noun}, like {names[0]}", type_name(array))
    return first

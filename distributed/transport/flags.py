"""Flags in the memory of every rank, which streams set and wait for without a kernel.

A barrier kernel needs a free multiprocessor. Beside multiplies, which take all of them, it waits for programs to end: 0.2 ms beside a
product of cuBLAS in float32 on an H200, where a meeting by flags takes 12 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from fastkron_py.distributed.transport.copies import driver_function

WORD: Final = 4  # bytes of a flag
_WAIT: Final = 1  # CU_STREAM_MEM_OP_WAIT_VALUE_32
_WRITE: Final = 2  # CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL: Final = 1  # CU_STREAM_WAIT_VALUE_EQ


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a union of 48 bytes, in which writes and waits have these fields."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class Flags:
    """Flags of a rank, one for each meeting and peer, and their addresses on the peers.

    A flag is 1 from when its peer has come to a meeting to when this rank has waited for it. Between two meetings of the same number, all
    ranks have one of another number: so nobody sets a flag that is 1 still.

    Args:
        rank: this one's position.
        addresses: of each rank's flags, all of them 0.

    Raises:
        RuntimeError: there is no driver of CUDA's that knows flags.
    """

    def __init__(self, rank: int, addresses: Sequence[int]) -> None:
        self._rank, self._addresses = rank, tuple(addresses)
        self._peers = [peer for peer in range(len(self._addresses)) if peer != rank]
        function = driver_function("cuStreamBatchMemOp_v2")
        if function is None:
            raise RuntimeError("expected a CUDA driver with cuStreamBatchMemOp_v2")
        self._function: Callable[..., int] = function
        self._meetings: dict[int, tuple[int, Any]] = {}

    @staticmethod
    def size(meetings: int, ranks: int) -> int:
        """Bytes of a rank's flags."""
        return meetings * ranks * WORD

    def meet(self, stream: torch.cuda.Stream, meeting: int) -> None:
        """Have a stream tell the other ranks that it has come so far, then wait until all of them have.

        Args:
            stream: of this rank.
            meeting: its number.

        Raises:
            RuntimeError: the driver refuses.
        """
        found = self._meetings.get(meeting)
        if found is None:
            found = self._meetings[meeting] = self._operations(meeting)
        code = self._function(ctypes.c_void_p(stream.cuda_stream), *found, 0)
        if code != 0:
            raise RuntimeError(f"cuStreamBatchMemOp: expected 0; got {code}")

    def _operations(self, meeting: int) -> tuple[int, Any]:
        """Number of operations, and the operations: they stay the same."""
        mine = [self._flag(self._rank, meeting, peer) for peer in self._peers]
        found = [_Operation(_WRITE, self._flag(peer, meeting, self._rank), 1) for peer in self._peers]
        found += [_Operation(_WAIT, flag, 1, _EQUAL) for flag in mine]
        found += [_Operation(_WRITE, flag, 0) for flag in mine]
        return len(found), (_Operation * len(found))(*found)

    def _flag(self, rank: int, meeting: int, sender: int) -> int:
        """Address on a rank of the flag that a sender sets."""
        return self._addresses[rank] + (meeting * len(self._addresses) + sender) * WORD

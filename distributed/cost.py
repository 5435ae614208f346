"""What multiplies and exchanges cost: links between GPUs, memory, the model of local launches, and the processor that begins all of it.

The figures of `NVLINK` are fitted to NCCL's all-to-all on eight H200 (1 MiB to 1 GiB a rank, within 7%). Stores into peers' memory are
those of copies among two and four GPUs (285e9 bytes a second were measured among eight), with a guess at their barriers. Those of
links between hosts are a data sheet's bandwidth and a guess at latency, meant to be replaced by the user's own. The processor's are
fitted to products on four H200 that waited for a processor with slow cores (0.34 to 0.47 ms a chunk of two exchanges).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from fastkron_py.errors import value_error
from fastkron_py.tuning.plan import Setting, plans

# The model of launches is asked for very many rows; what a launch costs by itself is added here.
MANY_ROWS: Final = 1 << 20
LAUNCH_SECONDS: Final = 4e-6
# A copy that turns rows to columns takes so many times as long as one of long runs (measured on an H200).
TURNING: Final = 2.5

CPU: Final = ("cpu_call", "cpu_chunk", "cpu_exchange", "cpu_message", "cpu_direct_exchange", "cpu_store")


@dataclass(frozen=True)
class Links:
    """Bandwidth in bytes a second, each way and for each GPU, and latency in seconds.

    Attributes:
        bandwidth: inside a host.
        pair_bandwidth: of an exchange between two ranks of a host, which is slower than one among more (at most bandwidth).
        latency: of a collective.
        message: of each message in it, inside a host.
        host_bandwidth: between hosts.
        host_message: of each message between hosts.
        ranks_per_host: ranks ``i * ranks_per_host`` up to ``(i + 1) * ranks_per_host`` share host i.
        memory: of a GPU's own memory, in bytes a second.
        direct_bandwidth: of stores into the peers' memory, inside a host.
        direct_latency: of the barriers before and after them.
        cpu_call: processor time of a product, before its first chunk.
        cpu_chunk: of each chunk of rows, for its multiplies.
        cpu_exchange: of each exchange of a chunk.
        cpu_message: of each round of messages in it, one to every peer.
        cpu_direct_exchange: in place of cpu_exchange, where ranks store into each other's memory.
        cpu_store: in place of cpu_message, of each run that is stored.
    """

    bandwidth: float = 330e9
    pair_bandwidth: float = 307e9
    latency: float = 26e-6
    message: float = 1e-6
    host_bandwidth: float = 45e9
    host_message: float = 2e-6
    ranks_per_host: int = 8
    memory: float = 3.0e12
    direct_bandwidth: float = 376e9
    direct_latency: float = 15e-6
    cpu_call: float = 0.3e-3
    cpu_chunk: float = 0.12e-3
    cpu_exchange: float = 0.12e-3
    cpu_message: float = 30e-6
    cpu_direct_exchange: float = 0.175e-3
    cpu_store: float = 8e-6

    def __post_init__(self) -> None:
        for name in ("bandwidth", "pair_bandwidth", "host_bandwidth", "memory", "ranks_per_host", "direct_bandwidth"):
            if not getattr(self, name) > 0:
                raise value_error(name, "a positive number", getattr(self, name))
        for name in ("latency", "message", "host_message", "direct_latency", *CPU):
            if not getattr(self, name) >= 0:
                raise value_error(name, "a number of seconds, not negative", getattr(self, name))

    def stored(self) -> Links:
        """The same links where ranks store into each other's memory."""
        return replace(
            self,
            bandwidth=self.direct_bandwidth,
            pair_bandwidth=self.direct_bandwidth,
            latency=self.direct_latency,
            cpu_exchange=self.cpu_direct_exchange,
            cpu_message=self.cpu_store,
        )

    def exchange_seconds(self, near: float, far: float, near_messages: int, far_messages: int) -> float:
        """Time of a rank's part in an exchange: bytes and messages to ranks of its own host, and to others."""
        if near_messages + far_messages == 0:
            return 0.0
        bandwidth = min(self.bandwidth, self.pair_bandwidth) if near_messages + far_messages == 1 else self.bandwidth
        moved = max(near / bandwidth, far / self.host_bandwidth)
        return self.latency + near_messages * self.message + far_messages * self.host_message + moved


NVLINK: Final = Links()


@lru_cache(maxsize=4096)
def _launches(ps: tuple[int, ...], qs: tuple[int, ...], itemsize: int) -> tuple[float, int]:
    """Modelled elements moved for each row, and the number of launches."""
    cost, launches = plans(ps, qs, Setting(min(8, itemsize), MANY_ROWS, 1, itemsize <= 4))[0]
    return cost, len(launches)


def multiply_seconds(rows: int, ps: tuple[int, ...], qs: tuple[int, ...], itemsize: int, links: Links) -> float:
    """Time of one rank's multiply of ``[rows, prod(ps)]`` on a GPU, by the model that chooses its launches."""
    moved, launches = _launches(ps, qs, itemsize)
    return rows * moved * itemsize / links.memory + launches * LAUNCH_SECONDS


def copy_seconds(size: float, links: Links) -> float:
    """Time to copy so many bytes in long runs on a GPU, which reads and writes them once."""
    return 2 * size / links.memory

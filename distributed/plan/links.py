"""How fast ranks exchange and multiply: the figures by which plans are modelled.

The figures of `NVLINK` are fitted to NCCL's all-to-all on eight H200 (1 MiB to 1 GiB a rank, within 7%), and to products on two and four
of them: memory, copies, copies to and from peers' memory with their barriers, and the speed of multiplies beside an exchange. The
processor's lie between two hosts, one of them twice as slow as the other. Those of links between hosts are a data sheet's bandwidth and a
guess at latency, meant to be replaced by the user's own.
docs/how_it_works/distributed.md has the table of modelled and measured times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from fastkron_py.runtime.errors import value_error
from fastkron_py.runtime.gpu import HOPPER

BANDWIDTHS: Final = (
    "bandwidth", "pair_bandwidth", "host_bandwidth", "memory", "copy_memory", "ranks_per_host", "direct_bandwidth"
)  # fmt: skip
CPU: Final = ("cpu_call", "cpu_chunk", "cpu_exchange", "cpu_direct_exchange", "cpu_gradients")


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
        memory: of a GPU's own memory, in multiplies.
        copy_memory: of the same in copies of long runs, read and written together.
        beside: how fast multiplies go on beside an all-to-all inside a host, as a share of their speed without one.
        beside_direct: the same beside copies to and from the peers' memory.
        direct_bandwidth: of copies to and from the peers' memory, inside a host.
        direct_latency: of the barriers before and after them, beside multiplies.
        cpu_call: processor time of a product, before its first chunk.
        cpu_chunk: of each chunk of rows, for its multiplies.
        cpu_exchange: of each exchange of a chunk.
        cpu_direct_exchange: in place of cpu_exchange, where ranks reach into each other's memory.
        cpu_gradients: of a chunk's gradients, with their exchanges.
    """

    bandwidth: float = 330e9
    pair_bandwidth: float = 307e9
    latency: float = 26e-6
    message: float = 1e-6
    host_bandwidth: float = 45e9
    host_message: float = 2e-6
    ranks_per_host: int = 8
    memory: float = 3.3e12
    copy_memory: float = 4.1e12
    beside: float = 0.5
    beside_direct: float = 0.8
    direct_bandwidth: float = 380e9
    direct_latency: float = 30e-6
    cpu_call: float = 0.15e-3
    cpu_chunk: float = 0.17e-3
    cpu_exchange: float = 0.17e-3
    cpu_direct_exchange: float = 0.14e-3
    cpu_gradients: float = 1.0e-3

    def __post_init__(self) -> None:
        for name in BANDWIDTHS:
            if not getattr(self, name) > 0:
                raise value_error(name, "a positive number", getattr(self, name))
        for name in ("beside", "beside_direct"):
            if not 0 <= getattr(self, name) <= 1:
                raise value_error(name, "a share from 0 to 1", getattr(self, name))
        for name in ("latency", "message", "host_message", "direct_latency", *CPU):
            if not getattr(self, name) >= 0:
                raise value_error(name, "a number of seconds, not negative", getattr(self, name))

    def exchange_seconds(self, near: float, far: float, near_messages: int, far_messages: int) -> float:
        """Time of a rank's part in an exchange: bytes and messages to ranks of its own host, and to others."""
        if near_messages + far_messages == 0:
            return 0.0
        bandwidth = min(self.bandwidth, self.pair_bandwidth) if near_messages + far_messages == 1 else self.bandwidth
        moved = max(near / bandwidth, far / self.host_bandwidth)
        return self.latency + near_messages * self.message + far_messages * self.host_message + moved


NVLINK: Final = Links()


@lru_cache(maxsize=64)
def links_for(link_bandwidth: float, bandwidth: float) -> Links:
    """`NVLINK` for other GPUs, in the ratio of their records to Hopper's.

    Args:
        link_bandwidth: as in `runtime.gpu.GPU`.
        bandwidth: of the memory, as there.
    """
    link, memory = link_bandwidth / HOPPER.link_bandwidth, bandwidth / HOPPER.bandwidth
    return replace(
        NVLINK,
        bandwidth=NVLINK.bandwidth * link,
        pair_bandwidth=NVLINK.pair_bandwidth * link,
        direct_bandwidth=NVLINK.direct_bandwidth * link,
        memory=NVLINK.memory * memory,
        copy_memory=NVLINK.copy_memory * memory,
    )

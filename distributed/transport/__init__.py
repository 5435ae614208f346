"""How blocks move between the ranks of a row group: one class, `plan.Transport`, and a file for each transport."""

from fastkron_py.distributed.plan import TRANSPORTS
from fastkron_py.distributed.transport.packed import PACKED
from fastkron_py.distributed.transport.peer_memory import PEER_MEMORY

TRANSPORTS.update({transport.name: transport for transport in (PACKED, PEER_MEMORY)})

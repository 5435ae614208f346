"""How blocks move between the ranks of a row group: one protocol, `transfer.Transport`, and a file for each transport."""

from fastkron_py.distributed.cost import TRANSPORTS
from fastkron_py.distributed.transport.packed import PACKED
from fastkron_py.distributed.transport.peer_memory import PEER_MEMORY

# In this order a plan takes them where they cost the same.
TRANSPORTS.update({transport.name: transport for transport in (PACKED, PEER_MEMORY)})

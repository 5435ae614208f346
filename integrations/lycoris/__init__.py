"""LyCORIS: LoKr modules on `fastkron_py.lokr_linear`.

``use_fastkron(network)`` is all that is needed. Needs the extra "lycoris": LyCORIS 4.0 or newer.
"""

from fastkron_py.integrations.versions import refuse_older

try:
    from fastkron_py.integrations.lycoris.apply import revert_fastkron, use_fastkron
except ImportError:
    refuse_older("lycoris_lora", (4, 0))
    raise

__all__ = ["revert_fastkron", "use_fastkron"]

"""LyCORIS: LoKr modules on `fastkron_py.lokr_linear`.

``use_fastkron(network)`` is all that is needed. Needs the extra "lycoris".
"""

from fastkron_py.integrations.lycoris.apply import revert_fastkron, use_fastkron

__all__ = ["revert_fastkron", "use_fastkron"]

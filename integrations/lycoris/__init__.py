"""LyCORIS: LoKr modules on `fastkron_py.lokr_linear`.

``use_fastkron(network)`` is all that is needed. Needs the extra "lycoris": LyCORIS 4.0 or newer.
"""

from fastkron_py.integrations.versions import of_extra

with of_extra("lycoris", "lycoris_lora", (4, 0)):
    from fastkron_py.integrations.lycoris.modules import use_fastkron
    from fastkron_py.integrations.replacement import revert_fastkron

__all__ = ["revert_fastkron", "use_fastkron"]

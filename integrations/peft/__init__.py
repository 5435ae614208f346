"""PEFT: LoKr adapters on `fastkron_py.lokr_linear`.

``use_fastkron(model)`` is all that is needed. Needs the extra "peft": PEFT 0.18 or newer.
"""

from fastkron_py.integrations.versions import of_extra

with of_extra("peft", "peft", (0, 18)):
    from fastkron_py.integrations.peft.config import lokr_config
    from fastkron_py.integrations.peft.layers import use_fastkron
    from fastkron_py.integrations.replacement import revert_fastkron

__all__ = ["lokr_config", "revert_fastkron", "use_fastkron"]

"""PEFT: LoKr adapters on `fastkron_py.lokr_linear`.

``use_fastkron(model)`` is all that is needed. Needs the extra "peft".
"""

from fastkron_py.integrations.peft.apply import revert_fastkron, use_fastkron

__all__ = ["revert_fastkron", "use_fastkron"]

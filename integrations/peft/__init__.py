"""PEFT: LoKr adapters on `fastkron_py.lokr_linear`.

``use_fastkron(model)`` is all that is needed. Needs the extra "peft": PEFT 0.18 or newer.
"""

from fastkron_py.integrations.versions import refuse_older

try:
    from fastkron_py.integrations.peft.apply import revert_fastkron, use_fastkron
except ImportError:
    refuse_older("peft", (0, 18))
    raise

__all__ = ["revert_fastkron", "use_fastkron"]

"""Hugging Face Transformers: the gated MLPs of its models, and of others, on `fastkron_py.functional.gated_mlp`.

``use_fastkron(model)``, or ``with use_fastkron(model):``, is all that is needed. Needs the extra "llm".
"""

from fastkron_py.integrations.replacement import Applied, revert_fastkron
from fastkron_py.integrations.transformers.layers import use_fastkron
from fastkron_py.integrations.versions import of_extra

with of_extra("llm", "transformers"):
    import transformers as transformers

# Names of earlier versions.
AppliedToLlama, apply_to_llama, revert_llama = Applied, use_fastkron, revert_fastkron

__all__ = ["Applied", "AppliedToLlama", "apply_to_llama", "revert_fastkron", "revert_llama", "use_fastkron"]

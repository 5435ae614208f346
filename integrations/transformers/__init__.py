"""Hugging Face Transformers: gated MLPs of Llama and its kin on `fastkron_py.functional.gated_mlp`.

``with use_fastkron(model):``, or `use_fastkron` alone for good, is all that is needed; `apply_to_llama` is another name of it. Needs the
extra "llm".
"""

from fastkron_py.integrations.versions import of_extra

with of_extra("llm", "transformers"):
    from fastkron_py.integrations.transformers.apply import AppliedToLlama, apply_to_llama, revert_llama

# The names that the other integrations have.
use_fastkron, revert_fastkron = apply_to_llama, revert_llama

__all__ = ["AppliedToLlama", "apply_to_llama", "revert_fastkron", "revert_llama", "use_fastkron"]

"""Hugging Face Transformers: gated MLPs of Llama and its kin on `fastkron_py.functional.gated_mlp`.

``with apply_to_llama(model):``, or `apply_to_llama` alone for good, is all that is needed. Needs the extra "llm".
"""

from fastkron_py.integrations.versions import of_extra

with of_extra("llm", "transformers"):
    from fastkron_py.integrations.transformers.apply import AppliedToLlama, apply_to_llama, revert_llama

__all__ = ["AppliedToLlama", "apply_to_llama", "revert_llama"]

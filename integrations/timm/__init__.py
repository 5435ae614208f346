"""timm: Kolmogorov-Arnold transformers in its registry. Needs the extra "vision".

Importing this package registers ``kat_tiny_patch16_224``, ``kat_small_patch16_224`` and ``kat_base_patch16_224`` for
`timm.create_model`. timm has no entry points by which it would find them by itself.
"""

from fastkron_py.integrations.versions import of_extra

with of_extra("vision", "timm"):
    from fastkron_py.integrations.timm.checkpoint import convert_state_dict
    from fastkron_py.integrations.timm.mimetic import init_attention_mimetic_
    from fastkron_py.integrations.timm.mlp import KATMlp
    from fastkron_py.integrations.timm.model import KATVisionTransformer, checkpoint_filter_fn
    from fastkron_py.integrations.timm.registry import kat_base_patch16_224, kat_small_patch16_224, kat_tiny_patch16_224

__all__ = [
    "KATMlp",
    "KATVisionTransformer",
    "checkpoint_filter_fn",
    "convert_state_dict",
    "init_attention_mimetic_",
    "kat_base_patch16_224",
    "kat_small_patch16_224",
    "kat_tiny_patch16_224",
]

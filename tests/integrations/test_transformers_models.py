"""Whole models of transformers with `use_fastkron`: logits, gradients of every parameter, and a generated sequence.

Five families in `make test-full`, all in `make families`, which asks for them by FASTKRON_FAMILIES=1.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkron_py.integrations.transformers import use_fastkron
from fastkron_py.testing import assert_close

pytest.importorskip("transformers", reason="the extra llm is not installed")
transformers: Any = importlib.import_module("transformers")
pytestmark = pytest.mark.full

SIZES: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8},
    **{"num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"initializer_range": 0.3, "attn_implementation": "eager", "tie_word_embeddings": False},
}
T5: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "d_kv": 8,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
# The name of a model, and the options of its configuration; those of make test-full first.
MODELS: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": {},
    "GraniteForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "FalconH1ForCausalLM": {
        **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2},
        **{"mlp_multipliers": [0.75, 0.5], "mamba_chunk_size": 8},
    },
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "OlmoForCausalLM": {},
    "HeliumForCausalLM": {},
    "GlmForCausalLM": {"pad_token_id": 0},
    "SmolLM3ForCausalLM": {},
    "Ernie4_5ForCausalLM": {},
    "SeedOssForCausalLM": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "Qwen2MoeForCausalLM": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "T5ForConditionalGeneration": T5,
}
NAMES = list(MODELS)[: None if os.environ.get("FASTKRON_FAMILIES") else 5]
IDS = torch.arange(3, 19).reshape(2, 8)


def made(name: str) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip("this version of transformers has no such model")
    config = kind.config_class(**{**SIZES, **MODELS[name]})
    return kind(config).eval()


def outputs(model: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits, gradients, and a generated sequence."""
    model.zero_grad()
    found = model(input_ids=IDS, labels=IDS, use_cache=False)
    found.loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(IDS))
    return found.logits.detach(), gradients, tokens


@pytest.mark.filterwarnings("ignore")  # of the libraries themselves
@pytest.mark.parametrize("name", NAMES)
def test_a_model_computes_the_same(name: str) -> None:
    model = made(name)
    logits, gradients, tokens = outputs(model)
    for backward in ("save", "recompute"):
        with use_fastkron(model, backward=backward) as applied:
            assert not applied.left_alone
            found, changed, generated = outputs(model)
            assert_close(found, logits, rms_tol=1e-5, max_tol=1e-4)
            assert list(changed) == list(gradients)
            assert [n for n in gradients if ".mlp" in n or "DenseReluDense" in n or "feed_forward" in n]
            for key, gradient in gradients.items():
                assert_close(changed[key], gradient, rms_tol=5e-5, max_tol=4e-4)
            assert torch.equal(generated, tokens)
            mlp = model.get_submodule(applied.replaced[0])
            next(p for p in mlp.parameters()).data.neg_()
            assert (outputs(model)[0] - logits).norm() > 1e-3 * logits.norm()
            next(p for p in mlp.parameters()).data.neg_()

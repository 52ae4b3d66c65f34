"""A random target and draft, small enough that a whole decode takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sgl_eagle.reference.draft_models import Draft
    from sgl_eagle.reference.target import Target

VOCAB_SIZE = 24
STOP_TOKEN = 23


def make_model(family: str = "llama", **changes: Any) -> Any:
    """A random model of a family, its weights enlarged so that its choices are not all alike."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "sliding_window": None,
        "pad_token_id": STOP_TOKEN,
        "eos_token_id": STOP_TOKEN,
    }
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = getattr(transformers, f"{names[family]}Config")(**(sizes | changes))
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def make_pair(kind: str = "eagle3", dtype: str = "float32") -> tuple[Any, Target, Draft]:
    """(Hugging Face model, target, draft) of random weights."""
    import torch

    from sgl_eagle.reference.draft_config import parse_draft_config
    from sgl_eagle.reference.draft_models import Eagle1Draft, Eagle3Draft
    from sgl_eagle.reference.target import Target

    model = make_model().to(getattr(torch, dtype))
    architectures = {"eagle1": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
    raw = {
        "architectures": [architectures[kind]],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB_SIZE,
        "fc_norm": True,
        "norm_output": True,
    }
    if kind == "eagle1":
        del raw["fc_norm"], raw["norm_output"]
    config = parse_draft_config(raw, source="test")
    target = Target(model, capture=config.hidden_state_indices(6))
    torch.manual_seed(1)
    cls = {"eagle1": Eagle1Draft, "eagle3": Eagle3Draft}[kind]
    draft = cls(config, embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    draft = draft.to(getattr(torch, dtype))
    return model, target, draft.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def model_maker() -> Callable[..., Any]:
    return make_model


@pytest.fixture(scope="session", params=["eagle3", "eagle1"])
def tiny_pair(request: pytest.FixtureRequest) -> tuple[Any, Target, Draft]:
    return make_pair(request.param)


@pytest.fixture(scope="session")
def eagle3_pair() -> tuple[Any, Target, Draft]:
    return make_pair("eagle3")


@pytest.fixture(scope="session")
def bfloat16_pair() -> tuple[Any, Target, Draft]:
    return make_pair("eagle3", "bfloat16")

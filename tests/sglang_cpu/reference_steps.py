"""Steps that the reference engine takes; runs in the fork server."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sgl_eagle.reference.decode import Engine
from sgl_eagle.reference.draft_checkpoint import load_draft
from sgl_eagle.reference.draft_config import load_draft_config
from sgl_eagle.reference.head_checkpoint import load_two_stage_head
from sgl_eagle.reference.target import Target
from sgl_eagle_harness.policies.policy_file import load_policy_file


def count_steps(pair, policy_file, prompts, length):
    """Number of steps that each prompt's completion of `length` tokens takes."""
    pair = Path(pair)
    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    num_layers = model.config.num_hidden_layers
    capture = load_draft_config(pair / "draft").hidden_state_indices(num_layers)
    target = Target(model, capture=capture)
    draft = load_draft(
        pair / "draft",
        embed_tokens=target.embed_tokens,
        lm_head=target.lm_head,
        num_target_layers=num_layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    stored = load_two_stage_head(pair / "draft", draft.lm_head)
    draft.two_stage_head = None if stored is None else stored.head
    engine, policy = Engine(target, draft), load_policy_file(Path(policy_file)).build()
    return [
        len(engine.generate(prompt, policy, max_new_tokens=length, stop_tokens=frozenset()).steps)
        for prompt in prompts
    ]

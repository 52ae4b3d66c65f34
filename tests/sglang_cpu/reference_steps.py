"""Steps that the reference engine takes; a script, since it needs an environment without warnings.

Reads a JSON list of prompts; prints the number of steps of each.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sgl_eagle.reference.decode import Engine
from sgl_eagle.reference.draft_checkpoint import load_draft
from sgl_eagle.reference.draft_config import load_draft_config
from sgl_eagle.reference.target import Target
from sgl_eagle_harness.policies.policy_file import load_policy_file


def count_steps(pair, policy_file, prompts, length):
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
    engine, policy = Engine(target, draft), load_policy_file(policy_file).build()
    return [
        len(engine.generate(prompt, policy, max_new_tokens=length, stop_tokens=frozenset()).steps)
        for prompt in prompts
    ]


if __name__ == "__main__":
    pair, policy_file, length = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(count_steps(pair, policy_file, json.load(sys.stdin), length)))  # noqa: T201

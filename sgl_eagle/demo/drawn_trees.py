"""Real steps of the engine, picked and prepared for drawing."""

from __future__ import annotations

import numpy as np

from sgl_eagle.reference.decode import Engine, StepView
from sgl_eagle.reference.measure import EncodedPrompt
from sgl_eagle.reference.pair import Pair
from sgl_eagle_harness.policies.price import PricePolicy
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.types import NO_NODE, FloatArray
from sgl_eagle_tuner.report.trees import DrawnTree, NodeState, TreeNode

CONTEXT_CHARACTERS = 60


def draw_best_step(
    pair: Pair, prompt: EncodedPrompt, policy: SpecPolicy, *, max_new_tokens: int
) -> DrawnTree | None:
    """Decode a prompt and take the step that shows most: the longest accepted path.

    Args:
        pair: Target and draft.
        prompt: What to decode.
        policy: Builds the trees.
        max_new_tokens: Completion length at most.

    Returns:
        The earliest of the best steps; None if nothing was drafted.
    """
    views: list[StepView] = []
    generation = Engine(pair.target, pair.draft).generate(
        list(prompt.tokens),
        policy,
        max_new_tokens=max_new_tokens,
        stop_tokens=pair.stop_tokens,
        observe=views.append,
    )
    # Steps that the end of the text cut are left out: their drawing would claim more than was said.
    whole = [v for v in views if v.position + v.outcome.num_accept_tokens <= len(generation.tokens)]
    if not whole:
        return None
    best = max(whole, key=lambda view: view.outcome.num_correct_drafts)
    return _drawn(pair, prompt, policy, generation.tokens, best)


def _drawn(
    pair: Pair,
    prompt: EncodedPrompt,
    policy: SpecPolicy,
    completion: tuple[int, ...],
    view: StepView,
) -> DrawnTree:
    candidates = view.candidates
    columns = np.flatnonzero(candidates.valid[0])
    index = np.full(candidates.num_nodes + 1, NO_NODE)
    index[columns] = np.arange(len(columns))
    index[NO_NODE] = NO_NODE
    verified = set(view.tree.columns.tolist())
    accepted = set(view.tree.columns[view.outcome.path].tolist())
    probs = _accept_probs(policy, view)

    def state(column: int) -> NodeState:
        if column in accepted:
            return "accepted"
        return "rejected" if column in verified else "pruned"

    before = prompt.tokens + completion[: view.position - 1]
    return DrawnTree(
        workload=prompt.workload,
        prompt_id=prompt.id,
        policy_name=policy.name,
        position=view.position,
        context_text=pair.decode(before)[-CONTEXT_CHARACTERS:],
        root_text=pair.decode((completion[view.position - 1],)),
        bonus_text=pair.decode((view.outcome.bonus_token,)),
        num_draft_tokens=view.tree.num_draft_tokens,
        nodes=tuple(
            TreeNode(
                parent=int(index[candidates.parents[0, column]]),
                token_text=pair.decode((int(candidates.tokens[0, column]),)),
                path_confidence=min(float(np.exp(candidates.path_log_confidence[0, column])), 1.0),
                accept_prob=None if probs is None else float(probs[column]),
                state=state(column),
            )
            for column in columns.tolist()
        ),
    )


def _accept_probs(policy: SpecPolicy, view: StepView) -> FloatArray | None:
    if not isinstance(policy, PricePolicy):
        return None
    trees = view.candidates
    probs: FloatArray = policy.calibration.accept_probs(
        trees.path_log_confidence, trees.step_log_probs, trees.depths, trees.ranks, trees.parents
    )
    first: FloatArray = probs[0]
    return first

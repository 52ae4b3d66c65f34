"""One drawn draft tree: what was drafted, what was pruned, what the target accepted."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sgl_eagle_tuner.report.base import ReportModel

NodeState = Literal["pruned", "rejected", "accepted"]
"""pruned: drafted, never verified; rejected: verified, not accepted; accepted: emitted."""


class TreeNode(ReportModel):
    """One drafted node; the root is not a node."""

    parent: int = Field(ge=-1)
    """Index of the parent in `DrawnTree.nodes`, -1 for a child of the root; parents come first."""
    token_text: str
    """The token as the tokenizer decodes it alone, leading space kept."""
    path_confidence: float = Field(ge=0, le=1)
    """Product of draft probabilities from the root to the node, uncalibrated."""
    accept_prob: float | None = Field(default=None, ge=0, le=1)
    """Calibrated probability that the target accepts the whole path to the node."""
    state: NodeState
    """What became of the node."""


class DrawnTree(ReportModel):
    """One real step of the engine, drawn in the report. Two or three make a good report."""

    workload: str
    """Workload that the prompt belongs to."""
    prompt_id: str
    """Prompt that was being answered."""
    policy_name: str
    """Policy that built the tree."""
    position: int = Field(ge=0)
    """Index in the completion of the first token that the tree predicts, 0-based."""
    context_text: str
    """End of the text before the root token (some 60 characters are enough)."""
    root_text: str
    """The root token: the last one the target had committed."""
    bonus_text: str
    """The token that the target added after the accepted path."""
    num_draft_tokens: int = Field(ge=1)
    """Nodes verified, root included."""
    nodes: tuple[TreeNode, ...]
    """Every drafted node, parents before children; the drawing leaves out pruned ones of small
    confidence when there are many, and says how many."""

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        last_accepted = -1
        for index, node in enumerate(self.nodes):
            if node.parent >= index:
                raise ValueError(f"node {index} has parent {node.parent}: parents must come first")
            if node.state == "accepted":
                if node.parent != last_accepted:
                    raise ValueError(
                        f"node {index} is accepted, but its parent {node.parent} is not the last "
                        f"accepted node, {last_accepted}"
                    )
                last_accepted = index
            is_orphan = node.parent >= 0 and self.nodes[node.parent].state == "pruned"
            if node.state == "rejected" and is_orphan:
                raise ValueError(f"node {index} was verified, but its parent is pruned")
        num_verified = 1 + sum(node.state != "pruned" for node in self.nodes)
        if num_verified != self.num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but {num_verified} nodes are "
                "rejected, accepted or the root"
            )
        return self

    @property
    def num_correct_drafts(self) -> int:
        """Accepted nodes, bonus token excluded."""
        return sum(node.state == "accepted" for node in self.nodes)

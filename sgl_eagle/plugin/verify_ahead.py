"""A verify pass that is prepared before its trees are known.

Preparing one takes SGLang as long as several draft steps, and needs of the trees only their size.
So where the size can be guessed, the pass is prepared while the device still works on the round
before, and the trees are written to where it will look for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_eagle.plugin import compat
from sgl_eagle.plugin.verify_input import TreeTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedVerify:
    """A verify pass without trees.

    Attributes:
        num_draft_tokens: Nodes of every tree, root included.
        verify_input: SGLang's record of the trees, which looks at `tensors`.
        tensors: To be filled.
    """

    num_draft_tokens: int
    verify_input: Any
    tensors: TreeTensors

    def fill(self, trees: TreeTensors) -> None:
        """Write the trees to where the pass looks for them.

        Args:
            trees: Of the prepared size; their mask is in the attention's own buffer already.
        """
        self.tensors.numbers.copy_(trees.numbers)


def prepare_verify(worker: Any, batch: Any, tensors: TreeTensors) -> PreparedVerify:
    """Prepare a verify pass; the batch is left as it was.

    Args:
        worker: Our worker, in the runtime state of the size.
        batch: SGLang's running batch of B requests.
        tensors: Room for B trees of M nodes, the mask in the attention's own buffer.

    Returns:
        The pass.
    """
    verify_input = make_verify_input(worker, tensors)
    compat.prepare_verify_ahead(worker, batch, verify_input)
    return PreparedVerify(
        num_draft_tokens=tensors.numbers.shape[2], verify_input=verify_input, tensors=tensors
    )


def make_verify_input(worker: Any, trees: TreeTensors) -> Any:
    """SGLang's record of trees to verify.

    Args:
        worker: Our worker.
        trees: B trees of M nodes.

    Returns:
        An `EagleVerifyInput`.
    """
    tokens, positions, index, first_child, next_sibling = trees.parts
    num_draft_tokens = index.shape[1]
    return compat.make_verify_input(
        draft_token=tokens,
        custom_mask=trees.mask,
        positions=positions,
        retrieve_index=index,
        retrieve_next_token=first_child,
        retrieve_next_sibling=next_sibling,
        # The same for all trees of a size: kernels are compiled for it.
        spec_steps=min(worker.speculative_num_steps, num_draft_tokens - 1),
        topk=worker.topk,
        draft_token_num=num_draft_tokens,
    )

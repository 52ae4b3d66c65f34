"""SGLang's requests and step results, as far as the plugin reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sgl_eagle.plugin.finished_step import DraftedTrees
from sgl_eagle_harness.types import NO_NODE, CandidateTrees, Children


def make_sampling(**changes):
    fields = {
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "logit_bias": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "custom_params": None,
    }
    return SimpleNamespace(**(fields | changes))


@dataclass
class FakeRequest:
    rid: str
    output_ids: list[int] = field(default_factory=lambda: [50])
    origin_input_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    sampling_params: Any = field(default_factory=make_sampling)
    grammar: Any = None
    custom_logit_processor: Any = None
    eos_token_ids: Any = None
    tokenizer: Any = None
    is_retracted: bool = False
    over: bool = False

    def finished(self):
        return self.over


def make_result(emitted):
    """Result of a verify step: each row's tokens, padded with what must not be read."""
    width = max(map(len, emitted)) + 1
    padded = [[*row, *[-7] * (width - len(row))] for row in emitted]
    return SimpleNamespace(
        next_token_ids=torch.tensor(padded).flatten(),
        accept_lens=torch.tensor([len(row) for row in emitted], dtype=torch.int32),
    )


def two_level_trees(num_rows=1, *, verified=3):
    """Children 10, 11 of the root; 20, 21 of 10 and 30, 31 of 11. The first few are verified."""
    trees = CandidateTrees.empty(num_rows)
    root = np.full((num_rows, 1), NO_NODE)
    trees = trees.append(root, _children([[10, 11]], num_rows))
    frontier = np.tile([0, 1], (num_rows, 1))
    trees = trees.append(frontier, _children([[20, 21], [30, 31]], num_rows))
    columns = np.tile(np.arange(verified), (num_rows, 1))
    return DraftedTrees(trees=trees, columns=columns, speculating=np.ones(num_rows, np.bool_))


def _children(tokens, num_rows):
    shape = (num_rows, len(tokens), 2)
    return Children(
        tokens=np.broadcast_to(np.array(tokens), shape),
        log_probs=np.broadcast_to(np.log(np.array([0.6, 0.3], np.float32)), shape),
        handles=np.zeros(shape, np.int64),
        valid=np.ones(shape, bool),
    )

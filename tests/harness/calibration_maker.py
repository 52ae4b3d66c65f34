"""A drafter of known overconfidence, as a sample of nodes or as a dense trace."""

from __future__ import annotations

import numpy as np
from trace_maker import VOCAB, make_header

from sgl_eagle_harness.calibration import (
    Calibration,
    IdentityMap,
    IsotonicMap,
    TemperatureMap,
)
from sgl_eagle_harness.continuation import PROB_EDGES, ContinuationModel
from sgl_eagle_harness.dense_trace import DenseTrace, PromptTrace
from sgl_eagle_harness.trace_store import read_dense_trace, write_dense_shard


def make_biased_trace(
    path, *, num_positions=3000, num_steps=2, topk=2, temperature=2.0, seed=0
) -> DenseTrace:
    """The step truly succeeds with sigmoid(logit(p) / temperature) while the draft says p."""
    rng = np.random.default_rng(seed)
    group_parents = [-1]
    depths = [1]
    for _ in range(2, num_steps + 1):
        group_parents.append((len(group_parents) - 1) * topk)
        depths.append(depths[-1] + 1)
    num_groups = len(group_parents)
    text = rng.integers(0, VOCAB, num_positions)
    stated = rng.uniform(0.02, 0.98, (num_positions, num_groups))
    rest = (1 - stated) * rng.uniform(0.1, 0.9, stated.shape)
    first = np.maximum(stated, rest)
    true = 1 / (1 + (1 / first - 1) ** (1 / temperature))
    hit = rng.random(first.shape) < true
    tokens = np.empty((num_positions, num_groups * topk), np.int32)
    logs = np.empty(tokens.shape, np.float32)
    for group in range(num_groups):
        wanted = text[np.minimum(np.arange(num_positions) + group, num_positions - 1)]
        miss = (wanted + 1) % VOCAB
        tokens[:, group * topk] = np.where(hit[:, group], wanted, miss)
        logs[:, group * topk] = np.log(first[:, group])
        for rank in range(1, topk):
            tokens[:, group * topk + rank] = (wanted + 1 + rank) % VOCAB
            logs[:, group * topk + rank] = np.log(np.minimum(stated, rest)[:, group]) - rank + 1
    prompt = PromptTrace(
        prompt_id="biased",
        workload="code",
        context_len=np.arange(num_positions),
        next_token=text.astype(np.int32),
        tokens=tokens,
        parents=np.tile(np.repeat(group_parents, topk), (num_positions, 1)).astype(np.int16),
        depths=np.tile(np.repeat(depths, topk), (num_positions, 1)).astype(np.int8),
        step_log_probs=logs,
    )
    write_dense_shard(path, make_header(num_steps=num_steps, topk=topk, beams=(1,)), [prompt])
    return read_dense_trace(path)


def some_maps() -> list[Calibration]:
    rise = np.linspace(0, 1, 25)
    return [
        IdentityMap(),
        TemperatureMap(temperatures=(0.6, 1.7, 1.0)),
        IsotonicMap(lowest_log=-6.0, curves=(tuple(rise**2), tuple(np.sqrt(rise)))),
        IsotonicMap(lowest_log=-3.0, curves=((0.3, 0.3, 0.3),)),
    ]


def make_continuation(topk=4, *, first=0.6, fall=0.4, num_steps=4) -> ContinuationModel:
    by_rank = tuple((first * fall**rank) for rank in range(topk))
    bins = len(PROB_EDGES) + 1
    return ContinuationModel(
        prob_edges=PROB_EDGES, ratios=tuple((by_rank,) * bins for _ in range(num_steps))
    )

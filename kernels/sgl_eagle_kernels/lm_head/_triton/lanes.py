"""What the lanes of a program remember of the scores of a tile that is read in parts.

Each lane keeps the best one or two scores that it has seen, and the mass of all others; lanes are
compared once a tile.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from sgl_eagle_kernels.lm_head._triton.order import id_of, key_of, score_of

MOST_KEPT = 2


@triton.jit
def see_nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Memory of [ROWS, COLUMNS] lanes before the first part.

    Returns the best score and its label, the second best and its label, the best score of those
    that are not kept, and their mass relative to it: relative to the best it might underflow.
    """
    nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
    none, label = nothing - float("inf"), nothing.to(tl.int32)
    return none, label, none, label, none, nothing


@triton.jit
def see_part(
    scores,
    inside,
    label,
    best,
    best_label,
    second,
    second_label,
    beyond,
    rest,
    KEPT: tl.constexpr,
):
    """Memory after one more part, of which lanes that are not `inside` hold padding.

    KEPT is how many scores of a tile are wanted, up to two: so many stay in each lane.
    """
    broken = inside & ((scores != scores) | (scores == float("inf")))
    scores = tl.where(inside & (scores == scores), scores, float("-inf"))
    # Of equals the first stays: parts ascend with token ids.
    wins = scores > best
    if KEPT > 1:
        runs_up = scores > second
        loser = tl.where(runs_up, second, scores)
        second_label = tl.where(wins, best_label, tl.where(runs_up, label, second_label))
        second = tl.where(wins, best, tl.maximum(scores, second))
    else:
        loser = tl.minimum(scores, best)
    best, best_label = tl.maximum(scores, best), tl.where(wins, label, best_label)
    low, high = tl.minimum(loser, beyond), tl.maximum(loser, beyond)
    lower_mass = tl.where(low == float("-inf"), 0.0, tl.exp(low - high))
    rest = tl.where(loser > beyond, rest * lower_mass + 1.0, rest + lower_mass)
    rest = tl.where(broken, float("nan"), rest)
    return best, best_label, second, second_label, high, rest


@triton.jit
def take_best(best, best_label, second, second_label, AXIS: tl.constexpr, KEPT: tl.constexpr):
    """Take the best score of all lanes along an axis, and its label, the lowest among equals.

    Returns both, and the memory without them.
    """
    # One reduction of both, which is one trip between warps.
    key = tl.max(key_of(best, best_label), axis=AXIS)
    value, label = score_of((key >> 32).to(tl.int32)), id_of(key).to(tl.int32)
    taken = best_label == tl.expand_dims(label, AXIS)
    best = tl.where(taken, second, best)
    if KEPT > 1:
        best_label = tl.where(taken, second_label, best_label)
        second = tl.where(taken, float("-inf"), second)
    return value, label, best, best_label, second


@triton.jit
def sum_rest(best, second, beyond, rest, AXIS: tl.constexpr):
    """Log mass of what is left in the memory; NaN where a score was NaN or plus infinity."""
    shift = tl.max(tl.maximum(best, beyond), axis=AXIS)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    wide_shift = tl.expand_dims(shift, AXIS)
    kept = tl.exp(best - wide_shift) + tl.exp(second - wide_shift)
    total = tl.sum(kept + tl.exp(beyond - wide_shift) * rest, axis=AXIS)
    # The interpreter warns of the logarithm of zero.
    mass = shift + tl.log(tl.where(total == 0.0, 1.0, total))
    return tl.where(total == 0.0, float("-inf"), mass)

"""What the lanes of a program remember of the scores of a tile that is read in parts.

Each lane keeps the best score that it has seen, and the mass of the others relative to it; lanes
are compared once a tile.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from sgl_eagle_kernels.lm_head._triton.order import id_of, key_of, score_of

@triton.jit
def see_nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Memory of [ROWS, COLUMNS] lanes before the first part.

    Returns the best score, the label that came with it, the second best, and the mass of all but the
    best relative to the second: relative to the best it might underflow.
    """
    nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
    return nothing - float("inf"), nothing.to(tl.int32), nothing - float("inf"), nothing


@triton.jit
def see_part(scores, inside, label, best, best_label, second, rest):
    """Memory after one more part, of which lanes that are not `inside` hold padding."""
    broken = inside & ((scores != scores) | (scores == float("inf")))
    scores = tl.where(inside & (scores == scores), scores, float("-inf"))
    # Of equals the first stays: parts ascend with token ids.
    wins = scores > best
    loser = tl.minimum(scores, best)
    best = tl.maximum(scores, best)
    low, high = tl.minimum(loser, second), tl.maximum(loser, second)
    lower_mass = tl.where(low == float("-inf"), 0.0, tl.exp(low - high))
    rest = tl.where(loser > second, rest * lower_mass + 1.0, rest + lower_mass)
    return best, tl.where(wins, label, best_label), high, tl.where(broken, float("nan"), rest)


@triton.jit
def find_best(best, places, AXIS: tl.constexpr):
    """Compare lanes along an axis: the best score of all, and its place, the lowest among equals."""
    # One reduction of both, which is one trip between warps.
    key = tl.max(key_of(best, places), axis=AXIS)
    return score_of((key >> 32).to(tl.int32)), id_of(key).to(tl.int32)


@triton.jit
def sum_rest(best, places, place, second, rest, AXIS: tl.constexpr):
    """Log mass of all but what `find_best` found; NaN where a score was NaN or plus infinity."""
    other = tl.where(places == tl.expand_dims(place, AXIS), float("-inf"), best)
    shift = tl.max(tl.maximum(other, second), axis=AXIS)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    wide_shift = tl.expand_dims(shift, AXIS)
    lane_mass = tl.exp(other - wide_shift) + tl.exp(second - wide_shift) * rest
    total = tl.sum(lane_mass, axis=AXIS)
    # The interpreter warns of the logarithm of zero.
    mass = shift + tl.log(tl.where(total == 0.0, 1.0, total))
    return tl.where(total == 0.0, float("-inf"), mass)

"""Keys, masses and the wait for inputs, as kernels compute them; keys are those of `order.py`."""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Wait until all writes of earlier kernels are visible, and let the next one be launched.

    In this order a chain of kernels is never more than one launch ahead, so that whoever waits for
    the last has waited for all.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def order_of(score):
    """[...] int32 that orders float32 scores; NaN ranks with minus infinity, -0.0 with 0.0."""
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(score, ids):
    """[...] int64 keys of scores and ids below 2^32: higher scores first, then lower ids."""
    return (order_of(score).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def score_of(order):
    """[...] float32 scores back from what orders them."""
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """[...] int64 ids back from keys."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def log_mass(scores, axis: tl.constexpr):
    """Log-sum-exp along an axis: minus infinity for no mass, NaN where a score is NaN or infinite.

    Returns float32 without that axis.
    """
    best = tl.max(tl.where(scores == scores, scores, float("-inf")), axis=axis)
    shift = tl.where(best == float("-inf"), 0.0, best)
    if len(scores.shape) > 1:
        shift = tl.expand_dims(shift, axis)
    total = tl.sum(tl.exp(scores - shift), axis=axis)
    best = tl.where(best == float("-inf"), 0.0, best)
    # The interpreter warns of the logarithm of zero.
    return tl.where(total == 0.0, float("-inf"), best + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def missing_log_mass(logits, scores):
    """Nats that scores of candidates miss of a log mass; `reference.missing_log_mass` says why."""
    known = (logits > float("-inf")) & (scores > float("-inf"))
    count = tl.maximum(tl.sum(known.to(tl.float32), axis=0), 1.0)
    residual = tl.where(known, logits - scores, 0.0)
    mean = tl.sum(residual, axis=0) / count
    spread = tl.where(known, residual - mean, 0.0)
    return mean + 0.5 * tl.sum(spread * spread, axis=0) / count


@triton.jit
def add_log_masses(left, right):
    """Log of the sum of two masses; NaN and infinity pass through."""
    # They must reach the flag, so the larger is not found by comparing alone.
    high = tl.where(left > right, left, right)
    low = tl.where(left > right, right, left)
    return tl.where(low == float("-inf"), high, high + tl.log(1.0 + tl.exp(low - high)))

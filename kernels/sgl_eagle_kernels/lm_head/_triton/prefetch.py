"""Hints that weights are wanted soon: memory delivers them while a kernel still waits.

What is hinted at comes into the last cache and is read from there later, so a hint may come before
the wait for earlier kernels, even where one of them writes these weights.
"""

# Triton types neither its decorator nor what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

HINT_BYTES = tl.constexpr(1024)
"""Of one lane's hint."""


@triton.jit
def prefetch(ptr, first, count, total, LANES: tl.constexpr, OVERLAP: tl.constexpr):
    """Hint at elements `first` to `first + count` of the `total` at `ptr`.

    LANES hints at most, and only whole ones inside the tensor. Where launches do not overlap there
    is nothing to gain.
    """
    if OVERLAP:
        size: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        base = ptr.to(tl.int64)
        start = base + tl.cast(first, tl.int64) * size
        at = start // 16 * 16 + tl.arange(0, LANES).to(tl.int64) * HINT_BYTES
        inside = at + HINT_BYTES <= base + tl.cast(total, tl.int64) * size
        wanted = inside & (at < start + tl.cast(count, tl.int64) * size)
        tl.inline_asm_elementwise(
            "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0; "
            "@wanted cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0; }",
            "=r,l,r",
            [at, wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

"""Price policies for tests."""

from __future__ import annotations

from calibration_maker import make_continuation
from cost_maker import make_table

from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.policies.price import PricePolicy, PriceRules
from sgl_eagle_harness.policies.tier import TierConfig


def make_policy(**changes) -> PricePolicy:
    fields = {
        "num_steps": 4,
        "topk": 3,
        "verify_sizes": (1, 2, 4, 8),
        "widths": (1, 2, 3),
        "price_tok_per_us": 1 / 900,
        "rules": PriceRules(),
        "tier": TierConfig(),
        "calibration": IdentityMap(),
        "continuation": make_continuation(topk=4),
        "costs": make_table(batches=(1, 4, 16)),
    }
    return PricePolicy(**(fields | changes))

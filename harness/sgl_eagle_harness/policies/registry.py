"""Every policy that a file can name: a new one adds its spec to the union below."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.plan import PlanSpec
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_harness.policies.static import StaticSpec

PolicySpec = Annotated[
    PlainSpec | StaticSpec | Eagle2Spec | PlanSpec | PriceSpec, Field(discriminator="kind")
]
"""Stored form of any policy; `build(cost_table)` makes the policy."""

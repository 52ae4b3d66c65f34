"""Policies: how deep to draft, what to verify, and when not to speculate at all."""

from sgl_eagle_harness.policies.protocol import SpecPolicy

__all__ = ["SpecPolicy"]

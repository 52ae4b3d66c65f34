"""Stands in for torchvision, which SGLang imports for images that the tests never send."""

from torchvision import io, ops, transforms

__version__ = "0.28.0"
__all__ = ["io", "ops", "transforms"]

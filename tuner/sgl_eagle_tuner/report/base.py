"""The two bricks of every report section: the strict model and the number with its interval."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, model_validator

from sgl_eagle_harness.records import Record


class ReportModel(Record):
    """Strict and frozen: an unknown field, NaN or infinity in a report file is an error."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)


class Estimate(ReportModel):
    """A number and, where one was computed, its 95 % interval."""

    value: float
    """The point estimate, in the unit of the field that holds it."""
    low: float | None = None
    """Lower end of the 95 % interval; None if no interval was computed."""
    high: float | None = None
    """Upper end of the 95 % interval; None if and only if `low` is None."""

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high must both be given, or neither")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low must not exceed high, got low={self.low}, high={self.high}")
        return self

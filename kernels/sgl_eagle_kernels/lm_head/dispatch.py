"""Which head to run for some rows: the one that was measured to be fastest on this device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from sgl_eagle_kernels.lm_head import HeadTopk, TwoStageHead, rank_full, rank_tokens

Route = Literal["full", "global", "local"]


class RouteTimes(BaseModel):
    """Measured times of one route."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: list[int]
    """Strictly increasing, at least 1."""
    us: list[float]
    """Median microseconds of one call at as many rows, from hidden states to tokens."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        rising = all(low < high for low, high in pairwise([0, *self.rows]))
        if not self.rows or not rising or len(self.us) != len(self.rows):
            raise ValueError(
                f"rows must rise from at least 1, with one time each, got {self.rows} and {self.us}"
            )
        if not all(math.isfinite(us) and us > 0 for us in self.us):
            raise ValueError(f"us must be finite and above 0, got {self.us}")
        return self

    def at(self, num_rows: int) -> float:
        """Interpolate linearly, never beyond what was measured.

        Args:
            num_rows: Rows of one call.

        Returns:
            Microseconds.

        Raises:
            ValueError: If `num_rows` lies outside the measured range.
        """
        if not self.rows[0] <= num_rows <= self.rows[-1]:
            raise ValueError(
                f"num_rows must be in the measured range [{self.rows[0]}, {self.rows[-1]}], got "
                f"{num_rows}; costs are not extrapolated"
            )
        right = next(index for index, rows in enumerate(self.rows) if rows >= num_rows)
        if self.rows[right] == num_rows:
            return self.us[right]
        share = (num_rows - self.rows[right - 1]) / (self.rows[right] - self.rows[right - 1])
        return (1 - share) * self.us[right - 1] + share * self.us[right]


class HeadCosts(BaseModel):
    """Measured times of one head's routes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_tokens: int
    """V."""
    hidden: int
    """H."""
    rank: int
    """R of the factors."""
    routes: dict[Route, RouteTimes]
    """What was measured; at least one route."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.routes:
            raise ValueError("routes must not be empty")
        return self

    def route_us(self, route: Route, num_rows: int) -> float:
        """Time of one route.

        Args:
            route: Which.
            num_rows: Rows of one call.

        Returns:
            Microseconds.

        Raises:
            ValueError: If it was not measured for these rows.
        """
        if route not in self.routes:
            raise ValueError(f"route must be one of {sorted(self.routes)}, got {route!r}")
        try:
            return self.routes[route].at(num_rows)
        except ValueError as error:
            raise ValueError(f"route {route}: {error}") from error


class HeadCostFile(BaseModel):
    """Head costs of one device, and where they come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    device: str
    """Name of the GPU."""
    dtype: str
    """Of the weights."""
    topk: int
    """Tokens of a row that every route returned."""
    torch: str
    triton: str
    commit: str
    created: str
    """UTC, ISO 8601."""
    source: str
    """Report that holds the measurements."""
    heads: list[HeadCosts]

    def find(self, *, device: str, num_tokens: int, hidden: int, rank: int) -> HeadCosts:
        """Costs of one head on one device.

        Args:
            device: Name of the GPU that will run it.
            num_tokens: V.
            hidden: H.
            rank: R.

        Returns:
            Its costs.

        Raises:
            ValueError: If the device or the head is another.
        """
        if device != self.device:
            raise ValueError(
                f"head costs of {self.source} were measured on {self.device!r}, running on "
                f"{device!r}; measure them there: python -m sgl_eagle_kernels.bench"
            )
        wanted = (num_tokens, hidden, rank)
        for head in self.heads:
            if (head.num_tokens, head.hidden, head.rank) == wanted:
                return head
        known = [f"{head.num_tokens}x{head.hidden} rank {head.rank}" for head in self.heads]
        raise ValueError(
            f"head costs of {self.source} hold {', '.join(known)}, not "
            f"{num_tokens}x{hidden} rank {rank}"
        )


def read_head_costs(path: Path) -> HeadCostFile:
    """Read a file that the benchmark wrote.

    Args:
        path: JSON.

    Returns:
        Its content.

    Raises:
        ValueError: If it is no such file.
    """
    try:
        return HeadCostFile.model_validate_json(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a file of head costs: {error}") from error


def choose_route(costs: HeadCosts, num_rows: int) -> Route:
    """The fastest route.

    Args:
        costs: Of the head on this device.
        num_rows: Rows of one call.

    Returns:
        The route; of equals the one with the fewest approximations.

    Raises:
        ValueError: If a route was not measured for so many rows.
    """
    order: tuple[Route, ...] = ("full", "global", "local")
    return min(
        (route for route in order if route in costs.routes),
        key=lambda route: costs.route_us(route, num_rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedHead:
    """A head that runs by its fastest route.

    Rows of a captured graph are fixed, so the route is, too.

    Attributes:
        costs: Measured on the device of the weights; every route in it can be run.
        weight: [V, H] full head.
        two_stage: Heads of the routes "global" and "local" in `costs`.
    """

    costs: HeadCosts
    weight: Tensor
    two_stage: Mapping[Route, TwoStageHead]

    def __post_init__(self) -> None:
        missing = self.costs.routes.keys() - self.two_stage.keys() - {"full"}
        if missing:
            raise ValueError(
                f"two_stage must have a head for each route in costs, missing {sorted(missing)}"
            )

    def head_us(self, num_rows: int) -> float:
        """Time of one call, for a cost table.

        Args:
            num_rows: Rows of the call.

        Returns:
            Microseconds.

        Raises:
            ValueError: If so many rows were not measured.
        """
        return self.costs.route_us(choose_route(self.costs, num_rows), num_rows)

    def rank_tokens(self, head_input: Tensor, topk: int) -> HeadTopk:
        """The most probable tokens of every row.

        Args:
            head_input: [N, H] in the dtype of the weights.
            topk: K.

        Returns:
            Ids and log-probabilities.

        Raises:
            ValueError: If the input does not fit, or so many rows were not measured.
        """
        route = choose_route(self.costs, len(head_input))
        if route == "full":
            return rank_full(head_input, self.weight, topk)
        return rank_tokens(head_input, self.two_stage[route], topk)

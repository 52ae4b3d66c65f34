"""How the target chooses tokens; apart from the choosing, so that help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle_harness.errors import PolicyConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target chooses tokens.

    Attributes:
        temperature: 0 is greedy.
        top_p: Smallest set of tokens whose probability reaches this is kept; 1 keeps all.
        top_k: Most tokens kept; 0 keeps all.
        seed: Of the uniform numbers.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 10.0:  # noqa: PLR2004  named in the message
            raise PolicyConfigError(f"temperature must be in [0, 10], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise PolicyConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise PolicyConfigError(f"top_k must be at least 0, got {self.top_k}")


GREEDY = Sampling()

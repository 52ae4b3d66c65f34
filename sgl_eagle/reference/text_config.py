"""What text to generate; apart from the generating, so that help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_eagle_harness.errors import SglEagleError

LOOP_WINDOW = 64  # an answer whose last tokens repeat with a short period will not end by itself


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """What to generate.

    Attributes:
        num_tokens: Tokens of text after which no new wave of rows is started.
        batch_size: Rows of a wave.
        max_length: Longest row, in tokens.
        max_user_tokens: Longest user turn, in tokens; it is closed there.
        primed_share: Share of the user turns that begin with words of ours.
        greedy_share: Share of the answers at temperature 0; the others are at temperature 1.
        user_min_p: In user turns, tokens below this multiple of the largest probability are not
            drawn: at temperature 1 a small model drifts into noise otherwise.
        seed: Of everything drawn.
    """

    num_tokens: int = 40_000_000
    batch_size: int = 2048
    max_length: int = 640
    max_user_tokens: int = 160
    primed_share: float = 0.6
    greedy_share: float = 0.7
    user_min_p: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.batch_size < 1:
            raise SglEagleError(
                f"num_tokens and batch_size must be at least 1, got {self.num_tokens=}, "
                f"{self.batch_size=}"
            )
        if not self.max_length >= 2 * LOOP_WINDOW:
            raise SglEagleError(f"max_length must be at least {2 * LOOP_WINDOW}")

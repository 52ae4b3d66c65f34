"""Numbers as text: every figure on the page passes through here, so that units and digits agree."""

from __future__ import annotations

from sgl_eagle_tuner.report.base import Estimate

NOT_MEASURED = "not measured"
"""What an absent number prints as."""

NOT_RECORDED = "not recorded"
"""What an absent fact of the provenance prints as."""

NOTHING = "\N{EN DASH}"
"""What prints where a number has no meaning, such as the accept rate of plain decoding."""

MINUS = "\N{MINUS SIGN}"
MICRO = "\N{MICRO SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"
"""Keeps a number and its unit on one line."""

MICROSECONDS_PER_MS = 1_000.0
SECONDS_PER_MINUTE = 60.0
ONE_DIGIT_BELOW = 100.0


def format_number(value: float | None, digits: int = 1) -> str:
    """A plain number with thousands separators.

    Args:
        value: Any finite number, or None.
        digits: Digits after the point.

    Returns:
        Text such as "1,234.5".
    """
    if value is None:
        return NOT_MEASURED
    rounded = round(value, digits) + 0.0  # adding zero turns a negative zero into a plain one
    return f"{rounded:,.{digits}f}".replace("-", MINUS)


def format_count(value: int | None) -> str:
    """A count with thousands separators.

    Args:
        value: A count, or None.

    Returns:
        Text such as "12,345".
    """
    return format_number(value, 0)


def format_things(count: int, thing: str) -> str:
    """A count with its noun.

    Args:
        count: How many.
        thing: What, in the singular; its plural takes an "s".

    Returns:
        Text such as "1 token" or "2,000 tokens".
    """
    return f"{format_count(count)} {thing}{'' if count == 1 else 's'}"


def format_signed_percent(fraction: float | None, digits: int = 1) -> str:
    """A deviation as a percentage.

    Args:
        fraction: Any fraction, 0 is no deviation, or None.
        digits: Digits after the point.

    Returns:
        Text such as "+1.5 %", "−3.0 %" or "0.0 %".
    """
    text = format_percent(fraction, digits)
    is_positive = fraction is not None and round(100 * fraction, digits) > 0
    return f"+{text}" if is_positive else text


def format_percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction as a percentage.

    Args:
        fraction: Any fraction, 1 is the whole, or None.
        digits: Digits after the point.

    Returns:
        Text such as "12.5 %", with a narrow space that does not break.
    """
    if fraction is None:
        return NOT_MEASURED
    return f"{format_number(100 * fraction, digits)}{NARROW_SPACE}%"


def format_us(value_us: float | None) -> str:
    """A short time in the unit that suits it.

    Args:
        value_us: Microseconds, or None.

    Returns:
        Text such as "850 µs", "3.2 ms" or "141 ms".
    """
    if value_us is None:
        return NOT_MEASURED
    if value_us < MICROSECONDS_PER_MS:
        return f"{format_number(value_us, 0)}{NARROW_SPACE}{MICRO}s"
    value_ms = value_us / MICROSECONDS_PER_MS
    return f"{format_number(value_ms, _digits(value_ms))}{NARROW_SPACE}ms"


def format_seconds(seconds: float | None) -> str:
    """A wall time.

    Args:
        seconds: Seconds, or None.

    Returns:
        Text such as "4.2 s", "48.0 s" or "3 min 05 s".
    """
    if seconds is None:
        return NOT_MEASURED
    if round(seconds) >= SECONDS_PER_MINUTE:
        minutes, rest = divmod(round(seconds), int(SECONDS_PER_MINUTE))
        return f"{minutes}{NARROW_SPACE}min {rest:02d}{NARROW_SPACE}s"
    return f"{format_number(seconds, _digits(seconds))}{NARROW_SPACE}s"


def _digits(value: float) -> int:
    # Three digits in all are what a median of some dozen runs supports.
    return 1 if value < ONE_DIGIT_BELOW else 0


def format_interval(estimate: Estimate | None, digits: int = 1) -> str:
    """The interval alone.

    Args:
        estimate: A number, or None.
        digits: Digits after the point.

    Returns:
        Text such as "1.46 to 1.58", empty if there is no interval.
    """
    if estimate is None or estimate.low is None:
        return ""
    return f"{format_number(estimate.low, digits)} to {format_number(estimate.high, digits)}"


def format_ratio(estimate: Estimate | None) -> str:
    """A speed ratio without its interval.

    Args:
        estimate: A ratio, or None.

    Returns:
        Text such as "1.52×".
    """
    if estimate is None:
        return NOT_MEASURED
    return f"{format_number(estimate.value, 2)}{TIMES}"


def format_digest(digest: str | None, length: int = 12) -> str:
    """The head of a digest or commit, enough to compare by eye.

    Args:
        digest: Hexadecimal text, or None.
        length: Characters kept.

    Returns:
        The first characters, "not recorded" if there are none.
    """
    if digest is None:
        return NOT_RECORDED
    return digest[:length]

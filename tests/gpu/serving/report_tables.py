"""Tables of a serving check, for a terminal."""

from __future__ import annotations

from statistics import median


def render_tables(results):
    """The tables as one text."""
    start = ", ".join(f"{name} {value:.0f}" for name, value in results.get("start_s", {}).items())
    return "\n".join(
        [
            *(f"FAILED {name}: {failure}" for name, failure in results["failures"].items()),
            *(f"UNFINISHED {what}" for what in results.get("unfinished", [])),
            f"\nstart (s): {start}",
            *_equality_lines(results.get("equality", [])),
            *_sampling_lines(results.get("sampling", [])),
            *_timing_lines(results.get("timing", [])),
            "",
        ]
    )


def _equality_lines(rows):
    yield "\ngreedy output against plain SGLang, one request at a time"
    yield f"{'engine':22} batch  equal  near ties  other  largest gap  tokens/verify"
    for row in rows:
        num_other = len(row["gaps"]) - row["num_near_ties"]
        yield (
            f"{row['engine']:22} {row['batch']:5} {row['num_equal']:4}/{row['num_prompts']:<3}"
            f" {row['num_near_ties']:7} {num_other:6} {max(row['gaps'], default=0):12.3f}"
            f" {row['tokens_per_verify']:12.2f}"
        )


def _sampling_lines(rows):
    yield "\nsampled continuations against plain SGLang's (chi-square of homogeneity)"
    for row in rows:
        yield (
            f"{row['engine']:22} n={row['num_samples']} outcomes={row['num_outcomes']}"
            f" chi2={row['chi_square']:.1f} df={row['degrees']} p={row['p_value']:.3f}"
        )


def _timing_lines(rows):
    yield from _speed_table(
        rows, "full_tok_per_s", "tokens per second while all requests decode (tokens per verify)"
    )
    yield from _speed_table(rows, "tok_per_s", "tokens per second of whole runs")
    yield "\nhost time of rounds, by the plugin's log"
    for row in rows:
        if row["host_us"]:
            yield f"{row['engine']:22} at {row['concurrency']:3}: {row['host_us']}"


def _speed_table(rows, field, title):
    concurrencies = sorted({row["concurrency"] for row in rows})
    yield f"\n{title}, median of repeats"
    yield f"{'engine':22}" + "".join(f"{concurrency:>18}" for concurrency in concurrencies)
    for name in dict.fromkeys(row["engine"] for row in rows):
        cells = [_speed_cell(rows, name, concurrency, field) for concurrency in concurrencies]
        yield f"{name:22}" + "".join(f"{cell:>18}" for cell in cells)


def _speed_cell(rows, name, concurrency, field):
    mine = [row for row in rows if (row["engine"], row["concurrency"]) == (name, concurrency)]
    mine = [row for row in mine if row[field] is not None]
    if not mine:
        return "not measured"
    speed = median(row[field] for row in mine)
    return f"{speed:.0f} ({median(row['tokens_per_verify'] for row in mine):.2f})"

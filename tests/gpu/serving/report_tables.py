"""Tables of a serving check, for a terminal."""

from __future__ import annotations

from statistics import median


def print_tables(results):
    for name, failure in results["failures"].items():
        print(f"FAILED {name}: {failure}")
    print("\nstart (s):", {k: round(v, 1) for k, v in results.get("start_s", {}).items()})
    _print_equality(results.get("equality", []))
    _print_sampling(results.get("sampling", []))
    _print_timing(results.get("timing", []))


def _print_equality(rows):
    print("\ngreedy output against plain SGLang, one request at a time")
    print(f"{'engine':14} batch  equal  near ties  other  largest gap  tokens/verify")
    for row in rows:
        num_other = len(row["gaps"]) - row["num_near_ties"]
        print(
            f"{row['engine']:14} {row['batch']:5} {row['num_equal']:4}/{row['num_prompts']:<3}"
            f" {row['num_near_ties']:7} {num_other:6} {max(row['gaps'], default=0):12.3f}"
            f" {row['tokens_per_verify']:12.2f}"
        )


def _print_sampling(rows):
    print("\nsampled continuations against plain SGLang's (chi-square of homogeneity)")
    for row in rows:
        print(
            f"{row['engine']:14} n={row['num_samples']} outcomes={row['num_outcomes']}"
            f" chi2={row['chi_square']:.1f} df={row['degrees']} p={row['p_value']:.3f}"
        )


def _print_timing(rows):
    concurrencies = sorted({row["concurrency"] for row in rows})
    print("\ntokens per second, median of repeats (tokens per verify)")
    print(f"{'engine':14}" + "".join(f"{concurrency:>18}" for concurrency in concurrencies))
    for name in dict.fromkeys(row["engine"] for row in rows):
        cells = []
        for concurrency in concurrencies:
            mine = [r for r in rows if (r["engine"], r["concurrency"]) == (name, concurrency)]
            if mine:
                speed = median(row["tok_per_s"] for row in mine)
                cells.append(f"{speed:10.0f} ({median(r['tokens_per_verify'] for r in mine):.2f})")
            else:
                cells.append("not measured")
        print(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells))
    print("\nhost time of rounds, by the plugin's log")
    for row in rows:
        if row["host_us"]:
            print(f"{row['engine']:14} at {row['concurrency']:3}: {row['host_us']}")

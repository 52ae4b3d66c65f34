"""The plugin's own numbers on a server's /metrics."""

from __future__ import annotations

import re


def read_metrics(server):
    """Values by name and labels, as tuples of words; several processes are added up."""
    with server.open("/metrics") as response:
        text = response.read().decode()
    values = {}
    for line in text.splitlines():
        match = re.match(r"(sgl_eagle:\w+)(\{.*\})? (\S+)$", line)
        if match:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            labels.pop("pid", None)
            assert labels.pop("model_name").endswith("target")
            key = (match[1].removeprefix("sgl_eagle:"), *labels.values())
            values[key] = values.get(key, 0.0) + float(match[3])
    return values


def contradictions(before, after):
    """Counters that cannot be right together, after requests that began and ended in between."""

    def rise(name):
        return sum(after[key] - before.get(key, 0.0) for key in after if key[0] == name)

    passes, correct = rise("verify_passes_total"), rise("correct_drafts_total")
    equal = {
        "accept_tokens = verify_passes + correct_drafts": (
            rise("accept_tokens_total"),
            passes + correct,
        ),
        "verify_size_passes of all sizes = verify_passes of all tiers": (
            rise("verify_size_passes_total"),
            passes,
        ),
        "draft_depth_passes of all depths = verify_passes of all tiers": (
            rise("draft_depth_passes_total"),
            passes,
        ),
    }
    found = [
        f"{rule}: {left:g}, {right:g}" for rule, (left, right) in equal.items() if left != right
    ]
    rising = {
        "correct_drafts": correct,
        "proposed_drafts": rise("proposed_drafts_total"),
        "drafted_nodes": rise("drafted_nodes_total"),
    }
    if list(rising.values()) != sorted(rising.values()):
        found.append(f"not in rising order: {rising}")
    if rise("steps_total") > passes:
        found.append(f"steps <= verify_passes: {rise('steps_total'):g}, {passes:g}")
    return found

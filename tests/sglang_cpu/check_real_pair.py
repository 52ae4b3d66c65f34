"""Greedy output of a real pair under every kind of policy, and many requests with random aborts.

    python tests/sglang_cpu/check_real_pair.py --target DIR --out RESULTS.json

DIR is a folder that `sgl-eagle export` wrote; the shipped draft serves it unless --draft names
another. A server for each policy, in float32, answers all prompts several at a time; Hugging Face's
`generate` says what they should be, one at a time. Then servers are soaked: requests of every kind
at once, some ended by their client. Progress goes to stderr; results are saved after every part, as
JSON and as a page in Markdown beside it. Ends with 1 where an output differs or something leaks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from policy_files import write_policies
from server_process import MAX_RUNNING_REQUESTS, STAND_IN_ATTENTION, ForkServer
from soak import Known, soak

import sgl_eagle
from sgl_eagle.reference.prompts import WORKLOADS, load_shipped_prompts
from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_tuner.provenance import collect_provenance

NO_FILE = "no policy file"
POLICIES = ("plain", "irregular", "chain", "eagle2", "price", NO_FILE)
SHIPPED_DRAFT = Path(sgl_eagle.__file__).parent / "assets" / "draft"
HUGGING_FACE_CHUNK = 10
"""Prompts of one call, so that progress is seen."""


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=SHIPPED_DRAFT)
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument("--prompts", type=int, default=100, help="shipped prompts, in turn")
    parser.add_argument("--length", type=int, default=24, help="new tokens of each")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--soak-requests", type=int, default=500)
    parser.add_argument("--soak-policies", nargs="*", choices=POLICIES, default=["eagle2", NO_FILE])
    parser.add_argument("--seed", type=int, default=0, help="of the soak")
    return parser.parse_args(words)


def say(text):
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def choose_prompts(count):
    """Shipped prompts, one of each workload in turn."""
    groups = [load_shipped_prompts((workload,)) for workload in WORKLOADS]
    prompts = [prompt for group in zip(*groups, strict=True) for prompt in group]
    if count > len(prompts):
        raise SystemExit(f"--prompts must be at most {len(prompts)}, got {count}")
    return prompts[:count]


def complete_known(fork_server, target, prompts, length):
    """The prompts with what Hugging Face's `generate` writes."""
    ids = fork_server.call("hugging_face", "encode_chats", target, [p.turns[0] for p in prompts])
    completions = []
    for start in range(0, len(ids), HUGGING_FACE_CHUNK):
        chunk = ids[start : start + HUGGING_FACE_CHUNK]
        completions += fork_server.call("hugging_face", "complete", target, chunk, length)
        say(f"Hugging Face: {len(completions)} of {len(ids)} prompts")
    texts = fork_server.call("hugging_face", "decode", target, completions)
    return [
        Known(prompt=prompt, completion=completion, text=text)
        for prompt, completion, text in zip(ids, completions, texts, strict=True)
    ]


def first_differences(prompts, known, answers):
    """Where each text that is not the known one leaves it."""
    found = []
    for prompt, one, answer in zip(prompts, known, answers, strict=True):
        pairs = enumerate(zip(one.completion, answer["output_ids"], strict=True))
        position = next((index for index, (a, b) in pairs if a != b), None)
        if position is not None:
            found.append(
                {"prompt_id": prompt.id, "position": position}
                | {"text": one.prompt + one.completion[:position]}
            )
    return found


def check_greedy(fork_server, server, target, prompts, known):
    """Output of all prompts against the known one."""
    length = len(known[0].completion)
    started = time.monotonic()
    answers = server.complete_all(
        [one.prompt for one in known], concurrency=MAX_RUNNING_REQUESTS, max_new_tokens=length
    )
    seconds = time.monotonic() - started
    differences = first_differences(prompts, known, answers)
    texts = [difference.pop("text") for difference in differences]
    gaps = fork_server.call("hugging_face", "top_two_gaps", target, texts) if texts else []
    for difference, gap in zip(differences, gaps, strict=True):
        difference["top_two_gap"] = gap
    num_steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return {
        "num_prompts": len(known),
        "num_equal": len(known) - len(differences),
        "differences": differences,
        # The first token of a text is prefill's.
        "accept_length": len(known) * (length - 1) / num_steps,
        "num_used_tokens": server.drain()["num_used_tokens"],
        "seconds": seconds,
    }


def is_clean(results):
    """Whether every text was equal and nothing leaked or contradicts itself."""
    greedy = results["greedy"].values()
    return all(
        [
            *(row["num_equal"] == row["num_prompts"] for row in greedy),
            *(row["num_used_tokens"] == 0 for row in greedy),
            *(not complaints(row) for row in results["soak"].values()),
        ]
    )


def complaints(row):
    """What is wrong after a soak."""
    counts = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return [
        *(f"{name} is {row[name]}" for name in counts if row[name]),
        *(f"{len(row['wrong'])} wrong outputs" for _ in row["wrong"][:1]),
        *row["contradictions"],
    ]


def render_page(results):
    """The results as Markdown."""
    provenance = results["provenance"]
    versions = ", ".join(f"{name} {value}" for name, value in provenance["versions"].items())
    yield "# Greedy output under every policy, and requests with random aborts\n"
    yield (
        f"{results['prompts']} shipped prompts of {', '.join(WORKLOADS)}, in the target's chat "
        f"format; {results['length']} new tokens each, {MAX_RUNNING_REQUESTS} at a time, float32, "
        "against Hugging Face's `generate`, one at a time.\n"
    )
    yield f"`{provenance['command']}`\n"
    yield (
        f"Commit {provenance['commit']}, {provenance['created']}, {provenance['cpu']}; "
        f"{versions}.\n"
    )
    yield "| policy | equal | largest top-two gap at a difference | accept length | slots left |"
    yield "|---|---|---|---|---|"
    for name, row in results["greedy"].items():
        gaps = [difference["top_two_gap"] for difference in row["differences"]]
        largest = f"{max(gaps):.5f}" if gaps else "no difference"
        yield (
            f"| {name} | {row['num_equal']} of {row['num_prompts']} | {largest} "
            f"| {row['accept_length']:.2f} | {row['num_used_tokens']} |"
        )
    for name, row in results["soak"].items():
        yield (
            f"\n## {row['num_requests']} requests, {row['concurrency']} at a time, {name}\n\n"
            f"Seed {row['seed']}. {len(row['wrong'])} outputs are not what they must be; in use "
            f"afterwards: {row['num_used_tokens']} cache slots, {row['num_running_reqs']} running "
            f"and {row['num_waiting_reqs']} waiting requests. Counters that contradict each "
            f"other: {'; '.join(row['contradictions']) or 'none'}.\n"
        )
        yield "| request: how it ended | count |\n|---|---|"
        yield from (f"| {outcome} | {count} |" for outcome, count in row["outcomes"].items())


def save(results, out):
    write_text(out, json.dumps(results, indent=1))
    write_text(out.with_suffix(".md"), "\n".join(render_page(results)) + "\n")


def main(words=None):
    args = parse_arguments(words)
    prompts = choose_prompts(args.prompts)
    provenance = collect_provenance(seed=args.seed).model_dump(mode="json")
    results = {"provenance": provenance, "prompts": len(prompts), "length": args.length}
    results |= {"greedy": {}, "soak": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for link, path in (("target", args.target), ("draft", args.draft)):
            (folder / link).symlink_to(path.resolve(strict=True))
        target, policies = str(folder / "target"), write_policies(folder)
        fork_server = ForkServer(folder / "fork_log", STAND_IN_ATTENTION)
        known = complete_known(fork_server, target, prompts, args.length)
        for policy in dict.fromkeys([*args.policies, *args.soak_policies]):
            flags = ["--enable-metrics", "--sgl-eagle-cost-cache", "none"]
            if policy != NO_FILE:
                flags += ["--sgl-eagle-policy", str(policies[policy])]
            log = folder / f"{policy}.log"
            with fork_server.serve(folder, log, *flags) as server:
                if policy in args.policies:
                    row = check_greedy(fork_server, server, target, prompts, known)
                    results["greedy"][policy] = row
                    say(f"{policy}: {row['num_equal']} of {row['num_prompts']} equal")
                    save(results, args.out)
                if policy in args.soak_policies and args.soak_requests:
                    row = soak(
                        server,
                        known,
                        num_requests=args.soak_requests,
                        concurrency=MAX_RUNNING_REQUESTS,
                        seed=args.seed,
                        say=say,
                    )
                    results["soak"][policy] = row
                    say(f"{policy}: {', '.join(complaints(row)) or 'nothing leaked'}")
                    save(results, args.out)
        fork_server.close()
    return 0 if is_clean(results) else 1


if __name__ == "__main__":
    sys.exit(main())

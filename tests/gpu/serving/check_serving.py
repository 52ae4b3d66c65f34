"""Serves one model pair under every kind of policy and compares with plain SGLang.

    python tests/gpu/serving/check_serving.py --target DIR --draft DIR --out DIR

Engines run side by side in processes of their own, on one GPU or spread over several. First all
answer the same prompts: greedily, at several concurrencies, and sampled. Then each is timed while
the others of its GPU are idle. What fails is reported and the rest goes on, up to the deadline; an
engine of ours that writes other text than plain SGLang is ended and not timed. Writes results.json
and logs.txt, never over those of another run, and prints tables last. Ends with 1 where an engine
failed, with 3 where output differed.

With --device cpu (and stand-ins of SGLang's kernels on PYTHONPATH) it rehearses itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).parent))

from engine_handle import EngineError, EngineHandle
from report_tables import render_tables
from serving_engines import (
    ASKED_FOR,
    ENGINES,
    PLAIN,
    context_length,
    engine_arguments,
    engine_name,
    spread,
    without_backend,
)
from serving_log import gpu_memory_mib, read_capture_seconds, read_log
from serving_policies import write_policies
from two_samples import homogeneity

NEAR_TIE = 0.251
"""Two units in the last place of a bfloat16 logit between 16 and 32, and rounding of the gap."""
MOST_OTHERS = (2, 0.05)
"""Prompts, and share of them, that may differ at a larger gap, whichever is more. Rounding reached
one in 16 in engines that were right; a wrong mask or a missing move of the cache spares hardly any.
"""
OUTPUT_DIFFERS = 3
LOG_BYTES = 400_000
SECONDS_PER_TIMING = 12
"""Nothing is timed that might not end before the deadline."""
DEADLINE_SLACK_S = 0.5
"""An engine that is this close to the deadline without an answer has not failed."""
FEWEST_REQUESTS = 4
"""Requests of a timing at low concurrency, so that it is not of one prompt alone."""
LONGEST_PROMPT = 256
SHIPPED_PROMPTS = Path(__file__).parents[3] / "sgl_eagle" / "assets" / "prompts"


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--engines",
        nargs="+",
        type=engine_name,
        default=[name for name in ENGINES if name not in ASKED_FOR],
        metavar="ENGINE",
        help=f"of {', '.join(ENGINES)}; with @fa3, say, on another attention backend",
    )
    parser.add_argument("--first-port", type=int, default=41000, help="one for each engine")
    parser.add_argument("--no-graphs", action="store_true", help="decode without CUDA graphs")
    parser.add_argument("--overlap", choices=("on", "off"), default="on")
    parser.add_argument("--backend", default="triton", help="attention backend on the GPU")
    parser.add_argument("--start-timeout", type=float, default=300)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument(
        "--max-total-tokens", type=int, default=120_000, help="cache slots of an engine on the GPU"
    )
    parser.add_argument(
        "--mem-fraction", type=float, default=0.5, help="SGLang's --mem-fraction-static on the GPU"
    )
    parser.add_argument("--context-length", type=int, help="default: 2048 on a GPU, else 512")
    parser.add_argument("--policy", type=Path, help="policy file of sgl-tuned")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help="JSON lines (default: the shipped prompts)"
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread the engines over")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs of each engine")
    parser.add_argument("--num-equal", type=int, default=64, help="prompts compared, 0 for none")
    parser.add_argument(
        "--equal-tokens", type=int, default=64, help="of each, 0 until the context is full"
    )
    parser.add_argument("--num-samples", type=int, default=1500, help="0 for none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--timed-tokens", type=int, default=256)
    parser.add_argument(
        "--profile", nargs="+", type=engine_name, default=[], help="engines to trace"
    )
    parser.add_argument("--profiled-requests", type=int, default=1, help="that decode together")
    parser.add_argument("--profiled-rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--commit", help="of the checkout, for the record")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything")
    args = parser.parse_args(words)
    if (args.out / "results.json").exists():
        parser.error(f"--out must be a new folder, {args.out} holds the results of another run")
    if "sgl-tuned" in map(without_backend, args.engines) and args.policy is None:
        parser.error("sgl-tuned needs --policy")
    together = (*args.batches, *args.concurrencies, args.profiled_requests)
    if max(together) > args.max_running_requests:
        parser.error(
            "--batches, --concurrencies and --profiled-requests must be at most "
            f"--max-running-requests, {args.max_running_requests}; the largest is {max(together)}"
        )
    return args


def load_prompts(target, files, count, longest):
    """Token ids of prompts in the target's chat format, at most as many as said, files in turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [path.read_text(encoding="utf-8").splitlines() for path in files]
    lines = [line for group in zip(*texts, strict=False) for line in group][:count]
    if len(lines) < count:
        raise ValueError(f"--prompts hold {len(lines)} in groups of one a file, {count} are needed")
    prompts = []
    for line in lines:
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"][-longest:])
    return prompts


def collect_provenance(args):
    """What the numbers depend on."""
    gpu = None
    if args.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        counts = Counter(text.strip().splitlines())
        gpu = "; ".join(f"{count} x {name}" for name, count in counts.items())
    words = map(_shorten, sys.argv[1:])
    return {
        "command": shlex.join(["python", "tests/gpu/serving/check_serving.py", *words]),
        "commit": args.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
    }


def _shorten(word):
    # Where files lay on the machine says nothing to a reader.
    path = Path(word)
    return str(Path(*path.parts[-2:])) if path.is_absolute() else word


class ServingCheck:
    """The running engines and what they have answered so far."""

    def __init__(self, args):
        self.args = args
        self.results = {"provenance": collect_provenance(args), "failures": {}, "unfinished": []}
        self._ends = time.monotonic() + args.deadline
        self._saving = Lock()
        self._ended = set()
        self.engines = {}
        self.gpus = spread(args.engines, args.gpus)
        plain = [name for name in args.engines if without_backend(name) in PLAIN]
        self.reference = plain[0] if plain else None

    def left(self):
        return max(self._ends - time.monotonic(), 1.0)

    def save(self):
        with self._saving:
            self._save()

    def _save(self):
        path = self.args.out / "results.json"
        path.with_suffix(".part").write_text(json.dumps(self.results), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        with (self.args.out / "logs.txt").open("w", encoding="utf-8") as file:
            for engine in self.engines.values():
                file.write(f"===== {engine.name}\n{engine.log_text()[-LOG_BYTES:]}\n")

    def start(self):
        folder = self.args.out / "engines"
        folder.mkdir(parents=True, exist_ok=True)
        policies = {
            f"sgl-{name}": path
            for name, path in write_policies(
                folder,
                largest_batch=self.args.max_running_requests,
                longest_context=context_length(self.args),
            ).items()
        }
        if self.args.policy is not None:
            policies["sgl-tuned"] = self.args.policy.resolve()
        for name in self.args.engines:
            arguments, environment = engine_arguments(name, self.args, policies, self.gpus[name])
            self.engines[name] = EngineHandle(name, arguments, environment, folder)
        timeout_s = min(self.args.start_timeout, self.left())
        self.results["start_s"] = self.ask_all("start", lambda e: e.wait_until_ready(timeout_s))
        alive = {name: self.engines[name] for name in self.alive()}
        self.results["capture_s"] = {
            name: read_capture_seconds(engine.log_text()) for name, engine in alive.items()
        }
        groups = {name: engine.process_group for name, engine in alive.items()}
        self.results["gpu_mib"] = gpu_memory_mib(groups)
        self.save()

    def ask_all(self, part, ask, names=None):
        """Answers of engines that are asked at the same time; one that fails is ended."""
        names = [name for name in names or self.engines if name in self.alive()]
        with ThreadPoolExecutor(max(len(names), 1)) as pool:
            futures = {name: pool.submit(ask, self.engines[name]) for name in names}
        answers = {}
        for name, future in futures.items():
            try:
                answers[name] = future.result()
            except EngineError as failure:
                if time.monotonic() > self._ends - DEADLINE_SLACK_S:
                    self.results["unfinished"].append(f"{name}: {part}")
                    self._ended.add(name)
                    continue
                self.results["failures"][name] = f"{part}: {failure}"
                self.engines[name].kill()
                say(f"FAILED {part}: {failure}\n{self.engines[name].log_text()[-3000:]}")
        say(f"[{self.args.deadline - self.left():.0f} s] {part}: {', '.join(answers) or 'none'}")
        self.save()
        return answers

    def alive(self):
        ended = self._ended | self.results["failures"].keys()
        return [name for name in self.engines if name not in ended]

    def warm_up(self, prompts):
        """Let kernels that first requests compile be compiled.

        Not all are by the first round of a batch size: cache slots are reserved every few rounds.
        """
        sampling = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
        for concurrency in sorted({*self.args.concurrencies, 1}, reverse=True):
            self.ask_all(
                f"warm-up at {concurrency}",
                lambda engine, c=concurrency: engine.complete(
                    prompts[:c], concurrency=c, sampling=sampling, timeout_s=self.left()
                ),
            )

    def check_equality(self, prompts):
        sampling = {
            "temperature": 0,
            "max_new_tokens": self.args.equal_tokens or None,
            "ignore_eos": True,
        }

        def ask(batch, count):
            return lambda engine: engine.complete(
                prompts[:count], concurrency=batch, sampling=sampling, timeout_s=self.left()
            )

        answers = self.ask_all("greedy reference", ask(1, len(prompts)), [self.reference])
        if self.reference not in answers:
            return
        reference = answers[self.reference]["outputs"]
        self.results["equality"] = []
        for batch in sorted(self.args.batches, reverse=True):
            count = len(prompts) if batch > 1 else min(16, len(prompts))
            answers = self.ask_all(f"greedy at batch {batch}", ask(batch, count))
            for name, answer in answers.items():
                self._compare(
                    name,
                    batch,
                    list(zip(prompts, reference, answer["outputs"], strict=False)),
                    answer,
                )
            for name in {row["engine"] for row in differing(self.results)} & set(self.alive()):
                say(f"OUTPUT DIFFERS, nothing more is asked: {name}")
                self.results["failures"][name] = f"greedy at batch {batch}: its output differs"
                self.engines[name].kill()
            self.save()

    def _compare(self, name, batch, pairs, answer):
        gaps = self._gaps_at_differences(pairs)
        self.results["equality"].append(
            {
                "engine": name,
                "batch": batch,
                "num_prompts": len(pairs),
                "num_equal": len(pairs) - len(gaps),
                "num_near_ties": sum(gap <= NEAR_TIE for gap in gaps),
                "gaps": gaps,
                "tokens_per_verify": _ratio(answer),
            }
        )

    def _gaps_at_differences(self, pairs):
        """Top-two gaps of the target where outputs first differ; infinite where one just ends."""
        prefixes, ends = [], []
        for prompt, wanted, found in pairs:
            places = [i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b]
            if places:
                prefixes.append(prompt + wanted[: places[0]])
            elif wanted != found:
                ends.append(math.inf)
        if not prefixes:
            return ends
        answer = self.engines[self.reference].complete(
            prefixes,
            concurrency=1,
            sampling={"temperature": 0, "max_new_tokens": 1},
            timeout_s=self.left(),
            logprobs=True,
        )
        return ends + [best[0] - second[0] for best, second in answer["top_two"]]

    def check_sampling(self, prompts):
        sampling = {"temperature": 1.0, "top_k": 3, "max_new_tokens": 4, "ignore_eos": True}
        answers = self.ask_all(
            "sampled",
            lambda engine: engine.complete(
                [prompts[0]] * self.args.num_samples,
                concurrency=self.args.num_samples,
                sampling=sampling,
                timeout_s=self.left(),
            ),
        )
        if self.reference not in answers:
            return
        counts = {name: Counter(map(tuple, answer["outputs"])) for name, answer in answers.items()}
        self.results["sampling"] = [
            {"engine": name, **homogeneity(counts[self.reference], counts[name])} for name in counts
        ]
        self.save()

    def time_engines(self, prompts):
        self.results["timing"] = []
        lanes = {}
        for name in self.alive():
            lanes.setdefault(self.gpus[name], []).append(name)
        with ThreadPoolExecutor(max(len(lanes), 1)) as pool:
            done = [pool.submit(self._time_lane, lane, prompts) for lane in lanes.values()]
            for future in done:
                future.result()

    def _time_lane(self, names, prompts):
        """Time the engines of one GPU, one after the other, there and back."""
        for repeat in range(self.args.repeats):
            for name in names if repeat % 2 == 0 else names[::-1]:
                for concurrency in self.args.concurrencies:
                    if self.left() < SECONDS_PER_TIMING:
                        return
                    row = self._time(name, concurrency, repeat, prompts)
                    if row is None:
                        break
                    with self._saving:
                        self.results["timing"].append(row)

    def _time(self, name, concurrency, repeat, prompts):
        sampling = {
            "temperature": 0,
            "max_new_tokens": self.args.timed_tokens,
            "ignore_eos": True,
        }
        # All start together: new arrivals would stop decoding for their prefill.
        count = max(concurrency, FEWEST_REQUESTS)
        log_start = len(self.engines[name].log_text())
        answers = self.ask_all(
            f"timed at {concurrency}",
            lambda engine: engine.complete(
                prompts[:count],
                concurrency=concurrency,
                sampling=sampling,
                timeout_s=self.left(),
            ),
            [name],
        )
        if name not in answers:
            return None
        answer = answers[name]
        num_tokens = sum(map(len, answer["outputs"]))
        return {
            "engine": name,
            "gpu": self.gpus[name],
            "repeat": repeat,
            "concurrency": concurrency,
            "num_requests": count,
            "num_tokens": num_tokens,
            "tok_per_s": num_tokens / answer["seconds"],
            "tokens_per_verify": _ratio(answer),
            **read_log(self.engines[name].log_text()[log_start:], concurrency),
        }

    def profile_rounds(self, prompts):
        """Traces of decode rounds in Chrome's format, one engine at a time."""
        sampling = {
            "temperature": 0,
            "max_new_tokens": self.args.timed_tokens,
            "ignore_eos": True,
        }
        for name in self.args.profile:
            folder = self.args.out / "traces" / name
            folder.mkdir(parents=True, exist_ok=True)
            self.ask_all(
                "profiled",
                lambda engine, folder=folder: engine.profile(
                    prompts[: self.args.profiled_requests],
                    sampling=sampling,
                    folder=folder.resolve(),
                    num_rounds=self.args.profiled_rounds,
                    timeout_s=min(60, self.left()),
                ),
                [name],
            )


def _ratio(answer):
    num_tokens = sum(map(len, answer["outputs"]))
    # The first token of an answer is prefill's.
    return (num_tokens - len(answer["outputs"])) / answer["verify_ct"] if answer["verify_ct"] else 1


def main(words=None):
    args = parse_arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    check = ServingCheck(args)
    try:
        check.start()
        files = args.prompts or sorted(SHIPPED_PROMPTS.glob("*"))
        most = max(args.num_equal, args.profiled_requests, *args.concurrencies)
        count = max(most, FEWEST_REQUESTS)
        longest = min(LONGEST_PROMPT, context_length(args) // 2)
        prompts = load_prompts(args.target, files, count, longest)
        check.results["prompt_tokens"] = [len(prompt) for prompt in prompts]
        check.warm_up(prompts)
        if check.reference in check.alive() and args.num_equal:
            check.check_equality(prompts[: args.num_equal])
        check.time_engines(prompts)
        if check.reference in check.alive() and args.num_samples:
            check.check_sampling(prompts)
        check.profile_rounds(prompts)
    except (EngineError, LookupError, ValueError) as error:
        check.results["failures"]["script"] = repr(error)
    finally:
        for engine in check.engines.values():
            engine.kill()
        check.save()
        say(render_tables(check.results))
    if differing(check.results):
        return OUTPUT_DIFFERS
    return 1 if check.results["failures"] else 0


def differing(results):
    """Rows of the comparison where SGL_EAGLE writes other text than plain SGLang.

    What plain SGLang itself writes otherwise in a batch than alone is no fault of theirs.
    """
    rows = results.get("equality", [])
    plain = {
        row["batch"]: _num_others(row) for row in rows if without_backend(row["engine"]) in PLAIN
    }
    count, share = MOST_OTHERS
    return [
        row
        for row in rows
        if row["engine"].startswith("sgl-")
        and _num_others(row) - plain.get(row["batch"], 0) > max(count, share * row["num_prompts"])
    ]


def _num_others(row):
    return len(row["gaps"]) - row["num_near_ties"]


if __name__ == "__main__":
    sys.exit(main())

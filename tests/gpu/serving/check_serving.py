"""Serves one model pair under every kind of policy and compares with plain SGLang.

    python tests/gpu/serving/check_serving.py --target DIR --draft DIR --out DIR

Engines run side by side in processes of their own. First all answer the same prompts: greedily, at
several concurrencies, and sampled. Then each is timed while the others are idle. What fails is
reported and the rest goes on. Writes results.json and logs.txt, prints tables last.

With --device cpu (and stand-ins of SGLang's kernels on PYTHONPATH) it rehearses itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from engine_handle import EngineError, EngineHandle
from report_tables import render_tables
from serving_policies import write_policies
from two_samples import homogeneity

CONTEXT_LENGTH = 2048
NEAR_TIE = 0.251
"""Two units in the last place of a bfloat16 logit between 16 and 32, and rounding of the gap."""
LOG_BYTES = 400_000
ROUNDS_PER_LOG_LINE = 10
SECONDS_PER_TIMING = 12
"""Nothing is timed that might not end before the deadline."""
PROMPTS = Path(__file__).parents[3] / "sgl_eagle" / "assets" / "prompts"

BUILTIN = {
    "eagle3-5-4-8": (5, 4, 8),
    "eagle3-3-1-4": (3, 1, 4),
}
POLICIES = ("plain", "static", "eagle2", "price")
ENGINES = ("sglang", *BUILTIN, *(f"sgl-{name}" for name in POLICIES), "sgl-default")
"""Plain SGLang, its own EAGLE-3 (num_steps, topk, num_draft_tokens), and SGL_EAGLE by policy; the
last has no policy file and measures its costs at its start, beside the others'."""


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
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--no-graphs", action="store_true", help="decode without CUDA graphs")
    parser.add_argument("--overlap", choices=("on", "off"), default="on")
    parser.add_argument("--backend", default="triton", help="attention backend on the GPU")
    parser.add_argument("--start-timeout", type=float, default=300)
    parser.add_argument("--num-equal", type=int, default=64, help="prompts compared, 0 for none")
    parser.add_argument("--equal-tokens", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=1500, help="0 for none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--timed-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--commit", help="of the checkout, for the record")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything")
    return parser.parse_args(words)


def engine_arguments(name, args, policies):
    """SGLang's arguments and the environment of one engine."""
    arguments = {
        "model_path": str(args.target),
        "dtype": args.dtype,
        "device": args.device,
        "context_length": CONTEXT_LENGTH if args.device == "cuda" else 512,
        "random_seed": 1,
        "decode_log_interval": ROUNDS_PER_LOG_LINE,
        "log_level": "info",
        "sleep_on_idle": True,
        "disable_overlap_schedule": args.overlap == "off",
        "nccl_port": 41000 + ENGINES.index(name),
        "skip_server_warmup": True,
    }
    if args.device == "cuda":
        arguments |= {
            "attention_backend": args.backend,
            "sampling_backend": "pytorch",
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
            "max_running_requests": 64,
            "max_total_tokens": 120_000,
            "mem_fraction_static": 0.5,
        }
        if args.no_graphs:
            arguments["disable_cuda_graph"] = True
    else:
        arguments |= {
            "attention_backend": "torch_native",
            "prefill_attention_backend": "intel_amx",
            "decode_attention_backend": "intel_amx",
            "disable_cuda_graph": True,
            "max_running_requests": 8,
            "max_total_tokens": 4096,
            "mem_fraction_static": 0.2,
        }
    environment = {}
    if name != "sglang":
        arguments["speculative_draft_model_path"] = str(args.draft)
        if args.device == "cpu":
            arguments["speculative_draft_attention_backend"] = "intel_amx"
    if name in BUILTIN:
        arguments["speculative_algorithm"] = "EAGLE3"
        keys = ("num_steps", "eagle_topk", "num_draft_tokens")
        arguments |= {
            f"speculative_{key}": value for key, value in zip(keys, BUILTIN[name], strict=True)
        }
    elif name != "sglang":
        arguments["speculative_algorithm"] = "SGL_EAGLE"
        policy = policies.get(name.removeprefix("sgl-"))
        environment |= {} if policy is None else {"SGLEAGLE_POLICY": str(policy)}
    return arguments, environment


def load_prompts(target, count):
    """Token ids of shipped prompts in the target's chat format, workloads in turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    files = [path.read_text(encoding="utf-8").splitlines() for path in sorted(PROMPTS.glob("*"))]
    lines = [line for group in zip(*files, strict=False) for line in group][:count]
    prompts = []
    for line in lines:
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"][-256:])
    return prompts


def collect_provenance(args):
    """What the numbers depend on."""
    gpu = None
    if args.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "command": shlex.join(["python", "tests/gpu/serving/check_serving.py", *sys.argv[1:]]),
        "commit": args.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "versions": {name: version(name) for name in ("sglang", "torch", "triton")},
        "arguments": {name: str(value) for name, value in vars(args).items()},
    }


class ServingCheck:
    """The running engines and what they have answered so far."""

    def __init__(self, args):
        self.args = args
        self.results = {"provenance": collect_provenance(args), "failures": {}}
        self._ends = time.monotonic() + args.deadline
        self.engines = {}

    def left(self):
        return max(self._ends - time.monotonic(), 1.0)

    def save(self):
        path = self.args.out / "results.json"
        path.with_suffix(".part").write_text(json.dumps(self.results), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        with (self.args.out / "logs.txt").open("w", encoding="utf-8") as file:
            for engine in self.engines.values():
                file.write(f"===== {engine.name}\n{engine.log_text()[-LOG_BYTES:]}\n")

    def start(self):
        folder = self.args.out / "engines"
        folder.mkdir(parents=True, exist_ok=True)
        policies = write_policies(folder, largest_batch=64, longest_context=CONTEXT_LENGTH)
        for name in self.args.engines:
            arguments, environment = engine_arguments(name, self.args, policies)
            self.engines[name] = EngineHandle(name, arguments, environment, folder)
        timeout_s = min(self.args.start_timeout, self.left())
        self.results["start_s"] = self.ask_all("start", lambda e: e.wait_until_ready(timeout_s))

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
                self.results["failures"][name] = f"{part}: {failure}"
                self.engines[name].kill()
                say(f"FAILED {part}: {failure}\n{self.engines[name].log_text()[-3000:]}")
        say(f"[{self.args.deadline - self.left():.0f} s] {part}: {', '.join(answers) or 'none'}")
        self.save()
        return answers

    def alive(self):
        return [name for name in self.engines if name not in self.results["failures"]]

    def check_equality(self, prompts):
        sampling = {
            "temperature": 0,
            "max_new_tokens": self.args.equal_tokens,
            "ignore_eos": True,
        }

        def ask(batch, count):
            return lambda engine: engine.complete(
                prompts[:count], concurrency=batch, sampling=sampling, timeout_s=self.left()
            )

        outputs = {}
        for batch in sorted(self.args.batches, reverse=True):
            count = len(prompts) if batch > 1 else min(16, len(prompts))
            answers = self.ask_all(f"greedy at batch {batch}", ask(batch, count))
            outputs |= {(name, batch): answer for name, answer in answers.items()}
        reference = self.ask_all("greedy reference", ask(1, len(prompts)), ["sglang"])["sglang"]
        self.results["equality"] = rows = []
        for (name, batch), answer in outputs.items():
            pairs = list(zip(prompts, reference["outputs"], answer["outputs"], strict=False))
            gaps = self._gaps_at_differences(pairs)
            rows.append(
                {
                    "engine": name,
                    "batch": batch,
                    "num_prompts": len(answer["outputs"]),
                    "num_equal": len(answer["outputs"]) - len(gaps),
                    "num_near_ties": sum(gap <= NEAR_TIE for gap in gaps),
                    "gaps": gaps,
                    "tokens_per_verify": _ratio(answer),
                }
            )
        self.save()

    def _gaps_at_differences(self, pairs):
        """Top-two gaps of the target where outputs first differ."""
        prefixes = []
        for prompt, wanted, found in pairs:
            if wanted != found:
                place = next(
                    i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b
                )
                prefixes.append(prompt + wanted[:place])
        if not prefixes:
            return []
        answer = self.engines["sglang"].complete(
            prefixes,
            concurrency=1,
            sampling={"temperature": 0, "max_new_tokens": 1},
            timeout_s=self.left(),
            logprobs=True,
        )
        return [best[0] - second[0] for best, second in answer["top_two"]]

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
        counts = {name: Counter(map(tuple, answer["outputs"])) for name, answer in answers.items()}
        self.results["sampling"] = [
            {"engine": name, **homogeneity(counts["sglang"], counts[name])} for name in counts
        ]
        self.save()

    def time_engines(self, prompts):
        sampling = {
            "temperature": 0,
            "max_new_tokens": self.args.timed_tokens,
            "ignore_eos": True,
        }
        self.results["timing"] = rows = []
        for repeat in range(self.args.repeats):
            names = self.alive() if repeat % 2 == 0 else self.alive()[::-1]
            for name in names:
                for concurrency in self.args.concurrencies:
                    if self.left() < SECONDS_PER_TIMING:
                        return
                    # All start together: new arrivals would stop decoding for their prefill.
                    count = max(concurrency, 2)
                    log_start = len(self.engines[name].log_text())
                    answers = self.ask_all(
                        f"timed at {concurrency}",
                        lambda engine, c=concurrency, n=count: engine.complete(
                            prompts[:n], concurrency=c, sampling=sampling, timeout_s=self.left()
                        ),
                        [name],
                    )
                    if name not in answers:
                        break
                    answer = answers[name]
                    num_tokens = sum(map(len, answer["outputs"]))
                    rows.append(
                        {
                            "engine": name,
                            "repeat": repeat,
                            "concurrency": concurrency,
                            "num_tokens": num_tokens,
                            "tok_per_s": num_tokens / answer["seconds"],
                            "tokens_per_verify": _ratio(answer),
                            **read_log(self.engines[name].log_text()[log_start:], concurrency),
                        }
                    )


def _ratio(answer):
    num_tokens = sum(map(len, answer["outputs"]))
    # The first token of an answer is prefill's.
    return (num_tokens - len(answer["outputs"])) / answer["verify_ct"] if answer["verify_ct"] else 1


def read_log(log, concurrency):
    """What SGLang and the plugin log while all requests of a run decode.

    SGLang's throughput is over the steps since its last line; the first after a prefill counts the
    prefill in.
    """
    speeds, host_us, follows = [], [], False
    for line in log.splitlines():
        if "Prefill batch" in line:
            follows = False
        elif "Decode batch" in line:
            running = int(re.search(r"#running-req: (\d+)", line)[1])
            if follows and running == concurrency:
                speeds.append(float(re.search(r"gen throughput \(token/s\): ([\d.]+)", line)[1]))
            follows = running == concurrency
        elif f"SGL_EAGLE batch {concurrency}.0, host us" in line:
            host_us.append(line.split("SGL_EAGLE ", 1)[1])
    return {
        "full_tok_per_s": median(speeds) if speeds else None,
        "host_us": host_us[len(host_us) // 2] if host_us else None,
    }


def main(words=None):
    args = parse_arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    check = ServingCheck(args)
    try:
        check.start()
        prompts = load_prompts(args.target, max(args.num_equal, *args.concurrencies))
        if "sglang" in check.alive():
            if args.num_equal:
                check.check_equality(prompts[: args.num_equal])
            if args.num_samples:
                check.check_sampling(prompts)
        check.time_engines(prompts)
    except (EngineError, LookupError, ValueError) as error:
        check.results["failures"]["script"] = repr(error)
    finally:
        for engine in check.engines.values():
            engine.kill()
        check.save()
        say(render_tables(check.results))


if __name__ == "__main__":
    main()

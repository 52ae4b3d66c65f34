"""The engines that a serving check compares, and how each is started."""

from __future__ import annotations

import argparse
from pathlib import Path

BUILTIN = {
    "eagle3-3-1-4": (3, 1, 4),
    "eagle3-5-4-8": (5, 4, 8),
    "eagle3-5-4-16": (5, 4, 16),
    "eagle3-8-4-16": (8, 4, 16),
    "eagle3-adaptive": (7, 1, 8),
}
"""SGLang's own EAGLE-3 by num_steps, topk and num_draft_tokens. The adaptive one starts at the most
steps that it may take: SGLang 0.5.17 cannot capture its graphs of more than it starts with."""
OWN_LIMITS = {
    f"sgl-default-{steps}-{topk}-{tokens}": (steps, topk, tokens)
    for steps, topk, tokens in ((5, 4, 16), (8, 4, 16), (6, 4, 32), (8, 4, 32))
}
"""SGL_EAGLE without a policy file, at other limits than its default ones."""
POLICIES = ("plain", "static", "chain", "eagle2", "price")
PLAIN = ("sglang", "sglang-again")
ENGINES = (
    *("sglang", *BUILTIN, "sglang-again"),
    *(*(f"sgl-{name}" for name in POLICIES), "sgl-eagle2-record", "sgl-eagle2-two-stage"),
    *("sgl-default", *OWN_LIMITS, "sgl-tuned"),
)
"""Plain SGLang, its own EAGLE-3, plain SGLang once more (what differs between the two is noise, of
the GPU and of the hour), and SGL_EAGLE by policy: EAGLE-2 also while it records traces, and with
the draft's two-stage LM head. `sgl-default` has no policy file and measures its costs at its start,
beside the others'; the last takes the file of --policy."""
ASKED_FOR = ("sgl-eagle2-record", "sgl-eagle2-two-stage", *OWN_LIMITS, "sgl-tuned")
"""Those that only a command line names: a two-stage head and a tuned file are not of every pair."""
BACKENDS = ("triton", "fa3", "flashinfer")
"""An engine named ENGINE@BACKEND has another attention backend than --backend says."""

ROUNDS_PER_LOG_LINE = 10
_GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def engine_name(word):
    """A name of the command line, checked."""
    name, _, backend = word.partition("@")
    if name not in ENGINES or backend not in ("", *BACKENDS):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(ENGINES)}, perhaps with @ and one of "
            f"{', '.join(BACKENDS)}, got {word!r}"
        )
    return word


def without_backend(name):
    return name.partition("@")[0]


def context_length(args):
    """Longest text of all engines, in tokens."""
    return args.context_length or (2048 if args.device == "cuda" else 512)


def backend_suffix(name):
    """ "@fa3" of an engine that has it, else nothing."""
    return name[len(without_backend(name)) :]


def spread(names, num_gpus):
    """The GPU of each engine: the first ones on the first GPU, the last on the last."""
    return {name: index * num_gpus // len(names) for index, name in enumerate(names)}


def engine_arguments(word, args, policies, gpu=0):
    """SGLang's arguments and the environment of one engine."""
    name, backend = without_backend(word), backend_suffix(word).removeprefix("@")
    arguments = {
        "model_path": str(args.target),
        "dtype": args.dtype,
        "device": args.device,
        "context_length": context_length(args),
        "random_seed": 1,
        "decode_log_interval": ROUNDS_PER_LOG_LINE,
        "log_level": "info",
        "sleep_on_idle": True,  # or idle engines would poll while another is timed
        "disable_overlap_schedule": args.overlap == "off",
        "nccl_port": args.first_port + args.engines.index(word),
        "tp_size": args.tp_size,
        "skip_server_warmup": True,
        **(_gpu_arguments(args, backend) if args.device == "cuda" else _cpu_arguments()),
    }
    environment = {}
    if args.tp_size > 1:
        arguments["disable_custom_all_reduce"] = True
    else:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if name not in PLAIN:
        arguments["speculative_draft_model_path"] = str(args.draft)
        if args.device == "cpu":
            arguments["speculative_draft_attention_backend"] = "intel_amx"
    if limits := BUILTIN.get(name) or OWN_LIMITS.get(name):
        keys = ("num_steps", "eagle_topk", "num_draft_tokens")
        arguments |= {f"speculative_{key}": value for key, value in zip(keys, limits, strict=True)}
    if name in BUILTIN:
        arguments["speculative_algorithm"] = "EAGLE3"
        arguments["speculative_adaptive"] = name == "eagle3-adaptive"
    elif name not in PLAIN:
        arguments["speculative_algorithm"] = "SGL_EAGLE"
        environment["SGLEAGLE_COST_CACHE"] = str(Path(args.out).resolve() / _cost_folder(name))
        policy = policies.get(name.removesuffix("-record").removesuffix("-two-stage"))
        if policy is not None:
            environment["SGLEAGLE_POLICY"] = str(policy)
        if name.endswith("-record"):
            environment["SGLEAGLE_RECORD"] = str(Path(args.out).resolve() / "traces-recorded")
        if name.endswith("-two-stage"):
            environment["SGLEAGLE_LM_HEAD"] = "two-stage"
    return arguments, environment


def _cost_folder(name):
    return f"costs-{name}" if name in OWN_LIMITS else "costs"


def _gpu_arguments(args, backend):
    arguments = {
        "attention_backend": backend or args.backend,
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": [b for b in _GRAPH_BATCHES if b <= args.max_running_requests],
        "max_running_requests": args.max_running_requests,
        "max_total_tokens": args.max_total_tokens,
        "mem_fraction_static": args.mem_fraction,
    }
    return arguments | ({"disable_cuda_graph": True} if args.no_graphs else {})


def _cpu_arguments():
    return {
        "attention_backend": "torch_native",
        "prefill_attention_backend": "intel_amx",
        "decode_attention_backend": "intel_amx",
        "disable_cuda_graph": True,
        "max_running_requests": 8,
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.2,
    }

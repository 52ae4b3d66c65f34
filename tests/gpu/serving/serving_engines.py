"""The engines that a serving check compares, and how each is started."""

from __future__ import annotations

from pathlib import Path

BUILTIN = {
    "eagle3-3-1-4": (3, 1, 4),
    "eagle3-5-4-8": (5, 4, 8),
    "eagle3-5-4-16": (5, 4, 16),
    "eagle3-adaptive": (3, 1, 4),
}
"""SGLang's own EAGLE-3 by num_steps, topk and num_draft_tokens; the adaptive one starts there."""
POLICIES = ("plain", "static", "chain", "eagle2", "price")
PLAIN = ("sglang", "sglang-again")
ENGINES = (
    *("sglang", *BUILTIN, "sglang-again"),
    *(*(f"sgl-{name}" for name in POLICIES), "sgl-default", "sgl-tuned"),
)
"""Plain SGLang, its own EAGLE-3, plain SGLang once more (what differs between the two is noise, of
the GPU and of the hour), and SGL_EAGLE by policy. `sgl-default` has no policy file and measures its
costs at its start, beside the others'; the last takes the file of --policy."""

CONTEXT_LENGTH = 2048
ROUNDS_PER_LOG_LINE = 10
_GRAPH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_FIRST_PORT = 41000


def spread(names, num_gpus):
    """The GPU of each engine: the first ones on the first GPU, the last on the last."""
    return {name: index * num_gpus // len(names) for index, name in enumerate(names)}


def engine_arguments(name, args, policies, gpu=0):
    """SGLang's arguments and the environment of one engine."""
    arguments = {
        "model_path": str(args.target),
        "dtype": args.dtype,
        "device": args.device,
        "random_seed": 1,
        "decode_log_interval": ROUNDS_PER_LOG_LINE,
        "log_level": "info",
        "sleep_on_idle": True,  # or idle engines would poll while another is timed
        "disable_overlap_schedule": args.overlap == "off",
        "nccl_port": _FIRST_PORT + len(ENGINES) * args.tp_size + ENGINES.index(name),
        "tp_size": args.tp_size,
        "skip_server_warmup": True,
        **(_gpu_arguments(args) if args.device == "cuda" else _cpu_arguments()),
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
    if name in BUILTIN:
        arguments["speculative_algorithm"] = "EAGLE3"
        keys = ("num_steps", "eagle_topk", "num_draft_tokens")
        arguments |= {
            f"speculative_{key}": value for key, value in zip(keys, BUILTIN[name], strict=True)
        }
        arguments["speculative_adaptive"] = name == "eagle3-adaptive"
    elif name not in PLAIN:
        arguments["speculative_algorithm"] = "SGL_EAGLE"
        environment["SGLEAGLE_COST_CACHE"] = str(Path(args.out).resolve() / "costs")
        if name in policies:
            environment["SGLEAGLE_POLICY"] = str(policies[name])
    return arguments, environment


def _gpu_arguments(args):
    arguments = {
        "context_length": CONTEXT_LENGTH,
        "attention_backend": args.backend,
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
        "context_length": 512,
        "attention_backend": "torch_native",
        "prefill_attention_backend": "intel_amx",
        "decode_attention_backend": "intel_amx",
        "disable_cuda_graph": True,
        "max_running_requests": 8,
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.2,
    }

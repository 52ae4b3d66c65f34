"""FlashAttention-3 for servers on a CPU: SGLang's own backend, over stand-ins of its kernels."""

import contextlib
from types import SimpleNamespace

import faults

CAPTURED_BATCHES = [2, 8]
"""So that most batches are padded."""


def pretend():
    """Let the server take the CPU for a Hopper GPU where it asks whether its kernels would run."""
    from sgl_kernel import flash_attn
    from sglang.kernels.ops.attention import flash_attention
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.mem_cache import allocation
    from sglang.srt.model_executor import forward_batch_info

    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
        setattr(flash_attention, name, getattr(flash_attn, name))
    from sglang.srt.layers.attention import flashattention_backend  # takes them from there

    for module in (attention_registry, flashattention_backend):
        module.get_device_capability = lambda: (9, 0)
    for module in (allocation, forward_batch_info):  # they would find cache slots by Triton kernels
        module.support_triton = lambda _: False


def pretend_with_draft_graphs():
    """The same, and draft steps run in graphs, stood in for by what they would record.

    So SGLang's backend plans them as it does for graphs: into static buffers, of padded batches.
    """
    from sgl_eagle.plugin import compat_graphs, tree_rounds

    pretend()

    def capture(segment, stream):
        del stream
        segment()
        return SimpleNamespace(replay=segment)

    def make_with_graphs(self, worker, policy, *, capture):
        del capture
        make(self, worker, policy, capture=True)

    make = tree_rounds.TreeRounds.__init__
    tree_rounds.TreeRounds.__init__ = make_with_graphs
    compat_graphs.capture_graph = capture
    compat_graphs.capturing = contextlib.nullcontext
    compat_graphs.captured_batch_sizes = lambda _: CAPTURED_BATCHES


def pretend_and_break_tree_mask():
    """The target's nodes see all nodes before them."""
    pretend()
    faults.break_tree_mask()

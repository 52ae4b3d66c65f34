"""What FlashAttention-3 reads when a graph verifies our trees: page tables of SGLang's own backend.

Made by hand and without a model, since graphs of the target need a GPU.
"""

from types import SimpleNamespace

import hopper
import numpy as np
import torch

from sgl_eagle.plugin.verify_input import MaskLayout, PackedTrees, send_trees

NUM_NODES, CONTEXT_LENGTH, CAPTURED_BATCH, NUM_REQUESTS, NUM_ROUNDS = 6, 40, 4, 8, 100
ROOM = CONTEXT_LENGTH + NUM_NODES
"""Slots of a request, behind one that is full, too."""


def read_trees(seed):
    """Verify random trees of random batches, each padded to one captured size.

    Args:
        seed: Of trees, lengths and slots.

    Returns:
        Pairs of the slots that a node must read and those that it reads, both sorted.
    """
    rng = np.random.default_rng(seed)
    slots = 1 + rng.permutation(NUM_REQUESTS * ROOM).reshape(NUM_REQUESTS, ROOM)
    table = torch.from_numpy(np.pad(slots, ((1, 0), (0, 0))).astype(np.int32))
    backend, make_batch = _capture(table)
    pairs = []
    for _ in range(NUM_ROUNDS):
        num_rows = int(rng.integers(1, CAPTURED_BATCH + 1))
        lengths = rng.integers(1, CONTEXT_LENGTH + 1, num_rows)
        rows = 1 + rng.permutation(NUM_REQUESTS)[:num_rows]
        packed = _random_trees(rng, num_rows)
        layout = MaskLayout(shows_prefix=True, buffer=backend.verify_mask.buffer)
        trees = send_trees(
            packed,
            SimpleNamespace(send=lambda arrays: [torch.from_numpy(array) for array in arrays]),
            root_tokens=np.zeros(num_rows, np.int64),
            context_len=lengths,
            layout=layout,
        )
        batch = make_batch(lengths, rows, trees)
        backend.init_forward_metadata_out_graph(batch)
        for row, length, request in zip(range(num_rows), lengths, rows, strict=True):
            for node in range(NUM_NODES):
                ancestors = length + np.flatnonzero(packed.ancestors[row, node])
                wanted = table[request, [*range(length), *ancestors]]
                pairs.append((sorted(wanted.tolist()), sorted(_read(backend, row, node))))
    return pairs


def _capture(table):
    # The backend with its static buffers, and what makes a batch in those of the runner.
    hopper.pretend()
    from sglang.srt.layers.attention import flashattention_backend, verify_mask
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    verify_mask.default_tree_mask_mode = lambda: TreeMaskMode.FULL_MASK  # as on a GPU
    flashattention_backend.build_trtllm_mha_page_table = _fill_page_table
    backend = object.__new__(flashattention_backend.FlashAttentionBackend)
    backend.__dict__ |= {
        "topk": 4,
        "speculative_num_draft_tokens": NUM_NODES,
        "speculative_step_id": 0,
        "req_to_token": table,
        "device": "cpu",
        "page_size": 1,
        "needs_cpu_seq_lens": False,
        "max_context_len": CONTEXT_LENGTH,
        "max_num_pages": CONTEXT_LENGTH,
        "_get_scheduler_metadata": None,
        "_verify_mask": None,
        "_unified_dense": False,
        "is_draft_runner": False,
        "skip_prefill": False,
        "is_encoder_decoder": False,
        "use_mla": False,
        "has_swa": False,
        "use_sliding_window_kv_pool": False,
        "has_local_attention": False,
        "local_attn_builder": None,
        "is_prefill_aware_swa": False,
        "fa_impl_ver": 3,
    }
    backend.init_cuda_graph_state(CAPTURED_BATCH, CAPTURED_BATCH * NUM_NODES)

    def make_batch(lengths, rows, trees):
        padding = CAPTURED_BATCH - len(lengths)
        positions = trees.numbers[1].flatten()
        return SimpleNamespace(
            batch_size=CAPTURED_BATCH,
            seq_lens=torch.from_numpy(np.pad(lengths, (0, padding), constant_values=1)),
            req_pool_indices=torch.from_numpy(np.pad(rows, (0, padding))),
            **dict.fromkeys(("seq_lens_cpu", "seq_lens_sum", "encoder_lens")),
            **dict.fromkeys(("out_cache_loc", "kv_loc_plan")),
            forward_mode=ForwardMode.TARGET_VERIFY,
            positions=positions,
            spec_info=SimpleNamespace(positions=positions, custom_mask=trees.mask),
        )

    whole = np.ones(CAPTURED_BATCH, np.int64)
    numbers = torch.zeros((5, CAPTURED_BATCH, NUM_NODES), dtype=torch.int64)
    captured = make_batch(whole, whole, SimpleNamespace(numbers=numbers, mask=None))
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    return backend, make_batch


def _fill_page_table(*, req_to_token, req_pool_indices, cache_seqlens, page_table, **_arguments):
    """In place of a Triton kernel."""
    for pages, row, length in zip(page_table, req_pool_indices, cache_seqlens, strict=True):
        pages[:length] = req_to_token[row, :length]


def _random_trees(rng, num_rows):
    ancestors = np.tile(np.eye(NUM_NODES, dtype=bool), (num_rows, 1, 1))
    for row in range(num_rows):
        for node in range(1, NUM_NODES):
            ancestors[row, node] |= ancestors[row, rng.integers(node)]
    shape = (num_rows, NUM_NODES)
    return PackedTrees(
        tokens=np.zeros(shape, np.int64),
        depths=ancestors.sum(-1) - 1,
        ancestors=ancestors,
        first_child=np.full(shape, -1),
        next_sibling=np.full(shape, -1),
        num_draft_tokens=np.full(num_rows, NUM_NODES),
        num_steps=NUM_NODES - 1,
    )


def _read(backend, row, node):
    prefix, tree = backend.forward_metadata, backend.forward_metadata_spec_decode_expand
    place = row * NUM_NODES + node
    cached = prefix.page_table[row, : prefix.cache_seqlens_int32[row]]
    return [*cached.tolist(), *tree.page_table[place, : tree.cache_seqlens_int32[place]].tolist()]

"""What the draft's cache holds, noted by the server itself; put into it before it starts."""

import os
from pathlib import Path

import numpy as np
import torch

FOLDER_VARIABLE = "NOTED_DRAFT_CACHE"


def note():
    """After each step, write what the draft has seen of each request to a file of its own.

    The draft is one whose keys and values depend on all that it reads.
    """
    from sgl_eagle.plugin.worker import SglEagleWorker

    run, prepare = SglEagleWorker.forward_batch_generation, SglEagleWorker.init_cuda_graphs

    def prepare_and_mix(self):
        prepare(self)
        weight = self.draft_worker.draft_runner.model.model.layers[0].self_attn.qkv_proj.weight
        with torch.no_grad():
            weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))

    def run_and_note(self, batch, *args, **kwargs):
        names = [request.rid for request in batch.reqs]
        rows, lengths = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        is_prefill = batch.forward_mode.is_extend()
        result = run(self, batch, *args, **kwargs)
        if not is_prefill:  # all that decode must be asked about, or others are forgotten
            num_unseen = self._plain_rounds.num_unseen(names)
            lengths = [
                length + 1 - unseen for length, unseen in zip(lengths, num_unseen, strict=True)
            ]
        for name, row, length in zip(names, rows, lengths, strict=True):
            _write(self, name, row, length)
        return result

    SglEagleWorker.init_cuda_graphs = prepare_and_mix
    SglEagleWorker.forward_batch_generation = run_and_note


def note_where_whole_passes_catch_up():
    """The same, as if the draft had more than one attention layer."""
    from sgl_eagle.plugin import compat_draft_cache

    compat_draft_cache.has_one_attention = lambda _: False
    note()


def note_where_nothing_is_written():
    """The same, and the writer does nothing."""
    from sgl_eagle.plugin.cache_writer import CacheWriter

    CacheWriter.write = lambda *_: None
    note()


def note_where_features_are_anothers():
    """The same, and the writer takes each token's features from the position before."""
    from sgl_eagle.plugin.draft_backlog import DraftBacklog

    look_up = DraftBacklog.window_before

    def look_up_wrongly(self, rows, lengths):
        tokens, features, positions = look_up(self, rows, lengths)
        return tokens, features.roll(1, 1), positions

    DraftBacklog.window_before = look_up_wrongly
    note()


def _write(worker, name, row, num_seen):
    pool = worker.draft_worker.draft_runner.token_to_kv_pool
    slots = worker.req_to_token_pool.req_to_token[row, :num_seen].long()
    cached = [buffer[slots].flatten(1).numpy() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    np.save(Path(os.environ[FOLDER_VARIABLE]) / f"{name}.npy", np.concatenate(cached, 1))

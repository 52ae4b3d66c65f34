"""A draft that is a formula, and graphs that are stood in for by what they would record.

Such a graph reads and writes the same static buffers, whichever batch is loaded.
"""

import contextlib
from types import SimpleNamespace

BRANCHES, NUM_STEPS, VOCABULARY, HIDDEN, PADDING_LEN = 3, 4, 19, 5, 1
SIZES = [1, 2, 4]
NUM_REQUESTS = 5


class Backend:
    """Notes which batch its metadata is for; a draft step must find its own."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        assert max_num_tokens == max_bs * BRANCHES

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        del in_capture
        self.init_forward_metadata(forward_batch)

    def init_forward_metadata(self, forward_batch):
        self.planned = forward_batch.seq_lens.tolist(), forward_batch.req_pool_indices.tolist()
        # SGLang's attention reads them when it is planned.
        wanted = forward_batch.seq_lens.repeat_interleave(BRANCHES)
        assert forward_batch.positions.tolist() == wanted.tolist()

    def init_forward_metadata_in_graph(self, forward_batch):
        pass

    def slots(self, worker, step):
        """What each branch may read, looked up in SGLang's table as Triton's attention does."""
        import torch

        lengths, pool_indices = self.planned
        starts = torch.tensor(lengths).repeat_interleave(BRANCHES)
        starts = starts + torch.arange(BRANCHES).repeat(len(lengths)) * NUM_STEPS
        rows = torch.tensor(pool_indices).repeat_interleave(BRANCHES)
        table = worker.req_to_token_pool.req_to_token
        return table[rows[:, None], starts[:, None] + torch.arange(step + 1)].long()


class FlashAttentionMultiStepBackend(Backend):
    """Keeps the page tables of all steps from when it was planned, as FlashAttention-3's does."""

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        if in_capture:  # there are no slots yet
            self.planned = forward_batch.seq_lens.tolist(), forward_batch.req_pool_indices.tolist()
            self.pages = forward_batch.seq_lens.new_zeros(len(forward_batch.positions), NUM_STEPS)
        else:
            self.init_forward_metadata(forward_batch)

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self.pages = forward_batch.out_cache_loc.view(-1, NUM_STEPS).clone()
        assert len(self.pages) == len(forward_batch.positions)

    def slots(self, worker, step):
        del worker
        return self.pages[:, : step + 1]


def fake_step(worker, forward_batch, step):
    """A draft whose output depends on tokens, positions, hidden states and its branch's cache."""
    import torch

    cache = worker.draft_runner.token_to_kv_pool.k_buffer[0]
    tokens = forward_batch.input_ids
    cache[forward_batch.out_cache_loc] = tokens.float()
    own = worker.draft_attn_backend.slots(worker, step)
    hidden = forward_batch.spec_info.hidden_states
    state = cache[own].sum(1) + 2 * hidden[:, 0] + 3 * forward_batch.positions
    return torch.sin(state[:, None] * torch.arange(1, VOCABULARY + 1)), hidden / 2 + tokens[:, None]


def namespace_batch(**fields):
    return SimpleNamespace(
        **fields, spec_info=SimpleNamespace(), mark_forward_metadata_ready=lambda: None
    )


def install(monkeypatch):
    """Put the stand-ins in place; returns what makes a draft worker."""
    import torch

    from sgl_eagle.plugin import compat, compat_graphs

    def capture(segment, stream):
        del stream
        segment()
        return SimpleNamespace(replay=segment)

    def prepare(worker, batch):
        columns = batch.seq_lens[:, None] + torch.arange(BRANCHES * NUM_STEPS)
        table = worker.req_to_token_pool.req_to_token
        return namespace_batch(
            out_cache_loc=table[batch.req_pool_indices[:, None], columns].flatten().long(),
            seq_lens=batch.seq_lens,
            req_pool_indices=batch.req_pool_indices,
            positions=batch.seq_lens.repeat_interleave(BRANCHES),
        )

    def make_captured(worker, *, pool_indices, out_cache_loc, hidden, **fields):
        del worker, out_cache_loc, hidden
        return namespace_batch(req_pool_indices=pool_indices, **fields)

    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(compat, "tensor_parallel_group", lambda: alone)
    monkeypatch.setattr(compat, "run_draft_step", fake_step)
    monkeypatch.setattr(compat, "prepare_draft_batch", prepare)
    monkeypatch.setattr(compat_graphs, "capture_graph", capture)
    monkeypatch.setattr(compat_graphs, "capturing", contextlib.nullcontext)
    monkeypatch.setattr(compat_graphs, "captured_batch_sizes", lambda _: SIZES)
    monkeypatch.setattr(
        compat_graphs, "draft_hidden_states", lambda _: (HIDDEN, torch.float32, "cpu")
    )
    monkeypatch.setattr(compat_graphs, "seq_len_of_padding", lambda _: PADDING_LEN)
    monkeypatch.setattr(compat_graphs, "make_captured_batch", make_captured)
    monkeypatch.setattr(compat_graphs, "attention_context", lambda _: contextlib.nullcontext())

    def make(backend=Backend):
        table = torch.zeros((1 + NUM_REQUESTS, 64), dtype=torch.int32)
        table[1:] = 1 + torch.arange(NUM_REQUESTS * 64).view(NUM_REQUESTS, 64)
        pool = SimpleNamespace(k_buffer=[torch.zeros(1 + NUM_REQUESTS * 64)], v_buffer=[])
        return SimpleNamespace(
            topk=BRANCHES,
            speculative_num_steps=NUM_STEPS,
            hot_token_id=None,
            draft_attn_backend=backend(),
            draft_runner=SimpleNamespace(token_to_kv_pool=pool),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
        )

    return make


def make_batch(requests, *, on_host):
    import torch

    draw = torch.Generator().manual_seed(7)
    drawn = {
        "topk_index": torch.randint(VOCABULARY, (NUM_REQUESTS, BRANCHES), generator=draw),
        "topk_p": torch.rand(NUM_REQUESTS, BRANCHES, generator=draw),
        "bonus_tokens": torch.randint(VOCABULARY, (NUM_REQUESTS,), generator=draw).int(),
        "hidden_states": torch.rand(NUM_REQUESTS, HIDDEN, generator=draw),
    }
    lengths = torch.tensor([5 + 3 * request for request in requests])
    return SimpleNamespace(
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone() if on_host else None,
        req_pool_indices=torch.tensor([1 + request for request in requests]),
        spec_info=SimpleNamespace(**{name: rows[requests] for name, rows in drawn.items()}),
    )

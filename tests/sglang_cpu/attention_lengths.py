"""Lets a server tell how long texts its attention backends hold."""

import logging

logger = logging.getLogger(__name__)


def tell():
    """Log it when the server's worker is ready."""
    from sgl_eagle.plugin import compat, worker

    prepare = worker.SglEagleWorker.init_cuda_graphs

    def prepare_and_tell(self):
        prepare(self)
        target, draft = self.target_worker.model_runner, self.draft_worker
        row_length = compat.token_table(draft).shape[1]
        steps = draft.draft_attn_backend.attn_backends
        for backend in (target.attn_backend, draft.draft_runner.attn_backend, *steps):
            name = type(backend).__name__
            logger.info("%s holds %d of %d", name, backend.max_context_len, row_length)

    worker.SglEagleWorker.init_cuda_graphs = prepare_and_tell

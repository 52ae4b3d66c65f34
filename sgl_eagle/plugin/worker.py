"""The decode round: draft, choose, verify, draft-extend."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_eagle.plugin import compat
from sgl_eagle.plugin.draft_check import check_draft
from sgl_eagle.plugin.drafter import ServerDrafter
from sgl_eagle.plugin.policy_source import choose_policy, require_measured
from sgl_eagle.plugin.self_check import require_page_size_one
from sgl_eagle.plugin.verify_input import PackedTrees, flat_mask, pack_trees
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.policies.tier import SpeculationTier, choose_rows
from sgl_eagle_harness.types import NO_NODE, BatchContext, CandidateTrees, IntArray, TreeLimits

logger = logging.getLogger(__name__)


class SglEagleWorker(compat.eagle_worker_class()):  # type: ignore[misc]  # untyped base
    """Speculates as a `SpecPolicy` decides; prefill and memory pools are SGLang's own EAGLE's."""

    def __init__(self, *, server_args: Any, target_worker: Any, **kwargs: Any) -> None:
        model_config = target_worker.model_runner.model_config
        check_draft(
            Path(server_args.speculative_draft_model_path),
            vocab_size=int(model_config.vocab_size),
            hidden_size=int(model_config.hidden_size),
            num_layers=int(model_config.num_hidden_layers),
        )
        super().__init__(server_args=server_args, target_worker=target_worker, **kwargs)
        require_page_size_one(compat.page_size())
        compat.replace_sampler()
        limits = TreeLimits(
            num_steps=self.speculative_num_steps,
            topk=self.topk,
            num_draft_tokens=self.speculative_num_draft_tokens,
        )
        self._policy = choose_policy(limits)
        require_measured(
            self._policy,
            max_running_requests=int(server_args.max_running_requests),
            context_length=int(model_config.context_len),
        )
        self._tiers: dict[str, SpeculationTier] = {}
        logger.info("SGL_EAGLE serves policy %s within %s", self._policy.name, limits)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """One step of the scheduler.

        Args:
            batch: What runs; decoding batches go through the round, others through SGLang's EAGLE.
            on_publish: Called with the new lengths as soon as they are known.
            grammar_barrier: Waited for before grammars are advanced.
            pp_proxy_tensors: None, since there is one pipeline stage.

        Returns:
            A `GenerationBatchResult`.
        """
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            return compat.run_builtin_step(
                super().forward_batch_generation,
                batch,
                on_publish=on_publish,
                grammar_barrier=grammar_barrier,
                pp_proxy_tensors=pp_proxy_tensors,
            )
        context_len = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).cpu()
        packed = self._draft_trees(batch, context_len.numpy().astype(np.int64))
        num_draft_tokens = packed.tokens.shape[1]
        batch.spec_info = self._verify_input(batch, packed, context_len.numpy())
        result = compat.run_verify(
            self,
            batch,
            num_draft_tokens=num_draft_tokens,
            num_steps=packed.num_steps,
            grammar_barrier=grammar_barrier,
        )
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        with compat.draft_context():
            compat.extend_draft(self.draft_worker, batch, result, num_draft_tokens)
        return result

    def _draft_trees(self, batch: Any, context_len: IntArray) -> PackedTrees:
        """Draft and prune, or choose not to draft.

        Args:
            batch: The running batch.
            context_len: [B] int64, cached tokens before each root.

        Returns:
            The trees to verify.
        """
        num_rows = len(context_len)
        context = BatchContext(
            batch_size=num_rows,
            context_len=context_len,
            # Draft-extend ends every round, so the draft's cache lacks the root alone.
            num_pending=np.ones(num_rows, np.int64),
        )
        names = [request.rid for request in batch.reqs]
        self._tiers = {name: self._tiers.get(name) or SpeculationTier() for name in names}
        speculating = choose_rows(self._policy, context, [self._tiers[name] for name in names])
        if not speculating.any():
            return pack_trees(CandidateTrees.empty(num_rows), np.empty((num_rows, 0), np.int64))
        with compat.draft_context():
            drafter = ServerDrafter(self.draft_worker, batch, speculating)
            trees = grow_trees(drafter, self._policy, context)
        columns = self._policy.select_verify(trees, context)
        return pack_trees(trees, np.where(speculating[:, None], columns, NO_NODE))

    def _verify_input(self, batch: Any, packed: PackedTrees, context_len: IntArray) -> Any:
        num_rows, num_draft_tokens = packed.tokens.shape
        full = compat.tree_mask_is_full(self.target_worker)
        tokens = torch.from_numpy(packed.tokens).to(self.device)
        # The root is what the last step emitted: the host does not know it, and need not.
        tokens[:, 0] = batch.spec_info.bonus_tokens
        depths = torch.from_numpy(packed.depths).to(self.device)
        return compat.make_verify_input(
            draft_token=tokens.flatten(),
            custom_mask=flat_mask(packed, context_len if full else None, self.device),
            positions=(batch.seq_lens.to(torch.int64)[:, None] + depths).flatten(),
            retrieve_index=torch.arange(num_rows * num_draft_tokens, device=self.device).view(
                num_rows, num_draft_tokens
            ),
            retrieve_next_token=torch.from_numpy(packed.first_child).to(self.device),
            retrieve_next_sibling=torch.from_numpy(packed.next_sibling).to(self.device),
            spec_steps=packed.num_steps,
            topk=self.topk,
            draft_token_num=num_draft_tokens,
        )

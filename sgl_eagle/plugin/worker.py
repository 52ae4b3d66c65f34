"""The decode round: draft, choose, verify, draft-extend."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sgl_eagle.plugin import compat, compat_context, compat_graphs, compat_plain, compat_slots
from sgl_eagle.plugin.draft_backlog import window_size
from sgl_eagle.plugin.draft_check import check_draft
from sgl_eagle.plugin.draft_head import install_draft_head
from sgl_eagle.plugin.observer import StepObserver
from sgl_eagle.plugin.plain_rounds import prepare_plain_rounds
from sgl_eagle.plugin.policy_source import choose_policy, require_measured
from sgl_eagle.plugin.ranks import Ranks
from sgl_eagle.plugin.request_tiers import RequestTiers, TierChoice
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.runtime_states import RuntimeStates
from sgl_eagle.plugin.self_check import require_page_size_one, require_room_for_rounds
from sgl_eagle.plugin.server_flags import read_settings
from sgl_eagle.plugin.server_setup import attention
from sgl_eagle.plugin.shared_decisions import share_decisions
from sgl_eagle.plugin.startup import make_observer, settle_policy
from sgl_eagle.plugin.tree_rounds import TreeRounds
from sgl_eagle.plugin.verify_sizes import verify_sizes
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.policies.tier import SpeculationTier
from sgl_eagle_harness.types import IntArray, TreeLimits

logger = logging.getLogger(__name__)


class SglEagleWorker(compat.eagle_worker_class()):  # type: ignore[misc]  # untyped base
    """Speculates as a `SpecPolicy` decides; prefill and memory pools are SGLang's own EAGLE's."""

    _decoded_last = False

    def __init__(self, *, server_args: Any, target_worker: Any, **kwargs: Any) -> None:
        model_config = target_worker.model_runner.model_config
        check_draft(
            Path(server_args.speculative_draft_model_path),
            target=Path(server_args.tokenizer_path or server_args.model_path),
            vocab_size=int(model_config.vocab_size),
            hidden_size=int(model_config.hidden_size),
            num_layers=int(model_config.num_hidden_layers),
        )
        super().__init__(server_args=server_args, target_worker=target_worker, **kwargs)
        require_page_size_one(compat.page_size())
        compat.replace_sampler()
        compat_context.widen_token_table()
        compat_context.widen_attention(self)
        compat_slots.reserve_for_several_rounds(num_steps=self.speculative_num_steps)
        self._settings = read_settings(os.environ)
        self._limits = limits = TreeLimits(
            num_steps=self.speculative_num_steps,
            topk=self.topk,
            num_draft_tokens=self.speculative_num_draft_tokens,
        )
        self._policy = choose_policy(limits, self._settings)
        require_measured(
            self._policy,
            max_running_requests=int(server_args.max_running_requests),
            context_length=int(model_config.context_len),
        )
        self._ranks = Ranks(compat.tensor_parallel_group())
        compat_graphs.leave_out_draft_loop(self.draft_worker)
        if self._policy.limits is None:
            compat_plain.leave_out_draft_prefill(self.draft_worker)
        self._clock = RoundClock()
        self._rounds_per_log_line = int(server_args.decode_log_interval)
        self._tiers = RequestTiers()
        self._requests: list[Any] = []
        self._names: list[str] = []
        self._observer: StepObserver | None = None
        logger.info("SGL_EAGLE serves policy %s within %s", self._policy.name, limits)

    def init_attention_backends(self) -> None:
        """Make the draft's attention, once it is known that rounds have room."""
        require_room_for_rounds(
            overhang=compat_context.row_overhang(self.target_worker.model_runner),
            reserved=compat_context.reserved_slots(),
        )
        super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Capture the graphs of all draft steps and verify sizes."""
        # Not before: a head that the draft shares with the target is there since its memory is.
        install_draft_head(
            self.draft_worker,
            Path(self.server_args.speculative_draft_model_path),
            self._settings.lm_head,
            tensor_parallel_size=int(self.server_args.tp_size),
        )
        super().init_cuda_graphs()
        logger.info("SGL_EAGLE verifies and drafts with %s", attention(self))
        capture = compat_graphs.captures_graphs(self.device)
        sizes, drafts = verify_sizes(self._policy), self._policy.limits is not None
        self._tree_rounds = TreeRounds(self, self._policy, capture=capture)
        with compat.draft_context():
            self._states = RuntimeStates(self, sizes, capture=capture, keeps_features=drafts)
        window = window_size(sizes) if drafts else None
        self._plain_rounds = prepare_plain_rounds(self, self._states, window)
        # Measured in the rounds that it would serve.
        self._tree_rounds.settle(self._policy, self._states)
        self._policy = settle_policy(
            self, self._policy, self._settings, self._ranks, in_graphs=capture
        )
        self._tree_rounds.settle(self._policy, self._states)
        if self._ranks.leads:  # the others would see the same
            self._observer = make_observer(
                self, self._policy, self._limits, self._clock, self._settings
            )
        self._policy = share_decisions(self._policy, self._ranks)
        self._states.rest()

    @property
    def war_fastpath_runner(self) -> Any:
        """Whose event says that the step has read SGLang's table of slots; up to 0.5.20."""
        return self._last_reader("war_fastpath_runner")

    @property
    def last_shared_read_runner(self) -> Any:
        """The same, from 0.5.21 on."""
        return self._last_reader("last_shared_read_runner")

    def _last_reader(self, name: str) -> Any:
        if self._decoded_last:
            return self.target_worker.model_runner
        return getattr(super(), name)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Look at the outcome of a step, which SGLang has brought to the host.

        Args:
            num_correct_drafts_per_req: Drafts that the target kept, of each request.
            batch_size: Requests of the step.
        """
        del batch_size
        if self._observer is not None:
            self._observer.completed(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Note that a request has ended.

        Args:
            rid: Its name.
            natural_stop: Whether a stop token ended it.
        """
        del natural_stop
        if self._observer is not None:
            self._observer.finished(rid)

    @contextlib.contextmanager
    def probing(
        self,
        policy: SpecPolicy,
        clock: RoundClock,
        tiers: dict[str, SpeculationTier],
        *,
        num_unseen: int,
    ) -> Iterator[None]:
        """Serve another policy on another clock, before the first request.

        Args:
            policy: Draws trees of the sizes that were prepared.
            clock: Takes the times.
            tiers: Those of made-up requests by name, as after many steps.
            num_unseen: Tokens of each that the draft has not seen, the root excluded.

        Yields:
            None.
        """
        self._plain_rounds.assume_unseen(list(tiers), num_unseen)
        before = self._policy, self._clock, self._tiers
        self._policy, self._clock, self._tiers = policy, clock, RequestTiers(tiers)
        try:
            yield
        finally:
            self._policy, self._clock, self._tiers = before

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
        self._decoded_last = False
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle():
            self._plain_rounds.forget([request.rid for request in batch.reqs])
            if self._observer is not None:
                self._observer.prefilled()
            self._states.rest()
            return compat.run_builtin_step(
                super().forward_batch_generation,
                batch,
                on_publish=on_publish,
                grammar_barrier=grammar_barrier,
                pp_proxy_tensors=pp_proxy_tensors,
            )
        with self._clock.stage("decide"):
            result = self._decode(batch, on_publish, grammar_barrier)
            self._clock.end_round(len(batch.reqs))
            if (times := self._clock.take(self._rounds_per_log_line)) is not None:
                logger.info("SGL_EAGLE %s", times.describe())
        return result

    def _decode(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> Any:
        if self._requests != batch.reqs:  # nearly every round has those of the one before
            self._requests = list(batch.reqs)
            self._names = [request.rid for request in batch.reqs]
        names = self._names
        num_unseen = self._plain_rounds.num_unseen(names)
        choice = self._choose_tiers(batch, names, num_unseen)
        must_verify = compat_plain.needs_verification(batch)
        at_once = must_verify or choice is not None
        self._plain_rounds.catch_up(batch, names, num_unseen, self._clock, at_once=at_once)
        verify_input = None
        if choice is not None:
            verify_input = self._tree_rounds.draft(
                self._states, batch, choice, self._clock, self._observer
            )
        if verify_input is None and not must_verify:
            result = self._plain_rounds.decode(batch, names, self._clock, on_publish)
            self._decoded_last = True
        else:
            result = self._verify(batch, verify_input, on_publish, grammar_barrier)
        if self._observer is not None:
            if switch_ct := self._tiers.take_switch_ct():
                self._observer.switched(switch_ct)
            self._observer.launched(self._requests, result)
        return result

    def _verify(
        self, batch: Any, verify_input: Any | None, on_publish: Any, grammar_barrier: Any
    ) -> Any:
        num_draft_tokens = 1 if verify_input is None else int(verify_input.draft_token_num)
        with self._clock.stage("verify"):
            self._states.use(num_draft_tokens)
            if verify_input is None:
                verify_input = compat.make_plain_input(self, batch)
            batch.spec_info = verify_input
            result = compat.run_verify(
                self,
                batch,
                num_draft_tokens=num_draft_tokens,
                num_steps=batch.spec_info.spec_steps,
                grammar_barrier=grammar_barrier,
            )
            if on_publish is not None:
                on_publish(result.new_seq_lens)
        if self._policy.limits is None:
            # Nobody will ever draft from the cache.
            compat_plain.leave_out_children(result.next_draft_input, topk=self.topk)
        else:
            self._extend_draft(batch, result)
        return result

    def _choose_tiers(
        self, batch: Any, names: list[str], num_unseen: IntArray
    ) -> TierChoice | None:
        # None where nobody drafts.
        if self._policy.limits is None:
            return None
        choice = self._tiers.choose(self._policy, batch, names, num_unseen)
        return choice if choice.anyone or self._states.sizes[0] > 1 else None

    def _extend_draft(self, batch: Any, result: Any) -> None:
        with self._clock.stage("extend"), compat.draft_context():
            self.draft_worker._draft_extend_for_decode(batch, result)

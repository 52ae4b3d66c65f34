"""The algorithm that SGLang registers, with its capabilities."""

from __future__ import annotations

from typing import Any

from sgl_eagle.plugin import compat, compat_relay
from sgl_eagle.plugin.policy_source import may_draft
from sgl_eagle.plugin.server_arguments import resolve_server_args
from sgl_eagle.plugin.server_flags import ALGORITHM_NAME


class SglEagleAlgorithm(compat.custom_algorithm_class()):  # type: ignore[misc]  # untyped base
    """Answers every question that SGLang asks of an algorithm.

    One by one, and with the methods that its scheduler calls and `CustomSpecAlgo` lacks: no check
    of a name may stand in for a capability.
    """

    def is_eagle(self) -> bool:
        """Whether the draft has a key-value cache and reads hidden states of the target.

        Returns:
            True.
        """
        return True

    def is_eagle3(self) -> bool:
        """Whether the target keeps hidden states of several layers.

        Returns:
            True.
        """
        return True

    def supports_mixed_chunk(self) -> bool:
        """Whether prefill chunks may share a batch with decoding requests.

        Returns:
            False.
        """
        return False

    def supports_grammar_overlap(self) -> bool:
        """Whether verify waits for the grammar barrier.

        Returns:
            True.
        """
        return True

    def has_draft_kv(self) -> bool:
        """Whether drafting needs slots in the key-value cache.

        Returns:
            True.
        """
        return True

    def carries_draft_hidden_states(self) -> bool:
        """Whether the draft input of a request holds a hidden state.

        Returns:
            True.
        """
        return True

    def need_topk(self) -> bool:
        """Whether the draft input of a request holds its root's children.

        Returns:
            False for a policy that never drafts.
        """
        return may_draft()

    def get_platform_worker_cls(self) -> None:
        """No platform brings a worker of its own."""

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """Relay between steps under overlap scheduling.

        Args:
            *args: What the scheduler passes.
            **kwargs: The same by name.

        Returns:
            SGLang's `FutureMap`.
        """
        return compat_relay.make_relay(self, *args, **kwargs)


def register_algorithm() -> None:
    """Add `SGL_EAGLE` to SGLang's algorithms."""
    compat.require_known_version(compat.sglang_version())
    register = compat.speculative_algorithms().register(
        ALGORITHM_NAME,
        supports_overlap=True,
        validate_server_args=resolve_server_args,
        spec_class=SglEagleAlgorithm,
    )
    register(_worker_class)


def _worker_class(server_args: Any) -> Any:
    del server_args
    # The worker's module imports the scheduler, which the launching process never needs.
    from sgl_eagle.plugin.worker import SglEagleWorker

    return SglEagleWorker

"""The last part of a start: the policy that serves, and who watches it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any

from sgl_eagle.plugin.accept_alarm import AcceptAlarm
from sgl_eagle.plugin.builtin_policy import (
    LEAST_ASKING_GAIN,
    UnmeasuredPolicy,
    choose_builtin,
    load_prior,
)
from sgl_eagle.plugin.compat_relay import host_runs_ahead
from sgl_eagle.plugin.cost_cache import cache_file
from sgl_eagle.plugin.metrics_export import PrometheusExport, StepReport
from sgl_eagle.plugin.node_learner import NodeLearner
from sgl_eagle.plugin.observer import StepListener, StepObserver
from sgl_eagle.plugin.policy_source import SGLANG_ENGINE
from sgl_eagle.plugin.ranks import Ranks
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle.plugin.server_costs import measured_costs
from sgl_eagle.plugin.server_flags import PluginSettings
from sgl_eagle.plugin.server_setup import server_setup
from sgl_eagle.plugin.table_alarm import TableAlarm
from sgl_eagle.plugin.trace_pipe import TracePipe
from sgl_eagle.plugin.trace_recorder import TraceRecorder
from sgl_eagle.reference.draft_config import load_draft_config
from sgl_eagle_harness.cost_table import CostSetup
from sgl_eagle_harness.errors import CheckpointError, CostTableError
from sgl_eagle_harness.policies.learning import LearningPolicy
from sgl_eagle_harness.policies.online_plan import OnlinePlanPolicy
from sgl_eagle_harness.policies.online_price import OnlinePricePolicy
from sgl_eagle_harness.policies.price import PricePolicy
from sgl_eagle_harness.policies.protocol import SpecPolicy
from sgl_eagle_harness.trace_schema import PromptSource, SamplingParams, TraceHeader
from sgl_eagle_harness.types import TreeLimits
from sgl_eagle_tuner.provenance import collect_provenance

logger = logging.getLogger(__name__)


def settle_policy(
    worker: Any, policy: SpecPolicy, settings: PluginSettings, ranks: Ranks, *, in_graphs: bool
) -> SpecPolicy:
    """The policy to serve, once the worker could serve.

    Args:
        worker: Our worker, its graphs captured.
        policy: The one it started with.
        settings: What the flags said.
        ranks: Get one policy, at the costs of the first.
        in_graphs: Whether it decodes in CUDA graphs.

    Returns:
        The same policy, or the server's own at measured costs where it was started without a policy
        file.
    """
    if not isinstance(policy, UnmeasuredPolicy):
        return policy
    setup = server_setup(worker, in_graphs=in_graphs)
    try:
        costs = measured_costs(
            worker, policy.limits, policy.verify_sizes, settings, setup=setup, ranks=ranks
        )
        table = costs.to_table()
        if not host_runs_ahead(worker):
            table = replace(table, launch=None)  # nothing hides it
    except CostTableError as error:
        logger.warning("SGL_EAGLE serves %s, since %s", policy.name, error)
        return policy
    largest_batch = int(worker.server_args.max_running_requests)
    chosen = choose_builtin(policy.limits, table, load_prior(), largest_batch=largest_batch)
    topk, context_len = chosen.policy.limits.topk, chosen.context_len
    logger.info(
        "SGL_EAGLE serves policy %s at its own costs: with one request, asking after every draft "
        "step (%.0f us; the step %.0f us, a stop %.0f us) would gain %+.1f %% over a plan; it is "
        "asked from %.0f %% on",
        *(chosen.policy.name, table.decide_us),
        *(float(table.draft_step_us(1, topk, context_len)), float(table.stop_us(1, context_len))),
        *(100 * chosen.asking_gain, 100 * LEAST_ASKING_GAIN),
    )
    return chosen.policy


def make_observer(
    worker: Any,
    policy: SpecPolicy,
    limits: TreeLimits,
    clock: RoundClock,
    settings: PluginSettings,
) -> StepObserver:
    """Who watches the steps of a worker.

    Args:
        worker: Our worker.
        policy: The one that serves.
        limits: Upper limits of the trees.
        clock: The worker's.
        settings: What the flags said.

    Returns:
        An observer that counts and warns, and learns or records where that is asked for.
    """
    listeners: list[StepListener] = []
    if isinstance(policy, LearningPolicy):
        listeners.append(NodeLearner(policy))
    patient: list[StepListener] = [AcceptAlarm()]
    if isinstance(policy, OnlinePlanPolicy):
        folder, setup = settings.cost_cache, policy.plan.costs.setup
        table = None if folder is None else cache_file(folder, setup)
        patient.append(TableAlarm(policy, table))
    recorder = None
    if settings.record is not None:
        setup = server_setup(worker, in_graphs=False)
        recorder = _open_recording(settings.record, worker, limits, setup, settings)
        listeners.append(recorder)
    return StepObserver(
        clock=clock,
        runs_ahead=host_runs_ahead(worker),
        listeners=tuple(listeners),
        patient=tuple(patient),
        gauges=lambda batch_size: policy_gauges(policy, batch_size),
        export=_exporter(worker.server_args),
        dropped_ct=(lambda: 0) if recorder is None else (lambda: recorder.dropped_ct),
    )


def policy_gauges(policy: SpecPolicy, batch_size: int) -> dict[str, float]:
    """What a policy can say about itself.

    Args:
        policy: Any policy.
        batch_size: Of the latest step.

    Returns:
        Values by metric name; none for policies without a price.
    """
    if isinstance(policy, PricePolicy):
        return {"price_tok_per_us": policy.price_tok_per_us}
    if not isinstance(policy, OnlinePricePolicy | OnlinePlanPolicy):
        return {}
    gauges = {
        "price_tok_per_us": policy.price_tok_per_us(batch_size),
        "yield_ratio": policy.yield_ratio,
        "observed_nodes": float(policy.num_observed_nodes),
        "asks_every_level": float(isinstance(policy, OnlinePricePolicy)),
    }
    if isinstance(policy, OnlinePlanPolicy):
        gauges["scheduler_us"] = policy.scheduler_us(batch_size)
    if isinstance(policy, OnlinePlanPolicy) and policy.running_shape is not None:
        gauges["planned_depth"] = float(policy.running_shape.num_steps)
        gauges["planned_verify_size"] = float(policy.running_shape.num_draft_tokens)
    return gauges


def trace_header(
    setup: CostSetup,
    limits: TreeLimits,
    draft: Path,
    *,
    dense: bool,
) -> TraceHeader:
    """Provenance of a server's recording.

    Args:
        setup: What is served.
        limits: Upper limits of the trees.
        draft: Folder of the draft.
        dense: Whether every position gets the largest tree.

    Returns:
        The header; sampling, prompts and forced continuation are those of each shard.
    """
    return TraceHeader(
        kind="dense" if dense else "ordinary",
        target=setup.target,
        draft=setup.draft,
        engine=SGLANG_ENGINE,
        versions={name: version(name) for name in ("sglang", "torch", "transformers", "numpy")},
        head_kind=_head_kind(draft),
        vocab_size=setup.target.dims["vocab_size"],
        num_steps=limits.num_steps,
        topk=limits.topk,
        beams=(limits.topk,),
        dtype=setup.dtype,
        sampling=SamplingParams(temperature=0.0),
        prompts=PromptSource(kind="text", files=()),
        forced_continuation=False,
        censored=not dense,
        created=datetime.now(UTC),
        commit=collect_provenance(seed=0).commit,
    )


def _head_kind(draft: Path) -> str:
    try:
        return load_draft_config(draft).kind
    except CheckpointError:  # an architecture that only SGLang reads
        return "unknown"


def _open_recording(
    folder: Path,
    worker: Any,
    limits: TreeLimits,
    setup: CostSetup,
    settings: PluginSettings,
) -> TraceRecorder:
    dense = settings.records_dense
    draft = Path(worker.server_args.speculative_draft_model_path)
    pipe = TracePipe(folder, trace_header(setup, limits, draft, dense=dense))
    # SGLang's schedulers are children of multiprocessing, which skip what atexit knows.
    multiprocessing_util.Finalize(None, pipe.close, exitpriority=10)
    logger.info("SGL_EAGLE records %s traces in %s", settings.record_mode, folder)
    return TraceRecorder(pipe.send, dense=dense)


def _exporter(server_args: Any) -> Callable[[StepReport], None] | None:
    if not server_args.enable_metrics:
        return None
    model_name = server_args.served_model_name or server_args.model_path
    return PrometheusExport(model_name=str(model_name)).add

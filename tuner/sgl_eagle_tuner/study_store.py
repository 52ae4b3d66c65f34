"""Where trials are kept, under a name that no other inputs can have."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict

import optuna
from sqlalchemy.exc import SQLAlchemyError

from sgl_eagle_harness.dense_trace import DenseTrace
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_tuner.search_space import SearchSpace
from sgl_eagle_tuner.session import ReplaySession
from sgl_eagle_tuner.study_config import StudyConfig

logger = logging.getLogger(__name__)

STARTUP_TRIALS = 30
"""Random trials before the sampler's model takes over, enqueued ones included."""


def study_name(
    workload: str,
    space: SearchSpace,
    session: ReplaySession,
    config: StudyConfig,
    *,
    cost_sha256: str,
) -> str:
    """Name a study after everything its trials depend on, so that none is resumed by mistake.

    Args:
        workload: Its name.
        space: Search space.
        session: Tuning prompts and load.
        config: How to search; the seed and the limit count.
        cost_sha256: Digest of the cost table.

    Returns:
        "<workload>-<12 hexadecimal digits>".
    """
    load = None if session.load is None else asdict(session.load)
    inputs = {
        "space": asdict(space),
        "trace": trace_digest(session.trace),
        "costs": cost_sha256,
        "load": load,
        "seed": config.seed,
        "uncovered_limit": config.uncovered_limit,
    }
    text = json.dumps(inputs, sort_keys=True)
    return f"{workload}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def trace_digest(trace: DenseTrace) -> str:
    """Digest of everything in a trace that replay reads.

    Args:
        trace: Dense trace.

    Returns:
        Hexadecimal sha256.
    """
    digest = hashlib.sha256("\0".join(trace.prompt_ids).encode())
    for array in (trace.tokens, trace.parents, trace.step_log_probs, trace.next_token):
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    digest.update(trace.context_len.tobytes())
    return digest.hexdigest()


def open_study(name: str, workload: str, config: StudyConfig) -> optuna.Study:
    """Create a study, or resume the one of exactly the same inputs.

    Args:
        name: From `study_name`.
        workload: Its first part.
        config: Storage and seed.

    Returns:
        The study.

    Raises:
        PolicyConfigError: If the storage cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=config.seed, n_startup_trials=STARTUP_TRIALS)
    try:
        if config.storage is not None:
            known = optuna.get_all_study_names(config.storage)
            earlier = [other for other in known if other.rpartition("-")[0] == workload]
            if name in known:
                logger.info("resuming study %s", name)
            elif earlier:
                logger.warning(
                    "search space, traces, costs or seed of %s have changed: starting study %s; "
                    "%s stays in the storage unused",
                    workload,
                    name,
                    ", ".join(earlier),
                )
        return optuna.create_study(
            study_name=name, storage=config.storage, sampler=sampler, load_if_exists=True
        )
    except (SQLAlchemyError, ImportError, ValueError, OSError) as error:
        first_line = str(error).partition("\n")[0]
        raise PolicyConfigError(
            f"--storage {config.storage!r} cannot be used: {first_line}"
        ) from error

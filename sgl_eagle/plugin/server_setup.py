"""Who serves: the provenance of costs that are measured, and of traces that are recorded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from sgl_eagle.plugin import compat
from sgl_eagle.plugin.draft_head import served_head
from sgl_eagle.plugin.policy_source import SGLANG_ENGINE
from sgl_eagle.reference.checkpoint_digest import checkpoint_digest
from sgl_eagle.reference.head_checkpoint import describe_head
from sgl_eagle_harness.cost_table import CostSetup
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_tuner.provenance import collect_provenance

_DIMS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "num_experts",
    "num_local_experts",
)


def server_setup(worker: Any, *, in_graphs: bool) -> CostSetup:
    """Everything that latencies of this server depend on.

    Args:
        worker: Our worker, its attention backends made.
        in_graphs: Whether it decodes in CUDA graphs.

    Returns:
        The setup of a cost table.
    """
    here = collect_provenance(seed=0)
    target = worker.target_worker.model_runner
    return CostSetup(
        device=(here.gpu or "GPU") if str(worker.device).startswith("cuda") else here.cpu,
        tensor_parallel_size=int(worker.server_args.tp_size),
        dtype=str(target.dtype).removeprefix("torch."),
        attention_backend=f"{attention(worker)}, {'in graphs' if in_graphs else 'no graphs'}",
        engine=SGLANG_ENGINE,
        engine_version=compat.sglang_version(),
        num_threads=torch.get_num_threads(),
        target=model_identity(target.model_config),
        draft=_draft_identity(worker.draft_worker),
    )


def attention(worker: Any) -> str:
    """What attends to the cache.

    Args:
        worker: Our worker, its attention backends made.

    Returns:
        Classes of the target's backend and of that of the draft's steps.
    """
    target, draft = worker.target_worker.model_runner, worker.draft_worker
    return f"{type(target.attn_backend).__name__} and {type(draft.draft_attn_backend).__name__}"


def _draft_identity(draft_worker: Any) -> ModelIdentity:
    # Drafts with another head propose other tokens at another cost.
    model_config = draft_worker.draft_runner.model_config
    scorer = served_head(draft_worker)
    if scorer is None:
        return model_identity(model_config)
    plain = model_identity(model_config, scorer.stored.file)
    head = scorer.stored.head
    return plain.model_copy(
        update={
            "name": f"{plain.name}, {describe_head(head)}",
            "dims": plain.dims
            | {"lm_head_rank": head.up.shape[1], "lm_head_candidates": head.num_candidates},
        }
    )


def model_identity(model_config: Any, *further: Path) -> ModelIdentity:
    """Name, digest and dimensions of a served model.

    Args:
        model_config: SGLang's `ModelConfig`.
        *further: Files that it was loaded from, beside those that SGLang reads.

    Returns:
        The identity; of a model that is not a local folder, the digest covers its configuration
        alone.
    """
    config = model_config.hf_config
    folder = Path(model_config.model_path)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors")), *further]
    dims = {name: getattr(config, name, None) for name in _DIMS}
    return ModelIdentity(
        name=folder.name or str(folder),
        sha256=checkpoint_digest(*(file for file in files if file.is_file()))
        if folder.is_dir()
        else _digest_of(config),
        dims={name: int(value) for name, value in dims.items() if isinstance(value, int)},
    )


def _digest_of(config: Any) -> str:
    return hashlib.sha256(str(config.to_json_string(use_diff=False)).encode()).hexdigest()

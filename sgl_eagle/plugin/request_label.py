"""What a client says about its request, through `custom_params` of the sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from sgl_eagle_harness.records import Record, describe_validation_error

LABEL_KEY = "sgl_eagle"
"""Key of the label in `custom_params`."""

UNLABELLED = "unlabelled"


class RequestLabel(Record):
    """Where a request belongs in a trace.

    Attributes:
        workload: Kind of text, e.g. "code".
        prompt_id: Name of the prompt; None takes the server's name of the request.
        prompts: "random_tokens" marks synthetic ids, which readers of traces refuse.
    """

    workload: str = Field(default=UNLABELLED, min_length=1)
    prompt_id: str | None = Field(default=None, min_length=1)
    prompts: Literal["text", "random_tokens"] = "text"


def read_label(custom_params: Mapping[str, Any]) -> RequestLabel | str:
    """Read the label of a request.

    Args:
        custom_params: What the client attached.

    Returns:
        The label, empty where there is none; or what is wrong with it, in one line.
    """
    try:
        return RequestLabel.model_validate(custom_params.get(LABEL_KEY) or {})
    except ValidationError as error:
        return f"custom_params.{LABEL_KEY}: {describe_validation_error(error)}"

"""Has Triton interpret where there is no GPU."""

from contextlib import suppress

import pytest

# Triton's own functions are made at its import, to be interpreted or not. Left set, the variable
# would reach the servers that other tests start.
with suppress(ModuleNotFoundError), pytest.MonkeyPatch.context() as environment:
    import torch

    if not torch.cuda.is_available():
        environment.setenv("TRITON_INTERPRET", "1")
    import triton.language  # noqa: F401

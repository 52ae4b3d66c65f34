"""Whether a draft was made for the target's tokenizer, as far as its checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sgl_eagle_harness.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Ids of all tokens of a tokenizer, added ones included.

    Args:
        folder: A target or a draft.

    Returns:
        Token to id; None where the folder has no tokenizer in one file.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(
            with_added_tokens=True
        )
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return vocabulary


def differing_tokens(draft: Mapping[str, int], target: Mapping[str, int]) -> list[str]:
    """Tokens of the draft's tokenizer that the target's lacks or has under another id.

    Args:
        draft: Token to id.
        target: Token to id.

    Returns:
        Tokens, in the order of the draft's.
    """
    return [token for token, index in draft.items() if target.get(token) != index]

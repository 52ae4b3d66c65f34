"""Text shards on disk -> batches of rows of about equal length."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sgl_eagle.reference.generate_text import UNFINISHED, TextRows
from sgl_eagle_harness.errors import PromptError

ROUND_TO = 64  # rows are padded to a multiple of it
MIN_ANSWER = 8  # shorter answers have no chain to learn from


class TextBatch(NamedTuple):
    """Rows of one padded length.

    The target's hidden state at (`rows`, `columns`) predicts a token of an answer.

    Attributes:
        tokens: [B, T] int64.
        answer_end: [B] int64, one past the last token of each answer.
        rows: [N] int64.
        columns: [N] int64.
    """

    tokens: Tensor
    answer_end: Tensor
    rows: Tensor
    columns: Tensor


def has_text(folder: Path) -> bool:
    """Whether a folder holds text shards.

    Args:
        folder: May be missing.

    Returns:
        True if there is at least one.
    """
    return any(folder.glob("text-*.safetensors"))


def require_finished(folder: Path) -> None:
    """Refuse text whose generation ended early: a head would be trained on an unknown part of it.

    Args:
        folder: Written by `write_text`.

    Raises:
        PromptError: If text of some seed is not finished.
    """
    for file in sorted(folder.glob(UNFINISHED.format(seed="*"))):
        seed = file.stem.removeprefix("text-")
        raise PromptError(
            f"{folder} holds only a part of the text of seed {seed}, whose generation ended early "
            f"or still runs: write it with `sgl-eagle train --text-only --seed {seed}`, or delete "
            f"{file.name} there to use the part"
        )


def load_text(folder: Path) -> TextRows:
    """Read every shard of a folder.

    Args:
        folder: Written by `write_text`.

    Returns:
        All rows whose answer has at least `MIN_ANSWER` tokens.

    Raises:
        PromptError: If there is no shard, one is damaged, text is not finished, or nothing is left.
    """
    require_finished(folder)
    files = sorted(folder.glob("text-*.safetensors"))
    if not files:
        raise PromptError(f"{folder}: no text-*.safetensors; generate text first")
    shards = []
    for file in files:
        try:
            tensors = load_file(file)
            shards.append(TextRows(**tensors))
        except (SafetensorError, OSError, TypeError) as error:
            raise PromptError(f"{file}: not a text shard: {error}") from error
    widths = {shard.tokens.shape[1] for shard in shards}
    if len(widths) > 1:
        raise PromptError(f"{folder}: shards have different lengths {sorted(widths)}")
    rows = TextRows(
        **{
            name: torch.cat([getattr(shard, name) for shard in shards])
            for name in TextRows.__annotations__
        }
    )
    rows = select_rows(rows, rows.answer_end - rows.answer_start >= MIN_ANSWER)
    if not len(rows.tokens):
        raise PromptError(f"{folder}: no answer has {MIN_ANSWER} tokens")
    return rows


def select_rows(rows: TextRows, which: Tensor) -> TextRows:
    """A part of the rows.

    Args:
        rows: Any rows.
        which: [R] bool or [r] int64.

    Returns:
        The rows chosen.
    """
    return TextRows(**{name: getattr(rows, name)[which] for name in TextRows.__annotations__})


def split_held_out(rows: TextRows, count: int) -> tuple[TextRows, TextRows]:
    """Set greedy answers aside, evenly spread over the shards.

    Args:
        rows: All rows.
        count: Rows to hold out; at most a tenth of the greedy ones is taken.

    Returns:
        Rows to train on, and rows at temperature 0 to evaluate on.

    Raises:
        PromptError: If there are fewer than ten greedy rows.
    """
    greedy = (rows.temperature == 0).nonzero()[:, 0]
    count = min(count, len(greedy) // 10)
    if count == 0:
        raise PromptError(
            f"evaluation needs at least 10 answers at temperature 0, and the text has "
            f"{len(greedy)}: write more with --tokens"
        )
    chosen = greedy[torch.arange(count) * len(greedy) // count]
    held_out = torch.zeros(len(rows.tokens), dtype=torch.bool)
    held_out[chosen] = True
    return select_rows(rows, ~held_out), select_rows(rows, held_out)


def plan_batches(rows: TextRows, *, batch_tokens: int, seed: int) -> list[Tensor]:
    """Group rows of about equal length.

    Args:
        rows: R rows.
        batch_tokens: Tokens of a batch, padding included.
        seed: Decides who comes together and in which order.

    Returns:
        Row indices of each batch; every row is in exactly one.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(rows.tokens), generator=generator)
    lengths = _padded(rows.answer_end[shuffled])
    batches: list[Tensor] = []
    for length in sorted(set(lengths.tolist())):
        group = shuffled[lengths == length]
        batches += torch.split(group, max(1, batch_tokens // length))
    order = torch.randperm(len(batches), generator=generator)
    return [batches[index] for index in order.tolist()]


def load_batch(rows: TextRows, indices: Tensor, device: torch.device) -> TextBatch:
    """Cut the rows of one batch to their common padded length.

    Args:
        rows: All rows.
        indices: [B] of `plan_batches`.
        device: Where the batch goes.

    Returns:
        The batch.
    """
    length = int(_padded(rows.answer_end[indices]).max())
    length = min(length, rows.tokens.shape[1])
    tokens = rows.tokens[indices, :length].long()
    end = rows.answer_end[indices].long()
    predicted = torch.arange(length)[None, :] + 1
    inside = (predicted >= rows.answer_start[indices, None]) & (predicted < end[:, None])
    # Found on the host: asking the device for the number of positions would drain its queue.
    where = inside.nonzero(as_tuple=True)
    return TextBatch(*(_send(part, device) for part in (tokens, end, *where)))


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _padded(lengths: Tensor) -> Tensor:
    return -(-lengths // ROUND_TO) * ROUND_TO

"""Text that the target writes itself: user turns sampled from its chat template, and its answers.

Each row is one dialogue: the template up to the user turn, sometimes first words of ours, a user
turn sampled by the target, and the target's answer at temperature 0 or 1.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sgl_eagle.reference.lockstep import LENGTH_BUCKET, GraphedSteps, LockstepDecoder
from sgl_eagle.reference.starters import sample_starter, sample_system_prompt
from sgl_eagle.reference.tensor_file import save_tensors
from sgl_eagle.reference.text_config import LOOP_WINDOW, TextConfig
from sgl_eagle_harness import atomic_file
from sgl_eagle_harness.errors import CheckpointError

logger = logging.getLogger(__name__)

FREE = -1
"""In a plan of tokens: the target chooses."""

USER, ANSWER, DONE = range(3)
CHECK_EVERY = 32  # steps between looks at which rows are finished; each look waits for the device
LOOP_PERIODS = 24
ROW_BUCKETS = 8  # batch sizes that rows are compacted to, hence graphs of each length
UNFINISHED = "text-{seed}.unfinished"
"""Lies beside the shards of a seed until the last of them is written."""
MIN_LIVE_SHARE = 0.08  # below it a new wave costs less than the rest of this one


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Dialogues, padded to one length.

    Attributes:
        tokens: [R, T] int32.
        answer_start: [R] int32, index of the answer's first token.
        answer_end: [R] int32, one past its last token; what follows is padding.
        temperature: [R] float32, of the answer.
    """

    tokens: Tensor
    answer_start: Tensor
    answer_end: Tensor
    temperature: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.answer_end.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The target's chat template, taken apart into token ids.

    Attributes:
        after_user: Between the end of the user turn and the answer.
        end_of_turn: The one token that closes a turn.
    """

    tokenizer: Any
    after_user: tuple[int, ...]
    end_of_turn: int

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFormat:  # noqa: ANN401  transformers types no tokenizer
        """Take a template apart.

        Args:
            tokenizer: Of the target, with a chat template.

        Returns:
            The parts.

        Raises:
            CheckpointError: If there is no template, or it does not close a turn with the
                end-of-sequence token.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise CheckpointError("the target's tokenizer has no chat template to generate with")
        mark = "@@"
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        tail = tokenizer.encode(rendered.split(mark)[-1], add_special_tokens=False)
        if not tail:
            raise CheckpointError("the chat template puts nothing between user turn and answer")
        return cls(tokenizer=tokenizer, after_user=tuple(tail[1:]), end_of_turn=int(tail[0]))

    def opening(self, system: str | None, first_words: str) -> list[int]:
        """Everything before the target's own words.

        Args:
            system: System prompt, None for the template's own.
            first_words: Beginning of the user turn, may be empty.

        Returns:
            Token ids.
        """
        mark = "@@"
        turns = [{"role": "user", "content": mark}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        text = self.tokenizer.apply_chat_template(turns, tokenize=False).split(mark)[0]
        # A trailing space would be its own token, which the target has not seen before a word.
        ids = self.tokenizer.encode(text + first_words.rstrip(" "), add_special_tokens=False)
        return [int(token) for token in ids]


class _Wave:
    """One batch of dialogues on the device; every row has its own plan of fixed and free tokens."""

    def __init__(self, decoder: LockstepDecoder, chat: ChatFormat, config: TextConfig) -> None:
        self.decoder, self.chat, self.config = decoder, chat, config
        device = decoder.position.device
        rows, width = config.batch_size, config.max_length + len(chat.after_user) + 2
        self.tokens = torch.empty(rows, width, dtype=torch.int64, device=device)
        self.phase = torch.empty(rows, dtype=torch.int64, device=device)
        self.user_start = torch.empty_like(self.phase)
        self.answer_start = torch.empty_like(self.phase)
        self.answer_end = torch.empty_like(self.phase)
        self.temperature = torch.empty(rows, dtype=torch.float32, device=device)
        self.tail = torch.tensor(chat.after_user, dtype=torch.int64, device=device)
        self.noise_floor = torch.finfo(torch.float32).tiny

    def begin(self, openings: Sequence[Sequence[int]], temperature: Sequence[float]) -> None:
        """Start all rows anew."""
        plan = torch.full(self.tokens.shape, FREE, dtype=torch.int64)
        for row, opening in enumerate(openings):
            plan[row, : len(opening)] = torch.tensor(opening[: self.config.max_length // 2])
        self.tokens.copy_(plan)
        lengths = [min(len(opening), self.config.max_length // 2) for opening in openings]
        self.user_start.copy_(torch.tensor(lengths))
        self.phase.fill_(USER)
        self.answer_start.fill_(self.tokens.shape[1])
        self.answer_end.fill_(self.config.max_length)
        self.temperature.copy_(torch.tensor(temperature))
        self.decoder.position.zero_()

    def step(self, rows: int, length: int) -> None:
        """Run the target on the token at `position` and settle the next one, for the first rows."""
        position = self.decoder.position
        tokens, phase = self.tokens[:rows], self.phase[:rows]
        logits = self.decoder.forward(tokens.index_select(1, position)[:, 0], length)
        following = position + 1
        planned = tokens.index_select(1, following)[:, 0]
        free = planned == FREE
        in_user = phase == USER
        chosen = self._choose(logits, in_user, self.temperature[:rows])
        too_long = following - self.user_start[:rows] >= self.config.max_user_tokens
        chosen = torch.where(in_user & too_long, self.chat.end_of_turn, chosen)
        token = torch.where(free, chosen, planned)
        tokens.index_copy_(1, following, token[:, None])

        ends = free & (token == self.chat.end_of_turn)
        ends_user, ends_answer = ends & in_user, ends & (phase == ANSWER)
        for offset, fixed in enumerate(self.tail, start=1):
            column = following + offset
            kept = tokens.index_select(1, column)[:, 0]
            tokens.index_copy_(1, column, torch.where(ends_user, fixed, kept)[:, None])
        first = following + 1 + len(self.tail)
        self.answer_start[:rows] = torch.where(ends_user, first, self.answer_start[:rows])
        self.answer_end[:rows] = torch.where(ends_answer, following + 1, self.answer_end[:rows])
        phase += ends_user.long() + ends_answer.long()
        position.copy_(following)

    def _choose(self, logits: Tensor, in_user: Tensor, temperature: Tensor) -> Tensor:
        scores = logits.float()
        highest = scores.amax(dim=-1, keepdim=True)
        floor = highest + torch.log(torch.tensor(self.config.user_min_p))
        floor = torch.where(in_user[:, None], floor, -torch.inf)
        # Gumbel's trick: the largest of log-probability plus noise is a sample. Without noise it is
        # the most probable token, so both temperatures share one pass over the vocabulary.
        noise = torch.empty_like(scores).exponential_().clamp_(min=self.noise_floor).log_()
        noisy = (in_user | (temperature > 0))[:, None]
        scores = torch.where(scores < floor, -torch.inf, scores - noise * noisy)
        return scores.argmax(dim=-1)

    def mark_loops(self, rows: int, filled: int) -> None:
        """End answers that repeat themselves; `filled` slots are settled."""
        window = self.tokens[:rows, filled - LOOP_WINDOW : filled]
        looping = torch.zeros(rows, dtype=torch.bool, device=window.device)
        for period in range(1, LOOP_PERIODS + 1):
            looping |= (window[:, period:] == window[:, :-period]).all(dim=1)
        looping &= (self.phase[:rows] == ANSWER) & (
            self.answer_start[:rows] <= filled - LOOP_WINDOW
        )
        self.answer_end[:rows] = torch.where(looping, filled, self.answer_end[:rows])
        self.phase[:rows] = torch.where(looping, DONE, self.phase[:rows])

    def keep_rows(self, order: Tensor, filled: int) -> None:
        """Move the rows `order` to the front, cache included."""
        self.decoder.keep_rows(order, filled)
        for state in (
            self.tokens,
            self.phase,
            self.user_start,
            self.answer_start,
            self.answer_end,
            self.temperature,
        ):
            state[: len(order)] = state[order]

    def archive(self, rows: Tensor, filled: int) -> TextRows:
        """Copy finished rows, or those that will not be finished, to the host.

        Args:
            rows: [m] int64 row indices.
            filled: Slots that are settled.

        Returns:
            The rows, free tokens as 0.
        """
        tokens = self.tokens[rows, : self.config.max_length].to("cpu", torch.int32)
        return TextRows(
            tokens=tokens.clamp_(min=0),
            answer_start=self.answer_start[rows].to("cpu", torch.int32),
            answer_end=self.answer_end[rows].clamp(max=filled).to("cpu", torch.int32),
            temperature=self.temperature[rows].cpu(),
        )


@torch.no_grad()
def generate_text(
    model: Any,  # noqa: ANN401  any Hugging Face model
    tokenizer: Any,  # noqa: ANN401  likewise
    config: TextConfig,
) -> Iterator[TextRows]:
    """Generate dialogues, a wave of rows at a time.

    Args:
        model: Hugging Face target on its device.
        tokenizer: Its tokenizer.
        config: What to generate.

    Yields:
        One wave's rows that have an answer, until `config.num_tokens` tokens are reached.
    """
    chat = ChatFormat.of(tokenizer)
    decoder = LockstepDecoder(model, batch_size=config.batch_size, max_length=config.max_length)
    wave = _Wave(decoder, chat, config)
    steps = GraphedSteps(wave.step, decoder.position.device)
    rng = random.Random(config.seed)
    torch.manual_seed(config.seed)
    total = 0
    while total < config.num_tokens:
        openings, temperature = _draw_rows(chat, config, rng)
        wave.begin(openings, temperature)
        rows = _with_answer(_run_wave(wave, steps, config))
        total += rows.num_tokens
        yield rows


def _draw_rows(
    chat: ChatFormat, config: TextConfig, rng: random.Random
) -> tuple[list[list[int]], list[float]]:
    openings, temperature = [], []
    for _ in range(config.batch_size):
        first_words = sample_starter(rng) if rng.random() < config.primed_share else ""
        openings.append(chat.opening(sample_system_prompt(rng), first_words))
        temperature.append(0.0 if rng.random() < config.greedy_share else 1.0)
    return openings, temperature


def _run_wave(wave: _Wave, steps: GraphedSteps, config: TextConfig) -> list[TextRows]:
    live, finished = config.batch_size, []
    bucket = -(-config.batch_size // ROW_BUCKETS)
    for filled in range(1, config.max_length):
        length = min(-(-filled // LENGTH_BUCKET) * LENGTH_BUCKET, config.max_length)
        steps.run(live, length)
        if filled % CHECK_EVERY or filled < 2 * LOOP_WINDOW:
            continue
        wave.mark_loops(live, filled + 1)
        order = torch.argsort(wave.phase[:live] == DONE, stable=True)
        remaining = int((wave.phase[:live] != DONE).sum())
        if remaining < MIN_LIVE_SHARE * config.batch_size:
            break
        wanted = min(-(-remaining // bucket) * bucket, live)
        if wanted < live:
            finished.append(wave.archive(order[wanted:], filled + 1))
            wave.keep_rows(order[:wanted], filled + 1)
            live = wanted
    everything = torch.arange(live, device=wave.phase.device)
    return [*finished, wave.archive(everything, filled + 1)]


def _with_answer(parts: Sequence[TextRows]) -> TextRows:
    keep = [part.answer_start < part.answer_end for part in parts]

    def joined(name: str) -> Tensor:
        return torch.cat(
            [getattr(part, name)[kept] for part, kept in zip(parts, keep, strict=True)]
        )

    return TextRows(
        tokens=joined("tokens"),
        answer_start=joined("answer_start"),
        answer_end=joined("answer_end"),
        temperature=joined("temperature"),
    )


def write_text(
    model: Any,  # noqa: ANN401  any Hugging Face model
    tokenizer: Any,  # noqa: ANN401  likewise
    config: TextConfig,
    folder: Path,
    *,
    quiet: bool = False,
) -> int:
    """Generate text into a folder, one safetensors file a wave.

    Whatever ends it early leaves a file named by `UNFINISHED`, for which the text is refused.

    Args:
        model: Hugging Face target on its device.
        tokenizer: Its tokenizer.
        config: What to generate.
        folder: Made if missing.
        quiet: Show no progress.

    Returns:
        Tokens written.

    Raises:
        OutputError: If the folder cannot be written.
    """
    total = 0
    unfinished = folder / UNFINISHED.format(seed=config.seed)
    bar = tqdm(total=config.num_tokens, unit="tok", unit_scale=True, desc="generate", disable=quiet)
    with bar as progress:
        for index, rows in enumerate(generate_text(model, tokenizer, config)):
            if index == 0:
                atomic_file.write_text(unfinished, f"{config.num_tokens} tokens are wanted\n")
            file = folder / f"text-{config.seed}-{index:04d}.safetensors"
            tensors = {name: getattr(rows, name) for name in TextRows.__annotations__}
            save_tensors(file, tensors)
            total += rows.num_tokens
            progress.update(rows.num_tokens)
    unfinished.unlink(missing_ok=True)
    logger.info("%d tokens of text in %s", total, folder)
    return total

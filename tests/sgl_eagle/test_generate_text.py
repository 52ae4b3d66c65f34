import random

import pytest

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402

from sgl_eagle.reference.generate_text import ChatFormat, generate_text  # noqa: E402
from sgl_eagle.reference.lockstep import LockstepDecoder  # noqa: E402
from sgl_eagle.reference.starters import sample_starter  # noqa: E402
from sgl_eagle.reference.text_config import TextConfig  # noqa: E402
from sgl_eagle_harness.errors import CheckpointError, SglEagleError  # noqa: E402

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def model():
    return tiny_models.make_target()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_models.make_tokenizer()


def test_lockstep_logits_equal_the_model(model):
    torch.manual_seed(0)
    tokens = torch.randint(0, len(tiny_models.WORDS), (3, 20))
    decoder = LockstepDecoder(model, batch_size=3, max_length=32)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        for column in range(20):
            logits = decoder.forward(tokens[:, column], 32)
            decoder.position += 1
            torch.testing.assert_close(logits, expected[:, column], atol=1e-3, rtol=1e-3)


def test_rows_that_move_keep_their_past(model):
    torch.manual_seed(0)
    tokens = torch.randint(0, len(tiny_models.WORDS), (3, 12))
    decoder = LockstepDecoder(model, batch_size=3, max_length=16)
    with torch.no_grad():
        for column in range(11):
            decoder.forward(tokens[:, column], 16)
            decoder.position += 1
        kept = torch.tensor([2, 0])
        decoder.keep_rows(kept, 11)
        logits = decoder.forward(tokens[kept, 11], 16)
        expected = model(tokens[kept], use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def rows(model, tokenizer):
    config = TextConfig(
        num_tokens=1, batch_size=24, max_length=160, max_user_tokens=20, greedy_share=0.5, seed=2
    )
    return next(generate_text(model, tokenizer, config))


def test_a_dialogue_has_its_turns_in_order(rows, tokenizer):
    after_user = list(ChatFormat.of(tokenizer).after_user)
    assert len(rows.tokens) > 0
    for tokens, start, end in zip(
        rows.tokens.tolist(), rows.answer_start.tolist(), rows.answer_end.tolist(), strict=True
    ):
        assert tokens[start - len(after_user) : start] == after_user
        assert tokens[start - len(after_user) - 1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in tokens[start : end - 1]


def test_greedy_answers_are_the_models_own(rows, model):
    greedy = (rows.temperature == 0).nonzero()[:, 0]
    assert 0 < len(greedy) < len(rows.tokens)
    for row in greedy.tolist():
        start, end = int(rows.answer_start[row]), int(rows.answer_end[row])
        tokens = rows.tokens[row, :end].long()
        with torch.no_grad():
            logits = model(tokens[None], use_cache=False).logits[0]
        chosen = logits[start - 1 : end - 1].gather(-1, tokens[start:end, None])[:, 0]
        best = logits[start - 1 : end - 1].amax(dim=-1)
        torch.testing.assert_close(chosen, best, atol=1e-3, rtol=1e-3)


def test_the_same_seed_writes_the_same_text(model, tokenizer):
    config = TextConfig(num_tokens=1, batch_size=4, max_length=128, max_user_tokens=8, seed=9)
    first = next(generate_text(model, tokenizer, config))
    again = next(generate_text(model, tokenizer, config))
    assert first.tokens.tolist() == again.tokens.tolist()


def test_user_turns_begin_with_starters_of_every_workload():
    rng = random.Random(0)
    starters = {sample_starter(rng) for _ in range(3000)}
    assert len(starters) > 500
    for words in ("def ", "Write a poem", "Summarize", "When did", "miles"):
        assert any(words in starter for starter in starters), words


def test_a_tokenizer_without_template_is_refused():
    plain = tiny_models.make_tokenizer()
    plain.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatFormat.of(plain)


def test_settings_out_of_range_are_refused():
    with pytest.raises(SglEagleError, match="max_length must be at least 128"):
        TextConfig(max_length=100)

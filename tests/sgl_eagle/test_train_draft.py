import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from sgl_eagle.reference import generate_text  # noqa: E402
from sgl_eagle.reference.draft_checkpoint import load_draft  # noqa: E402
from sgl_eagle.reference.generate_text import TextRows, write_text  # noqa: E402
from sgl_eagle.reference.text_config import TextConfig  # noqa: E402
from sgl_eagle.reference.train import learning_rate, train_draft  # noqa: E402
from sgl_eagle.reference.train_config import TrainConfig  # noqa: E402
from sgl_eagle.reference.train_data import (  # noqa: E402
    load_batch,
    load_text,
    plan_batches,
    select_rows,
    split_held_out,
)
from sgl_eagle_harness.errors import CheckpointError, PromptError, SglEagleError  # noqa: E402

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def model():
    return tiny_models.make_target()


@pytest.fixture(scope="module")
def rows(model):
    """Greedy continuations of random words."""
    torch.manual_seed(5)
    tokens = torch.randint(4, len(tiny_models.WORDS), (120, 4))
    with torch.no_grad():
        for _ in range(28):
            best = model(tokens, use_cache=False).logits[:, -1].argmax(dim=-1)
            tokens = torch.cat([tokens, best[:, None]], dim=1)
    return TextRows(
        tokens=tokens.int(),
        answer_start=torch.full((120,), 4, dtype=torch.int32),
        answer_end=torch.full((120,), 32, dtype=torch.int32),
        temperature=torch.zeros(120),
    )


def small(**changes):
    defaults = {
        "num_updates": 4,
        "batch_tokens": 1024,
        "eval_every": 2,
        "warmup": 2,
        "intermediate_size": 96,
        "held_out_rows": 8,
        "num_steps": 3,
    }
    return TrainConfig(**(defaults | changes))


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_training_raises_the_accept_length(model, rows, tmp_path, kind):
    config = small(kind=kind, num_updates=90, eval_every=10, warmup=10, learning_rate=5e-3)
    curve = train_draft(model, rows, config, tmp_path, quiet=True)
    assert curve[-1].accept_length > curve[0].accept_length + 0.3
    assert curve[-1].step_losses[0] < curve[0].step_losses[0]
    assert json.loads((tmp_path / "curve.json").read_text())[-1]["update"] == 90
    draft = load_draft(
        tmp_path,
        embed_tokens=model.model.embed_tokens.weight.detach(),
        lm_head=model.lm_head.weight.detach(),
        num_target_layers=tiny_models.NUM_LAYERS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert draft.config.kind == kind


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(model, rows, tmp_path, kind, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_draft(model, rows, small(kind=kind), whole, quiet=True)

    import sgl_eagle.reference.train as train_module

    real_save = train_module.save_state

    def save_then_die(*args):
        real_save(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "save_state", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        train_draft(model, rows, small(kind=kind), broken, quiet=True)
    monkeypatch.setattr(train_module, "save_state", real_save)
    curve = train_draft(model, rows, small(kind=kind), broken, resume=True, quiet=True)
    assert [point.update for point in curve] == [2, 4]
    unbroken = load_file(whole / "state.safetensors")
    for name, tensor in load_file(broken / "state.safetensors").items():
        torch.testing.assert_close(tensor, unbroken[name], msg=name)


def test_a_state_that_cannot_be_resumed_is_refused(model, rows, tmp_path):
    with pytest.raises(CheckpointError, match="no state to resume from"):
        train_draft(model, rows, small(), tmp_path, resume=True, quiet=True)
    train_draft(model, rows, small(num_updates=1), tmp_path, quiet=True)
    with pytest.raises(CheckpointError, match="num_updates 1 now 4"):
        train_draft(model, rows, small(), tmp_path, resume=True, quiet=True)
    file = tmp_path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        train_draft(model, rows, small(), tmp_path, resume=True, quiet=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, _: tensors.pop("weight.fc.weight"), r"weight\.fc\.weight must be .* miss"),
        (lambda tensors, _: tensors["exp_avg.norm.weight"].fill_(torch.nan), "finite numbers, got"),
        (lambda tensors, _: tensors.update({"weight.norm.weight": torch.ones(3)}), r"got \[3\]"),
        (lambda _, notes: notes.clear(), "holds no configuration and curve of a training: KeyErr"),
        (lambda _, notes: notes.update(curve="[]"), "of a training: IndexError"),
        (lambda _, notes: notes.update(curve='[{"update": 1}]'), "of a training: TypeError"),
        (lambda _, notes: notes.update(config="{"), "of a training: JSONDecodeError"),
    ],
    ids=["tensor", "nan", "shape", "bare", "empty", "curve", "config"],
)
def test_a_damaged_state_is_refused(model, rows, tmp_path, change, message):
    train_draft(model, rows, small(num_updates=1), tmp_path, quiet=True)
    file = tmp_path / "state.safetensors"
    with safe_open(file, "pt") as stored:
        tensors, notes = load_file(file), stored.metadata()
    change(tensors, notes)
    save_file(tensors, file, metadata=notes)
    with pytest.raises(CheckpointError, match=message):
        train_draft(model, rows, small(num_updates=1), tmp_path, resume=True, quiet=True)


def test_too_little_text_to_evaluate_names_the_flag(rows):
    with pytest.raises(PromptError, match="the text has 9: write more with --tokens"):
        split_held_out(select_rows(rows, torch.arange(9)), 8)


def test_batches_hold_every_row_once_and_only_answers_count(rows):
    train, held_out = split_held_out(rows, 8)
    assert (len(train.tokens), len(held_out.tokens)) == (112, 8)
    plan = plan_batches(train, batch_tokens=640, seed=3)
    assert sorted(torch.cat(plan).tolist()) == list(range(112))
    assert [p.tolist() for p in plan_batches(train, batch_tokens=640, seed=3)] == [
        p.tolist() for p in plan
    ]
    batch = load_batch(train, plan[0], torch.device("cpu"))
    assert (batch.columns.min(), batch.columns.max()) == (3, 30)
    assert len(batch.rows) == 28 * len(plan[0])


def test_learning_rate_rises_then_falls_to_a_twentieth():
    config = small(num_updates=100, warmup=10, learning_rate=1e-2)
    rates = [learning_rate(update, config) for update in range(101)]
    assert rates[9] == pytest.approx(1e-2)
    assert rates[100] == pytest.approx(5e-4)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_updates": 0}, "num_updates must be at least 1"),
        ({"learning_rate": 0}, "learning_rate"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(SglEagleError, match=message):
        small(**changes)


def test_missing_and_damaged_text_is_named(tmp_path):
    with pytest.raises(PromptError, match=r"no text-\*.safetensors"):
        load_text(tmp_path)
    save_file({"tokens": torch.zeros(2, 2)}, tmp_path / "text-0-0000.safetensors")
    with pytest.raises(PromptError, match="not a text shard"):
        load_text(tmp_path)


def test_generated_text_reads_back(model, tmp_path):
    config = TextConfig(num_tokens=300, batch_size=6, max_length=128, max_user_tokens=12)
    total = write_text(model, tiny_models.make_tokenizer(), config, tmp_path, quiet=True)
    rows = load_text(tmp_path)
    assert 0 < rows.num_tokens <= total
    assert total >= 300


def test_text_that_ended_early_is_refused_until_it_is_written(model, tmp_path, monkeypatch):
    config = TextConfig(num_tokens=300, batch_size=6, max_length=128, max_user_tokens=12, seed=3)
    saved = generate_text.save_tensors
    num_saved = 0

    def save_one(file, tensors):
        nonlocal num_saved
        if num_saved == 1:
            raise KeyboardInterrupt
        num_saved += 1
        saved(file, tensors)

    tokenizer = tiny_models.make_tokenizer()
    with monkeypatch.context() as context:
        context.setattr(generate_text, "save_tensors", save_one)
        with pytest.raises(KeyboardInterrupt):
            write_text(model, tokenizer, replace(config, num_tokens=10**9), tmp_path, quiet=True)
    with pytest.raises(PromptError, match=r"only a part of the text of seed 3, .* --seed 3`"):
        load_text(tmp_path)
    write_text(model, tokenizer, config, tmp_path, quiet=True)
    assert load_text(tmp_path).num_tokens > 0
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors"}

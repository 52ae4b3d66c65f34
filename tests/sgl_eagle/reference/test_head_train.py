"""Training of factors: what it lowers, that it goes on where it stopped, and what it refuses."""

import json

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from sgl_eagle.reference.generate_text import TextRows  # noqa: E402
from sgl_eagle.reference.head_factors import HeadFactors, factorize_head  # noqa: E402
from sgl_eagle.reference.head_train import (  # noqa: E402
    HeadTrainConfig,
    divergence,
    learning_rate,
    measure_distance,
    train_factors,
)
from sgl_eagle.reference.head_train_state import HeadTrainFolder  # noqa: E402
from sgl_eagle_harness.errors import CheckpointError, SglEagleError  # noqa: E402


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    return TextRows(
        tokens=torch.randint(0, 23, (60, 40), generator=generator, dtype=torch.int32),
        answer_start=torch.full((60,), 6, dtype=torch.int32),
        answer_end=torch.full((60,), 40, dtype=torch.int32),
        temperature=torch.zeros(60),
    )


def small(**changes):
    sizes = {
        "rank": 6,
        "num_updates": 20,
        "batch_tokens": 640,
        "learning_rate": 0.01,
        "num_steps": 3,
        "start_batches": 2,
        "candidates": 4,
        "held_out_rows": 6,
        "eval_every": 10,
    }
    return HeadTrainConfig(**(sizes | changes))


def train(pair, rows, folder, *, resume=False, **changes):
    model, _, draft = pair
    config = small(**changes)
    return train_factors(
        model, draft, rows, config, HeadTrainFolder(folder), resume=resume, quiet=True
    )


def test_divergence_is_that_of_the_two_softmaxes():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 8, generator=generator)
    inputs = torch.randn(5, 8, generator=generator)
    low = factorize_head(weight, 3).apply(weight)
    p = (inputs @ weight.T).double().softmax(-1)
    q = (inputs @ low.down.T @ low.up.T).double().softmax(-1)
    wanted = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(divergence(inputs, weight, low).double(), wanted, atol=1e-5, rtol=0)
    exact = HeadFactors(weight, torch.eye(8))
    distance = measure_distance(weight, exact, [inputs[None]], candidates=1)
    assert distance.recall == 1.0
    assert distance.step_kl == pytest.approx((0.0,), abs=1e-5)


def test_training_lowers_the_divergence_at_every_draft_step(eagle3_pair, rows, tmp_path):
    factors, curve = train(eagle3_pair, rows, tmp_path, num_updates=60)
    assert factors.up.shape == (24, 6)
    assert factors.down.shape == (6, 64)
    assert [point.update for point in curve] == [0, 10, 20, 30, 40, 50, 60]
    first, last = curve[0], curve[-1]
    assert len(first.step_kl) == 3
    pairs = zip(first.step_kl, last.step_kl, strict=True)
    assert all(after < 0.9 * before for before, after in pairs)
    assert last.recall >= first.recall
    stored = json.loads((tmp_path / "train_curve.json").read_text())
    assert stored[-1]["step_kl"] == list(last.step_kl)


def test_a_resumed_run_ends_where_an_unbroken_one_does(eagle3_pair, rows, tmp_path, monkeypatch):
    whole, curve = train(eagle3_pair, rows, tmp_path / "whole")
    halted = tmp_path / "halted"
    save = HeadTrainFolder.save

    def save_and_stop(*args):
        save(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(HeadTrainFolder, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train(eagle3_pair, rows, halted)
    monkeypatch.undo()
    resumed, both = train(eagle3_pair, rows, halted, resume=True)
    torch.testing.assert_close(resumed, whole)
    assert [point.update for point in both] == [point.update for point in curve]
    assert both[-1].step_kl == pytest.approx(curve[-1].step_kl)


def test_the_same_seed_gives_the_same_factors_and_another_does_not(eagle3_pair, rows, tmp_path):
    one, two, other = (
        train(eagle3_pair, rows, tmp_path / str(index), num_updates=4, seed=seed)[0]
        for index, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(one.up, two.up)
    assert not torch.equal(one.up, other.up)


def test_what_cannot_be_resumed_is_refused(eagle3_pair, rows, tmp_path):
    with pytest.raises(CheckpointError, match="no state to resume from; start without --resume"):
        train(eagle3_pair, rows, tmp_path, resume=True)
    train(eagle3_pair, rows, tmp_path, num_updates=4)
    with pytest.raises(CheckpointError, match="another configuration: num_updates 4 now 8"):
        train(eagle3_pair, rows, tmp_path, num_updates=8, resume=True)
    state = tmp_path / "train_state.safetensors"
    state.write_bytes(state.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="cannot be read, truncated"):
        train(eagle3_pair, rows, tmp_path, num_updates=4, resume=True)


def test_bad_settings_are_named(eagle3_pair, rows, tmp_path):
    with pytest.raises(SglEagleError, match="num_updates must be at least 1, got 0"):
        small(num_updates=0)
    with pytest.raises(SglEagleError, match=r"learning_rate must be in \(0, 1\), got 2"):
        small(learning_rate=2)
    with pytest.raises(SglEagleError, match=r"rank must be in \[1, 64\], .* got 65"):
        train(eagle3_pair, rows, tmp_path, rank=65)


def test_learning_rate_rises_then_falls():
    config = small(num_updates=100)
    rates = [learning_rate(update, config) for update in range(100)]
    assert rates[0] == pytest.approx(0.002)
    assert max(rates) == pytest.approx(0.01)
    assert rates.index(max(rates)) in {4, 5}
    assert rates[-1] == pytest.approx(0.0005, rel=0.05)

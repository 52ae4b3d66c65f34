"""Choosing tokens: filters, determinism by position, and lossless tree sampling."""

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch", reason="needs torch installed")

from sgl_eagle.reference.best_tokens import best_tokens  # noqa: E402
from sgl_eagle.reference.sampling import choose_token, target_probs, uniform_at  # noqa: E402
from sgl_eagle.reference.sampling_config import Sampling  # noqa: E402
from sgl_eagle.reference.verify import walk_tree  # noqa: E402
from sgl_eagle_harness.errors import PolicyConfigError  # noqa: E402
from sgl_eagle_harness.types import DraftTree  # noqa: E402

NUM_SAMPLES = 200_000
REJECT_BELOW = 1e-4
"""p-value under which a distribution counts as different: one false alarm in ten thousand runs."""

VOCAB = 5
TABLE = torch.tensor(np.random.default_rng(5).normal(0.0, 1.3, (VOCAB, VOCAB)))
"""[last token, next token] logits of a toy target."""


def toy_tree(root: int) -> DraftTree:
    """The tree of a toy draft that knows the target only roughly, pruned by its own scores."""
    scores = torch.log_softmax(TABLE + 0.8 * torch.sin(3.0 * TABLE), dim=-1)
    nodes = [(-1, root, 0, 0.0)]
    for depth in (1, 2):
        for parent, (_, token, at, score) in list(enumerate(nodes)):
            if at == depth - 1:
                best = scores[token].topk(3)
                nodes += [
                    (parent, int(child), depth, score + float(value))
                    for child, value in zip(best.indices, best.values, strict=True)
                ]
    by_score = sorted(range(1, len(nodes)), key=lambda node: (-nodes[node][3], node))
    kept = [0, *sorted(by_score[:5])]
    return DraftTree(
        tokens=np.array([nodes[node][1] for node in kept]),
        parents=np.array([-1, *(kept.index(nodes[node][0]) for node in kept[1:])]),
        depths=np.array([nodes[node][2] for node in kept]),
        path_log_confidence=np.array([nodes[node][3] for node in kept], np.float32),
        columns=np.array(kept) - 1,
    )


TREES = [toy_tree(root) for root in range(VOCAB)]
LOGITS = [TABLE[tree.tokens] for tree in TREES]
"""What the target says after every node of each tree."""


def sample_pair(seed: int, walk) -> tuple[int, int]:
    """Two tokens after token 0, by as many verify steps as it takes."""
    emitted: list[int] = []
    sampling = Sampling(temperature=1.0, seed=seed)
    while len(emitted) < 2:
        last = emitted[-1] if emitted else 0
        tree = TREES[last]
        outcome = walk(tree, LOGITS[last], sampling, len(emitted))
        emitted += [*tree.tokens[outcome.path].tolist(), outcome.bonus_token]
    return emitted[0], emitted[1]


def chi_square_p(samples: list[tuple[int, int]]) -> float:
    probs = torch.softmax(TABLE, dim=-1).numpy()
    expected = (probs[0][:, None] * probs).reshape(-1) * len(samples)
    counts = np.bincount([VOCAB * a + b for a, b in samples], minlength=VOCAB**2)
    return float(stats.chisquare(counts, expected).pvalue)


def peeking_walk(tree, logits, sampling, first_index):
    """A rule that looks at target samples first: of two draws it keeps the longer accepted path."""
    draws = [
        walk_tree(tree, logits, Sampling(temperature=1.0, seed=sampling.seed + offset), first_index)
        for offset in (0, NUM_SAMPLES)
    ]
    return max(draws, key=lambda outcome: outcome.num_correct_drafts)


@pytest.mark.slow
def test_pruned_trees_sample_from_the_exact_target_distribution():
    samples = [sample_pair(seed, walk_tree) for seed in range(NUM_SAMPLES)]
    assert chi_square_p(samples) > REJECT_BELOW


@pytest.mark.slow
def test_the_same_test_rejects_a_rule_that_looks_at_target_samples_first():
    samples = [sample_pair(seed, peeking_walk) for seed in range(NUM_SAMPLES // 4)]
    assert chi_square_p(samples) < REJECT_BELOW


def test_greedy_takes_the_lowest_of_tied_tokens():
    assert choose_token(torch.tensor([0.0, 2.0, 2.0, 1.0]), Sampling(), 0) == 1


def test_token_depends_on_seed_and_index_alone():
    logits = torch.zeros(50)
    first = [choose_token(logits, Sampling(temperature=1.0, seed=7), i) for i in range(20)]
    again = [
        choose_token(logits, Sampling(temperature=1.0, seed=7), i) for i in reversed(range(20))
    ]
    assert first == again[::-1]
    assert len(set(first)) > 5
    assert first != [choose_token(logits, Sampling(temperature=1.0, seed=8), i) for i in range(20)]


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions():
    for draws in (
        [uniform_at(seed, 0) for seed in range(20_000)],
        [uniform_at(3, index) for index in range(20_000)],
    ):
        assert 0.0 <= min(draws) < max(draws) < 1.0
        assert stats.kstest(draws, "uniform").pvalue > REJECT_BELOW
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.03


def test_top_k_and_top_p_keep_the_smallest_sufficient_sets():
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))
    assert target_probs(logits, Sampling(temperature=1.0, top_k=2)).tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0.0, 0.0]
    )
    assert target_probs(logits, Sampling(temperature=1.0, top_p=0.6)).tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0.0, 0.0]
    )
    sharp = target_probs(logits, Sampling(temperature=0.5))
    assert sharp.tolist() == pytest.approx((np.array([25, 6.25, 2.25, 1]) / 34.5).tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, r"temperature must be in \[0, 10\], got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": -3}, "top_k must be at least 0, got -3"),
    ],
    ids=str,
)
def test_sampling_parameters_out_of_range_are_refused(changes, message):
    with pytest.raises(PolicyConfigError, match=message):
        Sampling(**changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_best_tokens_break_ties_to_the_lowest_id(dtype):
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0] * 6], dtype=dtype)
    log_probs, ids = best_tokens(logits, 4)
    assert ids.tolist() == [[1, 3, 2, 4], [0, 1, 2, 3]]
    expected = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids)
    assert torch.equal(log_probs, expected)

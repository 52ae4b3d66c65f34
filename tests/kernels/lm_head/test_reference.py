from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from sgl_eagle_kernels.lm_head import (  # noqa: E402
    GlobalTop,
    LocalTop,
    build_two_stage_head,
    expected_recall,
    merge_shards,
    rank_tokens,
    shuffle_vocabulary,
)
from sgl_eagle_kernels.lm_head.order import key_ids, key_scores, rank_keys  # noqa: E402
from sgl_eagle_kernels.lm_head.reference import (  # noqa: E402
    choose_candidates,
    full_topk,
    low_rank_topk,
    missing_log_mass,
)

SHORTLISTS = [
    GlobalTop(num_candidates=20),
    LocalTop(tile_size=16, per_tile=2),
    LocalTop(tile_size=16, per_tile=3, shuffle_seed=None),
    LocalTop(tile_size=7, per_tile=1, shuffle_seed=5),
]


def inputs(num_rows, hidden=37, seed=1):
    return torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_every_step_agrees_with_a_plain_loop(head_maker, shortlist, num_rows):
    head = head_maker(shortlist)
    x = inputs(num_rows)
    found = rank_tokens(x, head, 4)
    natural = torch.arange(203) if head.ids is None else head.ids
    for row in range(num_rows):
        low_rank = dict(
            zip(natural.tolist(), (head.up @ (head.down @ x[row])).tolist(), strict=True)
        )
        if isinstance(shortlist, GlobalTop):
            groups, kept = [list(low_rank)], shortlist.num_candidates
        else:
            groups = [tile.tolist() for tile in natural.split(shortlist.tile_size)]
            kept = shortlist.per_tile
        chosen = {
            token
            for group in groups
            for token in sorted(group, key=lambda t: (-low_rank[t], t))[:kept]
        }
        logits = {token: float(head.weight[token] @ x[row]) for token in chosen}
        missing = torch.tensor([logits[token] - low_rank[token] for token in chosen])
        shift = float(missing.mean() + missing.var(unbiased=False) / 2)
        others = [score + shift for token, score in low_rank.items() if token not in chosen]
        normalizer = torch.tensor([*logits.values(), *others]).logsumexp(0)
        best = sorted(chosen, key=lambda t: (-logits[t], t))[:4]
        assert found.ids[row].tolist() == best
        expected = torch.tensor([logits[token] for token in best]) - normalizer
        torch.testing.assert_close(found.log_probs[row], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(found.log_normalizer[row], normalizer, rtol=0, atol=2e-5)
    assert found.is_finite.all()


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
def test_head_of_full_rank_gives_the_full_softmax(head_maker, shortlist):
    # Nothing is lost to the rank, so wherever the best tokens are candidates all is equal.
    head = head_maker(shortlist, rank=37)
    x = inputs(64)
    found, full = rank_tokens(x, head, 1), full_topk(x, head.weight, 1)
    torch.testing.assert_close(found.log_normalizer, full.log_normalizer, rtol=0, atol=1e-4)
    assert (found.ids == full.ids).all()  # a top-1 is first in its tile
    torch.testing.assert_close(found.log_probs, full.log_probs, rtol=0, atol=1e-4)
    direct = low_rank_topk(x, head, 1)
    assert (direct.ids == full.ids).all()
    torch.testing.assert_close(direct.log_probs, full.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("value", [0.0, -3.0, 3.0])
def test_tied_rows_give_the_lowest_ids(shortlist, value):
    weight = torch.full((50, 8), value / 8)
    head = build_two_stage_head(weight, torch.full((50, 1), value), torch.ones(1, 8) / 8, shortlist)
    found = rank_tokens(torch.ones(2, 8), head, 3)
    candidates = choose_candidates(torch.ones(2, 8), head).ids
    lowest = sorted(set(candidates[0].tolist()) - {-1})[:3]
    assert found.ids.tolist() == [lowest, lowest]
    assert found.ids[0, 0] == 0
    expected = torch.full((2, 3), -torch.log(torch.tensor(50.0)))
    torch.testing.assert_close(found.log_probs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_flagged_and_do_not_touch_others(head_maker, shortlist, bad):
    head = head_maker(shortlist)
    x = inputs(3)
    clean = rank_tokens(x, head, 4)
    x[1, 5] = bad
    found = rank_tokens(x, head, 4)
    assert found.is_finite.tolist() == [True, False, True]
    assert found.ids[1].tolist() == [0, 1, 2, 3]
    assert found.log_probs[1].tolist() == [-torch.inf] * 4
    for row in (0, 2):
        assert found.ids[row].tolist() == clean.ids[row].tolist()
        assert found.log_probs[row].tolist() == clean.log_probs[row].tolist()


def test_normal_parts_that_scores_leave_out_are_made_up_for():
    # Scores of a large vocabulary miss a normally distributed part: the mass is that of the sum.
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 20000, generator=generator)
    logits = scores + torch.tensor([[0.5], [1.0], [1.5]]) * torch.randn(
        3, 20000, generator=generator
    )
    missing = missing_log_mass(logits[:, :500], scores[:, :500])
    truth = logits[:, 500:].logsumexp(-1) - scores[:, 500:].logsumexp(-1)
    torch.testing.assert_close(missing, truth, rtol=0, atol=0.15)
    assert (truth > torch.tensor([0.1, 0.4, 1.0])).all()


def test_candidates_without_a_score_or_a_logit_say_nothing_of_what_is_missing():
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 9.0], [-torch.inf] * 4])
    scores = torch.tensor([[0.0, 3.0, 7.0, -torch.inf], [0.0] * 4])
    assert missing_log_mass(logits, scores).tolist() == [0.5, 0.0]


def test_padding_rows_of_the_full_head_never_win(head_maker):
    head = head_maker(GlobalTop(num_candidates=20))
    padded = torch.cat([head.weight, torch.full((21, 37), torch.nan)])
    again = build_two_stage_head(padded, head.up, head.down, head.shortlist)
    x = inputs(5)
    assert torch.equal(rank_tokens(x, head, 4).ids, rank_tokens(x, again, 4).ids)


def test_padding_of_the_last_tile_never_wins(head_maker):
    # Every logit is below zero, and the last tile holds fewer tokens than it may propose.
    head = head_maker(LocalTop(tile_size=100, per_tile=5), exact=True)
    assert head.most_topk == 10 + 3
    x = torch.full((2, 37), -1.0)
    found = rank_tokens(x, head, 13)
    assert (found.ids >= 0).all()
    assert (found.ids < 203).all()
    assert all(len(set(row)) == 13 for row in found.ids.tolist())


@pytest.mark.parametrize("shortlist", SHORTLISTS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_of_the_factors_is_flagged(head_maker, shortlist, bad):
    head = head_maker(shortlist)
    head.up[3] = bad
    x = inputs(2).abs()
    head.down.abs_()
    assert rank_tokens(x, head, 4).is_finite.tolist() == [False, False]


@pytest.mark.parametrize("shortlist", SHORTLISTS[1:], ids=str)
def test_tokens_with_a_score_of_minus_infinity_are_never_candidates(shortlist):
    up = torch.arange(50.0)[:, None]
    up[::2] = -torch.inf
    head = build_two_stage_head(torch.arange(50.0)[:, None], up, torch.ones(1, 1), shortlist)
    ids = choose_candidates(torch.ones(1, 1), head).ids[0]
    real = ids[ids >= 0].tolist()
    assert len(set(real)) == len(real)
    assert all(token % 2 for token in real)


def test_shards_of_the_vocabulary_join_to_the_whole(head_maker):
    head = head_maker(GlobalTop(num_candidates=64), num_tokens=208, rank=37)
    x = inputs(6)
    cuts = [0, 64, 208]
    shards = [
        rank_tokens(
            x,
            build_two_stage_head(head.weight[a:b], head.up[a:b], head.down, head.shortlist),
            4,
        )
        for a, b in pairwise(cuts)
    ]
    joined = merge_shards(shards, cuts[:-1])
    full = full_topk(x, head.weight, 4)
    assert torch.equal(joined.ids, full.ids)
    assert joined.is_finite.all()
    x[2] = torch.nan
    shards[1] = shards[1]._replace(log_normalizer=shards[1].log_normalizer.clone().fill_(torch.nan))
    assert not merge_shards(shards, cuts[:-1]).is_finite.any()


def test_keys_order_floats_and_come_back():
    scores = torch.tensor([-torch.inf, -3.5, -0.0, 0.0, 1e-40, 2.0, torch.inf])
    keys = rank_keys(scores, torch.arange(7).flip(0))
    assert keys.argsort().tolist() == list(range(7))
    assert torch.equal(key_scores(keys), scores + 0.0)
    assert key_ids(keys).tolist() == [6, 5, 4, 3, 2, 1, 0]
    nan, low = rank_keys(torch.tensor([torch.nan, -torch.inf]), torch.tensor([0, 0]))
    assert nan == low


@pytest.mark.parametrize(("num_tokens", "tile_size"), [(203, 16), (64, 64), (5, 7)])
def test_shuffle_is_a_permutation_sorted_within_tiles(num_tokens, tile_size):
    ids = shuffle_vocabulary(num_tokens, tile_size, 3)
    assert sorted(ids.tolist()) == list(range(num_tokens))
    for tile in ids.split(tile_size):
        assert tile.tolist() == sorted(tile.tolist())
    assert torch.equal(ids, shuffle_vocabulary(num_tokens, tile_size, 3))


@pytest.mark.parametrize(("num_tiles", "per_tile", "topk"), [(16, 1, 8), (32, 2, 24), (4, 3, 10)])
def test_expected_recall_is_what_random_partitions_measure(num_tiles, per_tile, topk):
    num_tokens, trials = 512, 4000
    generator = torch.Generator().manual_seed(0)
    best = torch.stack([torch.randperm(num_tokens, generator=generator) for _ in range(trials)])
    tiles = best[:, :topk] // (num_tokens // num_tiles)
    held = torch.nn.functional.one_hot(tiles, num_tiles).sum(1)
    recall = held.clamp(max=per_tile).sum(1) / topk
    expected = expected_recall(num_tokens, topk, num_tiles, per_tile)
    error = float(recall.double().std()) / trials**0.5
    assert abs(float(recall.double().mean()) - expected) < 4 * error
    assert 0 < expected < 1


def test_expected_recall_of_one_tile_and_of_whole_tiles():
    assert expected_recall(100, 10, 1, 4) == pytest.approx(0.4)
    assert expected_recall(100, 10, 25, 4) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GlobalTop(num_candidates=0), "num_candidates must be in"),
        (lambda: LocalTop(tile_size=4, per_tile=5), "per_tile must be in"),
        (lambda: LocalTop(tile_size=0, per_tile=1), "tile_size must be at least 1"),
        (lambda: expected_recall(100, 3, 7, 1), "multiple of num_tiles"),
        (
            lambda: build_two_stage_head(
                torch.ones(9, 4), torch.ones(9, 2), torch.ones(3, 4), GlobalTop(num_candidates=4)
            ),
            r"shapes must be .* got weight \[9, 4\], up \[9, 2\], down \[3, 4\]",
        ),
        (
            lambda: build_two_stage_head(
                torch.ones(9, 4).half(),
                torch.ones(9, 2),
                torch.ones(2, 4),
                GlobalTop(num_candidates=4),
            ),
            "weights must share",
        ),
        (
            lambda: build_two_stage_head(
                torch.ones(20000, 1),
                torch.ones(20000, 1),
                torch.ones(1, 1),
                LocalTop(tile_size=4, per_tile=1),
            ),
            "makes 5000 candidates",
        ),
    ],
)
def test_refusals_name_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("x", "topk", "message"),
    [
        (torch.zeros(2, 36), 4, r"head_input must be \[N, 37\], got \[2, 36\]"),
        (torch.zeros(2, 37).half(), 4, "head_input must be torch.float32 on cpu"),
        (torch.zeros(2, 37), 21, r"topk must be in \[1, 20\]"),
    ],
)
def test_input_that_does_not_fit_is_refused(head_maker, x, topk, message):
    with pytest.raises(ValueError, match=message):
        rank_tokens(x, head_maker(GlobalTop(num_candidates=20)), topk)

from dataclasses import dataclass

import numpy as np
import pytest

from sgl_eagle_harness.draft_loop import grow_trees, verify_tree
from sgl_eagle_harness.policies.eagle2 import Eagle2Policy
from sgl_eagle_harness.policies.plain import PlainPolicy
from sgl_eagle_harness.policies.static import StaticPolicy
from sgl_eagle_harness.types import BatchContext, TreeLimits
from sgl_eagle_tuner.replay import replay_positions, tokens_left
from sgl_eagle_tuner.walk import walk


def eagle2(num_steps: int, topk: int, num_draft_tokens: int) -> Eagle2Policy:
    return Eagle2Policy(
        limits=TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    )


POLICIES = [
    StaticPolicy.chain(1),
    StaticPolicy.chain(4),
    StaticPolicy(name="fork", paths=((0,), (1,), (0, 0), (1, 0), (1, 2), (0, 0, 1))),
    eagle2(4, 1, 5),
    eagle2(3, 2, 6),
    eagle2(4, 4, 16),
    eagle2(4, 4, 4),
]


@dataclass
class NaiveStep:
    position: int
    num_accept_tokens: int
    num_draft_tokens: int
    num_pending: int


def run_engine(language, text, policy, live_drafter) -> list[NaiveStep]:
    # Drafts live and compares tokens only: nothing of the trace is used.
    completion, steps = text[2:], []
    num_done, num_pending = 1, 1
    while num_done < len(completion):
        before = (text[num_done], text[num_done + 1])
        batch = BatchContext(
            batch_size=1,
            context_len=np.array([num_done + 1]),
            num_pending=np.array([num_pending]),
        )
        trees = grow_trees(live_drafter(language, before), policy, batch)
        tree = verify_tree(trees, 0, policy.select_verify(trees, batch)[0], before[1])
        node, accepted = 0, 0
        for token in completion[num_done:]:
            children = [
                child
                for child in range(1, tree.num_draft_tokens)
                if tree.parents[child] == node and tree.tokens[child] == token
            ]
            if not children:
                break
            node, accepted = children[0], accepted + 1
        emitted = min(accepted + 1, len(completion) - num_done)
        steps.append(NaiveStep(num_done, emitted, tree.num_draft_tokens, num_pending))
        num_done, num_pending = num_done + emitted, emitted
    return steps


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_walk_equals_an_engine_that_drafts_live(corpus, costs, live_drafter, policy):
    trace = corpus.trace
    run = walk(trace, replay_positions(trace, policy), costs)
    expected = [
        (prompt, step)
        for prompt, (language, text) in enumerate(zip(corpus.languages, corpus.texts, strict=True))
        for step in run_engine(language, text, policy, live_drafter)
    ]
    assert run.prompt_index.tolist() == [prompt for prompt, _ in expected]
    assert trace.position[run.rows].tolist() == [step.position for _, step in expected]
    assert run.num_accept_tokens.tolist() == [s.num_accept_tokens for _, s in expected]
    assert run.loads.num_draft_tokens.tolist() == [s.num_draft_tokens for _, s in expected]
    assert run.loads.num_pending.tolist() == [s.num_pending for _, s in expected]
    assert not run.uncovered.any()


def test_plain_policy_emits_one_token_a_step(corpus, costs):
    trace = corpus.trace
    run = walk(trace, replay_positions(trace, PlainPolicy()), costs)
    assert (run.num_accept_tokens == 1).all()
    assert run.num_steps == trace.num_positions - trace.num_prompts
    assert run.outcome.accept_length == 1.0
    assert run.outcome.accept_rate is None
    np.testing.assert_allclose(run.times.total_us, costs.decode_us(1, run.loads.context_len))


def test_totals_cover_every_completion_token_but_prefills(corpus, costs):
    trace = corpus.trace
    totals = walk(trace, replay_positions(trace, eagle2(3, 2, 6)), costs).outcome.totals
    lengths = [len(text) - 2 for text in corpus.texts]
    assert totals.num_tokens.tolist() == [length - 1 for length in lengths]
    assert totals.prompt_ids == tuple(trace.prompt_ids)


@pytest.mark.parametrize("num_draft_tokens", [2, 3, 5, 9, 20, 40])
def test_more_nodes_never_accept_fewer_tokens(corpus, num_draft_tokens):
    small = replay_positions(corpus.trace, eagle2(4, 4, num_draft_tokens))
    large = replay_positions(corpus.trace, eagle2(4, 4, num_draft_tokens + 3))
    assert (large.num_accept_tokens >= small.num_accept_tokens).all()
    assert (large.num_draft_tokens > small.num_draft_tokens).all()


def test_accepted_tokens_never_exceed_what_the_text_holds(corpus):
    steps = replay_positions(corpus.trace, eagle2(4, 4, 40))
    left = tokens_left(corpus.trace)
    assert (steps.num_accept_tokens <= left).all()
    assert (left[corpus.trace.is_last] == 1).all()


def test_beyond_the_recorded_depth_every_row_is_uncovered(corpus):
    steps = replay_positions(corpus.trace, StaticPolicy.chain(5))
    assert steps.uncovered.all()
    covered = replay_positions(corpus.trace, StaticPolicy.chain(4))
    assert not covered.uncovered.any()
    np.testing.assert_array_equal(steps.num_accept_tokens, covered.num_accept_tokens)


def test_more_children_than_recorded_are_never_guessed(corpus):
    steps = replay_positions(corpus.trace, eagle2(2, 5, 6))
    assert steps.uncovered.all()
    assert (steps.num_drafted == 0).all()
    assert (steps.num_accept_tokens == 1).all()


def test_nodes_outside_every_recorded_beam_are_counted(record, tmp_path):
    trace = record(tmp_path, beams=(2,), num_prompts=3).trace
    # Children of both nodes of every level: the second level has four, of which two were expanded.
    paths = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    everything = (*paths, *((*path, 0) for path in paths if len(path) == 2))
    steps = replay_positions(trace, StaticPolicy(name="full", paths=everything))
    assert steps.uncovered.all()
    assert steps.uncovered_share == 1.0
    assert not replay_positions(trace, StaticPolicy(name="two", paths=paths)).uncovered.any()


def test_chunks_do_not_change_the_result(corpus, monkeypatch):
    whole = replay_positions(corpus.trace, eagle2(3, 4, 12))
    monkeypatch.setattr("sgl_eagle_tuner.replay.MAX_CHUNK_POSITIONS", 7)
    chunked = replay_positions(corpus.trace, eagle2(3, 4, 12))
    np.testing.assert_array_equal(whole.num_accept_tokens, chunked.num_accept_tokens)
    np.testing.assert_array_equal(whole.widths, chunked.widths)


def test_expected_accept_tokens_match_the_draws_on_average(sampled_corpus):
    steps = replay_positions(sampled_corpus.trace, eagle2(4, 4, 16))
    inside = tokens_left(sampled_corpus.trace) > 4
    drawn, expected = steps.num_accept_tokens[inside], steps.expected_accept_tokens[inside]
    error = (drawn - expected).std() / np.sqrt(inside.sum())
    assert abs(drawn.mean() - expected.mean()) < 4 * error
    assert np.corrcoef(drawn, expected)[0, 1] > 0.2


def test_expected_accept_tokens_sum_the_paths_of_the_target(sampled_corpus):
    trace = sampled_corpus.trace
    steps = replay_positions(trace, StaticPolicy.chain(3))
    row = 11
    log_prob, total, node = 0.0, 1.0, 0
    for _ in range(3):
        log_prob += float(trace.target_log_probs[row, node])
        total += np.exp(log_prob)
        node = int(trace.first_child[row, node])
    assert steps.expected_accept_tokens[row] == pytest.approx(total)


def test_greedy_traces_have_no_expectation(corpus):
    assert replay_positions(corpus.trace, eagle2(3, 2, 6)).expected_accept_tokens is None

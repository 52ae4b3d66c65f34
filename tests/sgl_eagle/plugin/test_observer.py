"""Steps are counted, learnt from and timed once their outcome is on the host."""

import dataclasses
import logging
from collections import Counter

import numpy as np
import pytest
from fake_requests import FakeRequest, make_result, two_level_trees

from sgl_eagle.plugin.finished_step import DraftedTrees
from sgl_eagle.plugin.metrics_export import describe_report
from sgl_eagle.plugin.node_learner import STEPS_BETWEEN_LESSONS, NodeLearner
from sgl_eagle.plugin.observer import StepObserver
from sgl_eagle.plugin.round_clock import RoundClock
from sgl_eagle_harness.policies.learning import REFRESH_STEPS, STEPS_TO_SETTLE
from sgl_eagle_harness.types import NO_NODE


class Recorder:
    """A listener, and a policy that learns, which keep what they are told."""

    def __init__(self):
        self.steps, self.forgotten, self.nodes, self.rows = [], [], [], []

    def observe(self, step):
        assert len(step.emitted)  # looked at now, since the result goes
        self.steps.append(step)

    def forget(self, rid):
        self.forgotten.append(rid)

    def observe_nodes(self, depths, path_log_confidence, accepted):
        self.nodes.append((depths.tolist(), path_log_confidence, accepted.tolist()))

    def observe_step(self, rows):
        self.rows.append(rows)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def make_observer(
    *listeners, now=None, reports=None, dropped_ct=lambda: 0, runs_ahead=False, gauges=None
):
    return StepObserver(
        clock=RoundClock(),
        runs_ahead=runs_ahead,
        listeners=listeners,
        gauges=gauges or (lambda batch_size: {"price_tok_per_us": 0.001 * batch_size}),
        export=[].append if reports is None else reports.append,
        dropped_ct=dropped_ct,
        now=now or Clock(),
    )


def make_learner(policy, *, steps_between_lessons, steps_between_trees=1):
    return NodeLearner(
        policy,
        steps_between_lessons=steps_between_lessons,
        steps_between_trees=steps_between_trees,
    )


def run_step(observer, requests, emitted, drafted=None):
    if drafted is not None:
        observer.drafted(drafted)
    observer.launched(requests, make_result(emitted))
    observer.completed([len(row) - 1 for row in emitted])
    for request, tokens in zip(requests, emitted, strict=True):
        request.output_ids += tokens


def test_counts_of_a_speculative_and_a_plain_step():
    observer = make_observer()
    requests = [FakeRequest("a"), FakeRequest("b")]
    run_step(observer, requests, [[10, 20, 5], [9]], two_level_trees(2))
    run_step(observer, requests, [[4], [4]])
    counts = observer.counts
    assert (counts.step_ct, counts.row_ct, counts.speculated_ct) == (2, 4, 2)
    assert (counts.drafted_ct, counts.proposed_ct, counts.correct_ct) == (12, 6, 2)
    assert counts.verify_size_ct == {4: 2, 1: 2}
    assert counts.depth_ct == {2: 2, 0: 2}


def test_requests_without_a_finite_draft_are_counted():
    observer = make_observer()
    requests = [FakeRequest(name) for name in "abc"]
    drafted = two_level_trees(3)
    trees = dataclasses.replace(drafted.trees, valid=drafted.trees.valid.copy())
    trees.valid[1:] = False  # the second was wanted, the third was not
    columns = np.where(trees.valid[:, :3], drafted.columns, NO_NODE)
    wanted = np.array([True, True, False])
    run_step(
        observer,
        requests,
        [[10, 5], [9], [9]],
        DraftedTrees(trees=trees, columns=columns, speculating=wanted),
    )
    assert (observer.counts.invalid_row_ct, observer.counts.speculated_ct) == (1, 1)


def test_requests_that_have_ended_do_not_count():
    observer, seen = make_observer(), Recorder()
    observer = make_observer(seen)
    requests = [FakeRequest("a"), FakeRequest("b", over=True), FakeRequest("c", is_retracted=True)]
    run_step(observer, requests, [[10, 5], [10, 20, 5], [9]], two_level_trees(3))
    assert (observer.counts.row_ct, observer.counts.correct_ct) == (1, 1)
    assert seen.steps[0].counted.tolist() == [True, False, False]


def test_under_overlap_outcomes_belong_to_the_step_that_was_launched_first():
    seen = Recorder()
    observer = make_observer(seen)
    first, second = [FakeRequest("a")], [FakeRequest("a"), FakeRequest("b")]
    observer.drafted(two_level_trees(1))
    observer.launched(first, make_result([[10, 5]]))
    observer.launched(second, make_result([[6], [7]]))
    observer.completed([1])
    observer.completed([0, 0])
    assert [step.batch_size for step in seen.steps] == [1, 2]
    assert seen.steps[0].drafted is not None
    assert seen.steps[1].drafted is None
    assert seen.steps[1].emitted[:, 0].tolist() == [6, 7]


def test_requests_that_were_launched_again_have_not_ended():
    class Unseen(FakeRequest):
        def finished(self):
            raise AssertionError("looked at")

    observer, requests = make_observer(), [Unseen("a"), Unseen("b")]
    for _ in range(2):
        observer.launched(requests, make_result([[10, 5], [6]]))
    observer.completed([1, 0])
    assert (observer.counts.row_ct, observer.counts.correct_ct) == (2, 1)
    with pytest.raises(AssertionError, match="looked at"):
        observer.completed([1, 0])  # nothing says so of the newest


def test_a_step_that_does_not_fit_is_not_learnt_from(caplog):
    seen = Recorder()
    observer = make_observer(seen)
    observer.launched([FakeRequest("a")], make_result([[5]]))
    with caplog.at_level(logging.WARNING):
        observer.completed([0, 0, 0])
    assert "lost track of its steps" in caplog.text
    assert seen.steps == []
    run_step(observer, [FakeRequest("b")], [[5]])
    assert len(seen.steps) == 1


def test_time_between_steps_counts_unless_a_prefill_ran():
    seen, now = Recorder(), Clock()
    observer = make_observer(seen, now=now)
    request = FakeRequest("a")
    for prefilled in (True, False, True, False):
        if prefilled:
            observer.prefilled()
        now.seconds += 0.01
        run_step(observer, [request], [[5]])
    elapsed = [step.elapsed_us for step in seen.steps]
    assert elapsed == [None, pytest.approx(1e4), None, pytest.approx(1e4)]


class Copy:
    """SGLang's event behind the copy of a result."""

    def __init__(self, *, is_done):
        self.query = lambda: is_done

    def synchronize(self):
        raise AssertionError("waited for the device")


def test_a_step_is_host_bound_where_the_next_was_launched_after_the_device_was_done():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=1), runs_ahead=True)
    request = FakeRequest("a")
    for is_done in (True, False, True, True):
        result = make_result([[5]])
        result.copy_done = Copy(is_done=is_done)
        observer.launched([request], result)
        if len(observer._launched) > 1:
            observer.completed([0])
    observer.prefilled()  # launched behind the last
    observer.completed([0])
    assert [rows.host_bound for rows in policy.rows] == [True, False, True, None]


def test_a_host_that_takes_turns_with_its_device_is_never_slower_or_faster():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=1))
    for _ in range(3):
        run_step(observer, [FakeRequest("a")], [[5]])
    assert [rows.host_bound for rows in policy.rows] == [True] * 3


def test_pruned_nodes_are_learnt_from_once_the_text_has_caught_up():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=1))
    request = FakeRequest("a")
    # Verified: 10, 11 and 20. The target goes on with 11 and then with 31, which was pruned.
    run_step(observer, [request], [[11, 31]], two_level_trees(1))
    assert not policy.nodes  # a step's tokens are the request's when the next one is looked at
    run_step(observer, [request], [[10]], two_level_trees(1, verified=0))
    ((depths, logs, accepted),) = policy.nodes
    assert depths == [1, 1, 2, 2, 2, 2]
    assert accepted == [0, 1, 0, 0, 0, 1]
    assert logs == pytest.approx(np.log([0.6, 0.3, 0.36, 0.18, 0.18, 0.09]), abs=1e-5)
    # That step emitted one token; the second, from a plain step, settles its tree.
    run_step(observer, [request], [[21]])
    assert len(policy.nodes) == 1
    run_step(observer, [request], [[5]])
    assert policy.nodes[1][2] == [1, 0, 0, 1, 0, 0]
    assert [rows.largest for rows in policy.rows] == [(2, 4), (2, 1), (0, 1), (0, 1)]


def test_what_a_text_does_not_reach_has_no_outcome():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=1))
    request = FakeRequest("a")
    run_step(observer, [request], [[10]], two_level_trees(1, verified=0))
    for _ in range(2):
        observer.finished("a")
        run_step(observer, [FakeRequest("b")], [[5]])
        ((depths, _, accepted),) = policy.nodes
        assert (depths, accepted) == ([1, 1], [1, 0])


def test_an_aborted_request_is_not_waited_for():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=1))
    request, other = FakeRequest("a"), FakeRequest("b")
    run_step(observer, [request], [[11]], two_level_trees(1))
    run_step(observer, [other], [[5]])
    assert not policy.nodes
    request.over = True  # and nobody says so
    run_step(observer, [other], [[5]])
    assert [accepted for _, _, accepted in policy.nodes] == [[0, 1]]


def test_lessons_come_together_and_are_complete_at_every_refresh():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=4))
    request, taught = FakeRequest("a"), []
    for _ in range(8):
        run_step(observer, [request], [[11, 31]], two_level_trees(1))
        taught.append(len(policy.nodes))
    assert taught == [0, 0, 0, 3, 3, 3, 3, 7]
    assert REFRESH_STEPS % STEPS_BETWEEN_LESSONS == 0


def test_every_request_has_its_turn():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=1))
    requests = [FakeRequest(name) for name in "abc"]
    for _ in range(6):
        run_step(observer, requests, [[10, 20], [11, 30], [12, 9]], two_level_trees(3))
    run_step(observer, requests, [[5], [5], [5]])
    outcomes = [tuple(accepted) for _, _, accepted in policy.nodes]
    assert len(outcomes) == 6
    assert set(outcomes) == {(1, 0, 1, 0, 0, 0), (0, 1, 0, 0, 1, 0), (0, 0, 0, 0, 0, 0)}


def test_a_tree_of_every_few_drafted_steps_is_followed_and_each_request_has_its_turn():
    policy = Recorder()
    learner = make_learner(policy, steps_between_lessons=1, steps_between_trees=3)
    observer, requests = make_observer(learner), [FakeRequest(name) for name in "ab"]
    for _ in range(6):
        run_step(observer, requests, [[10, 20], [11, 30]], two_level_trees(2))
        run_step(observer, requests, [[5], [5]])
    assert [accepted for _, _, accepted in policy.nodes] == [[0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]]
    assert len(policy.rows) == 12  # what steps yield is learnt from all of them


def test_fewer_trees_are_followed_at_a_slower_pace_and_each_request_still_has_its_turn():
    policy = Recorder()
    observer = make_observer(make_learner(policy, steps_between_lessons=1))
    requests = [FakeRequest(name) for name in "ab"]
    for index in range(2 * STEPS_TO_SETTLE + 40):
        if index == 2 * STEPS_TO_SETTLE:
            policy.nodes.clear()
        run_step(observer, requests, [[10, 20], [11, 30]], two_level_trees(2))
    outcomes = [tuple(accepted) for _, _, accepted in policy.nodes]
    assert len(outcomes) == pytest.approx(20, abs=1)
    counts = Counter(outcomes)
    assert set(counts) == {(1, 0, 1, 0, 0, 0), (0, 1, 0, 0, 1, 0)}
    assert min(counts.values()) >= 9
    assert len(policy.rows) == 2 * STEPS_TO_SETTLE + 40


def test_reports_hold_what_happened_since_the_last():
    reports, now, dropped = [], Clock(), [0]
    observer = make_observer(now=now, reports=reports, dropped_ct=lambda: dropped[0])
    requests = [FakeRequest("a"), FakeRequest("b")]
    run_step(observer, requests, [[10, 5], [5]], two_level_trees(2))
    assert reports == []
    now.seconds, dropped[0] = 2.0, 3
    run_step(observer, requests, [[10, 5], [11, 5]], two_level_trees(2))
    observer.finished("a")
    assert [report.counts.step_ct for report in reports] == [2, 0]
    assert [report.dropped_ct for report in reports] == [3, 0]
    observer.switched(2)
    observer.publish()
    assert reports[-1].counts.tier_switch_ct == 2
    assert reports[0].counts.accept_length == pytest.approx(7 / 4)
    assert reports[0].gauges == {"price_tok_per_us": 0.002}


def test_the_end_of_a_request_is_reported_at_once_where_no_other_decodes():
    reports = []
    observer = make_observer(reports=reports)
    first, second = requests = [FakeRequest("a"), FakeRequest("b")]
    run_step(observer, requests, [[10], [5]])
    observer.launched(requests, make_result([[10], [5]]))
    first.over = True
    observer.finished("a")
    assert not reports
    second.over = True
    observer.finished("b")
    assert [report.counts.row_ct for report in reports] == [2]


def test_the_log_line_says_what_a_step_did():
    reports, now = [], Clock()
    observer = make_observer(now=now, reports=reports)
    assert describe_report_of(observer, reports) == "no decode step"
    run_step(observer, [FakeRequest("a"), FakeRequest("b")], [[10, 5], [5]], two_level_trees(2))
    line = describe_report_of(observer, reports)
    assert line.startswith(
        "accept length 1.50; kept 0.50 of 3.00 proposed and 6.0 drafted a pass; verify size 4.0; "
        "depth 2.0; batch 2.0; plain 0%; host-bound 100%; 0 tier switches; price 2000.0 tok/s"
    )


def test_the_log_line_tells_the_schedulers_time_where_it_is_learnt():
    reports = []
    observer = make_observer(reports=reports, gauges=lambda _: {"scheduler_us": 1799.6})
    run_step(observer, [FakeRequest("a")], [[5]])
    assert describe_report_of(observer, reports).endswith("; scheduler 1800 us between rounds")


def describe_report_of(observer, reports):
    observer.publish()
    return describe_report(reports[-1])

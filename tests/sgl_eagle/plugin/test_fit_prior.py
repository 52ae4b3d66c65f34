"""Fitting the prior of a server without a policy file, and holding it against traces."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch installed")

from sgl_eagle.cli import main as sgl_eagle
from sgl_eagle.plugin import check_prior, fit_prior
from sgl_eagle.plugin.builtin_policy import builtin_sizes, load_prior
from sgl_eagle.plugin.server_arguments import DEFAULT_LIMITS
from sgl_eagle_harness.trace_store import read_dense_trace

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def traces(tmp_path_factory, target_folder, good_draft, prompt_file):
    out = tmp_path_factory.mktemp("prior") / "traces"
    models = ["--target", str(target_folder), "--draft", str(good_draft), "--dtype", "float32"]
    sizes = ["--max-new-tokens", "40", "--num-steps", "8", "--beams", "2,4,8"]
    files = ["--prompts", str(prompt_file), "--out", str(out)]
    assert sgl_eagle(["record", *files, *sizes, *models, "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def prior_file(traces):
    out = traces.parent / "prior.json"
    assert fit_prior.main([str(traces), str(out)]) == 0
    return out


def test_a_fit_says_what_it_was_fitted_on(traces, prior_file):
    prior, trace = load_prior(prior_file), read_dense_trace([traces])
    assert prior.num_positions == trace.num_positions
    assert prior.target == trace.header.target.name
    assert prior.command.endswith(f"fit_prior {traces} {prior_file}")
    assert [model.topk for model in prior.continuations] == list(fit_prior.TOPKS)


def test_it_foresees_the_text_that_it_was_fitted_on_better_than_another_pairs_does(
    traces, prior_file
):
    trace = read_dense_trace([traces])
    own, shipped = load_prior(prior_file), load_prior()
    # Isotonic regression minimises the Brier score.
    assert check_prior.check_map(own, trace).brier < check_prior.check_map(shipped, trace).brier

    def worst(prior):
        checks = check_prior.check_shapes(prior, trace)
        return max(abs(each.expected - each.kept) for each in checks)

    assert worst(own) < 0.1 < worst(shipped)


def test_kept_drafts_are_those_of_the_text(traces):
    trace = read_dense_trace([traces])
    checks = {each.shape: each for each in check_prior.check_shapes(load_prior(), trace)}
    assert {shape.num_draft_tokens for shape in checks} == set(builtin_sizes(DEFAULT_LIMITS)[1:])
    chain = next(each for each in checks.values() if each.shape.num_draft_tokens == 2)
    # The one draft of a tree of two nodes is the best child of the root.
    best = (trace.depths == 1) & (trace.ranks == 0)
    goes_on = np.diff(trace.prompt_index, append=-1) == 0
    assert chain.num_positions == goes_on.sum()
    assert chain.kept == pytest.approx((trace.on_path & best).any(axis=1)[goes_on].mean())


def test_the_command_prints_every_shape(traces, prior_file, capsys):
    assert check_prior.main([str(traces), "--prior", str(prior_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("map: ")
    shapes = [line.split()[0] for line in lines[4:-1]]
    assert shapes[0] == "1/4/2"
    assert shapes[-1] == "6/4/16"
    assert lines[-1].startswith("expected less kept")

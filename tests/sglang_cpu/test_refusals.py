"""What must not be served does not come up, and says why."""

import json
import shutil

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_flags_that_are_not_supported_are_named_together(fork_server, pair, tmp_path):
    flags = ("--page-size", "16", "--speculative-accept-threshold-acc", "0.5")
    output = fork_server.output_of_refused_start(pair, tmp_path / "log", *flags)
    assert "--speculative-accept-threshold-acc must be 1.0" in output
    assert "--page-size must be 1: branches of a tree do not fill pages, got 16" in output


def test_a_policy_that_does_not_fit_the_flags_is_refused(fork_server, pair, policies, tmp_path):
    flags = ("--sgl-eagle-policy", str(policies["eagle2"]), "--speculative-num-steps", "2")
    output = fork_server.output_of_refused_start(pair, tmp_path / "log", *flags)
    assert "--speculative-num-steps must be at least 3" in output


def test_prices_of_another_engine_are_refused(fork_server, pair, policies, tmp_path):
    # By the variable, which is how a server that is started from Python gets its policy.
    variables = {"SGLEAGLE_POLICY": str(policies["price_of_reference_engine"])}
    output = fork_server.output_of_refused_start(pair, tmp_path / "log", **variables)
    assert "must be measured on engine='sglang', got engine='reference'" in output


def test_a_draft_without_its_head_is_refused(fork_server, pair, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "pair"
    broken.mkdir()
    (broken / "target").symlink_to(pair / "target")
    shutil.copytree(pair / "draft", broken / "draft")
    tensors = load_file(broken / "draft" / "model.safetensors")
    del tensors["lm_head.weight"], tensors["d2t"]
    save_file(tensors, broken / "draft" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((broken / "draft" / "config.json").read_text())
    (broken / "draft" / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 1024}))
    output = fork_server.output_of_refused_start(broken, tmp_path / "log")
    assert "lm_head.weight is missing, and SGLang would leave the head at its random" in output

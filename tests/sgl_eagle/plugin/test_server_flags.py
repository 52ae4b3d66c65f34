"""Flags of the plugin: what they say, and how they reach the scheduler."""

import argparse
import os
from pathlib import Path

import pytest

from sgl_eagle.plugin import server_flags
from sgl_eagle.plugin.server_flags import PluginSettings, read_settings
from sgl_eagle_harness.errors import PolicyConfigError


@pytest.fixture
def parser():
    made = argparse.ArgumentParser()
    assert server_flags._declare_flags("kept", made) == "kept"
    return made


def test_flags_set_the_variables_that_schedulers_read(parser, monkeypatch):
    for flag in server_flags._FLAGS:
        monkeypatch.delenv(flag.variable, raising=False)
    words = ["--sgl-eagle-record", "traces", "--sgl-eagle-record-mode", "dense"]
    words += ["--sgl-eagle-cost-cache", "none", "--sgl-eagle-lm-head", "full"]
    namespace = parser.parse_args(words)
    arguments = server_flags._export_flags("class", namespace)
    assert arguments == (("class", namespace), {})
    wanted = PluginSettings(lm_head="full", record=Path("traces"), record_mode="dense")
    assert read_settings(os.environ) == wanted
    for flag in server_flags._FLAGS:
        monkeypatch.delenv(flag.variable, raising=False)


def test_the_cost_cache_follows_xdg():
    assert read_settings({"XDG_CACHE_HOME": "/c"}).cost_cache == Path("/c/sgl-eagle/costs")
    assert read_settings({}).cost_cache == Path.home() / ".cache/sgl-eagle/costs"
    assert read_settings({"SGLEAGLE_COST_CACHE": "/mine"}).cost_cache == Path("/mine")
    assert read_settings({"SGLEAGLE_COST_CACHE": "none"}).cost_cache is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SGLEAGLE_LM_HEAD": "half"}, "lm-head must be full or two-stage, got 'half'"),
        ({"SGLEAGLE_RECORD_MODE": "full"}, "record-mode must be ordinary or dense, got 'full'"),
        ({"SGLEAGLE_RECORD_MODE": "dense"}, "dense needs a folder: add --sgl-eagle-record"),
        (
            {
                "SGLEAGLE_RECORD_MODE": "dense",
                "SGLEAGLE_RECORD": "t",
                "SGLEAGLE_POLICY": "p.json",
            },
            "leave out --sgl-eagle-policy, got p.json",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(variables, message):
    with pytest.raises(PolicyConfigError, match=message):
        read_settings(variables)

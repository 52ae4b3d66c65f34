from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from trace_maker import VOCAB, make_header, make_prompt

from sgl_eagle_harness.errors import TraceError
from sgl_eagle_harness.ordinary_trace import (
    OrdinaryStep,
    read_ordinary_trace,
    write_ordinary_shard,
)
from sgl_eagle_harness.trace_store import read_dense_trace, write_dense_shard

HEADER = make_header(kind="ordinary", censored=True)


def make_step(**changes) -> OrdinaryStep:
    fields_ = {
        "prompt_id": "p",
        "workload": "code",
        "position": 3,
        "context_len": 20,
        "tokens": np.array([5, 6, 7, 8]),
        "parents": np.array([-1, 0, 0, 2]),
        "path_log_confidence": np.array([0.0, -1.5, -0.5, -2.0], np.float32),
        "accepted": np.array([2, 3]),
        "bonus_token": 9,
    }
    return OrdinaryStep(**(fields_ | changes))


PLAIN = {
    "tokens": np.array([5]),
    "parents": np.array([-1]),
    "path_log_confidence": np.zeros(1, np.float32),
    "accepted": np.empty(0, np.int64),
}


def test_round_trip_in_shard_order(tmp_path):
    first, second = make_step(), make_step(prompt_id="q", position=0, **PLAIN)
    write_ordinary_shard(tmp_path / "1.parquet", HEADER, [first])
    write_ordinary_shard(tmp_path / "2.parquet", HEADER, [second])
    header, steps = read_ordinary_trace(tmp_path)
    assert header == HEADER
    for found, written in zip(steps, [first, second], strict=True):
        for item in fields(OrdinaryStep):
            assert np.array_equal(getattr(found, item.name), getattr(written, item.name))
    assert [step.num_accept_tokens for step in steps] == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.array([5, 6, 7, VOCAB])}, r"row 1: tokens must be in \[0, 97\)"),
        ({"parents": np.array([-1, 0, 3, 2])}, "row 1: node 0 must be the root"),
        ({"parents": np.array([-1, 0, 0])}, "row 1: parents and tokens differ in length"),
        ({"path_log_confidence": np.full(4, np.nan, np.float32)}, "row 1: path_log_confidence"),
        ({"accepted": np.array([3])}, "row 1: accepted must be a path from the root, got node 3"),
        ({"accepted": np.array([9])}, "got node 9"),
    ],
    ids=str,
)
def test_a_step_that_cannot_be_is_refused(tmp_path, changes, message):
    with pytest.raises(TraceError, match=message):
        write_ordinary_shard(tmp_path / "t.parquet", HEADER, [make_step(), make_step(**changes)])
    assert not list(tmp_path.iterdir())


def test_dense_and_ordinary_are_not_taken_for_each_other(tmp_path):
    dense, ordinary = tmp_path / "d.parquet", tmp_path / "o.parquet"
    write_dense_shard(dense, make_header(), [make_prompt(np.random.default_rng(0))])
    write_ordinary_shard(ordinary, HEADER, [make_step()])
    with pytest.raises(TraceError, match="kind must be 'dense', got kind='ordinary'"):
        read_dense_trace(ordinary)
    with pytest.raises(TraceError, match=r"d\.parquet: columns missing or unknown"):
        read_ordinary_trace(dense)
    with pytest.raises(TraceError, match="kind must be 'ordinary', got kind='dense'"):
        write_ordinary_shard(ordinary, make_header(), [make_step()])
    with pytest.raises(TraceError, match="at least one step"):
        write_ordinary_shard(ordinary, HEADER, [])


def test_shards_of_different_recordings_are_not_merged(tmp_path):
    write_ordinary_shard(tmp_path / "1.parquet", HEADER, [make_step()])
    other = make_header(kind="ordinary", censored=True, dtype="bfloat16")
    write_ordinary_shard(tmp_path / "2.parquet", other, [make_step()])
    with pytest.raises(TraceError, match="recorded differently: dtype"):
        read_ordinary_trace(tmp_path)


def test_an_empty_completion_prefix_is_a_plain_step(tmp_path):
    step = replace(make_step(), **PLAIN)
    write_ordinary_shard(tmp_path / "t.parquet", HEADER, [step, step])
    assert len(read_ordinary_trace(tmp_path / "t.parquet")[1]) == 2

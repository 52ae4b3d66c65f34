from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_maker import VOCAB, make_header, make_prompt

from sgl_eagle_harness.errors import OutputError, TraceError
from sgl_eagle_harness.trace_schema import HEADER_KEY, SamplingParams, SourceFile
from sgl_eagle_harness.trace_store import read_dense_trace, read_header, write_dense_shard


@pytest.fixture
def shard(tmp_path):
    rng = np.random.default_rng(0)
    prompts = [
        make_prompt(rng, prompt_id="a", workload="code", num_positions=9),
        make_prompt(rng, prompt_id="b", workload="chat", num_positions=4),
    ]
    path = tmp_path / "shard.parquet"
    write_dense_shard(path, make_header(), prompts)
    return path


def rewrite(path, **columns):
    """Replace columns of a shard by edited copies, keeping its metadata."""
    table = pq.read_table(path)
    for name, edit in columns.items():
        values = table.column(name).to_pylist()
        edit(values)
        table = table.set_column(
            table.column_names.index(name),
            table.schema.field(name),
            pa.array(values, table.schema.field(name).type),
        )
    pq.write_table(table, path)


def rewrite_header(path, **changes):
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[HEADER_KEY]) | changes
    pq.write_table(table.replace_schema_metadata({HEADER_KEY: json.dumps(header)}), path)


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    topk=st.integers(1, 3),
    num_steps=st.integers(1, 3),
)
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_round_trip_returns_what_was_written(tmp_path, seed, lengths, topk, num_steps):
    rng = np.random.default_rng(seed)
    prompts = [
        make_prompt(
            rng,
            prompt_id=f"p{i}",
            num_positions=n,
            topk=topk,
            num_steps=num_steps,
            holes=num_steps > 1,
        )
        for i, n in enumerate(lengths)
    ]
    path = tmp_path / "t.parquet"
    write_dense_shard(path, make_header(topk=topk, beams=(topk,), num_steps=num_steps), prompts)
    trace = read_dense_trace(path)
    assert trace.prompt_ids == [f"p{i}" for i in range(len(lengths))]
    assert trace.num_positions == sum(lengths)
    for index, prompt in enumerate(prompts):
        rows = trace.prompt_index == index
        assert np.array_equal(trace.next_token[rows], prompt.next_token)
        assert np.array_equal(trace.context_len[rows], prompt.context_len)
        assert trace.is_last[rows].sum() == 1
        for row, stored in enumerate(np.flatnonzero(rows)):
            kept = prompt.depths[row] > 0
            num = kept.sum()
            assert np.array_equal(trace.tokens[stored, :num], prompt.tokens[row, kept])
            assert np.array_equal(
                trace.step_log_probs[stored, :num], prompt.step_log_probs[row, kept]
            )
            assert (trace.depths[stored, num:] == 0).all()


def test_on_path_equals_a_walk_of_every_path(shard):
    trace = read_dense_trace(shard)
    for row in range(trace.num_positions):
        left = trace.last_row[row] - row + 1
        for node in np.flatnonzero(trace.depths[row]):
            path = []
            walker = node
            while walker >= 0:
                path.insert(0, trace.tokens[row, walker])
                walker = trace.parents[row, walker]
            text = trace.next_token[row : row + len(path)]
            expected = len(path) <= left and np.array_equal(path, text)
            assert trace.on_path[row, node] == expected


def test_nothing_is_credited_beyond_the_end_of_the_text(tmp_path):
    prompt = make_prompt(np.random.default_rng(0), num_positions=3, num_steps=3, topk=1)
    same = replace(
        prompt, tokens=np.full_like(prompt.tokens, 7), next_token=np.full_like(prompt.next_token, 7)
    )
    path = tmp_path / "t.parquet"
    write_dense_shard(path, make_header(topk=1, beams=(1,)), [same])
    assert read_dense_trace(path).on_path.tolist() == [
        [True] * 3,
        [True] * 2 + [False],
        [True] + [False] * 2,
    ]


def test_siblings_that_share_the_texts_token_are_refused(tmp_path):
    prompt = make_prompt(np.random.default_rng(0), num_positions=3, num_steps=1)
    twins = replace(prompt, tokens=np.repeat(prompt.next_token[:, None], 2, axis=1))
    with pytest.raises(TraceError, match="row 0: siblings must not share a token"):
        write_dense_shard(tmp_path / "t.parquet", make_header(), [twins])


def test_first_child_is_the_inverse_of_parents(shard):
    trace = read_dense_trace(shard)
    for row in range(trace.num_positions):
        for node in range(trace.tokens.shape[1]):
            children = np.flatnonzero((trace.parents[row] == node) & (trace.depths[row] > 0))
            assert trace.first_child[row, node] == (children[0] if len(children) else -1)


def test_padding_inside_a_recorded_row_is_dropped_and_parents_follow(tmp_path):
    rng = np.random.default_rng(3)
    prompt = make_prompt(rng, num_positions=3)
    width = prompt.tokens.shape[1]
    gap = 2
    moved = {
        name: np.insert(getattr(prompt, name), [gap] * 3, 0, axis=1)
        for name in ("tokens", "depths", "step_log_probs")
    }
    parents = np.where(prompt.parents >= gap, prompt.parents + 3, prompt.parents)
    parents = np.insert(parents, [gap] * 3, -1, axis=1).astype(np.int16)
    write_dense_shard(tmp_path / "a.parquet", make_header(), [prompt])
    write_dense_shard(
        tmp_path / "b.parquet", make_header(), [replace(prompt, parents=parents, **moved)]
    )
    one, two = (read_dense_trace(tmp_path / f"{name}.parquet") for name in "ab")
    assert two.tokens.shape[1] == width
    assert np.array_equal(one.parents, two.parents)
    assert np.array_equal(one.tokens, two.tokens)


def test_folder_reads_all_shards_in_name_order_and_merges_sources(tmp_path):
    rng = np.random.default_rng(1)
    other = make_header().prompts.model_copy(
        update={"files": (SourceFile(name="q.jsonl", sha256="d" * 64),)}
    )
    write_dense_shard(
        tmp_path / "2.parquet",
        make_header(prompts=other),
        [make_prompt(rng, prompt_id="z", workload="math", num_positions=3, holes=True)],
    )
    write_dense_shard(tmp_path / "1.parquet", make_header(), [make_prompt(rng, prompt_id="y")])
    trace = read_dense_trace(tmp_path)
    assert trace.prompt_ids == ["y", "z"]
    assert {f.name for f in trace.header.prompts.files} == {"p.jsonl", "q.jsonl"}
    assert read_dense_trace(tmp_path, workload="math").prompt_ids == ["z"]


def test_select_keeps_whole_prompts_and_renumbers(shard):
    trace = read_dense_trace(shard)
    part = trace.select(prompts=[1])
    assert part.prompt_ids == ["b"]
    assert part.num_positions == 4
    assert part.prompt_index.tolist() == [0] * 4
    assert np.array_equal(part.tokens, trace.tokens[9:])
    assert np.array_equal(part.last_row, [3] * 4)
    with pytest.raises(TraceError, match="no prompt of workload='qa'"):
        trace.select(workload="qa")
    with pytest.raises(TraceError, match=r"must be in \[0, 2\)"):
        trace.select(prompts=[2])


def test_target_log_probs_are_kept(tmp_path):
    prompt = make_prompt(np.random.default_rng(0))
    scores = np.full(prompt.tokens.shape, -0.5, np.float32)
    scores[0, 0] = -np.inf
    path = tmp_path / "t.parquet"
    write_dense_shard(path, make_header(), [replace(prompt, target_log_probs=scores)])
    found = read_dense_trace(path).target_log_probs
    assert np.array_equal(found, scores)


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    prompt = make_prompt(np.random.default_rng(0))
    prompt.tokens[0, 0] = VOCAB
    with pytest.raises(TraceError, match=r"row 0, node 0: tokens must be in \[0, 97\), got 97"):
        write_dense_shard(tmp_path / "t.parquet", make_header(), [prompt])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match="at least one prompt"):
        write_dense_shard(tmp_path / "t.parquet", make_header(), [])


def test_an_interrupted_write_keeps_the_older_file(shard, monkeypatch):
    before = shard.read_bytes()

    def interrupt(_table, where, **_):
        where.write_bytes(b"half")
        raise KeyboardInterrupt("stop")

    monkeypatch.setattr(pq, "write_table", interrupt)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        write_dense_shard(shard, make_header(), [make_prompt(np.random.default_rng(0))])
    assert shard.read_bytes() == before
    assert [p.name for p in shard.parent.iterdir()] == [shard.name]


def test_unwritable_folder_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot write"):
        write_dense_shard(
            tmp_path / "file" / "t.parquet", make_header(), [make_prompt(np.random.default_rng(0))]
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version must be 1, got schema_version=2"),
        ({"kind": "ordinary"}, "kind must be 'dense', got kind='ordinary'"),
        ({"censored": True}, "censored must be false"),
        ({"forced_continuation": True}, "forced_continuation must be false"),
        ({"prompts": {"kind": "random_tokens", "files": []}}, "prompts.kind must be 'text'"),
        ({"beams": [2, 1]}, "beams must be ascending"),
        ({"beams": [4]}, "beams must not exceed topk=2"),
        ({"vocab_size": 0}, "vocab_size: Input should be greater than or equal to 1, got 0"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"created": "2026-01-01T00:00:00"}, "created: Input should have timezone info"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unfit_header_is_refused_by_file_and_field(shard, changes, message):
    rewrite_header(shard, **changes)
    with pytest.raises(TraceError, match=message) as caught:
        read_dense_trace(shard)
    assert shard.name in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "bfloat16"}, "dtype: 'float32' and 'bfloat16'"),
        ({"beams": (2,)}, "beams: "),
        ({"sampling": SamplingParams(temperature=1.0)}, "sampling: "),
        (
            {"draft": make_header().draft.model_copy(update={"sha256": "e" * 64})},
            "draft: ",
        ),
    ],
    ids=str,
)
def test_shards_of_different_recordings_are_not_merged(tmp_path, changes, field):
    rng = np.random.default_rng(0)
    write_dense_shard(tmp_path / "1.parquet", make_header(), [make_prompt(rng, prompt_id="a")])
    write_dense_shard(
        tmp_path / "2.parquet", make_header(**changes), [make_prompt(rng, prompt_id="b")]
    )
    with pytest.raises(TraceError, match=f"recorded differently: {field}"):
        read_dense_trace(tmp_path)


def test_a_prompt_in_two_shards_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    for name in "12":
        write_dense_shard(tmp_path / f"{name}.parquet", make_header(), [make_prompt(rng)])
    with pytest.raises(TraceError, match="prompt_id 'p0' occurs in more than one"):
        read_dense_trace(tmp_path)


def set_node(row, node, value):
    def edit(values):
        values[row][node] = value

    return edit


def set_row(row, value):
    def edit(values):
        values[row] = value

    return edit


@pytest.mark.parametrize(
    ("column", "edit", "message"),
    [
        ("tokens", set_node(3, 1, VOCAB), r"row 3, node 1: tokens must be in \[0, 97\), got 97"),
        ("tokens", set_node(3, 1, -1), r"row 3, node 1: tokens must be"),
        ("next_token", set_row(2, 500), r"row 2: next_token must be in"),
        ("parents", set_node(2, 4, 4), "row 2, node 4: a parent must be a node of an earlier"),
        ("parents", set_node(2, 0, 0), "row 2, node 0: a parent must be"),
        ("parents", set_node(2, 2, 1), "row 2, node 3: siblings must share one parent"),
        ("depths", set_node(1, 2, 3), "row 1, node 2: depth must be the parent's depth"),
        ("depths", set_node(1, 2, 9), r"row 1, node 2: depths must be in \[1, 3\], got 9"),
        ("ranks", set_node(5, 1, 0), "row 5, node 1: ranks must run from 0"),
        ("step_log_probs", set_node(4, 0, float("nan")), "row 4, node 0: step_log_probs must be"),
        ("step_log_probs", set_node(4, 0, 0.5), "row 4, node 0: step_log_probs must be"),
        ("step_log_probs", set_node(4, 0, -99.0), "row 4, node 1: siblings must be ordered"),
        ("position", set_row(4, 7), "row 4: positions must rise by 1"),
        ("position", set_row(4, 0), "row 4: a prompt must begin at position 0"),
        ("position", set_row(0, 1), "the first row must be position 0"),
        ("context_len", set_row(4, 77), "row 4: context_len must rise by 1"),
        ("workload", set_row(4, "qa"), "row 4: a prompt must keep its workload"),
        ("prompt_id", set_row(4, "qa"), "row 4: a prompt must begin at position 0"),
    ],
)
def test_damaged_row_is_refused_by_file_and_row(shard, column, edit, message):
    rewrite(shard, **{column: edit})
    with pytest.raises(TraceError, match=message) as caught:
        read_dense_trace(shard)
    assert str(shard) in str(caught.value)


def test_wrong_path_marks_are_refused(shard):
    rewrite(shard, on_path=lambda values: values[1].__setitem__(0, not values[1][0]))
    with pytest.raises(TraceError, match="row 1: on_path must mark"):
        read_dense_trace(shard)


def test_a_twice_expanded_node_is_refused(shard):
    def edit(values):
        values[0][4:6] = [0, 0]

    rewrite(shard, parents=edit)
    with pytest.raises(TraceError, match="row 0: a node must not be expanded twice"):
        read_dense_trace(shard)


def test_lists_of_different_length_are_refused(shard):
    rewrite(shard, ranks=lambda values: values[2].pop())
    with pytest.raises(TraceError, match="row 2: ranks and tokens differ in length"):
        read_dense_trace(shard)


def test_missing_column_and_wrong_type_are_refused(shard):
    table = pq.read_table(shard)
    pq.write_table(table.drop_columns(["ranks"]), shard)
    with pytest.raises(TraceError, match="columns missing or unknown: ranks"):
        read_dense_trace(shard)
    index = table.column_names.index("next_token")
    wide = table.column("next_token").cast(pa.int64())
    pq.write_table(table.set_column(index, "next_token", wide), shard)
    with pytest.raises(TraceError, match="column next_token must be int32, got int64"):
        read_dense_trace(shard)


def test_flipped_bits_never_change_what_is_read(shard):
    content = shard.read_bytes()
    whole = read_dense_trace(shard)
    refusals = []
    positions = range(4, content.index(HEADER_KEY), 97)
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1
        shard.write_bytes(damaged)
        try:
            trace = read_dense_trace(shard)
        except TraceError as error:
            refusals.append(str(error))
        else:  # in a page's statistics, which no reader of ours looks at
            assert trace.prompt_ids == whole.prompt_ids
            for name in ("tokens", "parents", "step_log_probs", "next_token", "context_len"):
                np.testing.assert_array_equal(getattr(trace, name), getattr(whole, name))
    assert len(refusals) > len(positions) // 2
    assert all(text.startswith(str(shard)) and "\n" not in text for text in refusals)


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_truncated_file_is_refused(shard, keep):
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(TraceError, match=r"shard.parquet is truncated"):
        read_dense_trace(shard)


def test_corrupt_pages_are_refused(shard):
    data = bytearray(shard.read_bytes())
    data[4:400] = bytes(396)
    shard.write_bytes(bytes(data))
    with pytest.raises(TraceError, match=r"shard.parquet"):
        read_dense_trace(shard)


def test_other_parquet_files_and_missing_paths_are_refused(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(TraceError, match=r"x.parquet is not a trace"):
        read_header(tmp_path / "x.parquet")
    with pytest.raises(TraceError, match="does not exist"):
        read_dense_trace(tmp_path / "none.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="holds no trace"):
        read_dense_trace(tmp_path / "empty")
    with pytest.raises(TraceError, match="no trace was given"):
        read_dense_trace([])

"""A recording session: what is written, in which order, and what an end before the end leaves."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference import recorder  # noqa: E402
from sgl_eagle.reference.prompts import load_prompts  # noqa: E402
from sgl_eagle.reference.record_config import RecordConfig  # noqa: E402
from sgl_eagle.reference.recorder import record_prompts  # noqa: E402
from sgl_eagle.reference.sampling_config import Sampling  # noqa: E402
from sgl_eagle_harness.errors import OutputError, TreeLimitsError  # noqa: E402
from sgl_eagle_harness.trace_schema import PromptSource  # noqa: E402
from sgl_eagle_harness.trace_store import read_dense_trace, read_header  # noqa: E402

SOURCE = PromptSource(kind="text", files=())
SMALL = {"num_steps": 2, "beams": (1, 2), "max_new_tokens": 8}


@pytest.fixture
def record(loaded_pair, prompt_file, tmp_path):
    def run(**changes):
        prompts = load_prompts([prompt_file])
        config = RecordConfig(**(SMALL | changes))
        tokens = []
        summary = record_prompts(
            loaded_pair, prompts, tmp_path / "out", config, source=SOURCE, on_tokens=tokens.append
        )
        return summary, sum(tokens)

    return run


def test_every_group_of_a_workload_is_one_shard(record, tmp_path):
    summary, num_tokens = record(rows=4)
    assert [path.name for path in summary.shards] == [
        "chat-00000.parquet",
        "chat-00001.parquet",
        "code-00002.parquet",
        "code-00003.parquet",
    ]
    trace = read_dense_trace(tmp_path / "out")
    assert (summary.num_prompts, trace.num_prompts) == (12, 12)
    assert summary.num_positions == trace.num_positions
    # Every token is decoded once and every position drafted once.
    assert num_tokens == 2 * trace.num_positions


def test_rows_decoded_together_do_not_change_the_trace(record, tmp_path):
    record(rows=6)
    together = read_dense_trace(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    record(rows=1)
    alone = read_dense_trace(tmp_path / "out")
    assert alone.prompt_ids == together.prompt_ids
    assert alone.next_token.tolist() == together.next_token.tolist()
    assert alone.tokens.tolist() == together.tokens.tolist()


def test_sampled_recordings_carry_seed_and_target_probabilities(record, tmp_path):
    record(sampling=Sampling(temperature=0.8, top_p=0.9, seed=5))
    header = read_header(next((tmp_path / "out").iterdir()))
    assert header.sampling.model_dump() == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 0,
        "seed": 5,
    }
    assert read_dense_trace(tmp_path / "out").target_log_probs is not None


def test_folder_with_shards_is_left_alone(record):
    record()
    with pytest.raises(OutputError, match="out holds a recording already"):
        record()


def test_an_error_keeps_what_was_finished(record, tmp_path, monkeypatch, caplog):
    def fail_on_third(target, draft, text, **rest):
        if text.prompt_id == "chat-2":
            raise RuntimeError("a defect")
        return record_text(target, draft, text, **rest)

    record_text = recorder.record_text
    monkeypatch.setattr(recorder, "record_text", fail_on_third)
    with pytest.raises(RuntimeError, match="a defect"):
        record()
    assert read_dense_trace(tmp_path / "out").prompt_ids == ["chat-0", "chat-1"]
    assert "holds the 2 prompts that were done" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 33}, r"num_steps must be in \[1, 32\], got num_steps=33"),
        ({"beams": ()}, r"beams must be distinct, ascending and in \[1, 32\], got beams=\[\]"),
        ({"beams": (2, 2)}, r"got beams=\[2, 2\]"),
        ({"beams": (0, 1)}, r"got beams=\[0, 1\]"),
    ],
    ids=str,
)
def test_impossible_recordings_are_refused(changes, message):
    with pytest.raises(TreeLimitsError, match=message):
        RecordConfig(**changes)

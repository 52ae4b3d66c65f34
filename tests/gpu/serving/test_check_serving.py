"""The serving check from start to tables, with engines that answer at once."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import check_serving
from engine_handle import EngineError

DECODE = "Decode batch, #running-req: {}, gen throughput (token/s): {}, x\n"


class PromptEngine:
    """Answers with the prompt's first token; one named sgl-eagle2 ends at its first timing."""

    process_group = 1

    def __init__(self, name, arguments, environment, _folder):
        self.name, self.arguments, self.environment = name, arguments, environment
        self.ended = False
        self._log = ""

    def wait_until_ready(self, _timeout_s):
        return 12.0

    def complete(self, prompts, *, concurrency, sampling, logprobs=False, **_):
        if self.name == "sgl-eagle2" and sampling["max_new_tokens"] == 9:
            raise EngineError("it ended")
        self._log += DECODE.format(concurrency, 100) * 2
        return {
            "seconds": 2.0,
            "outputs": [prompt[:1] * sampling["max_new_tokens"] for prompt in prompts],
            "verify_ct": 0 if self.name == "sglang" else len(prompts),
            "top_two": [[0.5, 0.5]] * len(prompts) if logprobs else None,
        }

    def profile(self, _prompts, *, folder, **_):
        (Path(folder) / "trace.json").touch()
        return {"files": ["trace.json"]}

    def log_text(self):
        return self._log

    def kill(self):
        self.ended = True


@pytest.fixture
def instant(monkeypatch):
    monkeypatch.setattr(check_serving, "EngineHandle", PromptEngine)
    monkeypatch.setattr(check_serving, "collect_provenance", lambda _: {"gpu": None})
    monkeypatch.setattr(
        check_serving,
        "load_prompts",
        lambda _target, _files, count, longest: [[n, 1][:longest] for n in range(count)],
    )


def run(folder, *more):
    words = f"--target T --draft D --out {folder} --device cpu --timed-tokens 9 --repeats 2"
    small = "--num-equal 6 --num-samples 0 --batches 1 4 --concurrencies 1 4"
    check_serving.main([*words.split(), *small.split(), *more])
    return json.loads((folder / "results.json").read_text())


@pytest.mark.usefixtures("instant")
def test_an_engine_that_fails_leaves_the_others_their_results(tmp_path, capsys):
    engines = ["--engines", "sglang", "sgl-eagle2", "eagle3-adaptive", "--profile", "sglang"]
    results = run(tmp_path, *engines)
    assert results["failures"] == {"sgl-eagle2": "timed at 1: it ended"}
    timed = [(row["engine"], row["concurrency"], row["num_requests"]) for row in results["timing"]]
    for name in ("sglang", "eagle3-adaptive"):
        assert sorted(timed).count((name, 1, 4)) == sorted(timed).count((name, 4, 4)) == 2
    assert {row["full_tok_per_s"] for row in results["timing"]} == {100.0}
    assert [row["num_equal"] for row in results["equality"]] == [6] * 6
    assert (tmp_path / "traces" / "sglang" / "trace.json").exists()
    assert "FAILED sgl-eagle2: timed at 1: it ended" in capsys.readouterr().out


@pytest.mark.usefixtures("instant")
def test_an_engine_whose_output_differs_is_not_timed(tmp_path, monkeypatch, capsys):
    class OtherText(PromptEngine):
        def complete(self, prompts, *, sampling, logprobs=False, **more):
            answer = super().complete(prompts, sampling=sampling, logprobs=logprobs, **more)
            if self.name == "sgl-eagle2":
                answer["outputs"] = [[99] * len(output) for output in answer["outputs"]]
            if logprobs:
                answer["top_two"] = [[[-0.5, 7], [-3.0, 8]]] * len(prompts)
            return answer

    monkeypatch.setattr(check_serving, "EngineHandle", OtherText)
    words = ["--target", "T", "--draft", "D", "--out", str(tmp_path), "--device", "cpu"]
    words += ["--num-equal", "6", "--batches", "1", "4", "--concurrencies", "4"]
    words += ["--num-samples", "0", "--engines", "sglang", "sgl-eagle2", "sgl-chain"]
    assert check_serving.main(words) == check_serving.OUTPUT_DIFFERS
    results = json.loads((tmp_path / "results.json").read_text())
    batches = [(row["engine"], row["batch"]) for row in results["equality"]]
    assert ("sgl-eagle2", 4) in batches
    assert ("sgl-eagle2", 1) not in batches
    assert ("sgl-chain", 1) in batches
    assert {row["engine"] for row in results["timing"]} == {"sglang", "sgl-chain"}
    assert results["failures"] == {"sgl-eagle2": "greedy at batch 4: its output differs"}
    assert "OUTPUT DIFFERS, nothing more is asked: sgl-eagle2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_prompts", "others", "differs"),
    [(16, 2, False), (16, 3, True), (64, 3, False), (64, 4, True)],
)
def test_a_few_large_gaps_are_rounding(num_prompts, others, differs):
    def row(engine, count):
        gaps = [0.0, *[0.375] * count]
        counts = {"num_prompts": num_prompts, "gaps": gaps, "num_near_ties": 1}
        return {"engine": engine, "batch": 8} | counts

    assert bool(check_serving.differing({"equality": [row("sgl-chain", others)]})) == differs
    with_plain = [row("sglang", 2), row("eagle3-5-4-8", 9), row("sgl-chain", others)]
    assert check_serving.differing({"equality": with_plain}) == []


@pytest.mark.usefixtures("instant")
def test_what_the_deadline_cuts_off_is_no_failure(tmp_path, capsys):
    engines = ["--engines", "sglang", "sgl-eagle2", "--deadline", "0.1"]
    results = run(tmp_path, *engines)
    assert results["failures"] == {}
    assert results["unfinished"] == []  # nothing is timed that might not end in time
    assert results["timing"] == []
    (tmp_path / "o").mkdir()
    check = check_serving.ServingCheck(
        check_serving.parse_arguments(
            ["--target", "T", "--draft", "D", "--out", str(tmp_path / "o"), "--deadline", "0.1"]
        )
    )
    check.engines = {"sgl-eagle2": PromptEngine("sgl-eagle2", {}, {}, tmp_path)}
    assert (
        check.ask_all(
            "asked",
            lambda engine: engine.complete([[1]], concurrency=1, sampling={"max_new_tokens": 9}),
        )
        == {}
    )
    assert check.results["failures"] == {}
    assert check.results["unfinished"] == ["sgl-eagle2: asked"]
    assert check.alive() == []
    capsys.readouterr()


@pytest.mark.usefixtures("instant")
def test_engines_of_two_gpus_are_all_timed(tmp_path):
    results = run(tmp_path, "--gpus", "2", "--engines", "sglang", "eagle3-5-4-8", "sgl-chain")
    gpus = {row["engine"]: row["gpu"] for row in results["timing"]}
    assert gpus == {"sglang": 0, "eagle3-5-4-8": 0, "sgl-chain": 1}
    assert len(results["timing"]) == 3 * 2 * 2


def test_impossible_arguments_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--engines", "sgl-tuned")
    assert "sgl-tuned needs --policy" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--max-running-requests", "2")
    assert "at most --max-running-requests" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--engines", "sglang@fa4")
    assert "with @ and one of triton, fa3, flashinfer, got 'sglang@fa4'" in capsys.readouterr().err
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path)
    assert "holds the results of another run" in capsys.readouterr().err


def test_engines_get_their_own_policies_and_speculation():
    from serving_engines import engine_arguments

    words = "--target T --draft D --out O --max-running-requests 48 --mem-fraction 0.9"
    args = check_serving.parse_arguments([*words.split(), "--concurrencies", "1", "--batches", "1"])
    plain, _ = engine_arguments("sglang", args, {})
    assert "speculative_algorithm" not in plain
    assert plain["cuda_graph_bs_decode"] == [1, 2, 4, 8, 16, 32]
    adaptive, environment = engine_arguments("eagle3-adaptive", args, {})
    assert adaptive["speculative_adaptive"]
    assert environment == {"CUDA_VISIBLE_DEVICES": "0"}
    ours, environment = engine_arguments("sgl-chain", args, {"sgl-chain": Path("chain.json")})
    assert ours["speculative_algorithm"] == "SGL_EAGLE"
    assert environment["SGLEAGLE_POLICY"] == "chain.json"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert engine_arguments("sgl-chain", args, {}, 1)[1]["CUDA_VISIBLE_DEVICES"] == "1"
    args.tp_size = 2
    wide, environment = engine_arguments("sgl-chain", args, {})
    assert (wide["tp_size"], wide["disable_custom_all_reduce"]) == (2, True)
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert wide["nccl_port"] != plain["nccl_port"]
    args.tp_size = 1
    args.engines.append("sgl-eagle2-record@fa3")
    policies = {"sgl-eagle2": Path("eagle2.json")}
    recording, environment = engine_arguments("sgl-eagle2-record@fa3", args, policies)
    assert recording["attention_backend"] == "fa3"
    assert plain["attention_backend"] == "triton"
    assert environment["SGLEAGLE_POLICY"] == "eagle2.json"
    assert environment["SGLEAGLE_RECORD"].endswith("O/traces-recorded")
    args.engines.append("sgl-eagle2-two-stage")
    _, environment = engine_arguments("sgl-eagle2-two-stage", args, policies)
    assert environment["SGLEAGLE_POLICY"] == "eagle2.json"
    assert environment["SGLEAGLE_LM_HEAD"] == "two-stage"
    _, without = engine_arguments("sgl-default", args, {"sgl-chain": Path("chain.json")})
    assert "SGLEAGLE_POLICY" not in without
    args.engines.append("sgl-default-6-4-32")
    wide, elsewhere = engine_arguments("sgl-default-6-4-32", args, {})
    assert wide["speculative_algorithm"] == "SGL_EAGLE"
    assert wide["speculative_num_draft_tokens"] == 32
    assert elsewhere["SGLEAGLE_COST_CACHE"] != without["SGLEAGLE_COST_CACHE"]

"""`sgl-eagle head`: factors beside a draft, and every other command with and without them."""

import json
import shutil

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

import tiny_models  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from sgl_eagle.cli import main  # noqa: E402
from sgl_eagle.reference.head_checkpoint import FACTORS_FILE  # noqa: E402
from sgl_eagle.reference.pair import load_pair  # noqa: E402
from sgl_eagle.reference.profile import ProfileConfig, cost_setup, measure_costs  # noqa: E402
from sgl_eagle_harness.errors import CostTableError  # noqa: E402
from sgl_eagle_harness.output_folder import sole_writer  # noqa: E402

NAME = "two-stage LM head of rank 48, local 8 x 2, shuffled"


@pytest.fixture(scope="module")
def models(target_folder):
    return ["--target", str(target_folder), "--dtype", "float32", "--quiet", "--format", "json"]


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory, good_draft, models, prompt_file):
    """The good draft with factors that it is told to use."""
    folder = shutil.copytree(good_draft, tmp_path_factory.mktemp("head") / "fast")
    make = ["head", "factorize", "--draft", str(folder), "--rank", "48", "--limit", "2"]
    text = ["--prompts", str(prompt_file), "--max-new-tokens", "12"]
    assert main([*make, *text, "--activate", "local:8:2", *models]) == 0
    return folder


@pytest.fixture(scope="module")
def pairs(target_folder, draft_folder):
    """The same draft with either head."""
    return [
        load_pair(str(target_folder), draft_folder, dtype="float32", lm_head=lm_head)
        for lm_head in (None, "full")
    ]


def test_factors_lie_in_a_folder_of_their_own(draft_folder):
    # Engines load every *.safetensors file beside config.json as weights of the draft.
    assert [file.name for file in draft_folder.glob("*.safetensors")] == ["model.safetensors"]
    assert (draft_folder / FACTORS_FILE).is_file()


def test_a_draft_with_factors_uses_them_unless_told_otherwise(pairs):
    two_stage, full = pairs
    assert two_stage.draft.two_stage_head.num_candidates == 24
    assert two_stage.draft_identity.name == f"fast, {NAME}"
    assert two_stage.draft_identity.dims["lm_head_rank"] == 48
    assert full.draft.two_stage_head is None
    assert full.draft_identity.name == "fast"
    assert "lm_head_rank" not in full.draft_identity.dims
    assert two_stage.draft_identity.sha256 != full.draft_identity.sha256


def test_costs_of_one_head_are_refused_for_the_other(pairs):
    grid = ProfileConfig(
        num_tokens=(1, 2), widths=(1,), num_pending=(1,), context_len=(1,), num_repeats=1
    )
    two_stage, full = pairs
    costs = measure_costs(two_stage, grid, on_cell=lambda: None)
    costs.require_setup(cost_setup(two_stage))
    with pytest.raises(CostTableError, match=rf"draft: measured on .*{NAME}.*running fast \("):
        costs.require_setup(cost_setup(full))


def test_traces_say_which_head_drafted(tmp_path, draft_folder, models, prompt_file):
    from sgl_eagle_harness.trace_store import list_shards, read_dense_trace

    names = {}
    for flags in ([], ["--lm-head", "full"]):
        out = tmp_path / "-".join(["traces", *flags])
        record = ["record", "--draft", str(draft_folder), "--prompts", str(prompt_file)]
        sizes = ["--limit", "1", "--max-new-tokens", "6", "--num-steps", "2", "--beams", "2"]
        assert main([*record, "--out", str(out), *sizes, *flags, *models]) == 0
        names[tuple(flags)] = read_dense_trace(list_shards(out)).header.draft.name
    assert names == {(): f"fast, {NAME}", ("--lm-head", "full"): "fast"}


@pytest.mark.slow
def test_text_and_replay_are_exact_with_a_two_stage_head(
    tmp_path, draft_folder, models, prompt_file, capsys
):
    draft, cost = ["--draft", str(draft_folder)], str(tmp_path / "cost.json")
    assert main(["profile", "--out", cost, "--repeats", "1", *draft, *models]) == 0
    capsys.readouterr()
    command = ["validate", "--cost", cost, "--prompts", str(prompt_file), "--limit", "2"]
    assert main([*command, "--max-new-tokens", "24", *draft, *models]) == 0
    for policy in json.loads(capsys.readouterr().out)["policies"]:
        assert policy["texts"]["num_equal"] == policy["texts"]["num_prompts"]
        assert policy["steps"]["num_equal"] == policy["steps"]["num_steps"]


def test_check_knows_the_key_and_names_the_head(draft_folder, models, prompt_file, capsys):
    command = ["check", str(draft_folder), "--prompts", str(prompt_file), "--limit", "2"]
    assert main([*command, *models]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert {row["outcome"] for row in rows.values()} == {"ok"}
    assert "two_stage_head" in rows["config keys"]["found"]
    assert NAME in rows["weights"]["found"]
    assert main([*command, "--lm-head", "full", *models]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert "proposes with the full LM head" in rows["weights"]["found"]


def test_a_two_stage_head_that_is_missing_is_named(good_draft, models, prompt_file, capsys):
    command = ["check", str(good_draft), "--prompts", str(prompt_file), "--lm-head", "two-stage"]
    assert main([*command, *models]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert "--lm-head two-stage needs two_stage_head in" in rows["weights"]["found"]


def test_evaluate_compares_heads_with_the_full_one(draft_folder, models, prompt_file, capsys):
    capsys.readouterr()
    judge = ["head", "evaluate", "--draft", str(draft_folder), "--prompts", str(prompt_file)]
    sizes = ["--limit", "1", "--max-new-tokens", "12", "--num-steps", "3", "--topk", "4"]
    grid = ["--ranks", "24,48", "--shortlists", "global:24,local:8:2"]
    assert main([*judge, *sizes, *grid, *models]) == 0
    result = json.loads(capsys.readouterr().out)
    heads = [(score["rank"], score["route"]) for score in result["scores"]]
    assert heads == [
        (None, "full head"),
        *[
            (rank, shortlist)
            for rank in (24, 48)
            for shortlist in ("low rank alone", "global 24", "local 8 x 2, shuffled")
        ],
    ]
    full, *others = result["scores"]
    assert full["accept_length"] > 2
    assert all(score["accept_length"] <= full["accept_length"] + 0.2 for score in others)
    assert result["num_rows"] % 3 == 0
    assert [info["method"] for info in result["factors"]] == ["states-svd"]


def test_all_routes_make_a_page_and_its_numbers(
    tmp_path, draft_folder, models, prompt_file, capsys
):
    page = tmp_path / "heads.html"
    judge = ["head", "evaluate", "--draft", str(draft_folder), "--prompts", str(prompt_file)]
    sizes = ["--limit", "1", "--max-new-tokens", "12", "--num-steps", "3", "--topk", "4"]
    grid = ["--shortlists", "local:8:2", "--routes", "all", "--report", str(page)]
    assert main([*judge, *sizes, *grid, *models]) == 0
    shown = json.loads(capsys.readouterr().out)
    stored = json.loads(page.with_suffix(".json").read_text())
    assert stored["scores"] == shown["scores"]
    assert stored["provenance"]["command"]
    # 96 tokens are one cluster of 128, and fewer than any trimmed vocabulary.
    assert [score["route"] for score in stored["scores"]] == [
        "full head",
        "low rank alone",
        "local 8 x 2, shuffled",
        "int8 full head, global 256",
        "int8 factor, global 256",
    ]
    text = page.read_text()
    assert "<svg" in text
    assert "local 8 x 2, shuffled" in text


def test_a_page_must_be_html(draft_folder, models, capsys):
    assert main(["head", "evaluate", "--draft", str(draft_folder), "--report", "x.json", *models])
    assert "--report must name a file ending in .html, got x.json" in capsys.readouterr().err


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Greedy continuations of random words, as `sgl-eagle train --text-only` stores them."""
    torch.manual_seed(5)
    model, tokens = tiny_models.make_target(), torch.randint(4, len(tiny_models.WORDS), (60, 6))
    with torch.no_grad():
        for _ in range(20):
            best = model(tokens, use_cache=False).logits[:, -1].argmax(-1)
            tokens = torch.cat([tokens, best[:, None]], dim=1)
    folder = tmp_path_factory.mktemp("text")
    rows = {
        "tokens": tokens.int(),
        "answer_start": torch.full((60,), 6, dtype=torch.int32),
        "answer_end": torch.full((60,), 26, dtype=torch.int32),
        "temperature": torch.zeros(60),
    }
    save_file(rows, folder / "text-00000.safetensors")
    return folder


def test_trained_factors_are_used_and_go_on(
    tmp_path, good_draft, text_folder, models, target_folder, capsys
):
    folder = shutil.copytree(good_draft, tmp_path / "trained")
    command = ["head", "train", "--draft", str(folder), "--text", str(text_folder), "--rank", "12"]
    sizes = ["--batch-tokens", "512", "--num-steps", "3", "--eval-every", "2", "--steps", "6"]
    assert main([*command, *sizes, "--activate", "global:24", *models]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [point["update"] for point in result["curve"]] == [0, 2, 4, 6]
    assert sum(result["curve"][-1]["step_kl"]) < sum(result["curve"][0]["step_kl"])
    assert result["info"]["method"] == "trained"
    pair = load_pair(str(target_folder), folder, dtype="float32")
    assert pair.draft_identity.name == "trained, two-stage LM head of rank 12, global 24"
    assert main([*command, *sizes, "--resume", "--lr", "0.01", *models]) == 1
    assert "another configuration: learning_rate 0.001 now 0.01" in capsys.readouterr().err


def test_one_training_at_a_time_fills_a_folder(tmp_path, good_draft, text_folder, models, capsys):
    folder = shutil.copytree(good_draft, tmp_path / "trained")
    command = ["head", "train", "--draft", str(folder), "--text", str(text_folder), *models]
    with sole_writer(folder / "two_stage_head"):
        assert main(command) == 1
    message = f"{folder / 'two_stage_head'} is being filled by another command"
    assert message in capsys.readouterr().err


def test_a_part_of_a_text_is_refused(tmp_path, good_draft, text_folder, models, capsys):
    part = shutil.copytree(text_folder, tmp_path / "text")
    (part / "text-7.unfinished").touch()
    command = ["head", "train", "--draft", str(good_draft), "--text", str(part), *models]
    assert main(command) == 1
    assert f"{part} holds only a part of the text of seed 7" in capsys.readouterr().err


def test_training_needs_text(good_draft, models, capsys):
    assert main(["head", "train", "--draft", str(good_draft), *models]) == 2
    assert "head train needs --text" in capsys.readouterr().err

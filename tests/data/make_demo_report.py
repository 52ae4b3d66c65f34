"""Makes a report full of made-up numbers, to test the page and to work on its looks.

`python tests/data/make_demo_report.py FOLDER` writes report.json and report.html there.
"""

import random
import sys
from datetime import UTC, datetime
from pathlib import Path

from sgl_eagle_harness.atomic_file import write_text
from sgl_eagle_tuner.report.analysis import (
    CalibrationResult,
    CorrectnessCheck,
    CostCurve,
    CostError,
    CostSection,
    Importance,
    Marginal,
    ReliabilityBin,
    ReliabilityCurve,
    SearchResult,
    Trial,
)
from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.data import (
    REPORT_FILE,
    DemoReport,
    ModelIdentity,
    Provenance,
    StageTime,
    save_report,
)
from sgl_eagle_tuner.report.render import render_report
from sgl_eagle_tuner.report.speed import (
    OverallResult,
    PolicySetting,
    SettingResult,
    StepTimeSplit,
    WorkloadResult,
)
from sgl_eagle_tuner.report.trees import DrawnTree, TreeNode

WORKLOADS = {"chat": 1.38, "code": 1.83, "math": 1.71, "summary": 1.52, "qa": 1.31}
PLAIN_TOK_PER_S = 24.6
PLAIN_STEP_US = 1e6 / PLAIN_TOK_PER_S

PLAIN = PolicySetting(name="plain", kind="plain")
USUAL = PolicySetting(name="eagle2-5-4-8", kind="eagle2", num_steps=5, topk=4, num_draft_tokens=8)
STATIC = PolicySetting(name="eagle2-4-2-6", kind="eagle2", num_steps=4, topk=2, num_draft_tokens=6)
TUNED = PolicySetting(
    name="price-6-4-24",
    kind="price",
    num_steps=6,
    topk=4,
    num_draft_tokens=24,
    verify_sizes=[1, 2, 4, 6, 8, 12, 16, 24],
    price_tok_per_us=4.1e-5,
    calibration="isotonic",
    decisions=["prune", "stop", "width", "speculate"],
)


def _around(value: float, spread: float) -> Estimate:
    return Estimate(value=value, low=value * (1 - spread), high=value * (1 + spread))


def _setting(
    role: str, policy: PolicySetting, gain: float, static_gain: float, rng: random.Random
) -> SettingResult:
    speed = PLAIN_TOK_PER_S * gain
    is_plain = role == "plain"
    verify_us = PLAIN_STEP_US * (1.0 if is_plain else 1.18)
    draft_us = 0.0 if is_plain else PLAIN_STEP_US * 0.09 * (policy.num_steps or 0) * 0.7
    extend_us = 0.0 if is_plain else PLAIN_STEP_US * 0.11
    decide_us = 620.0 if role in {"tuned", "variant"} else 0.0 if is_plain else 90.0
    step_us = verify_us + draft_us + extend_us + decide_us
    accept_length = 1.0 if is_plain else speed * step_us / 1e6
    return SettingResult(
        role=role,
        policy=policy,
        measured_tok_per_s=_around(speed, 0.035),
        predicted_tok_per_s=_around(speed * rng.uniform(0.95, 1.06), 0.03),
        gain_over_plain=Estimate(value=1.0) if is_plain else _around(gain, 0.04),
        gain_over_best_static=(
            Estimate(value=1.0) if role == "best_static" else _around(gain / static_gain, 0.025)
        ),
        time_per_token_us=_around(1e6 / speed, 0.035),
        accept_length=Estimate(value=1.0) if is_plain else _around(accept_length, 0.03),
        accept_rate=None if is_plain else (accept_length - 1) / 6,
        mean_num_draft_tokens=1.0 if is_plain else 7.3,
        mean_num_steps=0.0 if is_plain else 3.6,
        speculated_share=0.0 if is_plain else 0.97,
        step_time=StepTimeSplit(
            draft_extend_us=extend_us,
            draft_us=draft_us,
            decide_us=decide_us,
            verify_us=verify_us,
            other_us=700.0,
        ),
        num_prompts=12,
        num_tokens=1536,
    )


def _workload(name: str, tuned_gain: float, rng: random.Random) -> WorkloadResult:
    is_clear = name != "qa"
    static_gain = tuned_gain / (1.07 if is_clear else 0.995)
    settings = [
        _setting("plain", PLAIN, 1.0, static_gain, rng),
        _setting("usual", USUAL, tuned_gain * 0.86, static_gain, rng),
        _setting("best_static", STATIC, static_gain, static_gain, rng),
        _setting("tuned", TUNED, tuned_gain, static_gain, rng),
    ]
    for decision, loss in (("stop", 0.985), ("prune", 0.95), ("speculate", 1.0)):
        policy = TUNED.model_copy(update={"name": f"tuned without {decision}"})
        settings.append(_setting("variant", policy, tuned_gain * loss, static_gain, rng))
    return WorkloadResult(
        workload=name,
        recommended="tuned" if is_clear else "best_static",
        reason=(
            "Its gain over the best static setting clears the interval."
            if is_clear
            else "The tuned policy's gain over it does not clear the interval, so it is kept."
        ),
        settings=settings,
    )


def _costs() -> CostSection:
    sizes = {
        "target": ([1, 2, 4, 8, 16, 32, 64], 39_000.0, 900.0),
        "draft": ([1, 2, 4, 8], 4_600.0, 130.0),
        "draft_extend": ([1, 2, 4, 8, 16], 4_900.0, 110.0),
    }
    curves = [
        CostCurve(
            part=part,
            batch_size=1,
            context_len=context_len,
            num_tokens=tokens,
            median_us=[base * (1 + context_len / 9000) + slope * n for n in tokens],
        )
        for part, (tokens, base, slope) in sizes.items()
        for context_len in (64, 256, 512, 1024)
    ]
    errors = [
        CostError(part="target", num_cells=7, median_rel_error=0.012, max_rel_error=0.041),
        CostError(part="draft", num_cells=4, median_rel_error=0.017, max_rel_error=0.052),
        CostError(part="draft_extend", num_cells=5, median_rel_error=0.014, max_rel_error=0.038),
    ]
    return CostSection(
        curves=curves, errors=errors, decide_us=95.0, verify_select_us=140.0, digest="5b1e" * 16
    )


def _reliability(kind: str, bend: float, rng: random.Random) -> ReliabilityCurve:
    bins = []
    for index in range(10):
        confidence = (index + 0.5) / 10
        rate = min(1.0, max(0.0, confidence**bend + rng.uniform(-0.015, 0.015)))
        bins.append(
            ReliabilityBin(
                confidence=confidence,
                accept_rate=rate,
                low=max(0.0, rate - 0.03),
                high=min(1.0, rate + 0.03),
                count=1200 - 90 * index,
            )
        )
    ece = sum(abs(item.confidence - item.accept_rate) for item in bins) / len(bins)
    return ReliabilityCurve(kind=kind, bins=bins, ece=ece, brier=0.06 + ece / 4, auc=0.93)


def _search(name: str, best_us: float, rng: random.Random) -> SearchResult:
    baselines = {
        "plain": PLAIN_STEP_US,
        "usual 5/4/8": best_us * 1.2,
        "best static": best_us * 1.07,
    }
    trials = [
        Trial(number=number, time_per_token_us=time_us, baseline=baseline)
        for number, (baseline, time_us) in enumerate(baselines.items())
    ]
    for number in range(len(baselines), 200):
        time_us = best_us * (1 + rng.expovariate(9) * (0.3 + 20 / number))
        trials.append(
            Trial(number=number, time_per_token_us=None if rng.random() < 0.05 else time_us)
        )
    return SearchResult(
        workload=name,
        trials=trials,
        importances=[
            Importance(param="num_steps", share=0.41),
            Importance(param="price_multiplier", share=0.27),
            Importance(param="topk", share=0.16),
            Importance(param="calibration", share=0.09),
            Importance(param="verify_sizes", share=0.07),
        ],
        marginals=[
            Marginal(
                param="num_steps",
                values=["2", "4", "6", "8"],
                best_us=[best_us * f for f in (1.15, 1.03, 1.0, 1.01)],
                median_us=[best_us * f for f in (1.22, 1.11, 1.08, 1.1)],
            ),
            Marginal(
                param="topk",
                values=["1", "2", "4", "8"],
                best_us=[best_us * f for f in (1.04, 1.01, 1.0, 1.03)],
                median_us=[best_us * f for f in (1.12, 1.09, 1.08, 1.14)],
            ),
        ],
        uncovered_limit=0.01,
        num_positions=1487,
        seconds=24.3,
    )


WORDS = (" the", " a", " to", "\n", ",", " in", " is", ".", " of", " and", " numbers", " two")


def _tree(
    workload: str, context: str, root: str, path: list[str], num_accepted: int, bonus: str
) -> DrawnTree:
    # A beam of three expanded nodes a step, four children each; the likeliest eleven are verified.
    rng = random.Random(len(context))
    parents: list[int] = []
    tokens: list[str] = []
    confidences: list[float] = []
    mainline: list[int] = []
    frontier = [-1]
    for token in path:
        start = len(parents)
        for parent in frontier:
            is_main = parent == (mainline[-1] if mainline else -1)
            first = rng.uniform(0.55, 0.92) if is_main else rng.uniform(0.3, 0.6)
            if is_main:
                mainline.append(len(parents))
            for rank, share in enumerate((1.0, 0.25, 0.1, 0.04)):
                above = confidences[parent] if parent >= 0 else 1.0
                parents.append(parent)
                tokens.append(token if is_main and rank == 0 else rng.choice(WORDS))
                confidences.append(above * first * share)
        newest = range(start, len(parents))
        frontier = sorted(sorted(newest, key=lambda index: -confidences[index])[:3])
        if mainline[-1] not in frontier:
            break
    order = sorted(range(len(parents)), key=lambda index: -confidences[index])
    accepted = set(mainline[:num_accepted])
    verified = set(order[:11]) | accepted
    states = [
        "accepted" if index in accepted else "rejected" if index in verified else "pruned"
        for index in range(len(parents))
    ]
    return DrawnTree(
        workload=workload,
        prompt_id=f"{workload}-031",
        policy_name="price-6-4-24",
        position=41,
        context_text=context,
        root_text=root,
        bonus_text=bonus,
        num_draft_tokens=1 + len(verified),
        nodes=[
            TreeNode(
                parent=parents[index],
                token_text=tokens[index],
                path_confidence=confidences[index],
                accept_prob=confidences[index] ** 1.2,
                state=states[index],
            )
            for index in range(len(parents))
        ],
    )


def make_report() -> DemoReport:
    rng = random.Random(5)
    calibrations = [
        CalibrationResult(
            workload=name,
            before=_reliability("identity", 1.55, rng),
            after=_reliability("isotonic", 1.03, rng),
            num_prompts=60 if name == "all" else 12,
            num_nodes=48_210 if name == "all" else 9_642,
        )
        for name in ("all", *WORKLOADS)
    ]
    return DemoReport(
        title="Speculation settings for SmolLM2-135M-Instruct",
        policy_file="policy.json",
        serving_note=(
            "Measured in the reference engine. The flags are SGLang's; SGL_EAGLE needs the plugin."
        ),
        synthetic=True,
        overall=OverallResult(
            gain_over_plain=Estimate(value=1.54, low=1.48, high=1.6),
            gain_over_best_static=Estimate(value=1.05, low=1.02, high=1.08),
            gain_over_usual=Estimate(value=1.16, low=1.12, high=1.21),
            worst_prediction_error=0.058,
        ),
        workloads=[_workload(name, gain, rng) for name, gain in WORKLOADS.items()],
        costs=_costs(),
        calibrations=calibrations,
        trees=[
            _tree(
                "code",
                "Here is a function that adds two numbers:\n\ndef add(a, b):\n   ",
                " return",
                [" a", " +", " b", "\n", "\n", "print"],
                5,
                "```",
            ),
            _tree(
                "math",
                "Each box holds 12 pencils, so 3 boxes hold 3 * 12",
                " =",
                [" ", "3", "6", " pencils", ".", " If"],
                2,
                "8",
            ),
            _tree(
                "chat", "I would be glad to help you plan", " a", [" trip", " to", " the"], 0, " we"
            ),
        ],
        searches=[_search(name, PLAIN_STEP_US / gain, rng) for name, gain in WORKLOADS.items()],
        correctness=[
            CorrectnessCheck(
                name="Greedy output equals plain decoding",
                setting="all policies, bfloat16",
                unit="outputs",
                num_prompts=100,
                num_compared=300,
                num_equal=297,
                num_near_ties=3,
                bound="top-two logit gap below 0.05",
            ),
            CorrectnessCheck(
                name="Replay accepts what the engine accepts",
                setting="static, eagle2, price; float32",
                unit="steps",
                num_prompts=50,
                num_compared=7_431,
                num_equal=7_431,
            ),
        ],
        stages=[
            StageTime(name="load models", seconds=6.2),
            StageTime(name="profile this machine", seconds=71.0, note="84 grid cells"),
            StageTime(
                name="record dense traces", seconds=184.0, note="120 prompts, 7,431 positions"
            ),
            StageTime(name="calibrate", seconds=4.1),
            StageTime(name="tune", seconds=121.5, note="5 workloads, 200 trials each"),
            StageTime(name="validate on held-out prompts", seconds=203.0, note="60 prompts"),
            StageTime(name="render", seconds=3.0),
        ],
        provenance=Provenance(
            created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            command="sgl-eagle demo --out runs/demo --seed 0",
            commit="0123456789abcdef0123456789abcdef01234567",
            versions={"sgl-eagle": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
            engine="reference engine",
            device="CPU",
            cpu="a CPU that does not exist",
            num_threads=2,
            dtype="bfloat16",
            attention_backend="sdpa",
            batch_size=1,
            target=ModelIdentity(
                name="SmolLM2-135M-Instruct", digest="ab12" * 16, description="30 layers of 576"
            ),
            draft=ModelIdentity(
                name="eagle3.1", digest="cd34" * 16, description="8.1 M parameters"
            ),
            sampling="temperature 0",
            prompts={"tuning": "120, shipped", "held out": "60, shipped"},
            seeds={"record": 0, "tune": 0, "bootstrap": 0},
            details={"bootstrap": "2,000 resamples of whole prompts"},
        ),
    )


def make_bare_report() -> DemoReport:
    # Everything that may be missing is missing.
    bare = [
        SettingResult(role=role, policy=policy)
        for role, policy in (("plain", PLAIN), ("usual", USUAL), ("tuned", TUNED))
    ]
    return DemoReport(
        title="Nothing measured",
        workloads=[
            WorkloadResult(workload="chat", recommended="tuned", reason="No reason.", settings=bare)
        ],
        provenance=Provenance(
            created=datetime(2026, 1, 2, tzinfo=UTC),
            command="none",
            engine="reference engine",
            device="CPU",
            target=ModelIdentity(name="target"),
            draft=ModelIdentity(name="draft"),
        ),
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_report(make_report(), folder / REPORT_FILE)
    write_text(folder / "report.html", render_report(make_report()))

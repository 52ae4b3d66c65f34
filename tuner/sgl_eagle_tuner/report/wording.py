"""What the page says in words: names of settings, flags, the sentence of each recommendation."""

from __future__ import annotations

from sgl_eagle_tuner.report.base import Estimate
from sgl_eagle_tuner.report.data import DemoReport
from sgl_eagle_tuner.report.format import (
    NARROW_SPACE,
    NOT_MEASURED,
    format_count,
    format_interval,
    format_ratio,
)
from sgl_eagle_tuner.report.speed import (
    OverallResult,
    PolicySetting,
    SettingResult,
    SettingRole,
    WorkloadResult,
)

ROLE_NAMES: dict[SettingRole, str] = {
    "plain": "plain decoding",
    "usual": "usual EAGLE-3",
    "best_static": "best static",
    "tuned": "tuned",
    "variant": "variant",
}
"""Role -> name in tables and figures."""

STEP_PARTS = ("draft_extend", "draft", "decide", "verify", "other")
"""Fields of `StepTimeSplit` without their unit, in the order of a step."""

STEP_PART_NAMES = {
    "draft_extend": "draft-extend",
    "draft": "draft steps",
    "decide": "decisions",
    "verify": "target pass (verify)",
    "other": "other",
}
"""Part of a step -> name."""

COST_PART_NAMES = {
    "target": "Target pass",
    "draft": "Draft step",
    "draft_extend": "Draft-extend",
}
"""Part of the cost table -> name."""


def tree_size(policy: PolicySetting) -> str:
    """The tree limits in the usual short form.

    Args:
        policy: Any setting.

    Returns:
        "steps/topk/tokens", such as "5/4/8" (tokens with the root), after "≤" if the policy decides
        the size of each tree; empty for plain decoding.
    """
    sizes = (policy.num_steps, policy.topk, policy.num_draft_tokens)
    if None in sizes:
        return ""
    return ("≤" if policy.decisions else "") + "/".join(str(size) for size in sizes)


def setting_label(setting: SettingResult) -> str:
    """Short name of a setting in tables and figures.

    Args:
        setting: Any setting.

    Returns:
        Text such as "best static 4/2/6", or the policy's own name for a variant.
    """
    if setting.role == "variant":
        return setting.policy.name
    return f"{ROLE_NAMES[setting.role]} {tree_size(setting.policy)}".strip()


def launch_flags(policy: PolicySetting, report: DemoReport) -> tuple[str, ...]:
    """Flags for `sglang.launch_server` that run a policy.

    A chain or an EAGLE-2 tree is a setting of stock SGLang; any other policy needs the policy file.

    Args:
        policy: The recommended policy.
        report: Names the policy file and SGLang's algorithm for the draft.

    Returns:
        One flag with its value an entry; empty for plain decoding.
    """
    if not tree_size(policy):
        return ()
    is_stock = policy.kind == "eagle2" or (policy.kind == "static" and policy.topk == 1)
    algorithm = report.sglang_algorithm if is_stock else "SGL_EAGLE"
    flags = [
        f"--speculative-algorithm {algorithm}",
        f"--speculative-num-steps {policy.num_steps}",
        f"--speculative-eagle-topk {policy.topk}",
        f"--speculative-num-draft-tokens {policy.num_draft_tokens}",
    ]
    if not is_stock:
        flags.append(f"--sgl-eagle-policy {report.policy_file or 'POLICY_FILE'}")
    return tuple(flags)


def gain_phrase(gain: Estimate | None, baseline: str, *, name_interval: bool = True) -> str:
    """A speed ratio in words, honest about an interval that holds 1.

    Args:
        gain: Ratio of tokens/s, or None.
        baseline: What it is over, e.g. "plain decoding".
        name_interval: Whether to say that the interval is a 95 % interval; once a sentence is
            enough.

    Returns:
        Text such as "1.52× the speed of plain decoding (95 % interval 1.46 to 1.58)".
    """
    if gain is None:
        return f"gain over {baseline} {NOT_MEASURED}"
    ratio = f"{format_ratio(gain)} the speed of {baseline}"
    if gain.low is None or gain.high is None:
        return f"{ratio} (no interval)"
    name = f"95{NARROW_SPACE}% interval " if name_interval else ""
    unclear = ", no clear difference" if gain.low <= 1 <= gain.high else ""
    return f"{ratio} ({name}{format_interval(gain, 2)}{unclear})"


def recommendation_sentence(result: WorkloadResult) -> str:
    """What to run on a workload, and what it gains, in one sentence.

    Args:
        result: The workload.

    Returns:
        A full sentence.
    """
    setting = result.setting(result.recommended)
    assert setting is not None, "WorkloadResult checks that the recommended role exists"
    if setting.role == "plain":
        return "Decode plainly: no setting that was tried beats it here."
    article = {"tuned": "the tuned policy", "best_static": "the best static setting"}.get(
        setting.role, "the usual EAGLE-3 setting"
    )
    if setting.gain_over_plain is None and setting.gain_over_best_static is None:
        return f"Run {article}; its gain was {NOT_MEASURED}."
    gains = [gain_phrase(setting.gain_over_plain, "plain decoding")]
    if setting.role != "best_static" and result.setting("best_static") is not None:
        gain = setting.gain_over_best_static
        gains.append(gain_phrase(gain, "the best static setting", name_interval=False))
    source = (
        f"measured on {format_count(setting.num_prompts)} held-out prompts"
        if setting.num_prompts is not None
        else f"number of held-out prompts {NOT_MEASURED}"
    )
    return f"Run {article}: {' and '.join(gains)}, {source}."


def overall_sentence(overall: OverallResult) -> str:
    """The headline of the report.

    Args:
        overall: All workloads together.

    Returns:
        A full sentence.
    """
    if overall.gain_over_plain is None:
        return f"Over all workloads together, the gain was {NOT_MEASURED}."
    gains = [gain_phrase(overall.gain_over_plain, "plain decoding")]
    for gain, baseline in (
        (overall.gain_over_best_static, "the best static setting of each workload"),
        (overall.gain_over_usual, "the usual EAGLE-3 setting"),
    ):
        if gain is not None:
            gains.append(gain_phrase(gain, baseline, name_interval=False))
    joined = ", ".join(gains[:-1]) + (" and " if gains[:-1] else "") + gains[-1]
    return f"Over all workloads together, the recommended policies reach {joined}."

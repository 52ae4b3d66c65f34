"""Server arguments: limits that fit together, and refusals that name flag, value and remedy."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_eagle.plugin.policy_source import choose_policy, require_measured
from sgl_eagle.plugin.self_check import (
    UNSUPPORTED,
    ServerConfigError,
    refuse_unsupported,
    require_page_size_one,
    require_room_for_rounds,
)
from sgl_eagle.plugin.server_arguments import DEFAULT_LIMITS, resolve_limits, resolve_server_args
from sgl_eagle.plugin.server_flags import POLICY_VARIABLE, PluginSettings
from sgl_eagle_harness.calibration import IdentityMap
from sgl_eagle_harness.continuation import ContinuationModel
from sgl_eagle_harness.cost_table import CostGrid, CostSetup, CostTable
from sgl_eagle_harness.errors import PolicyConfigError, TreeLimitsError
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.plan import PlanSpec
from sgl_eagle_harness.policies.policy_file import PolicyFile, PolicyProvenance, save_policy_file
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_harness.policies.recording import RecordingPolicy
from sgl_eagle_harness.policies.static import StaticSpec, chain_paths
from sgl_eagle_harness.records import ModelIdentity
from sgl_eagle_harness.trace_schema import SamplingParams
from sgl_eagle_harness.types import TreeLimits

MODEL = ModelIdentity(name="tiny", sha256="0" * 64, dims={})


def make_args(**changes):
    fields = {
        "speculative_draft_model_path": "draft",
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_adaptive": False,
        "tp_size": 1,
        "pp_size": 1,
        "page_size": None,
        "disaggregation_mode": "null",
        "device": "cuda",
        "speculative_draft_attention_backend": None,
        "max_running_requests": None,
        "enable_mixed_chunk": True,
        "disable_overlap_schedule": False,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture(autouse=True)
def _no_policy_file(monkeypatch):
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)


@pytest.fixture
def serve_policy(monkeypatch, tmp_path):
    def serve(spec):
        path = tmp_path / "policy.json"
        record = PolicyFile(
            default=spec,
            provenance=PolicyProvenance(
                traces=(),
                target=MODEL,
                draft=MODEL,
                sampling=SamplingParams(temperature=0.0),
                command="by hand",
                seed=None,
                created=datetime(2026, 1, 1, tzinfo=UTC),
                commit=None,
                versions={},
            ),
        )
        save_policy_file(path, record)
        monkeypatch.setenv(POLICY_VARIABLE, str(path))

    return serve


def limits_of(args):
    return (
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )


def test_without_flags_or_policy_the_defaults_hold():
    args = make_args()
    resolve_server_args(args)
    assert limits_of(args) == (
        DEFAULT_LIMITS.num_steps,
        DEFAULT_LIMITS.topk,
        DEFAULT_LIMITS.num_draft_tokens,
    )
    assert args.enable_mixed_chunk is False
    assert args.disable_overlap_schedule is False
    assert args.max_running_requests == 48
    policy = choose_policy(DEFAULT_LIMITS, PluginSettings())
    assert policy.name == "eagle2-6-4-16"
    assert policy.verify_sizes == (1, 2, 4, 8, 16)


def test_cpu_runs_without_overlap():
    args = make_args(device="cpu", max_running_requests=7)
    resolve_server_args(args)
    assert args.disable_overlap_schedule is True
    assert args.max_running_requests == 7


@pytest.mark.parametrize(
    ("device", "named", "found"),
    [("cuda", None, "triton"), ("cuda", "fa3", "fa3"), ("cpu", None, None)],
)
def test_on_a_gpu_the_draft_has_an_attention_backend_of_its_own(device, named, found):
    args = make_args(device=device, speculative_draft_attention_backend=named)
    resolve_server_args(args)
    assert args.speculative_draft_attention_backend == found


def test_a_policy_file_sets_the_limits(serve_policy):
    serve_policy(StaticSpec(name="chain-4", paths=chain_paths(4)))
    args = make_args()
    resolve_server_args(args)
    # A chain, yet two children: SGLang would return no confidence with one.
    assert limits_of(args) == (4, 2, 5)
    assert choose_policy(DEFAULT_LIMITS, PluginSettings()).name == "chain-4"


def test_flags_may_raise_the_limits_of_a_policy_file_and_not_lower_them(serve_policy):
    serve_policy(StaticSpec(name="chain-4", paths=chain_paths(4)))
    args = make_args(speculative_num_steps=6, speculative_num_draft_tokens=7)
    resolve_server_args(args)
    assert limits_of(args) == (6, 2, 7)
    with pytest.raises(
        PolicyConfigError, match=r"--speculative-num-steps must be at least 4.*got 3"
    ):
        resolve_server_args(make_args(speculative_num_steps=3))


def test_a_policy_that_never_drafts_is_served(serve_policy):
    serve_policy(PlainSpec())
    args = make_args()
    resolve_server_args(args)
    assert choose_policy(DEFAULT_LIMITS, PluginSettings()).name == "plain"


def test_a_dense_recording_drafts_whole_trees():
    settings = PluginSettings(record=Path("traces"), record_mode="dense")
    policy = choose_policy(DEFAULT_LIMITS, settings)
    assert isinstance(policy, RecordingPolicy)
    assert (policy.num_steps, policy.beams) == (6, (4,))


def test_a_policy_file_that_cannot_be_used_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(POLICY_VARIABLE, str(tmp_path / "absent.json"))
    with pytest.raises(PolicyConfigError, match=r"cannot read .*absent\.json"):
        resolve_server_args(make_args())


@pytest.mark.parametrize(
    ("given", "wanted", "found"),
    [
        ((None, None, None), None, (6, 4, 16)),
        ((1, None, None), None, (1, 4, 5)),
        ((2, 2, None), None, (2, 2, 7)),
        ((None, 8, 60), None, (6, 8, 60)),
        ((None, None, None), (3, 1, 4), (3, 1, 4)),
    ],
)
def test_open_limits_follow_from_the_given_ones(given, wanted, found):
    limits = None
    if wanted is not None:
        limits = TreeLimits(num_steps=wanted[0], topk=wanted[1], num_draft_tokens=wanted[2])
    resolved = resolve_limits(given, limits)
    assert (resolved.num_steps, resolved.topk, resolved.num_draft_tokens) == found


def test_limits_that_no_tree_satisfies_name_the_largest_legal_value():
    with pytest.raises(TreeLimitsError, match=r"num_draft_tokens must be in \[2, 7\].*got.*=8"):
        resolve_limits((2, 2, 8), None)
    with pytest.raises(
        ServerConfigError, match=r"--speculative-eagle-topk must be at least 2, got 1"
    ):
        resolve_limits((3, 1, 4), None)


REFUSED = {
    "speculative_draft_model_path": None,
    "speculative_use_rejection_sampling": True,
    "speculative_adaptive": True,
    "speculative_accept_threshold_single": 0.9,
    "speculative_accept_threshold_acc": 0.9,
    "speculative_token_map": "map.pt",
    "enable_multi_layer_eagle": True,
    "enable_dp_attention": True,
    "pp_size": 2,
    "disaggregation_mode": "decode",
    "enable_lora": True,
    "lora_paths": ["adapter"],
    "enable_deterministic_inference": True,
    "page_size": 16,
    "speculative_draft_attention_backend": "trtllm_mha",
}


@pytest.mark.parametrize("field", [field for field, _, _ in UNSUPPORTED])
def test_what_is_not_supported_is_refused_by_name(field):
    flag = "--" + field.replace("_", "-")
    with pytest.raises(
        ServerConfigError,
        match=f"^SGL_EAGLE: {flag} must .*, got {REFUSED[field]!r}".replace("[", r"\[").replace(
            "]", r"\]"
        ),
    ):
        refuse_unsupported(make_args(**{field: REFUSED[field]}))


def test_all_refusals_come_at_once():
    with pytest.raises(ServerConfigError, match=r"--pp-size must be 1.*; --page-size must be 1"):
        refuse_unsupported(make_args(pp_size=4, page_size=64))


def test_a_page_size_that_a_backend_chose_is_refused():
    require_page_size_one(1)
    with pytest.raises(
        ServerConfigError, match=r"--page-size must be 1.*got 64, which the attention"
    ):
        require_page_size_one(64)


def test_rows_that_a_round_would_leave_are_refused():
    require_room_for_rounds(overhang=40, reserved=40)
    with pytest.raises(
        ServerConfigError, match=r"--speculative-num-steps times .* must be at most 12, got 40: so"
    ):
        require_room_for_rounds(overhang=12, reserved=40)


def make_costly(kind, engine="sglang", batches=(1, 8), contexts=(0, 512)):
    import numpy as np

    def grid(kind, num_tokens):
        axes = (batches, num_tokens, contexts)
        us = np.ones([len(axis) for axis in axes])
        return CostGrid(
            kind=kind,
            batch_size=np.array(batches),
            num_tokens=np.array(num_tokens),
            context_len=np.array(contexts),
            us=us,
        )

    table = CostTable(
        setup=CostSetup(
            device="cpu",
            tensor_parallel_size=1,
            dtype="float32",
            attention_backend="any",
            engine=engine,
            engine_version="1",
            num_threads=1,
            target=MODEL,
            draft=MODEL,
        ),
        target=grid("target", (1, 8)),
        draft=grid("draft", (1, 2)),
        draft_extend=grid("draft_extend", (1, 8)),
        decide_us=1.0,
        verify_select_us=1.0,
    )
    if kind == "plan":
        drafts = ((0.0, 0.5), (0.0, 0.8))
        spec = PlanSpec(num_steps=2, topk=2, verify_sizes=(1, 4), expected_drafts=drafts)
        return spec.build(table)
    return PriceSpec(
        num_steps=2,
        topk=2,
        verify_sizes=(1, 4),
        widths=(1, 2),
        price_tok_per_us=0.1,
        calibration=IdentityMap(),
        continuation=ContinuationModel(prob_edges=(), ratios=(((0.5, 0.2),),)),
    ).build(table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "reference"}, "must be measured on engine='sglang', got engine='reference'"),
        ({"batches": (1, 4)}, "--max-running-requests must be in .1, 4., .*got 1 to 8"),
        ({"batches": (2, 8)}, "--max-running-requests must be in .2, 8., .*got 1 to 8"),
        ({"contexts": (0, 256)}, "--context-length must be in .0, 256., .*got 1 to 512"),
        ({"contexts": (128, 512)}, "--context-length must be in .128, 512., .*got 1 to 512"),
    ],
)
@pytest.mark.parametrize("kind", ["price", "plan"])
def test_a_policy_that_would_have_to_guess_costs_is_refused(kind, changes, message):
    require_measured(make_costly(kind), max_running_requests=8, context_length=512)
    with pytest.raises(PolicyConfigError, match=message):
        require_measured(make_costly(kind, **changes), max_running_requests=8, context_length=512)

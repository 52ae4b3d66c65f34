from __future__ import annotations

import json
from datetime import UTC, datetime

import numpy as np
import pytest
from calibration_maker import make_continuation, some_maps
from cost_maker import make_setup, make_table
from tree_maker import RandomDrafter, make_batch

from sgl_eagle_harness.cost_file import CostFile
from sgl_eagle_harness.draft_loop import grow_trees
from sgl_eagle_harness.errors import PolicyConfigError
from sgl_eagle_harness.policies.eagle2 import Eagle2Spec
from sgl_eagle_harness.policies.plain import PlainSpec
from sgl_eagle_harness.policies.policy_file import (
    PolicyFile,
    PolicyProvenance,
    load_policy_file,
    save_policy_file,
)
from sgl_eagle_harness.policies.price import PriceSpec
from sgl_eagle_harness.policies.static import EAGLE1_PATHS, StaticSpec
from sgl_eagle_harness.trace_schema import SamplingParams, SourceFile

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def record():
    price = PriceSpec(
        num_steps=4,
        topk=3,
        verify_sizes=(1, 4, 8),
        widths=(1, 3),
        price_tok_per_us=1 / 900,
        stop=False,
        calibration=some_maps()[2],
        continuation=make_continuation(),
    )
    return PolicyFile(
        default=Eagle2Spec(num_steps=5, topk=4, num_draft_tokens=8),
        workloads={
            "code": price,
            "chat": PlainSpec(),
            "math": StaticSpec(name="eagle1", paths=EAGLE1_PATHS),
        },
        costs=CostFile.from_table(make_table(), num_repeats=3, created=CREATED),
        provenance=PolicyProvenance(
            traces=(SourceFile(name="t.parquet", sha256="f" * 64),),
            target=make_setup().target,
            draft=make_setup().draft,
            sampling=SamplingParams(temperature=0.0),
            command="sgl-eagle tune",
            seed=0,
            created=CREATED,
            commit=None,
            versions={},
        ),
    )


def test_a_stored_policy_decides_as_the_original(tmp_path, record):
    path = tmp_path / "policy.json"
    save_policy_file(path, record)
    found = load_policy_file(path)
    assert found == record
    assert found.cost_sha256 == record.costs.sha256
    names = [found.build(w).name for w in (None, "code", "chat", "math", "unheard of")]
    assert names == ["eagle2-5-4-8", "price-4-3-8", "plain", "eagle1", "eagle2-5-4-8"]
    one, two = record.build("code"), found.build("code")
    assert two.rules.stop is False
    batch = make_batch(9)
    trees = [grow_trees(RandomDrafter(3, 9), policy, batch) for policy in (one, two)]
    assert np.array_equal(trees[0].parents, trees[1].parents)
    assert np.array_equal(one.select_verify(trees[0], batch), two.select_verify(trees[1], batch))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema_version=0), "schema_version must be 1, got schema_version=0"),
        (lambda d: d["default"].update(kind="magic"), "default: .*expected tags"),
        (
            lambda d: d["default"].update(topk=99),
            r"default: topk must be in \[1, 32\], got topk=99",
        ),
        (lambda d: d["default"].update(beam=3), "default.eagle2.beam: Extra inputs"),
        (lambda d: d["workloads"]["code"].update(widths=[9]), "workloads.code: widths must be at"),
        (lambda d: d["workloads"]["code"].update(price_tok_per_us=-1), "got -1.0"),
        (lambda d: d["workloads"]["math"].update(paths=[[0, 0]]), "workloads.math: paths must"),
        (lambda d: d.update(costs=None), "workloads.code: a price policy needs a cost table"),
        (lambda d: d["costs"]["target"].update(num_tokens=[1, 1, 8, 64, 256]), "target.num_tokens"),
        (lambda d: d["workloads"]["code"]["calibration"].update(curves=[[1, 0]]), "must not fall"),
        (lambda d: d["provenance"]["target"].update(sha256="x"), "provenance.target.sha256"),
    ],
)
def test_bad_file_is_refused_by_file_and_entry(tmp_path, record, edit, message):
    path = tmp_path / "policy.json"
    payload = json.loads(record.model_dump_json())
    edit(payload)
    path.write_text(json.dumps(payload))
    with pytest.raises(PolicyConfigError, match=message) as caught:
        load_policy_file(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(PolicyConfigError, match=r"cannot read .*none\.json: No such file"):
        load_policy_file(tmp_path / "none.json")

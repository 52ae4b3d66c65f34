import platform
from datetime import UTC, datetime

import numpy as np

from sgl_eagle_tuner.provenance import RunProvenance, collect_provenance


def test_describes_this_process():
    record = collect_provenance(seed=7, argv=["/somewhere/bin/sgl-eagle", "tune", "a b"])
    assert record.command == "sgl-eagle tune 'a b'"
    assert record.seed == 7
    assert record.versions["python"] == platform.python_version()
    assert record.versions["numpy"] == np.__version__
    assert record.num_cpus >= 1
    assert abs((datetime.now(UTC) - record.created).total_seconds()) < 60


def test_survives_json():
    record = collect_provenance(seed=0, argv=["sgl-eagle"])
    assert RunProvenance.model_validate_json(record.model_dump_json()) == record


def test_a_machine_without_git_or_driver_has_no_commit_and_no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    record = collect_provenance(seed=0, argv=["sgl-eagle"])
    assert record.commit is None
    assert record.gpu is None

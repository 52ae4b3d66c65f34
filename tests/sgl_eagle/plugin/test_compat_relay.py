"""Whether SGLang lets the host run ahead of the device."""

from types import SimpleNamespace

import pytest

from sgl_eagle.plugin.compat_relay import host_runs_ahead

KNOWS, ASKS = SimpleNamespace(needs_cpu_seq_lens=False), SimpleNamespace(needs_cpu_seq_lens=True)
SAYS_NOTHING = SimpleNamespace(name="unaudited")


@pytest.mark.parametrize(
    ("overlaps", "backends", "runs_ahead"),
    [
        (True, (KNOWS, KNOWS, None), True),
        (True, (KNOWS, ASKS, None), False),
        (True, (KNOWS, SAYS_NOTHING), False),
        (False, (KNOWS, KNOWS), False),
    ],
)
def test_it_does_with_overlap_where_no_attention_wants_to_know_the_lengths(
    overlaps, backends, runs_ahead
):
    arguments = SimpleNamespace(disable_overlap_schedule=not overlaps)
    worker = SimpleNamespace(server_args=arguments, spec_v2_attn_backends=backends)
    assert host_runs_ahead(worker) == runs_ahead

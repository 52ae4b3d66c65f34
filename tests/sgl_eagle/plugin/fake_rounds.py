"""A worker whose rounds take known times on a clock that is set by hand."""

import contextlib
from types import SimpleNamespace

WINDOW = 16
STAGE_US = {"decide": 3.0, "roots": 10.0, "verify": 500.0, "pack": 20.0}


class Marks:
    """A clock that is set by hand, of a device that the host may run ahead of."""

    def __init__(self, *, host_runs_ahead):
        self.host_runs_ahead = host_runs_ahead
        self.now_us = 0.0

    def mark(self):
        return self.now_us

    def wait(self):
        pass

    def us_between(self, start, end):
        return end - start


class Worker:
    """Rounds of known cost; the first of a row takes ten times as long."""

    device = "cpu"

    def __init__(self, marks, *, slowness=lambda _: 1.0):
        self.marks = marks
        self.slowness = slowness
        self.rows = []
        self.grad_modes = set()
        self.server_args = SimpleNamespace(max_running_requests=4)
        model_config = SimpleNamespace(context_len=64)
        self.target_worker = SimpleNamespace(
            model_runner=SimpleNamespace(model_config=model_config)
        )

    @contextlib.contextmanager
    def probing(self, policy, clock, tiers, *, num_unseen):
        self.policy, self.clock, self.num_unseen = policy, clock, num_unseen
        self.drafts = {tier.speculates for tier in tiers.values()} == {True}
        self.rows.append([])
        yield

    def forward_batch_generation(self, batch):
        import torch

        self.grad_modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        row, marks = self.rows[-1], self.marks
        row.append((batch.context_len, self.num_unseen))
        scale = self.slowness(len(self.rows)) * (10 if len(row) == 1 else 1)
        asked = self.policy.confidence_order.num_certain_steps == 0
        stages = dict(STAGE_US)
        if self.drafts:
            stages |= {"draft": 80.0, "extend": 60.0} | ({"wait": 40.0} if asked else {})
        elif self.num_unseen == WINDOW:
            stages["extend"] = 32.0
            self.num_unseen = 0
        with self.clock.stage("decide"):
            marks.now_us += scale * stages.pop("decide")
            for stage, us in stages.items():
                with self.clock.stage(stage):
                    marks.now_us += scale * us
            self.clock.end_round(len(batch.reqs))
        self.num_unseen += 1


def make_batches(worker, num_batches, *, batch_size, context_len):
    """In place of SGLang's."""
    del worker
    requests = [SimpleNamespace(rid=str(index)) for index in range(batch_size)]
    return [SimpleNamespace(reqs=requests, context_len=context_len)] * num_batches

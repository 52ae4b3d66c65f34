"""A server that exists only as costs on a clock of its own."""

from dataclasses import replace

from sgl_eagle.plugin.profile_grid import GridProfiler, ProfileGrid, RoundSample
from sgl_eagle_harness.cost_table import CostSetup
from sgl_eagle_harness.records import ModelIdentity

MODEL = ModelIdentity(name="tiny", sha256="0" * 64, dims={})
SETUP = CostSetup(
    device="cpu",
    tensor_parallel_size=1,
    dtype="float32",
    attention_backend="any",
    engine="sglang",
    engine_version="1",
    num_threads=1,
    target=MODEL,
    draft=MODEL,
)
GRID = ProfileGrid(batch_sizes=(1, 4, 16), num_tokens=(1, 2, 8), context_lens=(1, 64, 512), width=4)
CATCH_UP_US = 24.0


class FakeServer:
    """Rows of two rounds of known cost, on a clock of their own."""

    def __init__(self, seconds_per_round=0.005, *, runs_ahead=False):
        self.seconds = 0.0
        self.runs_ahead = runs_ahead
        self.seconds_per_round = seconds_per_round
        self.warmed_up, self.timed = [], []

    def now(self):
        return self.seconds

    def warm_up(self, batch, tokens, context):
        self.warmed_up.append((batch, tokens, context))
        self.seconds += self.seconds_per_round

    def time_rounds(self, batch, tokens, context):
        assert (batch, tokens, context) in self.warmed_up
        self.timed.append((batch, tokens, context))
        self.seconds += 2 * self.seconds_per_round
        plain = RoundSample(
            verify_us=100 + batch * tokens + 0.1 * context,
            extend_us=None,
            draft_step_us=None,
            launch_us=50.0 + batch + tokens if self.runs_ahead else None,
        )
        if tokens == 1:
            return [plain, replace(plain, extend_us=CATCH_UP_US)]
        drafted = replace(plain, extend_us=10 + tokens, draft_step_us=7.0 * batch)
        return [drafted, drafted]


def measure(server, *, budget_s=30.0, num_repeats=5, grid=GRID):
    profiler = GridProfiler(
        grid, server, now=server.now, budget_s=budget_s, num_repeats=num_repeats
    )
    return profiler.measure(SETUP), profiler

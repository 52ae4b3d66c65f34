"""A server that exists only as costs on a clock of its own."""

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


class FakeServer:
    """Rounds of known cost on a clock of their own."""

    def __init__(self, seconds_per_round=0.01):
        self.seconds = 0.0
        self.seconds_per_round = seconds_per_round
        self.seen = []

    def now(self):
        return self.seconds

    def time_round(self, batch, tokens, context):
        self.seen.append((batch, tokens, context))
        self.seconds += self.seconds_per_round
        first = (batch, tokens, context) not in self.seen[:-1]
        return RoundSample(
            verify_us=100 + batch * tokens + 0.1 * context + (5000 if first else 0),
            extend_us=None if tokens == 1 else 10 + tokens,
            draft_step_us=None if tokens == 1 else 7.0 * batch,
        )


def measure(server, *, budget_s=30.0, num_repeats=3, grid=GRID):
    profiler = GridProfiler(
        grid, server.time_round, now=server.now, budget_s=budget_s, num_repeats=num_repeats
    )
    return profiler.measure(SETUP), profiler

"""Counts the slots that rounds find behind their texts; put into a server before it starts."""

import json
import os
from pathlib import Path

import overlap

from sgl_eagle.plugin import compat_slots


def install():
    """Write to the file that a variable names what rounds found.

    Steps overlap. `room` is the fewest slots behind a text, `lag` the most tokens by which the
    host's length of it was short, and `rounds_topped_up` counts rounds that allocated slots.
    """
    overlap.install()
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.speculative import eagle_utils

    from sgl_eagle.plugin.worker import SglEagleWorker

    path = Path(os.environ["SLOT_WATCH_FILE"])
    rooms, lags, watched = [], [], {"rounds": 0, "rounds_topped_up": 0}
    allocate, decode = eagle_utils.alloc_for_spec_decode, SglEagleWorker._decode

    def count_allocation(*arguments, **more):
        watched["rounds_topped_up"] += 1
        return allocate(*arguments, **more)

    def look(worker, batch, *arguments):
        supposed = compat_slots._num_reserved(batch.reqs)
        for request, length, reserved in zip(
            batch.reqs, batch.seq_lens.tolist(), supposed, strict=True
        ):
            rooms.append(request.kv.kv_allocated_len - length)
            lags.append(reserved - rooms[-1])
        watched.update(rounds=watched["rounds"] + 1, room=min(rooms), lag=max(lags))
        watched["round_slots"] = allocation_sizing.get_alloc_len_per_decode()
        path.with_suffix(".part").write_text(json.dumps(watched), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        return decode(worker, batch, *arguments)

    eagle_utils.alloc_for_spec_decode = count_allocation
    SglEagleWorker._decode = look

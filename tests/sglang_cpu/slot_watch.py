"""Counts the slots that rounds find behind their texts; put into a server before it starts."""

import json
import os
from pathlib import Path


def install():
    """Write to the file that a variable names how many slots rounds found, and who allocated."""
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.speculative import eagle_utils

    from sgl_eagle.plugin.worker import SglEagleWorker

    path = Path(os.environ["SLOT_WATCH_FILE"])
    watched = {"room": None, "rounds": 0, "rounds_topped_up": 0}
    allocate, decode = eagle_utils.alloc_for_spec_decode, SglEagleWorker._decode

    def count_allocation(*arguments, **more):
        watched["rounds_topped_up"] += 1
        return allocate(*arguments, **more)

    def look(worker, batch, *arguments):
        lengths = batch.seq_lens.tolist()
        room = min(
            request.kv.kv_allocated_len - length
            for request, length in zip(batch.reqs, lengths, strict=True)
        )
        watched["room"] = room if watched["room"] is None else min(room, watched["room"])
        watched["rounds"] += 1
        watched["round_slots"] = allocation_sizing.get_alloc_len_per_decode()
        path.with_suffix(".part").write_text(json.dumps(watched), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        return decode(worker, batch, *arguments)

    eagle_utils.alloc_for_spec_decode = count_allocation
    SglEagleWorker._decode = look

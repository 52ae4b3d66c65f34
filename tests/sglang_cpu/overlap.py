"""Lets a server on a CPU schedule as on a GPU; put into it before it starts."""

import torch
from sglang.srt.managers import overlap_utils

from sgl_eagle.plugin import server_arguments


def install():
    """Launch each step before the one before has been looked at, which SGLang does not on a CPU.

    What is launched is done when the launch returns, so no race would show. But results, lengths
    and slots lag as they do on a GPU, and steps hand on to each other by the relay.
    """
    resolve = server_arguments.resolve_server_args

    def resolve_and_overlap(server_args):
        resolve(server_args)
        server_args.disable_overlap_schedule = False

    server_arguments.resolve_server_args = resolve_and_overlap  # before the algorithm takes it
    # A kernel, and what no tensor of a CPU knows.
    overlap_utils.gather_spec_extras = _gather
    torch.Tensor.record_stream = lambda *_: None


def _gather(rows, *buffers):
    return [None if buffer is None else buffer[rows] for buffer in buffers]

"""Deliberate faults, put into a server before it starts."""

import dataclasses

import numpy as np

from sgl_eagle.plugin import compat, device_trees, draft_segment, verify_input


def break_tree_mask():
    """Nodes of a tree see all nodes before them."""
    pack = verify_input.pack_trees

    def pack_as_chain(*arguments):
        packed = pack(*arguments)
        return dataclasses.replace(packed, ancestors=np.tril(np.ones_like(packed.ancestors)))

    verify_input.pack_trees = pack_as_chain  # before the worker's module takes it from there
    write = device_trees._write_mask

    def write_as_chain(mask, ancestors, lengths):
        write(mask, ancestors.new_ones(ancestors.shape).tril(), lengths)

    device_trees._write_mask = write_as_chain


def confuse_second_rank():
    """The second tensor-parallel rank proposes other tokens, with other confidences."""
    write = draft_segment._write_level

    def write_confused(worker, buffers, index, ids, log_probs):
        if compat.tensor_parallel_group().rank_in_group == 1:
            ids, log_probs = ids.roll(1, -1), log_probs * 0.5
        write(worker, buffers, index, ids, log_probs)

    draft_segment._write_level = write_confused


def confuse_second_rank_that_hears_nothing():
    """The same, and it does not listen to the first."""
    confuse_second_rank()
    draft_segment.Ranks.share_tensor = lambda *_: None

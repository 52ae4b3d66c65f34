"""A deliberate fault, put into a server before it starts: nodes of a tree see all nodes before."""

import dataclasses

import numpy as np

from sgl_eagle.plugin import verify_input


def break_tree_mask():
    pack = verify_input.pack_trees

    def pack_as_chain(*arguments):
        packed = pack(*arguments)
        return dataclasses.replace(packed, ancestors=np.tril(np.ones_like(packed.ancestors)))

    verify_input.pack_trees = pack_as_chain  # before the worker's module takes it from there

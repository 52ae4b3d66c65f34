"""Messages as bytes in a pipe between two processes of one machine.

A frame is its kind, the length of what follows, and that: JSON for the start of a request, its
number for the end, and for a step four sizes (B, E, C, N) and its arrays, one after the other. They
are written from where the worker holds them: whole trees, since picking nodes costs more than
sending them, and the interpreter is needed for the former only.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from dataclasses import replace
from enum import IntEnum
from typing import BinaryIO

import numpy as np

from sgl_eagle.plugin.foreseen_trees import ForeseenTrees
from sgl_eagle.plugin.round_mail import RoundMail
from sgl_eagle.plugin.trace_messages import (
    Message,
    RequestEnded,
    RequestStarted,
    StepRows,
    Unsent,
    UnsentStep,
)
from sgl_eagle_harness.types import NO_NODE, CandidateTrees, Float32Array, IntArray, TreeLimits

_PREFIX = struct.Struct("=BI")
_NUMBER = struct.Struct("=q")
_SIZES = struct.Struct("=IIII")
_MAIL = struct.Struct("=IIIIII?")

_NO_INTS: IntArray = np.empty(0, np.int64)
_NO_FLOATS: Float32Array = np.empty(0, np.float32)


class _Kind(IntEnum):
    STARTED = 1
    STEP = 2
    FORESEEN = 3
    ENDED = 4


def frame(message: Unsent) -> list[memoryview]:
    """Lay a message out.

    Args:
        message: What the scheduler's thread has handed over.

    Returns:
        The parts of its frame, to be written one after the other.
    """
    if isinstance(message, UnsentStep):
        parts, kind = _step_parts(message), _Kind.STEP
        if isinstance(message.drafted, ForeseenTrees):
            parts, kind = [*_mail_parts(message, message.drafted), *parts], _Kind.FORESEEN
        length = sum(part.nbytes for part in parts)
        return [memoryview(_PREFIX.pack(kind, length)), *parts]
    if isinstance(message, RequestStarted):
        fields = {name: getattr(message, name) for name in RequestStarted.__slots__}
        # A label that JSON cannot hold did not come over HTTP; its text is refused as a label.
        kind, payload = _Kind.STARTED, json.dumps(fields, default=str, skipkeys=True).encode()
    else:
        kind, payload = _Kind.ENDED, _NUMBER.pack(message.number)
    return [memoryview(_PREFIX.pack(kind, len(payload)) + payload)]


def read_message(stream: BinaryIO) -> Message | None:
    """Wait for the next message.

    Args:
        stream: Frames, one after the other.

    Returns:
        It; None where the stream ends, even amid a frame.
    """
    prefix = stream.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    kind, length = _PREFIX.unpack(prefix)
    payload = stream.read(length)
    if len(payload) < length:
        return None
    if kind == _Kind.STARTED:
        return RequestStarted(**json.loads(payload))
    if kind == _Kind.ENDED:
        return RequestEnded(number=_NUMBER.unpack(payload)[0])
    return _read_foreseen(payload) if kind == _Kind.FORESEEN else _read_step(payload)


def _step_parts(step: UnsentStep) -> list[memoryview]:
    columns = depths = tokens = parents = _NO_INTS
    log_probs = _NO_FLOATS
    num_verified = 0
    if step.drafted is not None and not isinstance(step.drafted, ForeseenTrees):
        trees = step.drafted.trees
        columns = _every_node(trees) if step.dense else step.drafted.columns
        num_verified, depths = columns.shape[1], trees.depths
        tokens, parents = trees.tokens, trees.parents
        log_probs = trees.step_log_probs if step.dense else trees.path_log_confidence
    num_rows, num_emitted = step.emitted.shape
    return [
        memoryview(_SIZES.pack(num_rows, num_emitted, num_verified, len(depths))),
        memoryview(array("q", step.numbers + step.position + step.root_token)),
        *(
            np.ascontiguousarray(values, np.int64).data
            for values in (step.num_accept_tokens, step.emitted, columns, tokens, parents, depths)
        ),
        np.ascontiguousarray(log_probs, np.float32).data,
        np.ascontiguousarray(step.counted, np.bool_).data,
    ]


def _mail_parts(step: UnsentStep, drafted: ForeseenTrees) -> list[memoryview]:
    # Its trees are put together by whoever reads it.
    layout, limits = drafted.layout, drafted.limits
    sizes = (layout.branches, layout.num_steps, limits.num_steps, limits.topk)
    return [
        memoryview(_MAIL.pack(len(drafted.mail), *sizes, limits.num_draft_tokens, step.dense)),
        np.ascontiguousarray(drafted.mail, np.int32).data,
    ]


def _read_foreseen(payload: bytes) -> StepRows:
    num_rows, branches, layout_steps, num_steps, topk, num_draft_tokens, dense = _MAIL.unpack_from(
        payload
    )
    layout = RoundMail(branches=branches, num_steps=layout_steps)
    mail = np.frombuffer(payload, np.int32, num_rows * layout.width, _MAIL.size)
    foreseen = ForeseenTrees(
        layout=layout,
        mail=mail.reshape(num_rows, layout.width),
        limits=TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens),
    )
    trees = foreseen.trees
    return replace(
        _read_step(payload[_MAIL.size + mail.nbytes :]),
        columns=_every_node(trees) if dense else foreseen.columns,
        tokens=trees.tokens,
        parents=trees.parents,
        depths=trees.depths,
        log_probs=trees.step_log_probs if dense else trees.path_log_confidence,
    )


def _every_node(trees: CandidateTrees) -> IntArray:
    return np.where(trees.valid, np.arange(trees.num_nodes), NO_NODE)


def _read_step(payload: bytes) -> StepRows:
    num_rows, num_emitted, num_verified, num_nodes = _SIZES.unpack_from(payload)
    line, nodes = (num_rows,), (num_rows, num_nodes)
    shapes: dict[str, tuple[int, ...]] = {
        "numbers": line,
        "position": line,
        "root_token": line,
        "num_accept_tokens": line,
        "emitted": (num_rows, num_emitted),
        "columns": (num_rows, num_verified),
        "tokens": nodes,
        "parents": nodes,
        "depths": (num_nodes,),
    }
    ints, start = {}, _SIZES.size
    for name, shape in shapes.items():
        ints[name] = np.frombuffer(payload, np.int64, math.prod(shape), start).reshape(shape)
        start += ints[name].nbytes
    logs = np.frombuffer(payload, np.float32, num_rows * num_nodes, start)
    counted = np.frombuffer(payload, np.bool_, num_rows, start + logs.nbytes)
    return StepRows(**ints, log_probs=logs.reshape(nodes), counted=counted)

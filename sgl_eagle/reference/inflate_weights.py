"""Weights of a larger model that computes the same function.

The first h of H residual dimensions carry what the small model's residual stream carried, the
others stay zero: what reads the stream (queries, keys, values, gate, up) may hold anything in its
new columns and new units, what writes it (embedding, attention output, MLP output, `fc`) holds
zeros outside of the old block. A mean of squares over H dimensions is h/H of the old one, so norm
weights are multiplied by sqrt(h/H) and the norm's epsilon by h/H. Head width and rotary embedding
stay. LM heads get zeros in new columns, so that factors of a head stay factors of the larger one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sgl_eagle_harness.errors import CheckpointError

Axis = Literal["residual", "query", "key", "mlp", "kept"]

_AXES: dict[str, tuple[Axis, ...]] = {
    "q_proj.weight": ("query", "residual"),
    "k_proj.weight": ("key", "residual"),
    "v_proj.weight": ("key", "residual"),
    "gate_proj.weight": ("mlp", "residual"),
    "up_proj.weight": ("mlp", "residual"),
    "o_proj.weight": ("residual", "query"),
    "down_proj.weight": ("residual", "mlp"),
    "fc.weight": ("residual", "residual"),
    "embed_tokens.weight": ("kept", "residual"),
    "lm_head.weight": ("kept", "residual"),
    "q_proj.bias": ("query",),
    "k_proj.bias": ("key",),
    "v_proj.bias": ("key",),
    "o_proj.bias": ("residual",),
    "fc.bias": ("residual",),
    "q_norm.weight": ("kept",),
    "k_norm.weight": ("kept",),
    "d2t": ("kept",),
}
_NORMS = frozenset(
    f"{name}.weight"
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "hidden_norm",
        "fc_norm",
        "input_norm",
        "norm",
    )
)
_RESIDUAL_WRITERS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder, before or after.

    Attributes:
        hidden_size: Width of the residual stream, a multiple of `num_heads` (transformers asks for
            it, whatever the width of a head).
        intermediate_size: Width of the MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of `num_heads`.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.hidden_size % self.num_heads:
            raise CheckpointError(
                f"hidden_size must be a multiple of num_heads, got hidden_size={self.hidden_size}, "
                f"num_heads={self.num_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads


class _Placement(NamedTuple):
    """Where the entries of one axis go: entry `source[i]` to `target[i]` of `length`."""

    length: int
    source: Tensor
    target: Tensor


class Inflation:
    """Enlarges the tensors of one model.

    Attributes:
        norm_scale: sqrt(h/H).
    """

    def __init__(
        self,
        old: ModelSizes,
        new: ModelSizes,
        *,
        model: str,
        dtype: torch.dtype,
        random: torch.Generator,
    ) -> None:
        """Decide where everything goes.

        Args:
            old: Sizes of the model.
            new: Sizes wanted, none smaller.
            model: "target" or "draft", for messages.
            dtype: Of the enlarged tensors.
            random: Source of the random weights; they are made on its device.

        Raises:
            CheckpointError: If a size would shrink or the old heads find no place.
        """
        for name in ("hidden_size", "intermediate_size"):
            small, large = getattr(old, name), getattr(new, name)
            if large < small:
                raise CheckpointError(
                    f"{name} must be at least the {model}'s {small}, got {name}={large}"
                )
        self.norm_scale = math.sqrt(old.hidden_size / new.hidden_size)
        self._old, self._new = old, new
        self._query_heads, self._key_heads = _place_heads(old, new, model)
        self._dtype, self._device, self._random = dtype, random.device, random

    def enlarge(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of the larger model.

        Args:
            name: Name in a Hugging Face or EAGLE checkpoint, e.g.
                "model.layers.3.self_attn.q_proj.weight".
            tensor: [rows, columns] weight or [size] vector of the small one.

        Returns:
            The enlarged tensor, on the generator's device; integers keep their type.

        Raises:
            CheckpointError: If it is unknown what the tensor does.
        """
        kind = ".".join(re.sub(r"\.\d+(?=\.)", "", name).split(".")[-2:])
        if kind in _NORMS:
            return self._enlarge_norm(tensor)
        if kind not in _AXES:
            raise CheckpointError(
                f"cannot enlarge the tensor {name}: only weights of Llama's layers, of EAGLE "
                f"drafts, and biases of attention are known"
            )
        axes = _AXES[kind]
        if set(axes) == {"kept"}:
            return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)
        places = [self._place(axis, size) for axis, size in zip(axes, tensor.shape, strict=True)]
        reads = len(axes) > 1 and axes[0] in {"query", "key", "mlp"}
        new = self._blank([place.length for place in places], random=reads)
        old = tensor.to(self._device, self._dtype)
        if len(places) == 1:
            new[places[0].target] = old[places[0].source]
        else:
            rows, columns = places
            new[rows.target[:, None], columns.target] = old[rows.source[:, None], columns.source]
        return new

    def enlarge_identity(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of an added layer, which passes its input on unchanged.

        Args:
            name: As in `enlarge`.
            tensor: The one of any layer of the small model.

        Returns:
            What `enlarge` gives, but zeros where the layer would write to the residual stream.
        """
        enlarged = self.enlarge(name, tensor)
        if name.split(".")[-2] in _RESIDUAL_WRITERS:
            return enlarged.zero_()
        return enlarged

    def enlarge_factor(self, name: str, tensor: Tensor) -> Tensor:
        """A factor of a low-rank LM head.

        Args:
            name: "up" [V, R], "lift" [h, R] or "down" [R, h].
            tensor: The factor, in any dtype.

        Returns:
            The factor of the larger head on the CPU, in its own dtype, zeros in what is new.
        """
        if name == "up":
            return tensor
        added = self._new.hidden_size - self._old.hidden_size
        padding = (0, 0, 0, added) if name == "lift" else (0, added)
        return torch.nn.functional.pad(tensor, padding)

    def _enlarge_norm(self, tensor: Tensor) -> Tensor:
        place = self._place("residual", len(tensor))
        new = torch.full((place.length,), self.norm_scale, device=self._device)
        new[place.target] = tensor.to(self._device, torch.float32)[place.source] * self.norm_scale
        return new.to(self._dtype)

    def _blank(self, shape: list[int], *, random: bool) -> Tensor:
        if not random:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        new = torch.empty(shape, dtype=self._dtype, device=self._device)
        return new.normal_(std=shape[-1] ** -0.5, generator=self._random)

    def _place(self, axis: Axis, size: int) -> _Placement:
        old, new = self._old, self._new
        index = torch.arange(size, device=self._device)
        if axis == "residual":  # features side by side, and embedding beside them, are each widened
            block = index // old.hidden_size
            width = size // old.hidden_size * new.hidden_size
            return _Placement(width, index, index + block * (new.hidden_size - old.hidden_size))
        if axis == "mlp":
            return _Placement(new.intermediate_size, index, index)
        if axis == "kept":
            return _Placement(size, index, index)
        heads, num_old, num_new = (
            (self._query_heads, old.num_heads, new.num_heads)
            if axis == "query"
            else (self._key_heads, old.num_kv_heads, new.num_kv_heads)
        )
        head_dim = size // num_old
        inside = torch.arange(head_dim, device=self._device)
        source, target = (
            (torch.tensor(numbers, device=self._device)[:, None] * head_dim + inside).flatten()
            for numbers in heads
        )
        return _Placement(num_new * head_dim, source, target)


def _place_heads(
    old: ModelSizes, new: ModelSizes, model: str
) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    """Which head goes where.

    Every query head keeps its key head. A key head that serves more query heads than fit to one in
    the larger model is copied.

    Args:
        old: Sizes of the model.
        new: Sizes wanted.
        model: For messages.

    Returns:
        Old and new numbers of the query heads, and of the key heads.

    Raises:
        CheckpointError: If the key heads do not suffice.
    """
    queries: tuple[list[int], list[int]] = ([], [])
    keys: tuple[list[int], list[int]] = ([], [])
    for key in range(old.num_kv_heads):
        for first in range(0, old.group, new.group):
            slot = len(keys[0])
            keys[0].append(key)
            keys[1].append(slot)
            for place, member in enumerate(range(first, min(first + new.group, old.group))):
                queries[0].append(key * old.group + member)
                queries[1].append(slot * new.group + place)
    if len(keys[0]) > new.num_kv_heads:
        raise CheckpointError(
            f"num_kv_heads must be at least {len(keys[0])} with {new.group} query heads to a key "
            f"head, since the {model} has {old.num_kv_heads} key heads of {old.group} query heads, "
            f"got num_kv_heads={new.num_kv_heads}"
        )
    return queries, keys

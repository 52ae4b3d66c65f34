"""EAGLE draft models in plain PyTorch: one decoder layer, cut where its attention happens.

The engine, the recorder and training hold the keys and values each in their own layout, so a draft
does not own a cache: `project` gives queries, keys and values, the caller attends, `finish` takes
the result. `*` stands for any leading shape.

Entry i of the draft's context joins the target's features of token i with the embedding of token
i + 1, has rotary position i and predicts token i + 2. A node k draft steps later has position i + k
and takes the feedback of its parent where entry i took features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sgl_eagle.reference.best_tokens import best_tokens
from sgl_eagle.reference.draft_config import DraftConfig
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_kernels.lm_head import TwoStageHead, rank_tokens
from sgl_eagle_kernels.packed_linear import PackedWeight, pack_int8, pack_weight, packed_linear

HEAD_ROWS = 64
"""Rows that the two-stage head scores together: it gathers a shortlist of head rows for each."""


class Projection(NamedTuple):
    """What a node brings to attention.

    Attributes:
        q: [*, Hq, D], rotary embedding applied.
        k: [*, Hkv, D], rotary embedding applied.
        v: [*, Hkv, D].
        residual: [*, H], handed back to `Draft.finish`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    residual: Tensor


class Output(NamedTuple):
    """What a node gives.

    Attributes:
        feedback: [*, H], the `hidden` of the node's children in `Draft.project`.
        head_input: [*, H], what `Draft.head` turns into logits.
    """

    feedback: Tensor
    head_input: Tensor


class RMSNorm(nn.Module):
    """Root mean square norm that computes in the dtype of its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis.

        Args:
            x: [*, size].

        Returns:
            [*, size] in the dtype of the weight.
        """
        weight = self.weight
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps)


class Linear(nn.Linear):
    """Linear layer whose weight can be laid out for a CPU once, when it is final."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self._packed: PackedWeight | None = None

    def pack(self, *, int8: bool = False) -> None:
        """Lay the weight out; later changes to it have no effect.

        Args:
            int8: Round it to eight bits.
        """
        self._packed = pack_int8(self.weight) if int8 else pack_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [*, in_features].

        Returns:
            [*, out_features].
        """
        return packed_linear(x, self.weight, self._packed, self.bias)


class Rotary(nn.Module):
    """Rotary position embedding with fixed frequencies."""

    inv_freq: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        # transformers knows every published variant of the frequencies, and what each one needs.
        source = _llama_rotary(config)
        self.scaling = float(source.attention_scaling)
        self.register_buffer("inv_freq", source.inv_freq.float(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, with an axis for heads.

        Args:
            positions: [*] integers.
            dtype: Of the result; the angles are float32.

        Returns:
            Two tensors [*, 1, D].
        """
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (
            (angles.cos() * self.scaling).to(dtype),
            (angles.sin() * self.scaling).to(dtype),
        )


def _llama_rotary(config: DraftConfig) -> LlamaRotaryEmbedding:
    try:
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        return LlamaRotaryEmbedding(llama)
    except Exception as error:  # of half a dozen kinds, from two libraries
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"head_dim {config.head_dim} and rope_parameters {dict(config.rope_parameters)} make "
            f"no rotary embedding: {reason}"
        ) from error


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding, halves convention of Llama.

    Args:
        x: [*, heads, D].
        cos: [*, 1, D].
        sin: [*, 1, D].

    Returns:
        [*, heads, D].
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class Draft(nn.Module, ABC):
    """A draft model of one decoder layer; see the module's docstring for its place in a step.

    Embedding and head are buffers, since they are shared with the target and never trained.

    Attributes:
        config: Shape and variant.
        embed_tokens: [V, H], by target id.
        lm_head: [V_draft, H].
        draft_to_target: [V_draft] int64 target ids, None when the vocabularies are the same.
        two_stage_head: Finds the best children without scoring the whole vocabulary; None uses
            the full head.
    """

    embed_tokens: Tensor
    lm_head: Tensor
    draft_to_target: Tensor | None
    two_stage_head: TwoStageHead | None

    def __init__(
        self,
        config: DraftConfig,
        *,
        embed_tokens: Tensor,
        lm_head: Tensor,
        draft_to_target: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.two_stage_head = None
        self._packed_head: Tensor | None = None
        hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.kv_heads = config.num_key_value_heads
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)
        self.rotary = Rotary(config)
        self.qkv_proj = Linear(self.attention_input_size, (heads + 2 * self.kv_heads) * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = Linear(hidden, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, hidden)

    @property
    @abstractmethod
    def attention_input_size(self) -> int:
        """Width of what the query, key and value projections read."""

    @abstractmethod
    def fuse(self, target_features: Tensor) -> Tensor:
        """Turn captured features into the `hidden` of `project`.

        Args:
            target_features: [*, num_features * target_hidden_size], captured layers concatenated
                in ascending order.

        Returns:
            [*, H].
        """

    @abstractmethod
    def project(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> Projection:
        """First half of a draft step, up to attention.

        Args:
            hidden: [*, H], fused features or the parent's feedback.
            token_ids: [*] target ids, the token that follows the features.
            positions: [*] rotary positions.

        Returns:
            Queries, keys, values and the residual.
        """

    @abstractmethod
    def finish(self, attention: Tensor, residual: Tensor) -> Output:
        """Second half of a draft step, from attention to the head's input.

        Args:
            attention: [*, Hq, D].
            residual: [*, H] of the same nodes' `Projection`.

        Returns:
            Feedback for the children and the head's input.
        """

    def head(self, head_input: Tensor) -> Tensor:
        """Logits over the draft's vocabulary.

        Args:
            head_input: [*, H] from `finish`.

        Returns:
            [*, V_draft].
        """
        return packed_linear(head_input, self.lm_head, self._packed_head)

    def best_children(self, head_input: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """The most probable next tokens, ties to the lowest draft id.

        Args:
            head_input: [n, H] from `finish`.
            topk: How many.

        Returns:
            Natural-log probabilities [n, topk] float32, descending, and target ids [n, topk] int64.
        """
        if self.two_stage_head is None:
            log_probs, ids = best_tokens(self.head(head_input), topk)
            return log_probs, self.to_target_ids(ids)
        parts = [
            rank_tokens(rows, self.two_stage_head, topk) for rows in head_input.split(HEAD_ROWS)
        ]
        return (
            torch.cat([part.log_probs for part in parts]),
            self.to_target_ids(torch.cat([part.ids for part in parts])),
        )

    def pack(self, *, int8: bool = False) -> None:
        """Make ready for decoding: lay the weights out for this device, once and for all.

        Args:
            int8: Round the weights of the layer to eight bits; in bfloat16 on a CPU only.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(int8=int8)

    def pack_head(self) -> None:
        """The same for the full head, a second copy of it: worth it where the draft uses it."""
        self._packed_head = pack_weight(self.lm_head)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Rename draft ids.

        Args:
            draft_ids: [*] integers in [0, V_draft).

        Returns:
            [*] target ids.
        """
        if self.draft_to_target is None:
            return draft_ids
        return self.draft_to_target[draft_ids]

    def _split_heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.config.num_attention_heads, self.kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (heads + 2 * kv_heads, self.config.head_dim))
        cos, sin = self.rotary(positions, qkv.dtype)
        qk = rotate(qkv[..., : heads + kv_heads, :], cos, sin)
        return qk[..., :heads, :], qk[..., heads:, :], qkv[..., heads + kv_heads :, :]

    def _add_attention_and_mlp(self, attention: Tensor, residual: Tensor) -> Tensor:
        residual = residual + self.o_proj(attention.flatten(-2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(residual)).chunk(2, dim=-1)
        hidden: Tensor = residual + self.down_proj(functional.silu(gate) * up)
        return hidden


class Eagle1Draft(Draft):
    """EAGLE-1 and EAGLE-2: `fc` joins embedding and top-layer feature; the output is a feature.

    Attributes:
        input_layernorm: None where the checkpoint has none, as in SafeAILab's.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        embed_tokens: Tensor,
        lm_head: Tensor,
        draft_to_target: Tensor | None = None,
        input_layernorm: bool = False,
    ) -> None:
        super().__init__(
            config, embed_tokens=embed_tokens, lm_head=lm_head, draft_to_target=draft_to_target
        )
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.input_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) if input_layernorm else None
        )

    @property
    def attention_input_size(self) -> int:  # noqa: D102
        return self.config.hidden_size

    def fuse(self, target_features: Tensor) -> Tensor:  # noqa: D102
        return target_features

    def project(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> Projection:  # noqa: D102
        embedding = functional.embedding(token_ids, self.embed_tokens)
        residual = self.fc(torch.cat([embedding, hidden.to(embedding.dtype)], dim=-1))
        x = residual if self.input_layernorm is None else self.input_layernorm(residual)
        return Projection(*self._split_heads(x, positions), residual)

    def finish(self, attention: Tensor, residual: Tensor) -> Output:  # noqa: D102
        hidden = self._add_attention_and_mlp(attention, residual)
        return Output(hidden, hidden)


class Eagle3Draft(Draft):
    """EAGLE-3 and EAGLE-3.1: `fc` fuses features of several layers; the output is free."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        embed_tokens: Tensor,
        lm_head: Tensor,
        draft_to_target: Tensor | None = None,
    ) -> None:
        super().__init__(
            config, embed_tokens=embed_tokens, lm_head=lm_head, draft_to_target=draft_to_target
        )
        hidden, feature, eps = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        count = config.num_features
        self.fc = Linear(count * feature, hidden, bias=config.fc_bias)
        self.fc_norm = (
            nn.ModuleList([RMSNorm(feature, eps) for _ in range(count)]) if config.fc_norm else None
        )
        self.input_norm = RMSNorm(count * feature, eps) if config.norm_before_fc else None
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.norm = RMSNorm(hidden, eps)

    @property
    def attention_input_size(self) -> int:  # noqa: D102
        return 2 * self.config.hidden_size

    def fuse(self, target_features: Tensor) -> Tensor:  # noqa: D102
        features = target_features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(self.config.num_features, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def project(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> Projection:  # noqa: D102
        embedding = functional.embedding(token_ids, self.embed_tokens)
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)
        return Projection(*self._split_heads(x, positions), hidden)

    def finish(self, attention: Tensor, residual: Tensor) -> Output:  # noqa: D102
        hidden = self._add_attention_and_mlp(attention, residual)
        normed: Tensor = self.norm(hidden)
        return Output(normed if self.config.norm_output else hidden, normed)


def build_draft(
    config: DraftConfig,
    *,
    embed_tokens: Tensor,
    lm_head: Tensor,
    draft_to_target: Tensor | None = None,
    eagle1_input_layernorm: bool = False,
) -> Draft:
    """A draft with fresh random weights.

    Args:
        config: Shape and variant.
        embed_tokens: [V, H], shared, not copied.
        lm_head: [V_draft, H], shared, not copied.
        draft_to_target: [V_draft] int64 target ids, None when the vocabularies are the same.
        eagle1_input_layernorm: An EAGLE-1 draft has the layer norm that SafeAILab's drop.

    Returns:
        The draft in float32, its embedding and head as they were given.
    """
    if config.kind == "eagle1":
        return Eagle1Draft(
            config,
            embed_tokens=embed_tokens,
            lm_head=lm_head,
            draft_to_target=draft_to_target,
            input_layernorm=eagle1_input_layernorm,
        )
    return Eagle3Draft(
        config, embed_tokens=embed_tokens, lm_head=lm_head, draft_to_target=draft_to_target
    )

"""Target model: a lean forward pass over the weights of any Hugging Face model of the Llama family.

Hugging Face's own modules would do, but their cache and mask machinery costs as much as the
mathematics at batch one; here a pass over a handful of tokens is thirty layers of plain matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sgl_eagle.reference.ordered_attention import attend_in_order, slots_with_ones, store_values
from sgl_eagle_harness.errors import CheckpointError
from sgl_eagle_harness.types import MAX_STEPS
from sgl_eagle_kernels.packed_linear import pack_weight, packed_linear

LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers this forward pass reproduces (tests compare the logits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDims:
    """Sizes of a target, as costs and checkpoints are keyed by them.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: H.
        intermediate_size: Width of the MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: D.
        vocab_size: V.
        max_positions: Longest context the model was made for.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


_LONGEST_SUM = 1024
"""Terms that oneDNN adds in one order for one row and for many; longer sums from two rows on."""


class _Linear:
    """A linear map whose weight is laid out for its device once, no second copy kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = pack_weight(weight)
        self._pairs_rows = self._packed is not None and weight.shape[1] > _LONGEST_SUM
        self._weight = weight if self._packed is None else weight.new_empty(0)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._pairs_rows and x.numel() == x.shape[-1]:
            # So that a token is read alone as it is read among others: see `attend_in_order`.
            return self._multiply(x.expand(*x.shape[:-2], 2, -1))[..., :1, :]
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        return packed_linear(x, self._weight, self._packed, self._bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one decoder layer; query, key and value in one matrix, gate and up in another."""

    input_norm: Tensor
    qkv: _Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: _Linear
    post_norm: Tensor
    gate_up: _Linear
    down: _Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """What one pass returns.

    Attributes:
        hidden: [B, T, H] after the final norm; `Target.logits` takes it.
        features: [B, T, F] the captured hidden states side by side, F = H * number captured.
    """

    hidden: Tensor
    features: Tensor


class KvCache:
    """Keys and values of every layer for B rows that advance together.

    Slots are filled in order; a tree's nodes sit behind the committed tokens until `compact` keeps
    the accepted ones. Float32, as `attend_in_order` wants it.

    Attributes:
        keys: [layers, B, Hkv, capacity, D].
        values: [layers, B, Hkv, capacity, D + 1], `slots_with_ones`.
    """

    def __init__(self, dims: TargetDims, *, capacity: int, batch_size: int, device: str) -> None:
        slots = (dims.num_layers, batch_size, dims.num_kv_heads, capacity)
        self.keys = torch.zeros((*slots, dims.head_dim), device=device)
        self.values = slots_with_ones(*slots, head_dim=dims.head_dim, device=device)

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.keys.shape[3]

    def compact(self, start: int, kept: Tensor) -> None:
        """Move the slots `start + kept` to `start, start + 1, ...` in every layer.

        Args:
            start: First slot of the tree.
            kept: [M] int64 ascending offsets of the accepted nodes.
        """
        end = start + len(kept)
        self.keys[:, :, :, start:end] = self.keys[:, :, :, start + kept]
        self.values[:, :, :, start:end] = self.values[:, :, :, start + kept]


class Target:
    """A causal language model that verifies trees and hands out its hidden states.

    Attributes:
        dims: Sizes.
        capture: Which hidden states become features, by Hugging Face's index: i is the input of
            layer i, `num_layers` the final normed one.
        embed_tokens: [V, H] embedding, shared with the draft.
        lm_head: [V, H], shared with the draft.
    """

    def __init__(self, model: Any, *, capture: tuple[int, ...] = ()) -> None:  # noqa: ANN401  every family has its own class
        """Take the weights of a Hugging Face causal language model.

        Args:
            model: `LlamaForCausalLM` or a model of the same family, on its final device and dtype.
            capture: See `capture` above.

        Raises:
            CheckpointError: If the architecture is outside `LLAMA_FAMILY`, uses a sliding window,
                or `capture` is out of range.
        """
        config = model.config
        if config.model_type not in LLAMA_FAMILY:
            raise CheckpointError(
                f"target architecture must be one of {', '.join(LLAMA_FAMILY)}, "
                f"got model_type={config.model_type!r}"
            )
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise CheckpointError(
                f"targets with sliding-window attention are not supported, got "
                f"sliding_window={config.sliding_window}"
            )
        num_heads = config.num_attention_heads
        self.dims = TargetDims(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
        )
        if any(not 0 <= index <= self.dims.num_layers for index in capture):
            raise CheckpointError(
                f"captured hidden states must be in [0, {self.dims.num_layers}], got {capture}"
            )
        self.capture = capture
        self.embed_tokens: Tensor = model.model.embed_tokens.weight.detach()
        self.lm_head: Tensor = model.lm_head.weight.detach()
        self._to_logits = _Linear(self.lm_head)
        self._eps = float(config.rms_norm_eps)
        self._final_norm: Tensor = model.model.norm.weight.detach()
        self._layers = [_layer_weights(layer) for layer in model.model.layers]
        self._cos, self._sin = _rotary_tables(model, self.dims, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and cache."""
        return self.embed_tokens.dtype

    @property
    def device(self) -> str:
        """Device of the weights."""
        return str(self.embed_tokens.device)

    def make_cache(self, capacity: int, batch_size: int = 1) -> KvCache:
        """Allocate an empty cache.

        Args:
            capacity: Slots a row: prompt, output and the largest tree.
            batch_size: Rows.

        Returns:
            A zeroed cache.
        """
        return KvCache(self.dims, capacity=capacity, batch_size=batch_size, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KvCache,
        start: int,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> TargetOutput:
        """Run T tokens a row behind the first `start` slots, which all of them may attend to.

        Args:
            tokens: [B, T] int64.
            cache: Written at slots `start .. start + T`.
            start: Slots already filled.
            positions: [T] int64 rotary positions; None counts up from `start`.
            mask: [T, T] bool, which of the new tokens each new token sees (ancestors and itself);
                None is causal.

        Returns:
            Final hidden states and features of the T tokens.
        """
        num_rows, num_tokens = tokens.shape
        dims = self.dims
        end = start + num_tokens
        if positions is None:
            cos, sin = self._cos[start:end], self._sin[start:end]
        else:
            cos, sin = self._cos[positions], self._sin[positions]
        bias = None if num_tokens == 1 else _attention_bias(num_tokens, start, mask, self)
        groups = dims.num_heads // dims.num_kv_heads
        kv_width = dims.num_kv_heads * dims.head_dim
        q_width = dims.num_heads * dims.head_dim
        captured: dict[int, Tensor] = {}
        x = functional.embedding(tokens, self.embed_tokens)
        for index, layer in enumerate(self._layers):
            if index in self.capture:
                captured[index] = x
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            q, k, v = qkv.split([q_width, kv_width, kv_width], dim=-1)
            q = self._heads(q, dims.num_heads, layer.q_norm)
            k = self._heads(k, dims.num_kv_heads, layer.k_norm)
            cache.keys[index, :, :, start:end] = rotate(k, cos, sin)
            values = self._heads(v, dims.num_kv_heads, None)
            store_values(cache.values[index, :, :, start:end], values)
            # Query heads that share a key head become rows of one matrix, so no key is repeated.
            attention = attend_in_order(
                rotate(q, cos, sin).reshape(-1, groups * num_tokens, dims.head_dim),
                cache.keys[index, :, :, :end].flatten(0, 1),
                cache.values[index, :, :, :end].flatten(0, 1),
                bias,
            )
            attention = attention.view(num_rows, dims.num_heads, num_tokens, dims.head_dim)
            merged = attention.transpose(1, 2).reshape(num_rows, num_tokens, q_width)
            x = x + layer.out(merged)
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        hidden = self._norm(x, self._final_norm)
        captured[dims.num_layers] = hidden
        features = [captured[index] for index in self.capture]
        return TargetOutput(
            hidden=hidden,
            features=torch.cat(features, dim=-1) if features else hidden[..., :0],
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """LM head.

        Args:
            hidden: [..., H] from `forward`.

        Returns:
            [..., V] in the model's dtype.
        """
        return self._to_logits(hidden)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _heads(self, x: Tensor, num_heads: int, norm: Tensor | None) -> Tensor:
        # [B, T, heads * D] -> [B, heads, T, D], normed head by head where the model does.
        x = x.view(*x.shape[:2], num_heads, self.dims.head_dim)
        if norm is not None:
            x = self._norm(x, norm)
        return x.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split layout.

    Args:
        x: [..., T, D].
        cos: [T, D].
        sin: [T, D], its first half negated, so that one multiply-add with the swapped halves does.

    Returns:
        [..., T, D].
    """
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def _attention_bias(num_tokens: int, start: int, mask: Tensor | None, target: Target) -> Tensor:
    # [groups * T, start + T]: every query head of a group sees the same tokens.
    if mask is None:
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=target.device).tril()
    visible = torch.ones(num_tokens, start + num_tokens, dtype=torch.bool, device=target.device)
    visible[:, start:] = mask
    groups = target.dims.num_heads // target.dims.num_kv_heads
    bias = torch.zeros(visible.shape, device=target.device)
    return bias.masked_fill_(~visible, -torch.inf).repeat(groups, 1)


def _layer_weights(layer: Any) -> _Layer:  # noqa: ANN401  likewise
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections]
    if mlp.gate_proj.bias is not None:
        raise CheckpointError("targets with biases in the MLP are not supported")
    return _Layer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=_Linear(
            torch.cat([projection.weight.detach() for projection in projections]),
            None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        ),
        q_norm=_norm_weight(attention, "q_norm"),
        k_norm=_norm_weight(attention, "k_norm"),
        out=_Linear(
            attention.o_proj.weight.detach(),
            None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        ),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_Linear(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])),
        down=_Linear(mlp.down_proj.weight.detach()),
    )


def _norm_weight(attention: Any, name: str) -> Tensor | None:  # noqa: ANN401  likewise
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach()


def _rotary_tables(
    model: Any,  # noqa: ANN401  likewise
    dims: TargetDims,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    # The model's own rotary module covers every rope scaling that transformers knows. Trees may
    # reach past the longest context, with nodes that can never be emitted; their angles are asked
    # for apart, since the angles of some scalings depend on the largest position asked for.
    rotary = model.model.rotary_emb
    device = model.lm_head.weight.device
    sample = torch.zeros(1, dtype=torch.float32, device=device)
    end = dims.max_positions
    with torch.inference_mode():
        parts = [
            rotary(sample, torch.arange(start, stop, device=device)[None])
            for start, stop in ((0, end), (end, end + MAX_STEPS))
        ]
    cos, sin = (torch.cat(tables, dim=1)[0] for tables in zip(*parts, strict=True))
    half = dims.head_dim // 2
    signed = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)
    return cos.to(dtype), signed.to(dtype)

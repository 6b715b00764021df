"""The decoder: embedding, transformer layers, final norm.

Legend: T tokens, D hidden size, H query heads, G key/value heads, K head dim.

Parameter names are those on disk (`q_proj`, `input_layernorm`, ...), as LoRA targets and quantization configs use them.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from saccade.model.attention import AttentionContext
from saccade.model.config import LanguageConfig
from saccade.model.layers import FeedForward, RMSNorm, make_embedding
from saccade.model.linear import Linear
from saccade.model.merged_projections import RowAdapters, project
from saccade.model.normed_sum import Input, NormedSum, add_update


class SelfAttention(nn.Module):
    """Grouped-query attention; queries, keys and values may have biases, the output has none."""

    merged_projections = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_TD: Input, attend: AttentionContext, chosen: RowAdapters | None = None) -> Tensor:
        """[T, D] to [T, D]. `chosen`: the adapter of each token."""
        q_THK, k_TGK, v_TGK = (
            x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
            for x in project(x_TD, self.q_proj, self.k_proj, self.v_proj, chosen=chosen)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_THK, k_TGK = self.q_norm(q_THK), self.k_norm(k_TGK)
        [out_TD] = project(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1), self.o_proj, chosen=chosen)
        return out_TD


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: self-attention, then the MLP, each with a residual connection."""

    normed_inputs: ClassVar[dict[str, tuple[str, ...]]] = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    """Norms, and the projections that read each; nothing else does."""

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, bias=False)

    def forward(
        self, x_TD: Tensor, update_TD: Tensor | None, attend: AttentionContext, select_S: Tensor | None = None,
        chosen: RowAdapters | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Map the residual stream x + update, see `add_update`.

        `select_S`: tokens to return (None: all); `chosen`: the adapter of each token. Without gradients each sum and
        norm runs in the kernel of the next matrix product, and the activation in that of gate and up: for one token a
        layer is four kernels and attention.
        """
        normed = self.input_layernorm.add_norm(x_TD, update_TD)
        attn_out_TD = self.self_attn(normed.input, attend, chosen)
        x_TD = normed.total
        if select_S is not None:
            attn_out_TD, x_TD = attn_out_TD.index_select(0, select_S), x_TD.index_select(0, select_S)
            chosen = None if chosen is None else chosen.select(select_S)
        normed = self.post_attention_layernorm.add_norm(attn_out_TD, x_TD)
        mlp_out_TD = self.mlp(normed.input, chosen)
        return add_update(normed.total, mlp_out_TD)


@dataclass(frozen=True)
class LayerFeatures:
    """Image features that are added to the residual stream after each of the first decoder layers (DeepStack)."""

    features: Tensor
    """[layers, M, D] in order of the tokens that `index` lists, or [layers, T, D] of all tokens."""
    index: Tensor | None = None
    """[M]: tokens that have features; None: all, with features of zero for text."""

    def add(self, layer: int, x_TD: Tensor, select_S: Tensor | None) -> Tensor:
        """Add the features of a layer to its outputs x, of the tokens `select_S` (None: all)."""
        if layer >= len(self.features):
            return x_TD
        features = self.features[layer].to(x_TD.dtype)
        if self.index is None:
            return x_TD + (features if select_S is None else features.index_select(0, select_S))
        assert select_S is None, "tokens are selected where features are given for all of them"
        return x_TD.index_add(0, self.index, features)


class LanguageModel(nn.Module):
    """The decoder: embeddings of tokens and images to hidden states."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = make_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.num_adapter_slots = 0
        """Adapters that a token can choose from (`adapters.py`)."""

    def forward(self, x_TD: Tensor, attend: AttentionContext, features: LayerFeatures | None = None) -> Tensor:
        """[T, D] embeddings to [T, D] normalised hidden states. `features` enter the first layers."""
        return self.run_layers(x_TD, attend, features=features).normed

    def run_layers(
        self,
        x_TD: Tensor,
        attend: AttentionContext,
        select_S: Tensor | None = None,
        adapter_T: Tensor | None = None,
        features: LayerFeatures | None = None,
    ) -> NormedSum:
        """`forward` of the tokens `select_S` (None: all), up to the last norm, which may run in the kernel of the head.

        The MLP of the last layer runs on the selected tokens only: a prompt needs logits of its last token.
        `adapter_T` [T] int32: the adapter slot of each token from 1, 0 for the base model (`adapters.py`).
        """
        update_TD: Tensor | None = None
        chosen = None if adapter_T is None else RowAdapters(adapter_T, self.num_adapter_slots)
        for i, layer in enumerate(self.layers):
            select = select_S if i == len(self.layers) - 1 else None
            x_TD, update_TD = layer(x_TD, update_TD, attend, select, chosen)
            if features is not None:
                x_TD = features.add(i, x_TD, select)
        return self.norm.add_norm(x_TD, update_TD)

"""The decoder: embedding, transformer layers, final norm.

Legend: T tokens, D hidden size, H query heads, G key/value heads, K head dim.

Parameter names are those on disk (`q_proj`, `input_layernorm`, ...), as LoRA targets and quantization configs use them.
"""

from typing import cast

from torch import Tensor, nn

from saccade.kernels.small_linear import gated_linear, small_linear
from saccade.model.attention import AttentionContext
from saccade.model.config import LanguageConfig
from saccade.model.layers import FeedForward, RMSNorm, in_row_chunks


class SelfAttention(nn.Module):
    """Grouped-query attention; queries, keys and values have biases, the output has none."""

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_size)
        self.v_proj = nn.Linear(config.hidden_size, kv_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.qkv_proj: nn.Linear | None = None
        """Q, K and V merged (`merge.py`), which replaces them."""
        self._sizes = (config.hidden_size, kv_size, kv_size)

    def forward(self, x_TD: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] to [T, D]."""
        q_THK, k_TGK, v_TGK = (
            project(x_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1))
        return out

    def forward_qkv(self, qkv_TN: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] from the output of the merged projection."""
        parts: tuple[Tensor, ...] = qkv_TN.split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        q_THK, k_TGK, v_TGK = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)  # type: ignore[no-untyped-call]
        return small_linear(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1), self.o_proj.weight, self.o_proj.bias)


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: self-attention, then the MLP, each with a residual connection."""

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x_TD: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] to [T, D]."""
        attn_out_TD = self.self_attn(self.input_layernorm(x_TD), attend)
        normed_TD, x_TD = self.post_attention_layernorm.add_norm(attn_out_TD, x_TD)
        out: Tensor = x_TD + self.mlp(normed_TD)
        return out

    def forward_fused(
        self, x_TD: Tensor, mlp_out_TD: Tensor | None, attend: AttentionContext, select_S: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`forward` with merged projections. The last residual sum is left to the next layer: the input is x + mlp_out, the
        result (x, mlp_out). `select_S`: tokens to return (None: all).

        Each sum, norm and activation runs in the kernel of the matrix product behind it: for few tokens a layer is five kernels
        and attention.
        """
        attention = self.self_attn
        assert attention.qkv_proj is not None, "merge_projections comes first"
        new_TD, residual_TD = (x_TD, None) if mlp_out_TD is None else (mlp_out_TD, x_TD)
        qkv_TN, x_TD = self.input_layernorm.norm_linear(attention.qkv_proj, new_TD, residual_TD)
        attn_out_TD = attention.forward_qkv(qkv_TN, attend)
        if select_S is not None:
            attn_out_TD, x_TD = attn_out_TD.index_select(0, select_S), x_TD.index_select(0, select_S)
        if x_TD.is_cpu:
            x_TD, mlp_out_TD = in_row_chunks(self._fused_mlp, attn_out_TD, x_TD)
            return x_TD, mlp_out_TD
        return self._fused_mlp(attn_out_TD, x_TD)

    def _fused_mlp(self, attn_out_TD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(x + attn_out, mlp(norm(x + attn_out)))."""
        gate_up, down = self.mlp.gate_up_proj, self.mlp.down_proj
        assert gate_up is not None, "merge_projections comes first"
        gate_up_TN, x_TD = self.post_attention_layernorm.norm_linear(gate_up, attn_out_TD, x_TD)
        return x_TD, gated_linear(gate_up_TN, down.weight, down.bias)


class LanguageModel(nn.Module):
    """The decoder: token embeddings (image features already in them) to hidden states."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.is_merged = False
        """Whether the projections are merged (`merge.py`), so that layers run fused."""

    def forward(self, x_TD: Tensor, attend: AttentionContext, select_S: Tensor | None = None) -> Tensor:
        """[T, D] embeddings to [S, D] normalised hidden states of the tokens `select_S` (None: all)."""
        if self.is_merged:
            return self._forward_fused(x_TD, attend, select_S)
        for layer in self.layers:
            x_TD = layer(x_TD, attend)
        out: Tensor = self.norm(x_TD if select_S is None else x_TD.index_select(0, select_S))
        return out

    def _forward_fused(self, x_TD: Tensor, attend: AttentionContext, select_S: Tensor | None) -> Tensor:
        """The MLP of the last layer runs on the selected tokens alone: of a prompt only the last is sampled from."""
        mlp_out_TD: Tensor | None = None
        for i, layer in enumerate(self.layers, start=1):
            select = select_S if i == len(self.layers) else None
            x_TD, mlp_out_TD = cast(DecoderLayer, layer).forward_fused(x_TD, mlp_out_TD, attend, select)
        assert mlp_out_TD is not None, "a decoder has layers"
        return self.norm.add_norm(mlp_out_TD, x_TD)[0]

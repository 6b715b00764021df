"""The decoder: embedding, transformer layers, final norm.

Legend: T tokens, D hidden size, H query heads, G key/value heads, K head dim.

Parameter names are those on disk (`q_proj`, `input_layernorm`, ...), as LoRA targets and quantization configs use them.
"""

import torch
from torch import Tensor, nn

from saccade.model.attention import AttentionContext
from saccade.model.config import LanguageConfig
from saccade.model.layers import FeedForward, RMSNorm
from saccade.model.linear import Input, Linear, add_update, project


class SelfAttention(nn.Module):
    """Grouped-query attention; queries, keys and values have biases, the output has none."""

    merged_projections = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Input, attend: AttentionContext, adapter_T: Tensor | None = None) -> Tensor:
        """[T, D] to [T, D]. `adapter_T`: the adapter of each token."""
        q_THK, k_TGK, v_TGK = (
            x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
            for x in project(x_TD, self.q_proj, self.k_proj, self.v_proj, adapter_T=adapter_T)
        )
        [out_TD] = project(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1), self.o_proj, adapter_T=adapter_T)
        return out_TD


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: self-attention, then the MLP, each with a residual connection."""

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, bias=False)

    def forward(
        self, x_TD: Tensor, update_TD: Tensor | None, attend: AttentionContext, select_S: Tensor | None = None,
        adapter_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The residual stream x + update to itself, see `add_update`. `select_S`: tokens to return (None: all); `adapter_T`: the adapter
        of each token.

        Without gradients each sum, norm and activation runs in the kernel of the matrix product behind it: for few tokens a layer is
        five kernels and attention.
        """
        normed = self.input_layernorm.of_sum(x_TD, update_TD)
        attn_out_TD = self.self_attn(normed.input, attend, adapter_T)
        x_TD = normed.total
        if select_S is not None:
            attn_out_TD, x_TD = attn_out_TD.index_select(0, select_S), x_TD.index_select(0, select_S)
            adapter_T = None if adapter_T is None else adapter_T.index_select(0, select_S)
        normed = self.post_attention_layernorm.of_sum(attn_out_TD, x_TD)
        mlp_out_TD = self.mlp(normed.input, adapter_T)
        return add_update(normed.total, mlp_out_TD)


class LanguageModel(nn.Module):
    """The decoder: token embeddings (image features already in them) to hidden states."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = _embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, x_TD: Tensor, attend: AttentionContext, select_S: Tensor | None = None, adapter_T: Tensor | None = None
    ) -> Tensor:
        """[T, D] embeddings to [S, D] normalised hidden states of the tokens `select_S` (None: all).

        The MLP of the last layer runs on the selected tokens alone: of a prompt only the last is sampled from.
        """
        update_TD: Tensor | None = None
        for i, layer in enumerate(self.layers, start=1):
            x_TD, update_TD = layer(x_TD, update_TD, attend, select_S if i == len(self.layers) else None, adapter_T)
        return self.norm.of_sum(x_TD, update_TD).normed


def _embedding(vocab_size: int, hidden_size: int) -> nn.Embedding:
    """An embedding, not initialized on the meta device: there `normal_` imports torch's compiler, which takes more than a second."""
    weight_VD = torch.empty(vocab_size, hidden_size)
    if not weight_VD.is_meta:
        nn.init.normal_(weight_VD)
    return nn.Embedding(vocab_size, hidden_size, _weight=weight_VD)

"""The decoder: embedding, layers of attention and feed-forward, a final norm.

Legend: T tokens, D hidden size, H query heads, G key/value heads, K head dim.

Parameter names are those of the checkpoint (`q_proj`, `input_layernorm`, ...), so that a name in a log, a LoRA target or a
quantization list is found here as it is on disk.
"""

from torch import Tensor, nn

from saccade.model.attention import AttentionContext
from saccade.model.config import LanguageConfig
from saccade.model.layers import FeedForward, RMSNorm


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

    def forward(self, x_TD: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] to the same."""
        q_THK, k_TGK, v_TGK = (
            project(x_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1))
        return out


class DecoderLayer(nn.Module):
    """Attend, then think: each on a normalised copy, added to the stream."""

    def __init__(self, config: LanguageConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x_TD: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] to the same."""
        attended_TD = self.self_attn(self.input_layernorm(x_TD), attend)
        normed_TD, x_TD = self.post_attention_layernorm.of_sum(attended_TD, x_TD)
        out: Tensor = x_TD + self.mlp(normed_TD)
        return out


class LanguageModel(nn.Module):
    """Token embeddings (with image features in their places) to hidden states."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_TD: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] embeddings to [T, D] normalised hidden states."""
        for layer in self.layers:
            x_TD = layer(x_TD, attend)
        out: Tensor = self.norm(x_TD)
        return out

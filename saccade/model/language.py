"""The decoder: embedding, layers of attention and feed-forward, a final norm.

Legend: T tokens, D hidden size, H query heads, G key/value heads, K head dim.

Parameter names are those of the checkpoint (`q_proj`, `input_layernorm`, ...), so that a name in a log, a LoRA target or a
quantization list is found here as it is on disk.
"""

from typing import cast

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
        self.qkv_proj: nn.Linear | None = None
        """The three projections as one, in a model that was merged (`merge.py`); they are then gone."""
        self._sizes = (config.hidden_size, kv_size, kv_size)

    def forward(self, x_TD: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] to the same."""
        q_THK, k_TGK, v_TGK = (x.unflatten(-1, (-1, self.head_dim)) for x in self._project(x_TD))  # type: ignore[no-untyped-call]
        out: Tensor = self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1))
        return out

    def _project(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        if self.qkv_proj is not None:
            return self.qkv_proj(x_TD).split(self._sizes, dim=-1)  # type: ignore[no-any-return]
        return self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)


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
        x_TD, thought_TD = self.advance(x_TD, None, attend)
        return x_TD + thought_TD

    def advance(self, x_TD: Tensor, thought_TD: Tensor | None, attend: AttentionContext) -> tuple[Tensor, Tensor]:
        """The same with the last sum left open: `x + thought` goes in, and comes out, as its two parts.

        The sum is then made by the norm that reads it next, which saves a pass over memory.
        """
        if thought_TD is None:
            normed_TD = self.input_layernorm(x_TD)
        else:
            normed_TD, x_TD = self.input_layernorm.of_sum(thought_TD, x_TD)
        attended_TD = self.self_attn(normed_TD, attend)
        normed_TD, x_TD = self.post_attention_layernorm.of_sum(attended_TD, x_TD)
        return x_TD, self.mlp(normed_TD)


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

    def infer(self, x_TD: Tensor, attend: AttentionContext) -> Tensor:
        """`forward` with fewer passes over memory. It goes past what wraps the layers (sharding, recomputation): not for training."""
        thought_TD: Tensor | None = None
        for layer in self.layers:
            x_TD, thought_TD = cast(DecoderLayer, layer).advance(x_TD, thought_TD, attend)
        assert thought_TD is not None, "a decoder has layers"
        return self.norm.of_sum(thought_TD, x_TD)[0]

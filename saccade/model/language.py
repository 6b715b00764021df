"""The decoder: embedding, layers of attention and feed-forward, a final norm.

Legend: T tokens, D hidden size, H query heads, G key/value heads, K head dim.

Parameter names are those of the checkpoint (`q_proj`, `input_layernorm`, ...), so that a name in a log, a LoRA target or a
quantization list is found here as it is on disk.
"""

from typing import cast

from torch import Tensor, nn

from saccade.kernels.small_linear import gated_linear, small_linear
from saccade.model.attention import AttentionContext
from saccade.model.config import LanguageConfig
from saccade.model.layers import FeedForward, RMSNorm, in_blocks


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
        if self.qkv_proj is not None:
            return self.attend(self.qkv_proj(x_TD), attend)
        q_THK, k_TGK, v_TGK = (
            project(x_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out: Tensor = self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1))
        return out

    def attend(self, qkv_TN: Tensor, attend: AttentionContext) -> Tensor:
        """[T, D] from queries, keys and values behind one another."""
        parts: tuple[Tensor, ...] = qkv_TN.split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        q_THK, k_TGK, v_TGK = (x.unflatten(-1, (-1, self.head_dim)) for x in parts)  # type: ignore[no-untyped-call]
        return small_linear(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(1), self.o_proj.weight, self.o_proj.bias)


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

    def infer(
        self, x_TD: Tensor, thought_TD: Tensor | None, attend: AttentionContext, places_S: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`forward` of a merged model with the last sum left open: `x + thought` goes in, and comes out, as its two parts.
        What comes out is of the given places (None: all).

        Sums and norms are made by the products that read them, and so is the activation: for few tokens a layer is then five
        kernels that read its weights, and attention.
        """
        attention = self.self_attn
        assert attention.qkv_proj is not None, "merge_projections comes first"
        new_TD, residual_TD = (x_TD, None) if thought_TD is None else (thought_TD, x_TD)
        qkv_TN, x_TD = self.input_layernorm.then(attention.qkv_proj, new_TD, residual_TD)
        attended_TD = attention.attend(qkv_TN, attend)
        if places_S is not None:
            attended_TD, x_TD = attended_TD.index_select(0, places_S), x_TD.index_select(0, places_S)
        if x_TD.is_cpu:
            x_TD, thought_TD = in_blocks(self._think, attended_TD, x_TD)
            return x_TD, thought_TD
        return self._think(attended_TD, x_TD)

    def _think(self, attended_TD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(x + attended, the feed-forward of its norm)."""
        gate_up, down = self.mlp.gate_up_proj, self.mlp.down_proj
        assert gate_up is not None, "merge_projections comes first"
        gate_up_TN, x_TD = self.post_attention_layernorm.then(gate_up, attended_TD, x_TD)
        return x_TD, gated_linear(gate_up_TN, down.weight, down.bias)


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

    def infer(self, x_TD: Tensor, attend: AttentionContext, places_S: Tensor | None = None) -> Tensor:
        """`forward` of a merged model, with fewer passes over memory. [S, D]: of the given places (None: all).

        The last layer thinks about these alone: behind a prompt only its end is asked for.
        """
        thought_TD: Tensor | None = None
        for i, layer in enumerate(self.layers, start=1):
            asked = places_S if i == len(self.layers) else None
            x_TD, thought_TD = cast(DecoderLayer, layer).infer(x_TD, thought_TD, attend, asked)
        assert thought_TD is not None, "a decoder has layers"
        return self.norm.of_sum(thought_TD, x_TD)[0]

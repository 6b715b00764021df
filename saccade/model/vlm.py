"""The model: embed text, encode images, merge both, run the decoder.

Legend: T tokens, P patches, M image tokens (merged patches), D decoder width, F features of an image token, L layers, V
vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from saccade.kernels.rope import CosSin, mrope_cos_sin
from saccade.model.attention import PackedAttention
from saccade.model.config import ModelConfig
from saccade.model.context_parallel import ContextAttention, ContextInputs, exchange_features
from saccade.model.families import family_named
from saccade.model.language import LanguageModel, LayerFeatures
from saccade.model.linear import Linear
from saccade.processor.inputs import ModelInputs


class VLM(nn.Module):
    """A vision-language model over packed sequences."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        family = family_named(config.family)
        self.vision = family.make_tower(config.vision)
        self.projector = family.make_projector(config.vision, config.language.hidden_size)
        self.language = LanguageModel(config.language)
        self.head = Linear(config.language.hidden_size, config.language.vocab_size, bias=False)
        self.tie_head()

    def tie_head(self) -> None:
        """Share the embedding with a tied head. Call it again after parameters were replaced."""
        if self.config.tied_head:
            self.head.tie(self.language.embed_tokens)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.language.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: of activations, embedding and norms."""
        return self.language.embed_tokens.weight.dtype

    def forward(self, inputs: ModelInputs) -> Tensor:
        """[T, V]: logits of every packed token."""
        logits: Tensor = self.head(self.hidden_states(inputs))
        return logits

    def hidden_states(self, inputs: ModelInputs, *, encode_dummy_image: bool = False) -> Tensor:
        """[T, D]: the input of the head. Training computes its loss from it, without the logits.

        `encode_dummy_image`: inputs without images run one blank image through the vision tower and add zero times its
        features, so that every rank of a sharded model runs the same modules.
        """
        x_TD, features = self.decoder_inputs(inputs, encode_dummy_image=encode_dummy_image)
        hidden_TD: Tensor = self.language(x_TD, self.attention(inputs), features)
        return hidden_TD

    def decoder_inputs(
        self, inputs: ModelInputs, *, encode_dummy_image: bool = False
    ) -> tuple[Tensor, LayerFeatures | None]:
        """[T, D]: what the decoder reads, and features of its first layers, if any. See `hidden_states`."""
        if isinstance(inputs, ContextInputs):
            return self._inputs_of_share(inputs, encode_dummy_image)
        x_TD, features = self.embed(inputs)
        if encode_dummy_image and inputs.image_grids.shape[0] == 0:
            x_TD = x_TD + 0.0 * self._dummy_image_features(x_TD).sum()
        return x_TD, features

    def attention(self, inputs: ModelInputs) -> PackedAttention | ContextAttention:
        """Attention of the decoder within the conversations of a packed sequence, or of one rank's share of it."""
        cos_sin, window = self.cos_sin(inputs.positions), self.config.language.window
        if isinstance(inputs, ContextInputs):
            return ContextAttention(cos_sin, inputs, window)
        return PackedAttention(cos_sin, inputs.cu_seqlens, inputs.max_seqlen, window)

    def _inputs_of_share(self, inputs: ContextInputs, encode_dummy_image: bool) -> tuple[Tensor, LayerFeatures | None]:
        """The same for the tokens of one rank, which may have been given features by other ranks."""
        x_TD: Tensor = self.language.embed_tokens(inputs.token_ids)
        if len(inputs.image_grids):
            encoded_MF = self.encode_images(inputs.normalized_patches(), inputs.image_grids)
        else:
            encoded_MF = (
                self._dummy_image_features(x_TD) if encode_dummy_image else x_TD.new_zeros(0, self.feature_size)
            )
        features_MF = exchange_features(encoded_MF.to(x_TD.dtype), inputs)
        return self._place(x_TD, features_MF, inputs)

    def _dummy_image_features(self, like: Tensor) -> Tensor:
        """[2, D]: features of one grey image of two tokens. (`torch.compile` specializes on a length of one.)"""
        grid, num_patches = self.vision.square_grid(0)
        pixels = torch.zeros(num_patches, self.config.vision.patch_dim, device=like.device)
        return self.encode_images(pixels, torch.tensor([grid])).to(like.dtype)

    def embed(self, inputs: ModelInputs) -> tuple[Tensor, LayerFeatures | None]:
        """[T, D]: embeddings of tokens, image features for placeholders; and features of the first layers, if any."""
        x_TD: Tensor = self.language.embed_tokens(inputs.token_ids)
        if inputs.image_grids.shape[0] == 0:
            return x_TD, None
        return self._place(x_TD, self.encode_images(inputs.normalized_patches(), inputs.image_grids), inputs)

    def _place(self, x_TD: Tensor, features_MF: Tensor, inputs: ModelInputs) -> tuple[Tensor, LayerFeatures | None]:
        """Embeddings with features instead of placeholders; and features of the first layers, if any."""
        features_MD, later_LMD = self.split_features(features_MF)
        x_TD = x_TD.index_copy(0, inputs.image_token_index, features_MD.to(x_TD.dtype))
        return x_TD, None if later_LMD is None else LayerFeatures(later_LMD, inputs.image_token_index)

    def split_features(self, features_MF: Tensor) -> tuple[Tensor, Tensor | None]:
        """[M, D] features for the embedding, and [L, M, D] for the first layers (None: the family has none)."""
        if self.feature_size == self.config.language.hidden_size:
            return features_MF, None
        sets = features_MF.unflatten(1, (-1, self.config.language.hidden_size))  # type: ignore[no-untyped-call]
        return sets[:, 0], sets[:, 1:].transpose(0, 1)

    @property
    def feature_size(self) -> int:
        """F: features of an image token, those for the embedding and those for the first layers."""
        return self.config.language.hidden_size * self.config.vision.feature_sets

    def encode_images(self, pixels: Tensor, image_grids: Tensor) -> Tensor:
        """[M, F]: features of all images, in reading order. `pixels` [P, patch_dim] are normalised."""
        layout = self.vision.layout([(t, h, w) for t, h, w in image_grids.tolist()])
        return self.encode_patches(pixels, layout.to(pixels.device))

    def encode_patches(self, pixels: Tensor, inputs: Any) -> Tensor:
        """`encode_images` with the layout on the device: without synchronisation or copies, for a CUDA graph."""
        return self.vision.arrange(self.projector(self.vision(pixels, inputs)), inputs)

    def encode_in_parts(self, pixels: Tensor, inputs: Any, num_parts: int) -> Iterator[Tensor | None]:
        """`encode_patches` in `num_parts` parts of about as many blocks each.

        A part runs when its item is requested: None, or the features with the last part.
        """
        tower = self.vision
        tower_pass = tower.start(pixels, inputs)
        num_blocks = len(tower_pass.block_inputs)
        for part in range(1, num_parts):
            tower.run_blocks(tower_pass, num_blocks * part // num_parts - tower_pass.num_blocks_run)
            yield None
        tower.run_blocks(tower_pass, num_blocks - tower_pass.num_blocks_run)
        yield tower.arrange(self.projector(tower.outputs(tower_pass)), inputs)

    def cos_sin(self, positions_3T: Tensor) -> CosSin:
        """RoPE cos and sin of each token, shared by all layers."""
        language = self.config.language
        return mrope_cos_sin(
            positions_3T, language.rope_theta, language.rope_sections, is_interleaved=language.rope_interleaved
        )

"""The projector: the patches of one token side by side, through two linear layers, to the decoder's width."""

from torch import Tensor, nn

from saccade.model.config import VisionConfig
from saccade.model.layers import RMSNorm
from saccade.model.vision import NORM_EPS


class PatchMerger(nn.Module):
    """[patches, vision width] to [patches / patches_per_token, decoder width]; a token's patches lie together."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.patches_per_token
        self.ln_q = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(self.merged_size, self.merged_size), nn.GELU(), nn.Linear(self.merged_size, out_size)
        )

    def forward(self, x_PD: Tensor) -> Tensor:
        """Normalise each patch, merge, project."""
        out: Tensor = self.mlp(self.ln_q(x_PD).view(-1, self.merged_size))
        return out

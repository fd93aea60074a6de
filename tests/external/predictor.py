"""A predictor as another package brings it: its config, which names its network."""

from dataclasses import dataclass

from mindspeed_mm_dit.configs.condition import ClassLabel, Conditions
from mindspeed_mm_dit.configs.predictor import PredictorConfig


@dataclass(frozen=True)
class ResidualConfig(PredictorConfig):
    """Residual layers over a whole image."""

    side: int
    classes: int
    in_channels: int
    width: int = 32
    num_layers: int = 2
    dropout: float = 0.1
    model_id: str = "residual"

    network = "tests.external.residual:Residual"

    @property
    def out_channels(self) -> int:
        return self.in_channels

    @property
    def conditions(self) -> Conditions:
        return Conditions(ClassLabel(self.classes, self.dropout))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.side, self.side)

    @property
    def num_tokens(self) -> int:
        return 1

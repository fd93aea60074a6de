"""An optimizer as another package brings it: Lion (Chen et al. 2023), which steps by the sign of a momentum."""

from dataclasses import dataclass

from mindspeed_mm_dit.optimizers.contract import OptimizerSpec, UpdateRule, flag, require


@dataclass(frozen=True)
class LionConfig:
    """Megatron's names."""

    lion_beta1: float = flag(0.95, "share of the momentum in the step")
    lion_beta2: float = flag(0.98, "decay of the momentum")

    def __post_init__(self) -> None:
        require(self, "lion_beta1", 0 <= self.lion_beta1 < 1, "must lie in [0, 1)")


def change(config, gradient, state, numbers):
    (momentum,), (lr,) = state, numbers
    step = config.lion_beta1 * momentum + (1 - config.lion_beta1) * gradient
    return lr * step.sign(), config.lion_beta2 * momentum + (1 - config.lion_beta2) * gradient


RULE = UpdateRule(("exp_avg",), change)
LION = OptimizerSpec(LionConfig, lambda config, parameter: RULE)

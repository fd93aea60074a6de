"""The trained part of a network: its weights, their EMAs and their optimizer, as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from mindspeed_mm_dit.checkpoint import power_ema
from mindspeed_mm_dit.checkpoint import torch_dcp as checkpoints
from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.configs.parameters import Parameter
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.training.pytorch.ema import MovingAverage, PowerEmas
from mindspeed_mm_dit.training.pytorch.stepper import Stepper


class Trained:
    """A predictor spread over the ranks, its optimizer and its EMAs, which begin with its weights.

    declared: the config's declaration of each parameter. lr_scales: factors of the learning rate, for some parameters.
    """

    def __init__(
        self,
        predictor: nn.Module,
        declared: Mapping[str, Parameter],
        args: RunConfig,
        lr_scales: Mapping[str, float] | None = None,
    ) -> None:
        self.predictor = predictor
        self.optimizer = Stepper(predictor, declared, args.chosen_optimizer(), args.weight_decay, lr_scales or {})
        trained = {name: p for name, p in predictor.named_parameters() if p.requires_grad}
        self.ema = MovingAverage(trained, args.ema_decay)
        self.power_ema = PowerEmas(trained, len(args.power_ema_stds))
        self._base_names = {name for name, p in declared.items() if not p.saved}

    def state(self, with_optimizer: bool = True) -> checkpoints.State:
        """Return every tensor a resumed run needs, by its name in the checkpoint; the tensors are the live ones."""
        weights = {name: p.detach() for name, p in self._saved()}
        averages = {"ema": self.ema.averages, **self.power_ema.state()}
        state: checkpoints.State = {
            "model": weights,
            **{tree: {**weights, **moved} for tree, moved in averages.items()},  # a frozen weight equals its EMA
        }
        if with_optimizer:
            state["optimizer"] = {"state": self.optimizer.state()}
        return state

    def load(self, path: Path, with_optimizer: bool) -> None:
        checkpoints.check_architecture(path, {name: tuple(p.shape) for name, p in self._saved()})
        state, has_power_ema = self.state(with_optimizer), power_ema.STDS in read_facts(path)
        if not has_power_ema:
            state = {tree: tensors for tree, tensors in state.items() if tree not in self.power_ema.state()}
        checkpoints.read(state, path)
        if not has_power_ema:
            self.power_ema.begin()

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that checkpoints hold."""
        return ((name, p) for name, p in self.predictor.named_parameters() if name not in self._base_names)

    def num_parameters(self) -> int:
        """Return the number of parameters of the predictor, over all shards."""
        return sum(p.numel() for p in self.predictor.parameters())

"""The state of a run that MindSpeed-MM does not handle: the EMA, and Adam's state before its first step.

The host has no EMA for predictors. With torch_dcp, an older MindSpeed loads into an optimizer whose state is still
empty, so the moments stay on disk. A newer one takes a step to fill the state, and does not undo that step if it then
loads no moments. Here PyTorch's own hooks make the first step start from the checkpoint's moments, or from none.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.training import print_rank_0
from torch import Tensor

from mindspeed_mm_dit.checkpoint.state import check_whole
from mindspeed_mm_dit.checkpoint.store import TRACKER, CheckpointStore, read_facts
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import newest
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.composite import HostedDiT
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers import adam
from mindspeed_mm_dit.optimizers.contract import STEP
from mindspeed_mm_dit.training.data_set import check_classes
from mindspeed_mm_dit.training.pytorch.stepper import ExponentialMovingAverage
from mindspeed_mm_dit.training.resume import changes, format_changes, run_facts

MAY_BE_PICKLED = (
    "argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "signal.Signals", "io.BytesIO",
    "numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType",
    "megatron.core.enums.ModelType", "megatron.core.optimizer.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic", "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState", "megatron.core.transformer.enums.AttnBackend",
    "mindspeed_mm.configs.config.ConfigReader", "mindspeed_mm.configs.config.MMConfig",
)  # fmt: skip
"""Types in the pickles of the host's checkpoints (flags, configs, states of generators) and of ours."""


def check_pickles_of(load: str | None) -> None:
    """Raise CheckpointError if a checkpoint under --load could run code: the host unpickles whatever it finds.

    Called on the first rank before the host starts; the other ranks wait for it in the host.
    """
    if load is not None and Path(load).is_dir():
        from mindspeed_mm_dit.checkpoint.torch_folder import check_pickles

        check_pickles(Path(load), MAY_BE_PICKLED)


def check_checkpoint(args: RunConfig) -> None:
    """Raise CheckpointError if --load is damaged, or has another architecture or other classes.

    The host would leave tensors that it does not find at their initial values. Other changes since the run are printed.
    Each rank reads its part of the files.
    """
    if args.load is None or not (Path(args.load) / TRACKER).is_file():
        return
    path = newest(f"--load = {args.load}", args.load)
    if args.ckpt_format != "torch_dcp":
        return
    from mindspeed_mm_dit.checkpoint import torch_dcp

    check_whole(path, lambda path: torch_dcp.find_damage(path, runtime.rank(), runtime.world_size()))
    torch_dcp.check_architecture(path, parameters_of(args.mm.model.predictor).shapes())
    facts = read_facts(path)
    check_classes(facts, args.mm.classes, path)
    if table := format_changes(changes(facts, run_facts(args, 0, 0))):
        print_rank_0(table)


class RunState:
    """The EMA and the moments of one run; empty until :meth:`start`."""

    def __init__(self) -> None:
        self.average: HostedEma | None = None
        self._parameters: dict[str, Tensor] = {}
        self._before_first_step: Callable[[torch.optim.Optimizer], None] | None = None

    def start(self, model: HostedDiT, args: Namespace) -> None:
        """Start from ``model`` after the host has sharded and loaded it.

        ``args``: the host's flags; ``args.iteration`` > 0 means that it resumed from ``args.load``.
        """
        model.restore_constants()
        self._parameters = model.predictor.state_dict(keep_vars=True)
        self.average = HostedEma(self._parameters, args.ema_decay)
        averages = self.average.averages
        averages.update({name: value.to(averages[name].device) for name, value in model.loaded_averages.items()})
        if args.ckpt_format == "torch_dcp":  # (with other formats the host loads the whole state, and takes no step)
            self._before_first_step = _clear_state_while_loading
            if args.load is not None and args.iteration > 0 and not args.finetune:
                self._read(CheckpointStore(args.load).path(args.iteration), with_moments=not args.no_load_optim)
        self._hook_into_the_optimizer()

    def averages(self) -> Mapping[str, Tensor]:
        """Bring the EMA up to date and return it, by the name of the weight."""
        if self.average is None:
            return {}
        self.average.flush()
        return self.average.averages

    def _hook_into_the_optimizer(self) -> None:
        try:
            from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        except ImportError:  # a torch that is MSAdapter
            print_rank_0("warning: this torch has no optimizer hooks; no moving average is kept")
            self.average = None
            return
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _read(self, path: Path, with_moments: bool) -> None:
        from mindspeed_mm_dit.checkpoint import torch_dcp

        assert self.average is not None
        kinds = {name.partition(".")[0] for name in torch_dcp.shapes(path)}
        if "ema" in kinds:
            torch_dcp.read({"ema": self.average.averages}, path)
        if with_moments and "optimizer" in kinds:
            self._before_first_step = partial(self._read_moments, path)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Set the optimizer's state before its first step."""
        if self._before_first_step is not None and _steps(optimizer, self._parameters):
            prepare, self._before_first_step = self._before_first_step, None
            prepare(optimizer)

    def _read_moments(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        from mindspeed_mm_dit.checkpoint import torch_dcp

        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        moments = {name: _zero_moments(p) for name, p in trained.items()}
        torch_dcp.read({"optimizer": {"state": moments}}, path)
        for name, p in trained.items():
            step = moments[name].pop(STEP)
            optimizer.state[p] = moments[name]
            _set_step(optimizer, p, step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.average is not None:
            self.average.is_due = True


class HostedEma(ExponentialMovingAverage):
    """An EMA that is updated when the next step begins or a checkpoint is written.

    During the optimizer's step, Megatron may not yet have copied its float32 weights to the model.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        super().__init__(parameters, decay)
        self.is_due = False

    def flush(self) -> None:
        """Update the averages if the optimizer has stepped since the last call."""
        if self.is_due:
            self.is_due = False
            self.update()


def _clear_state_while_loading(optimizer: torch.optim.Optimizer) -> None:
    """Empty the state of an optimizer that loads no moments; print a note if the host stepped it."""
    counts = [group.pop("step", None) for group in optimizer.param_groups]
    if optimizer.state or any(count is not None for count in counts):
        optimizer.state.clear()
        print_rank_0(
            "note: MindSpeed stepped AdamW while it loaded (torch_dcp), without gradients; "
            "that step is undone, so that the first one counts as the first"
        )


def _zero_moments(p: Tensor) -> dict[str, Tensor]:
    return {**{name: torch.zeros_like(p) for name in adam.RULE.state}, STEP: torch.zeros((), dtype=torch.float32)}


def _steps(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> bool:
    """Return whether ``optimizer`` steps the parameters themselves (not float32 copies of them)."""
    ids = {id(p) for p in parameters.values()}
    return all(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _set_step(optimizer: torch.optim.Optimizer, p: Tensor, step: Tensor) -> None:
    """Set the optimizer's step counter: PyTorch keeps one per parameter, MindSpeed one per group."""
    if isinstance(optimizer, torch.optim.Adam):
        optimizer.state[p]["step"] = step
        return
    for group in optimizer.param_groups:
        if any(p is other for other in group["params"]):
            group["step"] = step.to(p.device, torch.int64)

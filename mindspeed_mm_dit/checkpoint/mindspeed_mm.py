"""What MindSpeed-MM calls the tensors of a checkpoint, and what it wants to find in one. No framework.

here                              there
model.<name>                      model.<name>
ema.<name>                        model.ema.<name>
optimizer.state.<name>.exp_avg    optimizer.state.<number>.exp_avg     (exp_avg_sq likewise)
optimizer.state.<name>.step       optimizer.param_groups.<group>.step, or optimizer.state.<number>.step
-                                 args, iteration, opt_param_scheduler.*, ... (pickled)

The native engine has the averages there too, and the optimizer under our names.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_mm_dit.errors import CheckpointError

EMA = "model.ema."
NO_DECAY = ".bias"
"""Names with this ending are in the second group of AdamW, which does not decay."""


def is_theirs(stored: Collection[str]) -> bool:
    """Return whether MindSpeed-MM wrote the checkpoint whose tensors have the names ``stored``."""
    return any(name.startswith((EMA, "optimizer.param_groups.", "optimizer.state.0.")) for name in stored)


def our_name(stored: str) -> str:
    """Return our name of a weight or average of either layout; other names stay."""
    return f"ema.{stored[len(EMA) :]}" if stored.startswith(EMA) else stored


def their_names(ours: Collection[str], stored: Collection[str]) -> dict[str, str]:
    """Return our name -> their name for the tensors ``ours`` of a checkpoint of theirs.

    ``stored``: every name in the checkpoint.
    Raises CheckpointError when the optimizer there has other parameters.
    """
    optimized = _optimized(ours)
    numbers = {} if _has_names_of_ours(optimized, stored) else _numbers(optimized, stored)
    names = {}
    for name in ours:
        if not numbers and name.startswith("optimizer.state."):
            names[name] = name
        elif name.startswith("ema."):
            names[name] = f"{EMA}{name[4:]}"
        elif name.startswith("optimizer.state."):
            parameter, _, quantity = name[len("optimizer.state.") :].rpartition(".")
            number, group = numbers[parameter]
            own = f"optimizer.state.{number}.{quantity}"
            names[name] = own if own in stored else f"optimizer.param_groups.{group}.{quantity}"
        else:
            names[name] = name
    return names


def _optimized(ours: Collection[str]) -> list[str]:
    """Names of the trained parameters, in the model's order."""
    start, end = "optimizer.state.", ".exp_avg"
    return [name[len(start) : -len(end)] for name in ours if name.startswith(start) and name.endswith(end)]


def _has_names_of_ours(parameters: list[str], stored: Collection[str]) -> bool:
    """Return whether the optimizer's tensors go by the names of the weights, as in the native engine."""
    return all(f"optimizer.state.{name}.exp_avg" in stored for name in parameters)


def _numbers(parameters: list[str], stored: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return parameter -> (its number in their optimizer, its group): group by group, in the model's order."""
    count = len({name.split(".")[2] for name in stored if name.startswith("optimizer.state.")})
    if parameters and count != len(parameters):
        raise CheckpointError(
            "--load",
            f"the optimizer in the checkpoint has {count} parameters, this model trains {len(parameters)}",
            "pass --no-load-optim to start with a new optimizer state",
        )
    split = any(name.startswith("optimizer.param_groups.1.") for name in stored)
    groups = [[name for name in parameters if not split or not name.endswith(NO_DECAY)]]
    groups.append([name for name in parameters if split and name.endswith(NO_DECAY)])
    in_order = [(name, group) for group, names in enumerate(groups) for name in names]
    return {name: (number, group) for number, (name, group) in enumerate(in_order)}


def entries_for_mindspeed_mm(facts: Mapping[str, Any], predictor: Any) -> dict[str, Any]:
    """Return what MindSpeed-MM must find beside the tensors to resume from a checkpoint of ours.

    ``facts``: the run's facts; ``predictor``: its config. Megatron compares the sizes in ``args`` with the
    run's, and counts its schedule in samples.
    """
    samples = facts["consumed_samples"]
    return {
        "args": Namespace(
            num_layers=predictor.num_layers,
            hidden_size=predictor.hidden_size,
            num_attention_heads=predictor.num_heads,
            add_position_embedding=True,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            consumed_train_samples=samples,
            skipped_train_samples=0,
            consumed_valid_samples=0,
        ),
        "iteration": facts["iteration"],
        "checkpoint_version": 3.0,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {"num_steps": samples},
    }

"""How MindSpeed-MM names the tensors of a checkpoint, and which entries it needs in one. Needs no framework.

here                              there
model.<name>                      model.<name>
ema.<name>                        model.ema.<name>
optimizer.state.<name>.exp_avg    optimizer.state.<owner>.exp_avg     (exp_avg_sq likewise)
optimizer.state.<name>.step       optimizer.state.<owner>.step, or optimizer.param_groups.<group>.step
-                                 args, iteration, opt_param_scheduler.*, ... (pickled)

<owner> is the parameter's name in the composite, predictor.<name>, or its number in the optimizer, depending on the
MindSpeed version that wrote the checkpoint (docs/mindspeed_mm.md). The native engine also stores the EMA under the
names there, and the optimizer under ours.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers import adam

EMA = "model.ema."
STATE, GROUPS, MOMENT = "optimizer.state.", "optimizer.param_groups.", f".{adam.RULE.state[0]}"
PREDICTOR = "predictor."
"""Where the composite holds the network: the prefix of their parameter names."""
NO_DECAY = ".bias"
"""Parameters with this ending are in AdamW's second group, which does not decay."""


def is_mindspeed_mm(stored: Collection[str]) -> bool:
    """Return whether MindSpeed-MM wrote the checkpoint whose tensors have the names ``stored``."""
    return any(name.startswith((EMA, GROUPS, f"{STATE}0.", f"{STATE}{PREDICTOR}")) for name in stored)


def to_project_name(stored: str) -> str:
    """Return our name of a weight or EMA, given theirs or ours; other names stay."""
    return f"ema.{stored[len(EMA) :]}" if stored.startswith(EMA) else stored


def stored_names(ours: Collection[str], stored: Collection[str]) -> dict[str, str]:
    """Map our names of the tensors ``ours`` to their names in a checkpoint of MindSpeed-MM.

    ``stored``: every name in the checkpoint.
    Raises CheckpointError if the optimizer there has other parameters.
    """
    optimized = _optimized(ours)
    named = all(f"{STATE}{name}{MOMENT}" in stored for name in optimized)  # after weights, as in the native engine
    owners = {} if named else _owners(optimized, _optimized(stored), stored)
    names = {}
    for name in ours:
        if named and name.startswith(STATE):
            names[name] = name
        elif name.startswith("ema."):
            names[name] = f"{EMA}{name[4:]}"
        elif name.startswith(STATE):
            parameter, _, quantity = name[len(STATE) :].rpartition(".")
            owner, group = owners[parameter]
            per_parameter = f"{STATE}{owner}.{quantity}"
            names[name] = per_parameter if per_parameter in stored else f"{GROUPS}{group}.{quantity}"
        else:
            names[name] = name
    return names


def _optimized(names: Collection[str]) -> list[str]:
    """Return the owners of the moments among ``names``, in order; in our names these are the parameters."""
    return [name[len(STATE) : -len(MOMENT)] for name in names if name.startswith(STATE) and name.endswith(MOMENT)]


def _owners(parameters: list[str], owners: list[str], stored: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return parameter -> (its owner in the checkpoint, its group there)."""
    if not parameters:
        return {}
    if len(owners) != len(parameters):
        raise _other_optimizer(f"has {len(owners)} parameters, but this model trains {len(parameters)}")
    split = any(name.startswith(f"{GROUPS}1.") for name in stored)
    groups = {name: int(split and name.endswith(NO_DECAY)) for name in parameters}
    if all(owner.isdecimal() for owner in owners):  # group by group, each in the model's order
        in_order = sorted(parameters, key=groups.__getitem__)
        return {name: (str(number), groups[name]) for number, name in enumerate(in_order)}
    known = set(owners)
    for name in parameters:
        if f"{PREDICTOR}{name}" not in known:
            raise _other_optimizer(f"has no moments of {name}, which this model trains")
    return {name: (f"{PREDICTOR}{name}", groups[name]) for name in parameters}


def _other_optimizer(problem: str) -> CheckpointError:
    return CheckpointError(
        f"The optimizer in the checkpoint of --load {problem}. Pass --no-load-optim to start with a new state."
    )


def entries_for_mindspeed_mm(facts: Mapping[str, Any], predictor: PredictorConfig) -> dict[str, Any]:
    """Return the entries other than tensors that MindSpeed-MM needs to resume from one of our checkpoints.

    ``facts``: the run's facts; ``predictor``: its config. Megatron compares the sizes in ``args`` with the
    run's, and counts its schedule in samples.
    """
    samples = facts["consumed_samples"]
    return {
        "args": Namespace(
            num_layers=len(parameters_of(predictor).blocks),
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

"""The optimizers by their name for --optimizer: the registered ones, and any class of PyTorch as "module:Class"."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError, flag_of, nearest, not_known
from mindspeed_mm_dit.optimizers.adam import ADAM
from mindspeed_mm_dit.optimizers.contract import (
    ConfiguredOptimizer,
    OptimizerSpec,
    Parameter,
    Shape,
    StateSize,
    UpdateRule,
    flag,
)
from mindspeed_mm_dit.registry import Registry

PATTERN = "module:Class"
"""How such an optimizer is named."""
FLAGS = ("params", "lr", "weight_decay")
"""Arguments that a run decides, by its network, ``--lr`` and ``--weight-decay``."""
EXACT_ELEMENTS = 2**24
"""Elements up to which a tensor is stepped whole on a CPU, to count the state; of larger ones the first rows."""


def is_class(name: object) -> bool:
    """Return whether ``name`` names a class rather than a registered optimizer."""
    return isinstance(name, str) and ":" in name


@dataclass(frozen=True)
class ClassConfig:
    """Settings of an optimizer ``location``; a class of its own for each location (:func:`by_name`)."""

    optimizer_args: str = flag(
        "{}",
        "keyword arguments of the class as a JSON object, such as '{\"eps\": 1e-6}'; --lr and --weight-decay are flags",
        metavar="JSON",
    )
    """Its keyword arguments, a JSON object."""
    location: ClassVar[str] = PATTERN
    """The value of ``--optimizer``."""

    def __post_init__(self) -> None:
        try:
            is_object = isinstance(json.loads(self.optimizer_args), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ConfigError(
                f"--optimizer-args = {self.optimizer_args} is not a JSON object. Write it in quotes, such as "
                "--optimizer-args '{\"eps\": 1e-6}'."
            )

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments; lists become tuples, as which PyTorch takes pairs of betas."""
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(self.optimizer_args).items()
        }


@lru_cache
def by_name(location: str) -> OptimizerSpec:
    """Return the record of the optimizer class ``location``, without importing it."""
    config = type("ClassConfig", (ClassConfig,), {"location": location})
    return OptimizerSpec(config, _rule_of, check=check, state_size=state_size)


def _rule_of(config: ClassConfig, parameter: Parameter) -> UpdateRule:
    return RULE


def _no_change(*_: Any) -> tuple[Any, ...]:
    raise AssertionError("an optimizer class steps by itself")


def _pytorch(config: ClassConfig) -> tuple[type, dict[str, Any]]:
    """Return the class and its settings; the learning rate is set at every step (some classes refuse 0)."""
    return load_class(config.location), {"lr": 1.0, **config.arguments()}


RULE = UpdateRule((), _no_change, pytorch=_pytorch)


@lru_cache
def load_class(location: str) -> Any:
    """Import and return the optimizer class ``location``.

    Raises:
        PlatformError: its package is not installed, or cannot be imported.
        ConfigError: it is not a class of an optimizer of PyTorch.
    """
    what = f"--optimizer = {location}"
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", location):
        raise ConfigError(f"{what} does not name a class. Write {PATTERN}, such as torch.optim:Adafactor.")
    module_name, _, name = location.partition(":")
    package = module_name.partition(".")[0]
    try:
        library, module = importlib.import_module("torch.optim"), importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name in (package, "torch"):
            raise PlatformError(
                f"{what} needs the package {error.name}, which is not installed. Install it with pip install "
                f"{error.name}."
            ) from None
        if not module_name.startswith(str(error.name)):
            raise PlatformError(
                f"{what} needs {error.name}, which is not installed. Install it with pip install {error.name}."
            ) from None
        raise ConfigError(f"{what} names the module {error.name}, which {package} does not have. Correct it.") from None
    except Exception as error:  # (third-party code may raise anything)
        raise PlatformError(
            f"{what} cannot be imported: {type(error).__name__}: {error}. Fix or reinstall {package}."
        ) from error
    kind, base = getattr(module, name, None), library.Optimizer
    if kind is None:
        known = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
        known = [key for key in known if key not in ("Optimizer", "LBFGS")]
        raise ConfigError(
            f"{what} names a class that {module_name} does not have. {nearest(name, known)}Its optimizers are "
            f"{', '.join(known) or 'none'}."
        )
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{what} is not a class of optimizers of PyTorch. Name one that is.")
    if not callable(getattr(kind, "state_dict", None)):
        raise ConfigError(f"{what} has no state_dict, so no run with it could be resumed. Use another optimizer.")
    return kind


def settings_of(kind: type) -> set[str]:
    """Return the names of the arguments of the class ``kind``; with ``**kwargs``, also those of its bases."""
    names: set[str] = set()
    for each in kind.__mro__:
        if "__init__" in vars(each):
            parameters = inspect.signature(each.__init__).parameters  # type: ignore[misc]
            names |= {p.name for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
            if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
                break
    return names - {"self"}


def check(config: ClassConfig, flags: Mapping[str, Any]) -> None:
    """Raise a UserError unless the class can be imported, is an optimizer and takes the arguments.

    ``flags``: flags of the run by name; of these ``weight_decay`` is checked, if it is there.
    """
    what, kind = f"--optimizer = {config.location}", load_class(config.location)
    accepted, arguments = settings_of(kind), config.arguments()
    for name in arguments:
        if name in FLAGS:
            advice = "The network decides them" if name == "params" else f"Write --{name.replace('_', '-')}"
            raise ConfigError(f"--optimizer-args names {name}, which is not set there. {advice}.")
        if name not in accepted:
            raise ConfigError(
                f"--optimizer-args names {name}, which {config.location} does not take. {nearest(name, accepted)}Its "
                f"arguments are {', '.join(sorted(accepted - set(FLAGS))) or 'none'}."
            )
    if "lr" not in accepted:
        raise ConfigError(f"{what} takes no lr, so --lr and its schedule would be ignored. Use another optimizer.")
    decay = flags.get("weight_decay", 0.0)
    if decay and "weight_decay" not in accepted:
        raise ConfigError(f"{what} takes no weight_decay, but --weight-decay is {decay}. Pass --weight-decay 0.")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"{what} computes the loss several times in a step, which a run cannot. Use another.")
    try:
        _made(config, [(3, 2), (2,)], "cpu", decay).state_dict()
    except Exception as error:  # (third-party code may raise anything)
        raise ConfigError(
            f"{what} with --optimizer-args {config.optimizer_args} cannot be made: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Change the arguments, or use another optimizer."
        ) from None


def _made(config: ClassConfig, shapes: list[Shape], device: str, decay: float = 0.0) -> Any:
    """Return the optimizer of parameters of ones, with gradients of ones."""
    torch = importlib.import_module("torch")

    parameters = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
    kind, settings = _pytorch(config)
    groups = [{"params": [p], **({"weight_decay": decay} if decay else {})} for p in parameters]
    with contextlib.redirect_stdout(io.StringIO()):  # (some print what they were arguments)
        optimizer = kind(groups, **settings)
    for p in parameters:
        p.grad = torch.ones_like(p)
    return optimizer


@lru_cache
def state_size(config: ClassConfig, shape: Shape) -> StateSize:
    """Return what a parameter of ``shape`` needs: the class takes a step of meta tensors, or of small CPU tensors."""
    elements, rows = math.prod(shape), shape[0] if shape else 1
    small = (max(1, rows * EXACT_ELEMENTS // elements), *shape[1:]) if elements > EXACT_ELEMENTS else shape
    note = "" if small == shape else f"scaled up from smaller tensors, as {config.location} cannot step meta tensors"
    for device, tried, message in (("meta", shape, ""), ("cpu", small, note)):
        with contextlib.suppress(Exception):  # (third-party code may raise anything)
            held = _bytes_after_a_step(config, tried, device)
            return StateSize(-(-held * elements // math.prod(tried)), message)
    return StateSize(8 * elements, f"as AdamW's: {config.location} can step neither meta tensors nor those of a CPU")


def _bytes_after_a_step(config: ClassConfig, shape: Shape, device: str) -> int:
    optimizer = _made(config, [shape], device)
    if hasattr(optimizer, "train"):
        optimizer.train()
    optimizer.step()
    held = _tensors(list(optimizer.state.values()))
    return sum(x.numel() * x.element_size() for x in held if x.numel() > 1)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested values; of a tensor made of others, these."""
    if hasattr(value, "__tensor_flatten__"):
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "element_size"):
        yield value


DEFAULT = "adam"


class Optimizers(Registry[OptimizerSpec]):
    """The registered optimizers, and any class of PyTorch by the name "module:Class", which is in no list."""

    def __getitem__(self, name: str) -> OptimizerSpec:
        return by_name(name) if is_class(name) else super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return is_class(name) or super().__contains__(name)


OPTIMIZERS = Optimizers("optimizer")

ADAMW = ConfiguredOptimizer(DEFAULT, ADAM.config(), ADAM)
"""The optimizer of a run that does not choose one."""


def register_optimizer(name: str, optimizer: OptimizerSpec) -> None:
    """Add an optimizer that ``--optimizer`` can choose.

    Raises ConfigError if another one has that name.
    """
    OPTIMIZERS[name] = optimizer


def settings() -> dict[str, tuple[dataclasses.Field[Any], list[str]]]:
    """Return the settings of all optimizers by name, each with the names of the optimizers that have it."""
    owners_by_setting: dict[str, tuple[dataclasses.Field[Any], list[str]]] = {}
    for owner, record in [*OPTIMIZERS.items(), (PATTERN, by_name(PATTERN))]:
        for field in dataclasses.fields(record.config):
            owners_by_setting.setdefault(field.name, (field, []))[1].append(owner)
    return owners_by_setting


def optimizer_from_flags(name: str, flags: Mapping[str, Any]) -> ConfiguredOptimizer:
    """Return the optimizer ``name`` with its settings from the flags ``flags``.

    Raises:
        ConfigError: there is no optimizer of that name, or a setting is invalid.
    """
    record = _find(name)
    return ConfiguredOptimizer(name, record.config(**{setting: flags[setting] for setting in _names(record)}), record)


def check_flags(name: str, flags: Mapping[str, Any]) -> None:
    """Check as :func:`optimizer_from_flags` does, and raise ConfigError for a setting that the optimizer lacks.

    An optimizer that is a class is imported, and made once.
    """
    chosen = optimizer_from_flags(name, flags)
    for setting, (field, owners) in settings().items():
        if (PATTERN if is_class(name) else name) not in owners and (value := flags[setting]) != field.default:
            raise ConfigError(
                f"{flag_of(setting)} = {value} has no effect with --optimizer {name}. Leave it out, or use "
                f"{' or '.join(owners)}."
            )
    if chosen.optimizer.check is not None:
        chosen.optimizer.check(chosen.config, flags)


def optimizer_facts(chosen: ConfiguredOptimizer) -> dict[str, Any]:
    """Return the flags and values that run.json saves for an optimizer."""
    values = {flag_of(name): getattr(chosen.config, name) for name in _names(chosen.optimizer)}
    return {"--optimizer": chosen.name, **values}


def optimizer_from_facts(settings: Any, path: object) -> ConfiguredOptimizer:
    """Return the optimizer named by ``settings``, from the run.json of ``path``; AdamW if they name none.

    The settings come from :func:`optimizer_facts` or another program.

    Raises:
        CheckpointError: the optimizer belongs to a package that is not installed.
    """
    facts = settings if isinstance(settings, dict) else {}
    name = facts.get("--optimizer", DEFAULT)
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise CheckpointError(f"{path} was trained with the optimizer {name!r}. Install the package that provides it.")
    record = OPTIMIZERS[name]
    return ConfiguredOptimizer(
        name, record.config(**{n: facts[flag_of(n)] for n in _names(record) if flag_of(n) in facts}), record
    )


def _names(record: OptimizerSpec) -> list[str]:
    return [field.name for field in dataclasses.fields(record.config)]


def _find(name: str) -> OptimizerSpec:
    if name not in OPTIMIZERS:
        raise not_known(f"--optimizer = {name!r}", name, [*OPTIMIZERS, PATTERN])
    return OPTIMIZERS[name]

"""The processes of ``mm-dit prove`` and ``compare``: tasks, interpreters, initial weights, samples and results."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.checkpoint.adapting import read_source
from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.data.order import Stream, micro_batches, normals, philox
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError
from mindspeed_mm_dit.framework.exits import without_launch_variables
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import build_predictor
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.tools.verify.module_recorder import ModuleRecorder

Arrays = Mapping[str, np.ndarray]
_ALIKE = ("gradient/", "model/", "ema/", "start/")


@dataclass(frozen=True)
class Task:
    """A request for the first steps of a run in one layout; passed to the process as JSON."""

    flags: tuple[str, ...]
    """Flags of pretrain_dit.py."""
    output: str
    """Prefix of the names of its files."""
    steps: int = 1
    is_float64: bool = False
    """Whether it is computed in float64."""
    on_host: bool = False
    """Whether it is computed on the host's CPU, whatever accelerators there are."""
    rounding: float = 0.0
    """Relative size of the perturbation of every number of a float64 reference."""
    optimizer_rounding: float = 0.0
    """The same for the optimizer's weights and for constants, which are float32 in every precision."""
    draw: int = 0
    """Seed of the perturbation."""
    watched: bool = False
    """Whether the modules are watched."""
    inputs: str = ""
    """An .npz of samples for the network, instead of data; then no step is done."""
    randomise_zeros: bool = True
    """Whether zero-initialised weights are replaced by random ones."""

    @property
    def host(self) -> str:
        """Host of the steps, a value of ``--host``."""
        return self.value("--host") if "--host" in self.flags else "standalone"

    def value(self, flag: str) -> str:
        """Return the value after ``flag``."""
        return self.flags[self.flags.index(flag) + 1]

    def write(self, arrays: Arrays, rank: int) -> None:
        """Write the results of a rank; only rank 0 writes the arrays that are the same on all ranks."""
        written = {n: a for n, a in arrays.items() if rank == 0 or not n.startswith(_ALIKE)}
        np.savez(f"{self.output}.rank{rank}.npz", **written)  # type: ignore[arg-type]

    def refuse(self, error: UserError) -> None:
        """Write the reason why there are no results."""
        Path(f"{self.output}.refused").write_text(error.formatted, encoding="utf-8")


def sample_indices_of(
    args: RunConfig, steps: int, rank: int, ranks: int, dealt: Callable[..., Iterator[np.ndarray]] = micro_batches
) -> np.ndarray:
    """Return the sample indices of a rank, (steps, samples); ``ranks``: the number of data-parallel ranks.

    dealt: how a step's samples are dealt to micro-batches (``DataSet.micro_batches``).
    """
    rounds = args.global_batch_size // (args.micro_batch_size * ranks)
    batches = dealt(0, args.micro_batch_size, rank, ranks, rounds)
    return np.concatenate([next(batches) for _ in range(steps * rounds)]).reshape(steps, -1)


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    """Write the tasks of a process."""
    path.write_text(json.dumps([asdict(task) for task in tasks]), encoding="utf-8")


def read_tasks(path: str | Path) -> list[Task]:
    """Return the tasks that ``write_tasks`` wrote."""
    tasks = json.loads(Path(path).read_text(encoding="utf-8"))
    return [Task(**{**each, "flags": tuple(each["flags"])}) for each in tasks]


@dataclass(frozen=True)
class StepResult:
    """The results of steps in one layout, from all its ranks."""

    arrays: Arrays
    """``grad_norm`` and ``seconds``, (steps,); ``gradient/PARAMETER``, ``model/PARAMETER`` and ``ema/PARAMETER`` of the
    first step; for a float64 reference ``start/PARAMETER``, the weights before it. ``facts``: versions and device as
    JSON."""
    losses: Sequence[np.ndarray]
    """Losses of each step, (samples,), in the order of the run."""
    watched: Arrays
    """Inputs and outputs of the modules, by sample, in the order in which they were computed."""

    @property
    def quantities(self) -> Arrays:
        """Losses, norms and gradients by their names in the table."""
        steps = range(1, len(self.losses) + 1)
        return {
            **{f"loss/{n}": self.losses[n - 1] for n in steps},
            **{f"gradient norm/{n}": self.arrays["grad_norm"][n - 1 : n] for n in steps},
            **{name: array for name, array in self.arrays.items() if name.startswith("gradient/")},
        }

    @property
    def facts(self) -> dict[str, str]:
        """Versions and device."""
        facts: dict[str, str] = json.loads(str(self.arrays["facts"]))
        return facts

    @property
    def start(self) -> Arrays:
        """The weights before the first step; only a float64 reference has them."""
        return {name[6:]: array for name, array in self.arrays.items() if name.startswith("start/")}

    @classmethod
    def read(cls, task: Task) -> StepResult | str:
        """Return the results that the processes wrote, or the reason why they have none."""
        refused = Path(f"{task.output}.refused")
        if refused.is_file():
            return refused.read_text(encoding="utf-8")
        files = sorted(Path(task.output).parent.glob(f"{Path(task.output).name}.rank*.npz"))
        if not files:
            return ""
        ranks = [dict(np.load(file, allow_pickle=False)) for file in files]
        by_step = ([(rank["positions"][n], rank["losses"][n]) for rank in ranks] for n in range(task.steps))
        losses = [_by_sample_index(parts) for parts in by_step]
        first = [rank["positions"][0] for rank in ranks]
        names = [name for name in ranks[0] if name.startswith("watched/")]
        watched = {name[8:]: _joined(first, [rank[name] for rank in ranks], name) for name in names}
        return cls(ranks[0], losses, watched)


def _by_sample_index(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return values in the order of sample indices; if several ranks computed one, take the first rank's."""
    sample_indices, values = (np.concatenate(each) for each in zip(*parts))
    return values[np.unique(sample_indices, return_index=True)[1]]


def _joined(sample_indices: Sequence[np.ndarray], values: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Join the ranks' parts of one tensor: different samples, or token shards of the same samples.

    A rank averages gradients over its local samples only; they are rescaled to the mean over the whole batch.
    """
    if any(len(indices) != len(value) for indices, value in zip(sample_indices, values)):
        return values[0]  # not by sample
    groups: dict[int, list[np.ndarray]] = {}
    for indices, value in zip(sample_indices, values):
        groups.setdefault(int(indices[0]), []).append(value)
    shared = {first: each[0] if _same(each) else np.concatenate(each, 1) for first, each in groups.items()}
    scale = 1 / len(groups) if name.startswith(("watched/given", "watched/back")) else 1.0
    firsts = {int(indices[0]): indices for indices in sample_indices}
    return _by_sample_index([(firsts[first], value * scale) for first, value in shared.items()])


def _same(parts: Sequence[np.ndarray]) -> bool:
    return all(part.shape == parts[0].shape and np.allclose(part, parts[0], rtol=1e-2) for part in parts[1:])


ROOT = Path(__file__).resolve().parents[3]
"""Folder of the package and of pretrain_dit.py."""
WORKER = Path(__file__).with_name("worker.py")
"""Script that the processes run."""
PACKAGES = {"pytorch": "torch", "mindspore": "mindspore"}
VENVS = {"pytorch": ".venv", "mindspore": ".venv-mindspore"}
Pythons = Mapping[str, "str | UserError"]
"""Framework -> its interpreter, or why there is none; host that is not installed -> the reason."""
_START = "import sys; from mindspeed_mm_dit.training.launch import start; sys.exit(start(sys.argv[1], sys.argv[2:]))"

LEFT_OUT = tuple(
    """
    --save --load --init-from --tensorboard-dir --save-interval --eval-interval --eval-iters --log-interval
    --ai-framework --host --fsdp2-config-path --seed --mm-model --mm-data --mm-tool --report --use-torch-fsdp2
    --no-async-save --bf16
    """.split()
)
"""Flags that are decided here, and flags for things that a short run from fixed weights must not do."""


def run_tasks(
    ranks: int, framework: str, tasks: Sequence[Task], folder: Path, pythons: Pythons, script: Path = WORKER
) -> str:
    """Do ``tasks`` in ``ranks`` processes, started by the launcher of a run; return why they ended early, if they did.

    Their output goes to ``folder``, in a .log named after the first task.
    """
    python = pythons[framework]
    if isinstance(python, UserError):
        return str(python)
    listed = folder / f"{Path(tasks[0].output).name}.json"
    write_tasks(listed, tasks)
    path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", "")])
    command, log = ["-c", _START, framework, str(script), str(listed)], listed.with_suffix(".log")
    done = run_python(python, command, log, NPUS_PER_NODE=str(ranks), PATH=path)
    return last_words(done) if done.returncode else "its process ended without output"


def run_python(python: str, arguments: Sequence[str], log: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with this copy of the package on its path, and write its output to ``log``."""
    roots = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # (where plugins may be)
    environment = {**without_launch_variables(os.environ), "PYTHONPATH": os.pathsep.join(roots), **variables}
    done = subprocess.run(
        [python, *arguments], env=environment, text=True, stdin=subprocess.DEVNULL, capture_output=True
    )
    log.write_text(f"{shlex.join([python, *arguments])}\n{done.stdout}\n{done.stderr}", encoding="utf-8")
    return done


def interpreters(pytorch_python: str | None, mindspore_python: str | None) -> dict[str, str | UserError]:
    """Return an interpreter of each framework, or why there is none."""
    pythons: dict[str, str | UserError] = {}
    for framework, requested in (("pytorch", pytorch_python), ("mindspore", mindspore_python)):
        try:
            pythons[framework] = find_python(framework, requested)
        except PlatformError as error:
            pythons[framework] = error
    return pythons


def find_python(framework: str, requested: str | None) -> str:
    """Return an interpreter that has ``framework``; raises PlatformError if there is none.

    That is the requested one, or else this one, or else the one of .venv or .venv-mindspore in the working directory.
    """
    flag, package = f"--{framework}-python", PACKAGES[framework]
    if requested is not None:
        if not _has(requested, package):
            raise PlatformError(
                f"{flag} = {requested} cannot run, or has no package {package!r}. Name the python of an environment "
                "with it."
            )
        return requested
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    sibling = Path(VENVS[framework]).absolute() / "bin" / "python"
    if sibling.exists() and _has(str(sibling), package):
        return str(sibling)
    raise PlatformError(
        f"{flag} is needed, because neither {sys.executable} nor {sibling} has {package}. Name an interpreter with it."
    )


def project_flags(path: Path, left_out: Collection[str] = LEFT_OUT) -> list[str]:
    """Return the flags of a train.args, except those that are decided here, with their values."""
    words = [part for word in read_train_args(path, "--train-args") for part in word.split("=", 1)]
    included, is_included = list[str](), True
    for word in words:
        is_included = word not in left_out if word.startswith("--") else is_included
        included += [word] if is_included else []
    return included


def batch_size_of(flags: Sequence[str]) -> int:
    """Return the global batch size that ``flags`` set on one rank."""
    for name in ("--global-batch-size", "--micro-batch-size"):
        if name in flags:
            return int(flags[len(flags) - 1 - list(reversed(flags)).index(name) + 1])
    raise ConfigError("train.args has neither --micro-batch-size nor --global-batch-size. Pass --batch-size.")


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the reason a process gave: the error it ended with, or else its last line."""
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return f"exit code {done.returncode}: {(named or lines or ['no output'])[-1]}"


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


NUDGE = 0.05
"""Standard deviation of the values that replace zero-initialised weights, behind which no error would show."""
_PARTS = re.compile(r"|\w+|\w+\.\d+|\w+\.\d+\.\w+")
"""Names of modules that are watched. In a list such as ``blocks``, these are each item and its direct parts: small
enough to locate an error, and few enough for a disk."""


def measure(model: ModelConfig, weights: Path, inputs: Path) -> dict[str, np.ndarray]:
    """Return losses and gradients of a network on the samples of an .npz, and its modules' inputs and outputs."""
    from safetensors.numpy import load_file

    from mindspeed_mm_dit.framework import ops, runtime
    from mindspeed_mm_dit.tools.verify.reference.file import OptimizerStep

    process = runtime.to_runtime_device(objective_of(model.diffusion).build(model.diffusion))
    network = build_predictor(model)
    runtime.load_arrays(network, load_file(weights))
    network = runtime.to_runtime_device(network)
    with np.load(inputs) as file:
        tensors = runtime.to_device(dict(file))
    latents, draws = tensors["latents"], [tensors[name] for name in process.draw_names]
    condition = [tensors[name] for name in tensors if name not in ("latents", *process.draw_names)]

    def losses(network: Any) -> Any:
        noised = process.add_noise(latents, *draws)
        return process.loss(ops.to_float32(network(noised, draws[0], *condition)), latents, noised, *draws)

    watch = ModuleRecorder(network, lambda name: bool(_PARTS.fullmatch(name)))
    step = OptimizerStep(lambda: network, losses)
    arrays = {f"gradient/{name}": gradient for name, gradient in step.gradients.items()}
    arrays |= {f"watched/{name}": values for name, values in watch.end().items()}
    samples = np.arange(len(step.losses))[None]
    return {**arrays, "losses": step.losses[None], "positions": samples, "grad_norm": step.grad_norm[None]}


def draw_inputs(config: ModelConfig, seed: int, count: int) -> dict[str, np.ndarray]:
    """Generate ``count`` samples, at least 2: latents, noise, times from data to noise, and labels.

    The last label is the unconditional class.
    """
    numbers = np.arange(count)
    noise = normals(seed, Stream.NOISE, numbers, config.latent_shape)
    return {
        "latents": normals(seed, Stream.SAMPLE_START, numbers, config.latent_shape),
        **objective_of(config.diffusion).draws_at(config.diffusion, numbers / (count - 1), noise),
        **config.predictor.conditions.examples(count),
    }


def weights_of(model: ModelConfig, checkpoint: str | None, seed: int) -> Mapping[str, np.ndarray]:
    """Return the weights of a checkpoint of any format; without one, a run's initial weights, with no zeros."""
    if checkpoint is not None:
        return read_source(checkpoint, model.predictor).weights
    initial = initial_weights(parameters_of(model.predictor), seed)
    return {name: randomize_zeros(name, value, seed) for name, value in initial.items()}


def write_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write the initial weights of the processes."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, path)


def randomize_zeros(name: str, value: np.ndarray, seed: int) -> np.ndarray:
    """Return ``value``, or random values if it is all zero, because no error shows behind zeros."""
    if value.any():
        return value
    draw = philox((seed, zlib.crc32(name.encode())))
    return draw.standard_normal(value.shape, np.float32) * np.float32(NUDGE)


def facts() -> dict[str, str]:
    """Return the versions and the device of this process."""
    from mindspeed_mm_dit.framework import runtime

    machine = {"device": runtime.device_name(), "system": platform.platform()}
    return {"mindspeed_mm_dit": __version__, **runtime.versions(), "python": platform.python_version(), **machine}


def facts_as_array() -> np.ndarray:
    """Return :func:`facts` as an array, for a file of arrays."""
    return np.array(json.dumps(facts()))

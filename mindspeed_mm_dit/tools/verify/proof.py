"""A whole proof: the config that all layouts share, the processes that compute them, and the verdicts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm_dit.checkpoint.adapting import digest_of_base
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config, spelled_out
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.yaml_file import read_yaml
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework.exits import USER_ERROR
from mindspeed_mm_dit.framework.host_memory import host_memory_bytes
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.examples import weights_of, write_weights
from mindspeed_mm_dit.tools.verify.layouts import RECOMPUTED, UNITS, WATCHED_BY, Layout
from mindspeed_mm_dit.tools.verify.processes import (
    HOSTED,
    LEFT_OUT,
    OURS,
    Pythons,
    batch_size_of,
    project_flags,
    run_tasks,
)
from mindspeed_mm_dit.tools.verify.prove import DRAWS, ROUNDINGS, Crashed, Reference64, Verdict
from mindspeed_mm_dit.tools.verify.task import Taken, Task

SAMPLES = 16
"""Global batch of a proof: each of 4 ranks has 2 micro-batches of 2 samples."""
_DECIDED_HERE = (
    *LEFT_OUT, "--torch-compile", "--pynative", "--tf32", "--context-parallel-size", "--lr-warmup-iters",
    "--lr-decay-style", "--ema-decay", "--micro-batch-size",
)  # fmt: skip
SETTINGS = ("--lr-decay-style", "constant", "--ema-decay", "0.5")
"""Flags that a proof sets so that the first step moves weights and EMA by more than float32 rounding."""
WEIGHTS = "weights.safetensors"
REFERENCE_BYTES = 72
"""Bytes per parameter of a step in float64: the weight, a perturbed one, its gradient, a perturbed one, two moments and
the EMA, and two copies of what is written."""
Say = Callable[[str], None]
TruthTasks = dict[tuple[bool, tuple[str, ...]], dict[str, list[Task]]]
"""Layout.truth -> the task of the truth (key ""), and the tasks that measure rounding (key: precision)."""


@dataclass(frozen=True)
class Config:
    """What all layouts share."""

    folder: Path
    """Holds the model.json that is proved, the initial weights, and the files that the processes write."""
    model: ModelConfig
    data: str
    fsdp2: Mapping[str, Any]
    """Content of fsdp2.yaml."""
    flags: Sequence[str]
    """The user's flags."""
    samples: int
    """Global batch size."""
    steps: int
    about: Mapping[str, str]
    """What was proved, for the report."""

    @property
    def weights(self) -> Path:
        """The file of initial weights of all layouts."""
        return self.folder / WEIGHTS

    def task(self, layout: Layout, name: str, watched: bool = False, **truth: Any) -> Task:
        """Return the task of computing ``layout``; ``truth``: fields of the task."""
        micro = self.samples * layout.sharing // (layout.ranks * layout.micro_batches)
        flags = [
            *("--ai-framework", layout.framework, "--host", layout.host),
            *("--mm-model", str(self.folder / "model.json"), "--mm-data", self.data),
            *self.flags, *SETTINGS, *layout.what, *layout.flags, "--init-from", str(self.weights),
            *("--global-batch-size", str(self.samples), "--micro-batch-size", str(micro)),
        ]  # fmt: skip
        if layout.sharding is not None:
            flags += ["--use-torch-fsdp2", "--fsdp2-config-path", str(self._sharding(layout))]
        flags += WATCHED_BY.get(layout.framework, ()) if watched else ()
        return Task(tuple(flags), str(self.folder / name), self.steps, watched=watched, **truth)

    def _sharding(self, layout: Layout) -> Path:
        """Write the fsdp2.yaml of a layout: the user's, with the keys that the layout sets."""
        blocks = [f"predictor.{stem}.{{*}}" for stem in parameters_of(self.model).block_prefixes]
        asked = {"param_dtype": "fp32", "reduce_dtype": "fp32", **(layout.sharding or {})}
        recomputed = asked.pop(RECOMPUTED, None)
        content = {"sub_modules_to_wrap": blocks, **self.fsdp2, RECOMPUTED: blocks if recomputed else None, **asked}
        path = self.folder / f"{layout.stem}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path


def open_config(given: Path, folder: Path, checkpoint: str | None, is_whole: bool, steps: int) -> Config:
    """Read the config folder ``given`` and write its model, narrowed unless ``is_whole``, and weights into ``folder``.

    Raises:
        UserError: the folder lacks a file, or one of them is wrong.
    """
    model = load_model_config(str(given / "model.json"))
    content = spelled_out(read_json(str(given / "model.json"), "CONFIG"), str(given / "model.json"))
    flags = project_flags(given / "train.args", _DECIDED_HERE)
    small = model if is_whole or checkpoint else _narrowed(model)
    if small != model:
        content["predictor"] = dataclasses.asdict(small.predictor)
    (folder / "model.json").write_text(json.dumps(content), encoding="utf-8")
    _check_memory(small)
    weights = weights_of(small, checkpoint, _seed(flags))
    write_weights(folder / WEIGHTS, weights)
    sharding = given / "fsdp2.yaml"
    fsdp2 = read_yaml(sharding, "--fsdp2-config-path") or {} if sharding.is_file() and small == model else {}
    return Config(
        folder, small, str(given / "data.json"), fsdp2, [*flags, "--seed", str(_seed(flags))],
        samples=batch_size_of(flags) if is_whole else SAMPLES, steps=steps,
        about={
            "config": str(given), "model": _said(model, small),
            "weights": checkpoint or "drawn from the seed; what begins as zero is drawn too, for it would hide errors",
            "digest of the weights": digest_of_base(weights)[:16], "steps": str(steps),
        },
    )  # fmt: skip


def _narrowed(model: ModelConfig) -> ModelConfig:
    """Return a narrower copy of the model; ``model`` itself if the copy would have the same weights."""
    small = replace(model, predictor=model.predictor.reduced_width())
    return model if parameters_of(small.predictor).shapes() == parameters_of(model.predictor).shapes() else small


def _check_memory(model: ModelConfig) -> None:
    """Raise ConfigError if this machine has too little memory for a step of the model in float64."""
    need, there = parameters_of(model.predictor).num_elements() * REFERENCE_BYTES, host_memory_bytes()
    if need > there:
        raise ConfigError(
            "--full", f"a step in float64 needs {need / 2**30:.1f} GiB, and this machine has {there / 2**30:.1f} GiB",
            "leave --full and --checkpoint out: a narrowed copy is proved then",
        )  # fmt: skip


def prove(config: Config, layouts: Sequence[Layout], pythons: Pythons, echo: Say) -> list[Verdict]:
    """Compute the truths and every layout, and judge each layout; run wrong ones again to find where they differ."""
    verdicts = [_verdict(*each) for each in _taken(config, layouts, pythons, echo)]
    wrong = {verdict.layout.stem: verdict for verdict in verdicts if verdict.wrong}
    if not wrong:
        return verdicts
    echo(f"{len(wrong)} layout(s) are wrong: running them again to find where")
    again = _taken(replace(config, steps=1), [each.layout for each in wrong.values()], pythons, echo, watched=True)
    located = {layout.stem: _located(wrong[layout.stem], taken, truth) for layout, taken, truth in again}
    return [located.get(verdict.layout.stem, verdict) for verdict in verdicts]


def _verdict(layout: Layout, taken: Taken | str, truth: Reference64 | str) -> Verdict:
    if isinstance(taken, str) or isinstance(truth, str):
        return Verdict(layout, reason=taken if isinstance(taken, str) else f"its truth: {truth}")
    return Verdict(layout, truth.judge(layout, taken), taken=taken)


def _located(verdict: Verdict, taken: Taken | str, truth: Reference64 | str) -> Verdict:
    if isinstance(taken, str) or isinstance(truth, str):
        return verdict
    return replace(verdict, where=truth.first_wrong(verdict, taken))


def _taken(
    config: Config, layouts: Sequence[Layout], pythons: Pythons, echo: Say, watched: bool = False
) -> list[tuple[Layout, Taken | str, Reference64 | str]]:
    """Take the steps of every layout; return each with its results and its truth, or the reasons why there are none."""
    asked = reference_tasks(config, layouts, watched)
    truth = Layout("the truth in float64, and its rounding")
    tasks = {task.output: (truth, task) for each in asked.values() for own in each.values() for task in own}
    own = [(each, config.task(each, each.stem + watched * "-watched", watched)) for each in layouts]
    found = _compute(config, tasks | {task.output: (each, task) for each, task in own}, pythons, echo)
    truths = truths_of(asked, found)
    return [(each, found[task.output], truths[each.truth]) for each, task in own]


def reference_tasks(config: Config, layouts: Sequence[Layout], watched: bool = False) -> TruthTasks:
    """Return the tasks that compute each ``Layout.truth``, and its rounding in the layouts' precisions."""
    asked: TruthTasks = {}
    for layout in layouts:
        own, one = asked.setdefault(layout.truth, {}), Layout("truth", what=layout.what)
        stem = f"truth{list(asked).index(layout.truth)}{watched * '-watched'}"
        how = {"is_truth": True, "on_host": layout.against_host}
        own.setdefault("", [config.task(one, stem, watched, **how)])
        sizes = {"rounding": ROUNDINGS * UNITS[layout.precision], "kept": ROUNDINGS * UNITS["float32"]}
        names = [f"{stem}-{layout.precision}-{draw}" for draw in range(DRAWS)]
        own.setdefault(layout.precision, [config.task(one, name, watched, draw=draw, **how, **sizes)
                                          for draw, name in enumerate(names)])  # fmt: skip
    return asked


def truths_of(
    asked: TruthTasks, found: Mapping[str, Taken | str]
) -> dict[tuple[bool, tuple[str, ...]], Reference64 | str]:
    """Return each truth from the results of its tasks, or the reason why there is none."""
    truths: dict[tuple[bool, tuple[str, ...]], Reference64 | str] = {}
    for key, tasks in asked.items():
        taken = {precision: [found[task.output] for task in own] for precision, own in tasks.items()}
        refused = [each for each in itertools.chain(*taken.values()) if isinstance(each, str)]
        (exact,) = taken.pop("")
        truths[key] = refused[0] if refused else Reference64(exact, taken)  # type: ignore[arg-type]
    return truths


def _compute(
    config: Config, asked: Mapping[str, tuple[Layout, Task]], pythons: Pythons, echo: Say
) -> dict[str, Taken | str]:
    """Do the tasks, with one launch for each number of ranks; return the results, or why there are none."""
    found: dict[str, Taken | str] = {}
    for own in _by_processes(asked):
        (one, _), tasks = next(iter(own.values())), {output: task for output, (_, task) in own.items()}
        is_ours = one.host == "standalone"
        if isinstance(absent := pythons.get(one.host), UserError):
            found |= dict.fromkeys(own, str(absent))
            continue
        names = dict.fromkeys(layout.name for layout, _ in own.values())
        echo(f"{one.framework} on {one.ranks} rank(s): {', '.join(names)}")
        while tasks:
            script = OURS if is_ours else HOSTED
            why = run_tasks(one.ranks, one.framework, list(tasks.values()), config.folder, pythons, script)
            done = {output: taken for output, task in tasks.items() if (taken := Taken.read(task))}
            missing = [output for output in tasks if output not in done]
            found |= done
            if missing and (done or not (is_ours or why.startswith(f"exit code {USER_ERROR}:"))):
                found[missing[0]] = Crashed(f"its process crashed: {why}")
            else:  # the others would not begin either
                found |= dict.fromkeys(missing, why)
            tasks = {output: tasks[output] for output in missing[1:]} if done else {}
    return found


def _by_processes(asked: Mapping[str, tuple[Layout, Task]]) -> Iterable[dict[str, tuple[Layout, Task]]]:
    """Group the tasks by the processes that do them; a host that is not ours needs a launch for each task."""
    groups: dict[object, dict[str, tuple[Layout, Task]]] = {}
    for output, (layout, task) in asked.items():
        key = (layout.framework, layout.ranks, task.on_host) if layout.host == "standalone" else output
        groups.setdefault(key, {})[output] = layout, task
    return groups.values()


def _said(model: ModelConfig, proved: ModelConfig) -> str:
    count = f"{parameters_of(proved.predictor).num_elements():,} parameters"
    if proved == model:
        return f"whole: {count}"
    whole = parameters_of(model.predictor)
    changed = [
        f"{field.name} {getattr(model.predictor, field.name)} -> {getattr(proved.predictor, field.name)}"
        for field in dataclasses.fields(proved.predictor)
        if getattr(model.predictor, field.name) != getattr(proved.predictor, field.name)
    ]
    return f"NARROWED to {count} of {whole.num_elements():,} ({', '.join(changed)}); --full proves it whole"


def _seed(flags: Sequence[str]) -> int:
    return int(flags[flags.index("--seed") + 1]) if "--seed" in flags else 1234

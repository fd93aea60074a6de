"""A whole verification: the config that all layouts share, the processes that compute them, and the verdicts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm_dit.checkpoint.adapting import base_digest
from mindspeed_mm_dit.configs.files import read_yaml
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config, spelled_out
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.framework.exits import USER_ERROR
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.processes import (
    LEFT_OUT,
    WORKER,
    Pythons,
    StepResult,
    Task,
    batch_size_of,
    project_flags,
    run_tasks,
    weights_of,
    write_weights,
)
from mindspeed_mm_dit.tools.verify.prove import (
    DRAWS,
    RECOMPUTED,
    ROUNDINGS,
    UNITS,
    WATCHED_BY,
    CrashedLayout,
    Layout,
    Reference64,
    Verdict,
)

SAMPLES = 16
"""Global batch size of a verification: each of 4 ranks has 2 micro-batches of 2 samples."""
_OVERRIDDEN = (
    *LEFT_OUT,
    *"--torch-compile --pynative --tf32 --context-parallel-size --lr-warmup-iters --lr-decay-style".split(),
    *("--ema-decay", "--micro-batch-size"),
)
SETTINGS = ("--lr-decay-style", "constant", "--ema-decay", "0.5")
"""Flags that a verification sets so that the first step moves weights and EMA by more than float32 rounding."""
WEIGHTS = "weights.safetensors"
REFERENCE_BYTES = 72
"""Bytes per parameter of a step in float64: the weight, a perturbed one, its gradient, a perturbed one, two moments and
the EMA, and two copies of what is written."""
Echo = Callable[[str], None]
ReferenceKey = tuple[bool, tuple[str, ...]]
"""``Layout.reference_key``: layouts with the same key are compared with the same reference."""
ReferenceTasks = dict[ReferenceKey, dict[str, list[Task]]]
"""Key -> the task of the float64 reference (key ""), and the tasks that measure rounding noise (key: precision)."""


@dataclass(frozen=True)
class Config:
    """What all layouts share."""

    folder: Path
    """Holds the model.json that is verified, the initial weights, and the files that the processes write."""
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
    """What was verified, for the report."""

    @property
    def weights(self) -> Path:
        """The file of initial weights of all layouts."""
        return self.folder / WEIGHTS

    def task(self, layout: Layout, name: str, watched: bool = False, **reference: Any) -> Task:
        """Return the task of computing ``layout``; ``reference``: fields of the task of a float64 reference."""
        micro = self.samples * layout.context_parallel // (layout.ranks * layout.micro_batches)
        flags = [
            *("--ai-framework", layout.framework, "--host", layout.host),
            *("--mm-model", str(self.folder / "model.json"), "--mm-data", self.data),
            *(*self.flags, *SETTINGS, *layout.what, *layout.flags, "--init-from", str(self.weights)),
            *("--global-batch-size", str(self.samples), "--micro-batch-size", str(micro)),
        ]
        if layout.sharding is not None:
            flags += ["--use-torch-fsdp2", "--fsdp2-config-path", str(self._sharding(layout))]
        flags += WATCHED_BY.get(layout.framework, ()) if watched else ()
        return Task(tuple(flags), str(self.folder / name), self.steps, watched=watched, **reference)

    def _sharding(self, layout: Layout) -> Path:
        """Write the fsdp2.yaml of a layout: the user's, with the keys that the layout sets."""
        blocks = [f"predictor.{stem}.{{*}}" for stem in parameters_of(self.model).block_prefixes]
        settings = {"param_dtype": "fp32", "reduce_dtype": "fp32", **(layout.sharding or {})}
        recomputed = settings.pop(RECOMPUTED, None)
        content = {"sub_modules_to_wrap": blocks, **self.fsdp2, RECOMPUTED: blocks if recomputed else None, **settings}
        path = self.folder / f"{layout.stem}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path


def open_config(source: Path, folder: Path, checkpoint: str | None, is_whole: bool, steps: int) -> Config:
    """Read the config folder ``source``; write its model and weights into ``folder``.

    The model is a copy of reduced width unless ``is_whole``.

    Raises:
        UserError: the folder lacks a file, or one of them is wrong.
    """
    model = load_model_config(str(source / "model.json"))
    content = spelled_out(read_json(str(source / "model.json"), "CONFIG"), str(source / "model.json"))
    flags = project_flags(source / "train.args", _OVERRIDDEN)
    small = model if is_whole or checkpoint else _with_reduced_width(model)
    if small != model:
        content["predictor"] = dataclasses.asdict(small.predictor)
    (folder / "model.json").write_text(json.dumps(content), encoding="utf-8")
    _check_memory(small)
    weights = weights_of(small, checkpoint, _seed(flags))
    write_weights(folder / WEIGHTS, weights)
    sharding = source / "fsdp2.yaml"
    fsdp2 = read_yaml(sharding, "--fsdp2-config-path") or {} if sharding.is_file() and small == model else {}
    about = {
        "config": str(source),
        "model": _model_summary(model, small),
        "weights": checkpoint or "random from the seed, also those that start at zero",
        "digest of the weights": base_digest(weights)[:16],
        "steps": str(steps),
    }
    flags, samples = [*flags, "--seed", str(_seed(flags))], batch_size_of(flags) if is_whole else SAMPLES
    return Config(folder, small, str(source / "data.json"), fsdp2, flags, samples, steps, about)


def _with_reduced_width(model: ModelConfig) -> ModelConfig:
    """Return a copy of the model with reduced width; ``model`` itself if the copy would have the same weights."""
    small = replace(model, predictor=model.predictor.reduced_width())
    return model if parameters_of(small.predictor).shapes() == parameters_of(model.predictor).shapes() else small


def _check_memory(model: ModelConfig) -> None:
    """Raise ConfigError if this machine has too little memory for a step of the model in float64."""
    need, there = parameters_of(model.predictor).num_elements() * REFERENCE_BYTES, host_memory_bytes()
    if need > there:
        raise ConfigError(
            f"A step of this model in float64 needs {need / 2**30:.1f} GiB, and this machine has {there / 2**30:.1f} "
            "GiB. Leave out --full and --checkpoint, and a copy of reduced width is verified."
        )


def prove(config: Config, layouts: Sequence[Layout], pythons: Pythons, echo: Echo) -> list[Verdict]:
    """Compute the float64 references and every layout, and judge each layout; rerun wrong ones to locate the error."""
    verdicts = [_verdict(*each) for each in _run_layouts(config, layouts, pythons, echo)]
    wrong = {verdict.layout.stem: verdict for verdict in verdicts if verdict.wrong}
    if not wrong:
        return verdicts
    echo(f"{len(wrong)} layout(s) are wrong: running them again to locate the error")
    again = _run_layouts(
        replace(config, steps=1), [each.layout for each in wrong.values()], pythons, echo, watched=True
    )
    located = {layout.stem: _located(wrong[layout.stem], result, reference) for layout, result, reference in again}
    return [located.get(verdict.layout.stem, verdict) for verdict in verdicts]


def _verdict(layout: Layout, result: StepResult | str, reference: Reference64 | str) -> Verdict:
    if isinstance(result, str) or isinstance(reference, str):
        return Verdict(layout, reason=result if isinstance(result, str) else f"its float64 reference: {reference}")
    return Verdict(layout, reference.judge(layout, result), result=result)


def _located(verdict: Verdict, result: StepResult | str, reference: Reference64 | str) -> Verdict:
    if isinstance(result, str) or isinstance(reference, str):
        return verdict
    return replace(verdict, where=reference.first_wrong(verdict, result))


def _run_layouts(
    config: Config, layouts: Sequence[Layout], pythons: Pythons, echo: Echo, watched: bool = False
) -> list[tuple[Layout, StepResult | str, Reference64 | str]]:
    """Run every layout; return each with its result and its float64 reference, or the reasons why there are none."""
    requests = reference_tasks(config, layouts, watched)
    reference = Layout("the float64 reference and its rounding noise")
    groups = (group for by_precision in requests.values() for group in by_precision.values())
    tasks = {task.output: (reference, task) for group in groups for task in group}
    layout_tasks = [(each, config.task(each, each.stem + watched * "-watched", watched)) for each in layouts]
    results = _compute(config, tasks | {task.output: (each, task) for each, task in layout_tasks}, pythons, echo)
    references = references_from(requests, results)
    return [(each, results[task.output], references[each.reference_key]) for each, task in layout_tasks]


def reference_tasks(config: Config, layouts: Sequence[Layout], watched: bool = False) -> ReferenceTasks:
    """Return the tasks that compute each float64 reference, and its rounding noise in the layouts' precisions."""
    requests: ReferenceTasks = {}
    for layout in layouts:
        group, single = requests.setdefault(layout.reference_key, {}), Layout("float64 reference", what=layout.what)
        stem = f"reference{list(requests).index(layout.reference_key)}{watched * '-watched'}"
        settings = {"is_float64": True, "on_host": layout.cpu_reference}
        group.setdefault("", [config.task(single, stem, watched, **settings)])
        sizes = {"rounding": ROUNDINGS * UNITS[layout.precision], "optimizer_rounding": ROUNDINGS * UNITS["float32"]}
        names = [f"{stem}-{layout.precision}-{draw}" for draw in range(DRAWS)]
        group.setdefault(
            layout.precision,
            [config.task(single, name, watched, draw=draw, **settings, **sizes) for draw, name in enumerate(names)],
        )
    return requests


def references_from(
    requests: ReferenceTasks, results: Mapping[str, StepResult | str]
) -> dict[ReferenceKey, Reference64 | str]:
    """Return each float64 reference from the results of its tasks, or the reason why there is none."""
    references: dict[ReferenceKey, Reference64 | str] = {}
    for key, tasks in requests.items():
        by_precision = {precision: [results[task.output] for task in group] for precision, group in tasks.items()}
        refused = [each for each in itertools.chain(*by_precision.values()) if isinstance(each, str)]
        (exact,) = by_precision.pop("")
        references[key] = refused[0] if refused else Reference64(exact, by_precision)  # type: ignore[arg-type]
    return references


def _compute(
    config: Config, requests: Mapping[str, tuple[Layout, Task]], pythons: Pythons, echo: Echo
) -> dict[str, StepResult | str]:
    """Do the tasks, with one launch for each number of ranks; return the results, or why there are none."""
    results: dict[str, StepResult | str] = {}
    for group in _by_processes(requests):
        (first, _), tasks = next(iter(group.values())), {output: task for output, (_, task) in group.items()}
        is_ours = first.host == "standalone"
        if isinstance(absent := pythons.get(first.host), UserError):
            results |= dict.fromkeys(group, str(absent))
            continue
        names = dict.fromkeys(layout.name for layout, _ in group.values())
        echo(f"{first.framework} on {first.ranks} rank(s): {', '.join(names)}")
        while tasks:
            reason = run_tasks(first.ranks, first.framework, list(tasks.values()), config.folder, pythons, WORKER)
            done = {output: result for output, task in tasks.items() if (result := StepResult.read(task))}
            missing = [output for output in tasks if output not in done]
            results |= done
            if missing and (done or not (is_ours or reason.startswith(f"exit code {USER_ERROR}:"))):
                results[missing[0]] = CrashedLayout(f"its process crashed: {reason}")
            else:  # the others would not start either
                results |= dict.fromkeys(missing, reason)
            tasks = {output: tasks[output] for output in missing[1:]} if done else {}
    return results


def _by_processes(requests: Mapping[str, tuple[Layout, Task]]) -> Iterable[dict[str, tuple[Layout, Task]]]:
    """Group the tasks by the processes that do them; a host that is not ours needs a launch for each task."""
    groups: dict[object, dict[str, tuple[Layout, Task]]] = {}
    for output, (layout, task) in requests.items():
        key = (layout.framework, layout.ranks, task.on_host) if layout.host == "standalone" else output
        groups.setdefault(key, {})[output] = layout, task
    return groups.values()


def _model_summary(model: ModelConfig, proved: ModelConfig) -> str:
    count = f"{parameters_of(proved.predictor).num_elements():,} parameters"
    if proved == model:
        return f"whole: {count}"
    whole = parameters_of(model.predictor)
    changed = [
        f"{field.name} {getattr(model.predictor, field.name)} -> {getattr(proved.predictor, field.name)}"
        for field in dataclasses.fields(proved.predictor)
        if getattr(model.predictor, field.name) != getattr(proved.predictor, field.name)
    ]
    return f"REDUCED to {count} of {whole.num_elements():,} ({', '.join(changed)}); --full verifies it whole"


def _seed(flags: Sequence[str]) -> int:
    return int(flags[flags.index("--seed") + 1]) if "--seed" in flags else 1234

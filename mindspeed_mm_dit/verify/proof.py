"""A whole proof: the config folder that all layouts share, the processes that compute them, and what was found."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config, spelled_out
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.yaml_file import read_yaml
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework.host_memory import host_memory_bytes
from mindspeed_mm_dit.training.exit_codes import USER_ERROR
from mindspeed_mm_dit.verify.examples import weights_of, write_weights
from mindspeed_mm_dit.verify.layouts import RECOMPUTED, UNITS, WATCHED_BY, Layout
from mindspeed_mm_dit.verify.processes import HOSTED, LEFT_OUT, OURS, Pythons, batch_size_of, own_flags, run_tasks
from mindspeed_mm_dit.verify.prove import DRAWS, ROUNDINGS, Crashed, Truth, Verdict
from mindspeed_mm_dit.verify.task import Taken, Task

SAMPLES = 16
"""Of the global batch of a proof: each of 4 ranks has 2 micro-batches of 2."""
_DECIDED_HERE = (
    *LEFT_OUT, "--torch-compile", "--pynative", "--tf32", "--context-parallel-size", "--lr-warmup-iters",
    "--lr-decay-style", "--ema-decay", "--micro-batch-size",
)  # fmt: skip
SETTINGS = ("--lr-decay-style", "constant", "--ema-decay", "0.5")
"""What a proof sets: the first step moves weights and average by more than float32 rounds them."""
WEIGHTS = "weights.safetensors"
TRUTH_BYTES = 72
"""Of each parameter: in float64 the weight, one moved, its gradient and one moved, two moments, the average; and two
copies of what is written."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Config:
    """What all layouts share."""

    folder: Path
    """Holds the model.json that is proved, the weights that all begin with, and what the processes write."""
    model: ModelConfig
    data: str
    fsdp2: Mapping[str, Any]
    """Content of fsdp2.yaml."""
    flags: Sequence[str]
    """The user's."""
    samples: int
    """Of the global batch."""
    steps: int
    about: Mapping[str, str]
    """What was proved, for the report."""

    @property
    def weights(self) -> Path:
        """What all layouts begin with."""
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
        """Write the fsdp2.yaml of a layout: the user's, with what the layout is about."""
        blocks = f"predictor.{self.model.predictor.parameters().stem}.{{*}}"
        asked = {"param_dtype": "fp32", "reduce_dtype": "fp32", **(layout.sharding or {})}
        recomputed = asked.pop(RECOMPUTED, None)
        content = {"sub_modules_to_wrap": [blocks], **self.fsdp2, RECOMPUTED: [blocks] if recomputed else None, **asked}
        path = self.folder / f"{layout.stem}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path


def open_config(given: Path, folder: Path, checkpoint: str | None, is_whole: bool, steps: int) -> Config:
    """Return what the config folder ``given`` asks for, in files of ``folder``; narrowed unless it ``is_whole``.

    Raises:
        UserError: the folder lacks a file, or one of them is wrong.
    """
    from mindspeed_mm_dit.checkpoint.adapting import digest_of_base

    model = load_model_config(str(given / "model.json"))
    content = spelled_out(read_json(str(given / "model.json"), "CONFIG"), str(given / "model.json"))
    flags = own_flags(given / "train.args", _DECIDED_HERE)
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
    """Return a narrowed copy; ``model`` itself where no weight of it would be left out."""
    small = replace(model, predictor=model.predictor.narrowed())
    return model if small.predictor.parameters().shapes() == model.predictor.parameters().shapes() else small


def _check_memory(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose step in float64 this machine has no memory for."""
    need, there = model.predictor.parameters().num_elements() * TRUTH_BYTES, host_memory_bytes()
    if need > there:
        raise ConfigError(
            "--full", f"a step in float64 needs {need / 2**30:.1f} GiB, and this machine has {there / 2**30:.1f} GiB",
            "leave --full and --checkpoint out: a narrowed copy is proved then",
        )  # fmt: skip


def prove(config: Config, layouts: Sequence[Layout], pythons: Pythons, say: Say) -> list[Verdict]:
    """Compute every layout, and judge it; for each number of ranks the processes of one launcher do them in turn."""
    found = _compute(config, layouts, pythons, say)
    truths = truths_of(config, layouts, pythons, say)
    verdicts = [_verdict(layout, found[layout.stem], truths) for layout in layouts]
    wrong = [verdict.layout for verdict in verdicts if verdict.wrong]
    if not wrong:
        return verdicts
    say(f"{len(wrong)} layout(s) are wrong: looking where")
    once = replace(config, steps=1)
    watched = truths_of(once, wrong, pythons, say, watched=True)
    again = _compute(once, wrong, pythons, say, watched=True)
    return [_located(verdict, again.get(verdict.layout.stem), watched) for verdict in verdicts]


def _verdict(layout: Layout, taken: Taken | str, truths: Mapping[tuple[str, ...], Truth | str]) -> Verdict:
    truth = truths.get(layout.what, "there is no truth without PyTorch")
    if isinstance(taken, str) or isinstance(truth, str):
        return Verdict(layout, reason=taken if isinstance(taken, str) else f"its truth: {truth}")
    return Verdict(layout, truth.judge(layout, taken), taken=taken)


def _located(verdict: Verdict, taken: Taken | str | None, truths: Mapping[tuple[str, ...], Truth | str]) -> Verdict:
    truth = truths.get(verdict.layout.what)
    if not isinstance(taken, Taken) or not isinstance(truth, Truth):
        return verdict
    return replace(verdict, where=truth.first_wrong(verdict, taken))


def truths_of(
    config: Config, layouts: Sequence[Layout], pythons: Pythons, say: Say, watched: bool = False
) -> dict[tuple[str, ...], Truth | str]:
    """Compute the truth of each thing that the layouts compute, and its rounding in their precisions."""
    say("the truth, in float64, and its rounding")
    asked = {each.what: {other.precision for other in layouts if other.what == each.what} for each in layouts}
    tasks = {
        (what, precision): _truth_tasks(config, what, f"truth{number}-{precision}", precision, watched)
        for number, (what, precisions) in enumerate(asked.items())
        for precision in ("", *sorted(precisions))
    }
    why = run_tasks(1, "pytorch", list(itertools.chain(*tasks.values())), config.folder, pythons)
    truths: dict[tuple[str, ...], Truth | str] = {}
    for what, precisions in asked.items():
        found = {each: [Taken.read(task) or why for task in tasks[what, each]] for each in ("", *precisions)}
        refused = [taken for taken in itertools.chain(*found.values()) if isinstance(taken, str)]
        (exact,) = found.pop("")
        truths[what] = refused[0] if refused else Truth(exact, found)  # type: ignore[arg-type]
    return truths


def _truth_tasks(config: Config, what: tuple[str, ...], name: str, precision: str, watched: bool) -> list[Task]:
    """Return the task of a truth, or those of its rounding in a ``precision``."""
    one, name = Layout("truth", what=what), f"{name}-watched" if watched else name
    if not precision:
        return [config.task(one, name, is_truth=True, watched=watched)]
    sizes = {"rounding": ROUNDINGS * UNITS[precision], "kept": ROUNDINGS * UNITS["float32"]}
    return [
        config.task(one, f"{name}-{draw}", is_truth=True, watched=watched, draw=draw, **sizes) for draw in range(DRAWS)
    ]


def _compute(
    config: Config, layouts: Sequence[Layout], pythons: Pythons, say: Say, watched: bool = False
) -> dict[str, Taken | str]:
    """Take the steps of every layout; what was seen of it, or why nothing was."""
    found: dict[str, Taken | str] = {}
    for own in _by_processes(layouts):
        ranks, framework, is_ours = own[0].ranks, own[0].framework, own[0].host == "standalone"
        if isinstance(absent := pythons.get(own[0].host), UserError):
            found |= {each.stem: str(absent) for each in own}
            continue
        say(f"{framework} on {ranks} rank(s): {', '.join(each.name for each in own)}")
        tasks = {each.stem: config.task(each, each.stem + watched * "-watched", watched=watched) for each in own}
        while tasks:
            why = run_tasks(ranks, framework, list(tasks.values()), config.folder, pythons, OURS if is_ours else HOSTED)
            done = {stem: taken for stem, task in tasks.items() if (taken := Taken.read(task))}
            missing = [stem for stem in tasks if stem not in done]
            found |= done
            if missing and (done or not (is_ours or why.startswith(f"exit code {USER_ERROR}:"))):
                found[missing[0]] = Crashed(f"its process crashed: {why}")
            else:  # nor will the others begin
                found |= dict.fromkeys(missing, why)
            tasks = {stem: tasks[stem] for stem in missing[1:]} if done else {}
    return found


def _by_processes(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """Return the layouts that the same processes compute; those of a host that is not ours begin once."""
    groups: dict[object, list[Layout]] = {}
    for each in layouts:
        groups.setdefault((each.framework, each.ranks) if each.host == "standalone" else each.stem, []).append(each)
    return list(groups.values())


def _said(model: ModelConfig, proved: ModelConfig) -> str:
    count = f"{proved.predictor.parameters().num_elements():,} parameters"
    if proved == model:
        return f"whole: {count}"
    whole = model.predictor.parameters()
    changed = [
        f"{field.name} {getattr(model.predictor, field.name)} -> {getattr(proved.predictor, field.name)}"
        for field in dataclasses.fields(proved.predictor)
        if getattr(model.predictor, field.name) != getattr(proved.predictor, field.name)
    ]
    return f"NARROWED to {count} of {whole.num_elements():,} ({', '.join(changed)}); --full proves it whole"


def _seed(flags: Sequence[str]) -> int:
    return int(flags[flags.index("--seed") + 1]) if "--seed" in flags else 1234

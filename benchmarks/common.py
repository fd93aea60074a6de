"""Shared parts of the benchmarks: interleaved timing, medians, and a dated result file."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.sampling.pipeline import Pipeline
from mindspeed_mm_dit.training.pytorch.engine import Engine

RESULTS = Path(os.environ.get("RESULTS", Path(__file__).parent / "results"))


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Seconds that pass, or seconds of this process on a core: the one to use with OMP_NUM_THREADS=1 on a busy CPU."""


def engine_flags(**changes: object) -> RunConfig:
    """Return the flags an Engine reads, as in the published training, with ``changes``."""
    published = {"seed": 0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0,
                 "ema_decay": 0.9999, "clip_grad": 0.0}  # fmt: skip
    return RunConfig.of({**published, **changes})


class Training:
    """A network of ours that learns batches from memory, with an average of its weights over the last steps."""

    def __init__(self, model: Mapping[str, Any], batch: int, seed: int, **flags: object) -> None:
        self.pipe, self.seed, self.steps = Pipeline.untrained(model_config_from_mapping(model, "model"), seed), seed, 0
        runtime.initialize(None, batch, batch)
        self._engine = Engine(self.pipe.model, engine_flags(**{"seed": seed, "clip_grad": 1.0, **flags}), None)
        self.ema = self._engine.ema

    def step(self, pixels: np.ndarray, labels: np.ndarray, lr: float, averaged: float) -> None:
        """Learn (B, C, H, W) uint8 of classes (B,); the average is over the last ``averaged`` of all steps."""
        self.steps += 1

        def forward_step(_: Any, __: Any) -> tuple[Any, Any]:
            losses = self.pipe.loss(pixels, labels, step=self.steps, seed=self.seed)
            return losses, lambda own: (own.mean(), {"loss": own.detach().mean()})

        self.ema.decay = 1 - min(1.0, 1 / (averaged * self.steps))
        self._engine.train_step(forward_step, iter(()), lr)


class Lines:
    """A file of results, a line of JSON each, to which an interrupted or later call adds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return the lines that have what is ``wanted``."""
        return [line for line in self.all if all(line.get(key) == value for key, value in wanted.items())]

    def add(self, **line: Any) -> None:
        """Keep a line."""
        self.all.append(line)
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)


RESULT, PEAK, FIRST = "result", "peak bytes", "first result"


class Apart:
    """A contestant in a process of its own, as its users run it: ``build(*args)`` is called there, when it is first
    needed, and returns the call to time. What one side sets for its process does not reach the other."""

    def __init__(self, build: Callable[..., Callable[[], object]], *args: object) -> None:
        self._build, self._args, self._process, self._peak = build, args, None, 0
        self._first: float | None = None

    def timed(self, clock: str) -> float:
        """Return the seconds of one call."""
        return float(self._call_model(clock))

    def result(self) -> Any:
        """Return what one call returns, and end the process: what it had of an accelerator is free."""
        found = self._call_model(RESULT)
        self.end()
        return found

    def end(self) -> None:
        """End the process, if it has not ended."""
        if self._process is None:
            return
        self._peak, self._first = self.peak_bytes(), self.first()
        self._pipe.close()
        self._process.join()
        self._process = None

    def peak_bytes(self) -> int:
        """Return the most memory of the accelerator that its calls had at once; 0 on a CPU."""
        return self._peak if self._process is None else int(self._call_model(PEAK))

    def first(self) -> float | None:
        """Return the number that its first call returned; None if it has not been called or returned none."""
        return self._first if self._process is None else self._call_model(FIRST)

    def _call_model(self, what: str) -> Any:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(theirs, self._build, self._args), daemon=True)
            self._process.start()
            theirs.close()  # so that a process that ends is noticed
        self._pipe.send(what)
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            sys.exit("a contestant ended; its error stands above")


def _serve(pipe: Connection, build: Callable[..., Callable[[], object]], args: tuple[object, ...]) -> None:
    call, first = build(*args), None
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return  # the benchmark is over
        if asked == RESULT:
            pipe.send(call())
        elif asked == PEAK:
            kind = runtime.device_type()
            pipe.send(0 if kind == "cpu" else torch.get_device_module(kind).max_memory_allocated())
        elif asked == FIRST:
            pipe.send(first)
        else:
            returned = call()  # as in a run, where one comes after another
            first = returned if first is None and isinstance(returned, float) else first
            pipe.send(timed(call, asked))


def order() -> str:
    """Return in words how :func:`interleave` goes through its contestants."""
    return "rounds interleaved" if runtime.device_type() == "cpu" else "one side after the other"


def interleave(
    contestants: Mapping[str, Apart | Callable[[], object]], rounds: int, warm_up: int = 1, clock: str = "wall"
) -> dict[str, list[float]]:
    """Time each contestant once a round, in turn, so that other load on the machine falls on all alike.

    An accelerator has not room for all of them: there one ends before the next begins.
    Returns the seconds of every round by name, on one of CLOCKS; the order within a round alternates.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    turns = [(n, name) for n in range(-warm_up, rounds) for name in list(contestants)[:: 1 if n % 2 else -1]]
    if runtime.device_type() != "cpu":
        turns = [(n, name) for name in contestants for n in range(-warm_up, rounds)]
    for number, name in turns:
        contestant = contestants[name]
        took = contestant.timed(clock) if isinstance(contestant, Apart) else timed(contestant, clock)
        if number >= 0:
            seconds[name].append(took)
        if number == rounds - 1 and isinstance(contestant, Apart):
            contestant.end()
    return seconds


def timed(call: Callable[[], object], clock: str = "wall") -> float:
    """Return the seconds ``call`` takes, the device's work included."""
    synchronize()
    started = CLOCKS[clock]()
    call()
    synchronize()
    return CLOCKS[clock]() - started


def processor() -> str:
    """Return the model of the processor and what it has for bfloat16, which decides ratios on a CPU; Linux only."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return ""
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    units = [unit for unit in ("avx512_bf16", "amx_bf16") if unit in fields.get("flags", "").split()]
    return f", {fields.get('model name', 'unknown')} ({', '.join(units) or 'no bfloat16 units'})"


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if runtime.device_type() != "cpu":
        torch.accelerator.synchronize()


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how many times faster ours is: the median over rounds of theirs / ours of the same round."""
    return statistics.median(b / a for a, b in zip(ours, theirs))


class Report:
    """A Markdown file of results: what ran, where, and the raw figures."""

    def __init__(self, name: str, title: str) -> None:
        self.path = RESULTS / f"{date.today():%Y-%m-%d}-{name}.md"
        versions = ", ".join(f"{package} {version}" for package, version in runtime.versions().items())
        self._out = io.StringIO()
        command = " ".join(["python", *map(shlex.quote, [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])])
        self.echo(f"# {title}\n\n    {_without_paths(command)}\n")
        machine = f"{runtime.device_name()}{processor()}"
        self.echo(f"{date.today():%Y-%m-%d}, {machine}, Python {platform.python_version()}, {versions}.\n")

    def echo(self, text: str = "") -> None:
        """Print a line, and keep it."""
        print(text, flush=True)
        print(text, file=self._out)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print and keep a table."""
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (headings, ["---"] * len(headings), *rows)]
        self.echo("\n".join(lines) + "\n")

    def raw(self, seconds: dict[str, list[float]]) -> None:
        """Keep the seconds of every round."""
        for name, values in seconds.items():
            self.echo(f"    {name}: " + " ".join(f"{value:.4f}" for value in values))

    def save(self) -> None:
        """Write the file."""
        RESULTS.mkdir(exist_ok=True)
        self.path.write_text(self._out.getvalue(), encoding="utf-8")
        print(f"written to {self.path}")


def _without_paths(command: str) -> str:
    """A command as others would type it: folders of this machine shortened to their last part."""
    return " ".join(Path(word).name if word.startswith("/") else word for word in command.split(" "))


@contextlib.contextmanager
def reference_checkout(path: str) -> Iterator[None]:
    """Import from a checkout of facebookresearch/DiT: its modules ``models`` and ``diffusion``."""
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)

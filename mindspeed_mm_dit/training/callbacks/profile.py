"""--profile: trace some steps of some ranks with the framework's profiler."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.terminal import logger
from mindspeed_mm_dit.training.callbacks.registry import Callback, CallbackSpec, Run, Step


class Profiling(Callback):
    """Records the steps after --profile-step-start up to --profile-step-end, on the ranks of --profile-ranks."""

    def __init__(self, args: RunConfig) -> None:
        folder, ranks = folder_of(args), args.profile_ranks
        self._is_on = not ranks or runtime.rank() in ranks
        self._first, self._last = args.profile_step_start, args.profile_step_end
        self._path = folder and folder / f"rank_{runtime.rank()}_steps_{self._first + 1}-{self._last}"
        self._recording: runtime.Profiler | None = None

    def before_step(self, run: Run) -> None:
        """Begin if the first of the steps comes next; a run resumed in the middle records the rest."""
        iteration = run.progress.iteration
        if self._is_on and self._path and self._recording is None and self._first <= iteration < self._last:
            self._recording = runtime.Profiler(self._path)

    def after_step(self, run: Run, step: Step) -> None:
        """End after the last of the steps, and print where the trace is."""
        if self._recording is not None and run.progress.iteration >= self._last:
            self._write()

    def at_end(self, run: Run) -> None:
        """End with the run."""
        self._write()

    def _write(self) -> None:
        """Write the recording; if the disk fails, the trace is lost and the run continues."""
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        try:
            logger.info(f"profile of rank {runtime.rank()}: {recording.stop()}")
        except OSError as error:
            logger.info(f"warning: --profile: {self._path} cannot be written: {error}; the run goes on")


def folder_of(args: RunConfig) -> Path | None:
    """Return the folder of the traces: next to the --save folder, or in the TensorBoard folder; None without either."""
    if args.save:
        return Path(args.save).parent / "profile"
    board = args.parts["tensorboard_dir"]
    return Path(board) / "profile" if board else None


def check_profile(args: RunConfig, world_size: int) -> None:
    """Raise ConfigError for --profile with no steps to record, ranks that do not exist, or nowhere to write to."""
    if not args.profile:
        return
    start, end = args.profile_step_start, args.profile_step_end
    if not start < end:
        raise ConfigError(f"--profile-step-end = {end} must be more than --profile-step-start ({start}).")
    if start >= args.train_iters:
        raise ConfigError(f"--profile-step-start = {start} must be less than --train-iters = {args.train_iters}.")
    for rank in args.profile_ranks:
        if rank >= world_size:
            raise ConfigError(f"--profile-ranks has {rank}, but there are {world_size} rank(s), numbered from 0.")
    if folder_of(args) is None:
        raise ConfigError("--profile has nowhere to write a trace. Add --save DIR or --tensorboard-dir DIR.")


def _writes(args: RunConfig) -> tuple[str, Path] | None:
    folder = folder_of(args)
    return ("--profile", folder) if args.profile and folder is not None else None


KIND = CallbackSpec("profile", lambda run: Profiling(run.args) if run.args.profile else None, check_profile, _writes)

"""Runs of a script forked off a process that has made its imports once: a fifth of the CPU of a start.

What a run is given, and what is seen of it, is as with ``subprocess``: arguments, environment, working directory,
output, exit code, signals, what is registered with atexit. Only the imports are not its own, and objects are not freed
at its end: a test about the start or end itself starts a process, and a run with other variables that are read while
PyTorch is imported is started too.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.framework.exits import die_with_parent, without_launch_variables

READ_BY_IMPORTS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "PYTHON", "LD_", "MALLOC_",
                   "CUDA_", "ASCEND_", "AI_FRAMEWORK", "NON_MEGATRON", "PATH", "VIRTUAL_ENV")  # fmt: skip
"""Beginnings of the names of variables that decide what an import finds or sets up."""
PATIENCE_SECONDS = 1200
"""What takes longer is taken to hang, on a slow or busy machine too; on a quiet one nothing takes a tenth of it."""


ROOT = Path(__file__).resolve().parents[1]
DEVICE = str(ROOT / "tests" / "mock_accelerator")
GPUS = os.environ.get("MM_DIT_TEST_GPUS", "")
"""The GPUs that tests may use, as in CUDA_VISIBLE_DEVICES; none by default."""
_APART, _CALLERS = DEVICE in sys.path, os.environ.get("PYTHONPATH", "")
PATH = os.pathsep.join([str(ROOT), *([DEVICE] if _APART else []), *([_CALLERS] if GPUS else [])])
"""Where runs find packages: `make test-device` has them find a device apart, and beside a GPU the caller says more."""


class StartedProcesses(list[Any]):
    """The processes of the test under way; ``total`` counts those of all tests."""

    total = 0

    def append(self, process: Any) -> None:
        super().append(process)
        self.total += 1


STARTED = StartedProcesses()
"""What is left of them ends with the test."""
FORKED_CPU_SECONDS: list[float] = []
"""What each forked run that has ended took, its children included; :mod:`tests.durations` adds them up."""


class Forked:
    """A run under way, with what the tests use of ``subprocess.Popen``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: str, imported="standalone"):
        """Fork ``python script ...`` or ``python -m module ...`` where ``imported`` is imported already."""
        names = [name for name in dir(resource) if name.startswith("RLIMIT_")]  # which a process inherits
        limits = {name: resource.getrlimit(getattr(resource, name)) for name in names}
        request = {"argv": list(command), "environ": dict(environment), "folder": folder, "limits": limits}
        (read, write), (self._status, status) = os.pipe(), os.pipe()
        socket.send_fds(_server(command[0], environment, imported), [json.dumps(request).encode()], [write, status])
        os.close(write)
        os.close(status)
        self.stdout = open(read, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.returncode: int | None = None
        self._reading = threading.Lock()
        self.pid = int(self._line(None) or 0)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired("a forked run", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what it prints from now on, once it has ended."""
        said, end = b"", None if timeout is None else time.monotonic() + timeout
        while select.select([self.stdout], [], [], None if end is None else max(0, end - time.monotonic()))[0]:
            part = os.read(self.stdout.fileno(), 1 << 16)
            if not part:
                self.wait(timeout)
                return said.decode("utf-8", "replace"), None
            said += part
        raise subprocess.TimeoutExpired("a forked run", timeout or 0, said)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, timeout: float | None) -> int | None:
        if self._reading.acquire(blocking=timeout != 0):  # else another thread waits for it, and will say
            try:
                if self.returncode is None and (line := self._line(timeout)) is not None:
                    code, cpu_seconds = line.split()
                    self.returncode = int(code)
                    FORKED_CPU_SECONDS.append(float(cpu_seconds))
                    os.close(self._status)
            finally:
                self._reading.release()
        return self.returncode

    def _line(self, timeout: float | None) -> str | None:
        """Return the next line of the process that waits for the run; None where there is none in time."""
        if not select.select([self._status], [], [], timeout)[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            assert byte, "the process that runs are forked off has ended"
            line += byte
        return line.decode()


def launch(command: Sequence[str], environment: Mapping[str, str], folder: str) -> Any:
    """Fork a run where that is the same as to start it, else start it; return it, with its output as one text."""
    if can_fork(command, environment):
        # Whoever tests what reads texts has imported it, and his runs would: a process of its own, 5 s of CPU.
        return Forked(command, environment, folder, "texts" if "transformers" in sys.modules else "standalone")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, cwd=folder, text=True, **pipes)


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a run can be forked: of this Python, on PyTorch, with the imports that are there."""
    names = {name for name in {*os.environ, *environment} if name.startswith(READ_BY_IMPORTS)} - {"PYTHONPATH"}
    same = all(_variables().get(name) == environment.get(name) for name in names)
    ours = command[1].endswith(".py") or command[1:3] == ["-m", "mindspeed_mm_dit.cli.main"]
    is_pytorch = "mindspore" not in command and os.environ.get("MM_DIT_TEST_FRAMEWORK", "pytorch") == "pytorch"
    return same and command[0] == sys.executable and ours and is_pytorch and not GPUS  # (CUDA does not survive a fork)


_servers: dict[tuple[int, str, str], socket.socket] = {}


def _variables() -> dict[str, str]:
    """Return the environment that the imports are made in: that of ``launch.py``'s runs."""
    return {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": GPUS}


def _server(python: str, environment: Mapping[str, str], imported: str) -> socket.socket:
    """Return the way to the process that runs are forked off; each process of tests has its own."""
    if imported in ("standalone", "texts", "libraries"):
        environment = _variables()
    if imported == "mindspore":
        environment = {**without_launch_variables(environment), "PYTHONPATH": str(ROOT)}
    key = (os.getpid(), environment["PYTHONPATH"], imported)
    if key not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, "-m", "tests.forked", str(theirs.fileno()), imported]
            server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, cwd=ROOT)  # fmt: skip
        _servers[key] = ours
        atexit.register(_end, ours, server)
    return _servers[key]


def _end(way: socket.socket, server: subprocess.Popen) -> None:
    way.close()
    server.wait()


# --- the process that runs are forked off ------------------------------------------------------------------------


def _import_all(*names: str) -> None:
    for name in names:
        importlib.import_module(name)


def _import_for_the_old_route() -> None:
    """Import what MindSpeed-MM's old route imports before it reads its command line, as it is imported itself."""
    _import_all("diffusers", "torch", "torch_npu", "transformers")


def _import_for_the_engine() -> None:
    """Import what a run in MindSpeed-MM's native engine needs."""
    os.environ["NON_MEGATRON"] = "true"
    _import()
    _import_all("mindspeed_mm.fsdp.train.trainer", "peft")


IN_RUNS = (
    "PIL.Image", "tensorboardX", *("mindspeed_mm_dit." + name for name in (
        "hosts.registry", "hosts.standalone", "models.composite", "models.dit", "models.video_transformer",
        "objectives.flow.process", "objectives.gaussian.process", "objectives.wan_flow.process", "planning",
        "sampling.pictures", "training.contract", "training.report", "training.callbacks.registry",
    )),
)  # fmt: skip
"""What a run imports sooner or later, on either framework."""


def _import() -> None:
    """Import what a run of pretrain_dit.py needs, and nothing that decides anything."""
    from mindspeed_mm_dit import framework

    # The first by the first use of a shard: half a second of each rank.
    _import_all("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp")
    framework.activate("pytorch")
    _import_all(*IN_RUNS, "mindspeed_mm_dit.training.pytorch.engine")


def _import_for_texts() -> None:
    """Import what reads captions and makes states of them, too."""
    _import()
    from transformers import AutoTokenizer, BertModel, CLIPTextModel, T5EncoderModel, UMT5EncoderModel

    del AutoTokenizer, BertModel, CLIPTextModel, T5EncoderModel, UMT5EncoderModel
    with contextlib.suppress(ImportError):  # requirements/video.txt
        importlib.import_module("av")


def _import_for_mindspore() -> None:
    """Import what a run of pretrain_dit.py on MindSpore needs, in its own environment."""
    from mindspeed_mm_dit import framework

    framework.activate("mindspore")
    _import_all(*IN_RUNS, "mindspeed_mm_dit.training.mindspore.engine")


def _import_libraries() -> None:
    """Import what tests of any copy of this project need, and nothing of the project itself."""
    _import_all("hypothesis", "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp")
    for name in [name for name in sys.modules if name.startswith(("mindspeed_mm_dit", "tests"))]:
        del sys.modules[name]
    sys.dont_write_bytecode = True  # of a copy that changes


def _serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request; return the arguments, in that process alone."""
    while True:
        asked, (*descriptors,), _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not asked:  # who asks has ended, and what it has left running ends with this process
            os._exit(0)
        if os.fork() == 0 and _is_run(descriptors[1]):
            requests.close()
            return _become(json.loads(asked), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _is_run(status: int) -> bool:
    """Fork once more; return True in the new process, while the one before waits for its end and tells it."""
    die_with_parent(signal.SIGKILL)
    run = os.fork()
    if run == 0:
        die_with_parent(signal.SIGKILL)
        return True
    os.closerange(3, status)
    os.closerange(status + 1, 1024)
    os.write(status, f"{run}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.write(status, f"{code} {used.ru_utime + used.ru_stime:.3f}\n".encode())
    os._exit(0)


def _become(request: dict, output: int, status: int) -> list[str]:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    _add_to_path(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return request["argv"]


def _add_to_path(folders: list[str]) -> None:
    """Have this process find what stands in other folders of PYTHONPATH too, and do what they do to every start."""
    new = [folder for folder in folders if folder not in sys.path]
    sys.path[1:1] = new
    for folder in new:
        if (start := Path(folder, "sitecustomize.py")).is_file():
            runpy.run_path(str(start))


IMPORTS = {"standalone": _import, "texts": _import_for_texts, "mindspore": _import_for_mindspore,
           "libraries": _import_libraries, "old route": _import_for_the_old_route,
           "engine": _import_for_the_engine}  # fmt: skip


def _run(command: list[str]) -> None:
    """Be the process of a command: of a script, or of a module where it begins with -m."""
    if command[0] == "-m":
        sys.argv, sys.path[0] = command[1:], os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, os.path.dirname(command[0])
        runpy.run_path(command[0], run_name="__main__")


def _run_to_the_end(command: list[str]) -> None:
    """Do the same, and note what Python ends with after it."""
    try:
        _run(command)
        ENDED.append(0)
    except SystemExit as end:
        ENDED.append(end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None))
        raise
    except KeyboardInterrupt:
        ENDED.append(-signal.SIGINT)
        raise


ENDED: list[int] = []
"""The exit code of the run, once it has one; a signal's number, negated."""


def _leave() -> None:
    """End the process without freeing each object first, which takes longer than a short run."""
    sys.stdout.flush()
    sys.stderr.flush()
    code = ENDED[0] if ENDED else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    atexit.register(_leave)  # first, and so called last
    IMPORTS[sys.argv[2]]()
    gc.freeze()  # no run looks through what it will not free: to touch it would be to copy it
    _run_to_the_end(_serve(socket.socket(fileno=int(sys.argv[1])))[1:])

"""Compile the device once an environment, and keep it by the digest of its source."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
NAME = "mock_accelerator"


def can_build() -> bool:
    """Return whether the device is compiled already, or can be."""
    return _library().exists() or bool(shutil.which("g++"))


def extension() -> ModuleType:
    """Return the compiled device; the first time this takes some minutes of CPU."""
    library = _library()
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _library() -> Path:
    """Return where this source's library is, or will be."""
    text = b"".join(path.read_bytes() for path in _sources(".cpp", ".h"))
    digest = hashlib.sha256(text + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    return Path(sys.prefix) / NAME / digest / f"{NAME}.so"


def _sources(*endings: str) -> list[Path]:
    return sorted(path for path in HERE.iterdir() if path.suffix in endings)


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

    include = [*include_paths(), sysconfig.get_path("include")]
    flags = [f"-DTORCH_EXTENSION_NAME={NAME}", "-std=c++20", "-fPIC", "-O1", "-w", *(f"-I{path}" for path in include)]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # of an older PyTorch, whose types are else unknown
        if value := getattr(torch._C, f"_PYBIND11_{name}", None):
            flags.append(f'-DPYBIND11_{name}="{value}"')
    with tempfile.TemporaryDirectory(dir=library.parent) as build, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {str(source): f"{build}/{source.stem}.o" for source in _sources(".cpp")}
        list(pool.map(lambda one: _gcc(*flags, "-c", one[0], "-o", one[1]), objects.items()))
        libraries = [f"-L{TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        _gcc("-shared", *objects.values(), *libraries, f"-Wl,-rpath,{TORCH_LIB_PATH}", "-o", f"{build}/{NAME}.so")
        Path(build, f"{NAME}.so").rename(library)


def _gcc(*arguments: str) -> None:
    subprocess.run(["g++", *arguments], check=True)

"""Open a million tiny images in shards: measure the time of the first scan and of later ones, and the memory.

    python benchmarks/shards.py FOLDER [--rows 1000000] [--kind parquet]

Shards of 10,000 rows are written to FOLDER unless they exist. Each scan runs in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import resource
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.images import ImageReader
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.data.shards import INDEX
from mindspeed_mm_dit.data.sources import SourceRequest, source_of

SHARD_ROWS, GROUP_ROWS, CLASSES = 10_000, 100, 1_000
PIXELS, DRAWN = 16, 2_000


def pictures() -> list[bytes]:
    """Return a thousand different JPEG files."""
    files = []
    for seed in range(CLASSES):
        content = io.BytesIO()
        pixels = np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), np.uint8)
        Image.fromarray(pixels).save(content, "JPEG")
        files.append(content.getvalue())
    return files


def write_parquet(path: Path, first: int, files: list[bytes]) -> None:
    """Write one shard in the hub's layout."""
    import pyarrow
    from pyarrow import parquet

    numbers = range(first, first + SHARD_ROWS)
    rows = [{"bytes": files[n % CLASSES], "path": f"{n}.jpg"} for n in numbers]
    table = pyarrow.table({"image": rows, "label": [n % CLASSES for n in numbers]})
    parquet.write_table(table, path, row_group_size=GROUP_ROWS)


def write_tar(path: Path, first: int, files: list[bytes]) -> None:
    """Write one shard in webdataset's layout."""
    with open(path, "wb") as shard:
        for n in range(first, first + SHARD_ROWS):
            for suffix, content in ((".cls", str(n % CLASSES).encode()), (".jpg", files[n % CLASSES])):
                member = tarfile.TarInfo(f"{n:08d}{suffix}")
                member.size = len(content)
                shard.write(member.tobuf() + content + bytes(-len(content) % 512))
        shard.write(bytes(1024))


WRITERS = {"parquet": (write_parquet, ".parquet"), "webdataset": (write_tar, ".tar")}


def look(folder: Path, kind: str) -> None:
    """Open the shards, read some pictures at random, and print what that took."""
    before, started = peak_mib(), (time.perf_counter(), time.process_time())
    param = DatasetParam(str(folder), PIXELS, dataset_type=kind)  # type: ignore[arg-type]
    index = source_of(param).open(param, SourceRequest(param.items, CLASSES))
    wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    memory = peak_mib() - before
    images = SampleOrder(len(index), seed=1).images(np.arange(DRAWN))
    reader, began = ImageReader(index, PIXELS, 3), time.process_time()
    for batch in np.split(images, DRAWN // 100):
        reader.read(batch, np.zeros(len(batch), bool))
    each = (time.process_time() - began) / DRAWN * 1e3
    print(
        f"{len(index):,} rows opened in {wall:.2f} s, {cpu:.2f} s of a core and {memory:.0f} MiB; then {each:.2f} ms "
        "of a core for a picture at random"
    )


def peak_mib() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Write, and look twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=tuple(WRITERS), default="parquet")
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.look:
        look(args.folder, args.kind)
        return
    write, suffix = WRITERS[args.kind]
    args.folder.mkdir(parents=True, exist_ok=True)
    files = pictures()
    for first in range(0, args.rows, SHARD_ROWS):
        path = args.folder / f"train-{first // SHARD_ROWS:05d}{suffix}"
        if not path.exists():
            write(path, first, files)
    (args.folder / INDEX).unlink(missing_ok=True)
    command = [sys.executable, __file__, str(args.folder), "--kind", args.kind, "--look"]
    for words in ("first look", "later look"):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"{args.kind}, {words}: {done.stdout}", end="", flush=True)


if __name__ == "__main__":
    main()

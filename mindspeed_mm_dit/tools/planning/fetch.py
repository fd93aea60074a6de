"""Fetch published weights: show size, licence and checksums, download with resume, and verify."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from mindspeed_mm_dit.configs.files import add_content, reason_of
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError, nearest
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.planning.hubs import HUBS, MIRRORS, Hub, Listing, Part, answer_of, part_file
from mindspeed_mm_dit.tools.planning.published import PUBLISHED, Published, folder_name

TRIES = 5
"""Attempts at a file that make no progress."""
WAIT_SECONDS = 1.0
_NOT_READ = re.compile(
    r"(^|/)(\.git|onnx|openvino)|\.(md|py|png|jpe?g|gif|webp|mp4|pdf|h5|msgpack|onnx|ot|tflite|gguf)$|\.(fp16|bf16|non_ema)\.",
    re.IGNORECASE,
)
"""Files of a repository that this project does not use."""
_PICKLE = re.compile(r"\.(bin|pth?|ckpt)$")


def published(name: str, hub: str | None) -> Published:
    """Return the record of ``name``, which may also be ``owner/name`` of a hub; raises ConfigError if it is neither."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        cure = f"{nearest(name, PUBLISHED)}mm-dit get lists the names; you can also give OWNER/NAME of a hub"
        raise ConfigError(f"mm-dit get {name}", "is an unknown model name", cure)
    return Published("", {hub or "huggingface": name})


def with_needs(names: list[str], hub: str | None) -> dict[str, Published]:
    """Return the records of ``names`` and of the models they depend on, by name."""
    records: dict[str, Published] = {}
    for name in names:
        records[name] = published(name, hub)
        records |= with_needs([need for need in records[name].needs if need not in records], hub)
    return records


def fetch(name: str, record: Published, hub: str | None, root: Path) -> None:
    """Download the files that ``root`` does not have yet.

    Raises:
        ConfigError: the model is not known to be on that hub.
        PlatformError: the hub cannot be reached or refuses, or the disk is too full.
        CheckpointError: a downloaded file does not match the hub's size or checksum.
    """
    hub_name = hub or next(iter(record.repos))
    if hub_name not in record.repos:
        raise ConfigError(f"--hub = {hub_name}", f"is not known to have {name}; {', '.join(record.repos)} has it",
                          f"name what it is called there: mm-dit get OWNER/NAME --hub {hub_name}")  # fmt: skip
    source, repo = HUBS[hub_name](), record.repos[hub_name]
    page, folder = source.page.format(endpoint=source.endpoint, repo=repo), root / folder_name(repo)
    with _refusals(name, page, folder):
        listing = source.listing(repo)
    parts = chosen(listing, record.files)
    if not parts:
        raise CheckpointError(f"mm-dit get {name}", f"{page} has no files {' '.join(record.files)}")
    echo(f"{name}: {page}, licence: {' '.join(str(listing.licence or 'none stated').split())}")
    for part in parts:
        echo(f"  {part.size / 1e6:10,.1f} MB  {part.path}  {part.digest or 'no digest stated'}")
    echo(f"  {sum(part.size for part in parts) / 1e6:10,.1f} MB  in {len(parts)} file(s), to {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be made a folder: {reason_of(error)}"
        raise PlatformError(f"--output = {folder}", reason, "name a folder that you can write to") from None
    missing = [part for part in parts if _difference(folder / part.path, part)]
    need = sum(part.size - _bytes_of(part_file(part, folder)) for part in missing)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise PlatformError(f"--output = {folder}", f"{need / 1e9:.1f} GB are to come, {free / 1e9:.1f} GB are free",
                            "name a folder on a larger disk")  # fmt: skip
    for part in missing:
        (folder / part.path).unlink(missing_ok=True)  # (a hub's client might take a damaged file for complete)
        with _refusals(name, page, folder, f"broke off {TRIES} times"):
            _fetch_whole(source, repo, listing.revision, part, folder)
        if difference := _difference(folder / part.path, part):
            (folder / part.path).unlink(missing_ok=True)
            raise CheckpointError(f"{folder / part.path}", f"is not what {page} states: {difference}; it was removed",
                                  "run the same command again, or use another mirror or hub")  # fmt: skip
    unstated = [part.path for part in parts if not part.digest]
    echo(f"checked: size and digest of {len(parts) - len(unstated)} file(s) in {folder}")
    if unstated:
        echo(f"not checked: the content of {', '.join(unstated)}, as the hub states no digest")


def chosen(listing: Listing, patterns: tuple[str, ...]) -> list[Part]:
    """Return the files to download; where a folder has .safetensors, its pickled weights are left out."""
    safe = {part.path.rpartition("/")[0] for part in listing.parts if part.path.endswith(".safetensors")}
    return [
        part
        for part in listing.parts
        if any(fnmatch(part.path, pattern) for pattern in patterns)
        and not _NOT_READ.search(part.path)
        and not (_PICKLE.search(part.path) and part.path.rpartition("/")[0] in safe and part.path not in patterns)
    ]


def _fetch_whole(source: Hub, repo: str, revision: str, part: Part, folder: Path) -> None:
    tries, longest = 0, -1
    while True:
        try:
            return source.fetch(repo, revision, part, folder)
        except Exception as error:
            size = _bytes_of(part_file(part, folder))
            tries, longest = (1, size) if size > longest else (tries + 1, longest)
            if answer_of(error)[0] is not None or tries == TRIES:
                raise
            if tries > 1:
                time.sleep(WAIT_SECONDS)


def _bytes_of(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _difference(file: Path, part: Part) -> str:
    """Describe how a file differs from the hub's listing; empty if it matches."""
    if not file.is_file():
        return "it is not there"
    if file.stat().st_size != part.size:
        return f"{file.stat().st_size:,} bytes, not {part.size:,}"
    kind, _, stated = part.digest.partition(":")
    digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size) if kind == "git" else hashlib.sha256()
    add_content(digest, file)
    return "" if digest.hexdigest().startswith(stated) else f"{kind} {digest.hexdigest()}, not {stated}"


@contextmanager
def _refusals(name: str, page: str, folder: Path, broken: str = "") -> Iterator[None]:
    """Translate errors of a hub to a PlatformError; ``broken``: the reason to give if it does not answer."""
    try:
        yield
    except Exception as error:
        status, wait = answer_of(error)
        again = "run the same command again: what came is kept"
        by_hand = f"fetch it by hand into {folder}; or name a mirror, {MIRRORS}"
        reason, cure = {
            None: (broken or "cannot be reached", again if broken else by_hand),
            401: ("is not there, or not for everyone", "with an account, set HF_TOKEN"),
            403: ("asks for consent to its licence", "give it there, and set HF_TOKEN"),
            404: ("is not there", ""),
            429: (f"asks to wait{f' {wait} seconds' if wait.isdigit() else ''}", f"wait, and {again}"),
        }.get(status, (f"answers with {status}", again if status and status >= 500 else by_hand))
        raise PlatformError(f"mm-dit get {name}", f"{page} {reason}", cure) from None

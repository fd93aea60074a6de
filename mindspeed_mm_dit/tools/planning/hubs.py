"""Download sources of published weights: the Hugging Face hub or a mirror, ModelScope, or the URL of a single file."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from mindspeed_mm_dit.configs.limits import MAX_INT64, shorten_repr
from mindspeed_mm_dit.errors import CheckpointError, PlatformError, not_installed
from mindspeed_mm_dit.terminal import plain, progress

MIRRORS = "HF_ENDPOINT=https://hf-mirror.com, or --hub modelscope"
CHUNK_BYTES = 2**16
"""Write size: at most this much is lost if a connection breaks."""
MAX_LISTING_BYTES = 2**26
PARTIAL_CONTENT = 206
_DIGITS = {"sha256": 64, "git": 40}
_DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.\w+$")
"""The beginning of the SHA-256, as in file names of PyTorch's hub."""


class HubFile(NamedTuple):
    """A file in a hub's listing."""

    path: str
    size: int
    """In bytes."""
    digest: str
    """``sha256:...``, or ``git:...`` (the blob id) of a small file; for a URL only the beginning. Empty if the hub
    states none."""


class Listing(NamedTuple):
    """A hub's listing of one repository."""

    revision: str
    licence: Any
    """As the hub states it; empty if it states none."""
    parts: list[HubFile]


class Hub(Protocol):
    """A source of published weights."""

    endpoint: str
    page: str
    """Web page of a repository, a format string with ``endpoint`` and ``repo``."""

    def listing(self, repo: str) -> Listing:
        """Return the files of a repository."""

    def fetch(self, repo: str, revision: str, part: HubFile, folder: Path) -> None:
        """Download a file to its path below ``folder``; resumes an interrupted download."""


class HuggingFace:
    """The Hugging Face hub, or the mirror that HF_ENDPOINT names."""

    page = "{endpoint}/{repo}/tree/main"

    def __init__(self) -> None:
        self.endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

    def listing(self, repo: str) -> Listing:
        from huggingface_hub.utils import build_hf_headers

        with tempfile.TemporaryFile() as file:
            address = f"{self.endpoint}/api/models/{repo}?blobs=True"
            _append(address, file, MAX_LISTING_BYTES, build_hf_headers(), lambda count: None)
            file.seek(0)
            content = file.read()
        with _parsing(address):
            info = json.loads(content)
            parts = [
                _part(each["rfilename"], each["size"], "sha256", each["lfs"]["sha256"])
                if each.get("lfs")
                else _part(each["rfilename"], each["size"], "git", each.get("blobId"))
                for each in info["siblings"]
            ]
            return Listing(_text(info["sha"]), (info.get("cardData") or {}).get("license"), parts)

    def fetch(self, repo: str, revision: str, part: HubFile, folder: Path) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        _fetch(hf_hub_url(repo, part.path, revision=revision, endpoint=self.endpoint), part, folder, build_hf_headers())


class Address:
    """A single file at a URL; the file name holds the beginning of its digest."""

    endpoint, page = "", "{repo}"

    def listing(self, repo: str) -> Listing:
        from huggingface_hub.utils import get_session

        answer = get_session().request("HEAD", repo, timeout=10)  # (follows redirects, of requests and of httpx)
        _check_status(answer)
        digest = _DIGEST_IN_NAME.search(repo)
        with _parsing(repo):
            part = _part(repo.rpartition("/")[2], int(answer.headers["Content-Length"]))
        return Listing("", "", [part._replace(digest=f"sha256:{digest[1]}" if digest else "")])

    def fetch(self, repo: str, revision: str, part: HubFile, folder: Path) -> None:
        _fetch(repo, part, folder, {})


class ModelScope:
    """ModelScope (modelscope.cn), through its own package."""

    page = "{endpoint}/models/{repo}/files"

    def __init__(self) -> None:
        try:
            from modelscope_hub import HubApi, HubConfig
        except ImportError:
            raise not_installed("--hub modelscope", "modelscope-hub", "modelscope") from None
        self._api: Any = HubApi()
        self.endpoint = str(HubConfig().endpoint)

    def listing(self, repo: str) -> Listing:
        with _parsing(self.page.format(endpoint=self.endpoint, repo=repo)):
            files = [file for file in self._api.list_repo_files(repo, "model") if not file.is_dir]
            parts = [_part(file.path, file.size, "sha256", file.sha256) for file in files]
            return Listing("master", self._api.get_repo(repo, "model").license, parts)

    def fetch(self, repo: str, revision: str, part: HubFile, folder: Path) -> None:
        self._api.download_file(repo, "model", part.path, revision=revision, local_dir=folder, file_size=part.size)


HUBS: dict[str, type[Hub]] = {"huggingface": HuggingFace, "modelscope": ModelScope, "address": Address}


class HubRefusal(OSError):
    """A hub's answer with a status other than success."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"answered with {response.status_code}")
        self.response = response


def _check_status(response: Any) -> None:
    if not 200 <= response.status_code < 300:
        raise HubRefusal(response)


@contextmanager
def _opened(address: str, headers: dict[str, str]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield the HTTP status and the chunks. huggingface_hub's session is one of requests, or of httpx from 1.0 on."""
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
    from huggingface_hub.utils import get_session

    session, options = get_session(), {"headers": headers, "timeout": HF_HUB_DOWNLOAD_TIMEOUT}
    if callable(session.stream):
        with session.stream("GET", address, **options) as response:
            _check_status(response)
            yield response.status_code, response.iter_bytes(CHUNK_BYTES)
    else:
        with session.get(address, stream=True, **options) as response:
            _check_status(response)
            yield response.status_code, response.iter_content(CHUNK_BYTES)


def _append(address: str, file: BinaryIO, most: int, headers: dict[str, str], update: Callable[[int], Any]) -> None:
    """Append the rest of ``address`` to ``file``; raises CheckpointError if that exceeds ``most`` bytes."""
    if start := file.tell():
        headers = {**headers, "Range": f"bytes={start}-"}
    with _opened(address, headers) as (status, chunks):
        if status != PARTIAL_CONTENT:  # the hub sends all of it
            _empty(file)
        for chunk in chunks:
            if file.tell() + len(chunk) > most:
                _empty(file)
                raise CheckpointError(
                    f"{address} sends more than the {most:,} bytes that it may have. Use another mirror or hub."
                )
            file.write(chunk)
            update(len(chunk))


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def partial_download(part: HubFile, folder: Path) -> Path:
    """Return the path of an incomplete download; the digest in it keeps versions apart."""
    return folder / f"{part.path}.{part.digest[-8:]}.part"


def _fetch(address: str, part: HubFile, folder: Path, headers: dict[str, str]) -> None:
    """Download ``part`` from ``address``; resumes an interrupted download."""
    aside = partial_download(part, folder)
    aside.parent.mkdir(parents=True, exist_ok=True)
    with open(aside, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlatformError(f"{aside} is being fetched by another process. Wait for it, and run again.") from None
        except OSError:
            pass  # a network disk without locks
        if file.tell() > part.size:
            _empty(file)
        try:
            if file.tell() < part.size:
                with progress(part.path, total=part.size, unit="byte", unit_scale=True) as bar:
                    bar.update(file.tell())
                    _append(address, file, part.size, headers, bar.update)
            if file.tell() < part.size:
                raise ConnectionError(f"{address} broke off")
        finally:
            if not file.tell() and part.size:
                aside.unlink()
    aside.replace(folder / part.path)


@contextmanager
def _parsing(address: str) -> Iterator[None]:
    """Context in which a hub's response is parsed: errors are reported as an invalid response."""
    try:
        yield
    except OSError:  # (the hubs' clients send further requests here, and some of their errors are ValueErrors too)
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{address} does not list files as a hub does ({type(error).__name__}: {error}). Name another mirror or "
            f"hub: {MIRRORS}."
        ) from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or plain(value) != value or {"\n", "\t"} & set(value):
        raise ValueError(f"{shorten_repr(value)} is no name")
    return value


def _part(path: Any, size: Any, kind: str = "", digest: Any = "") -> HubFile:
    """Return a validated entry of a hub's listing; raises ValueError or TypeError if it is invalid."""
    if {"", ".", ".."} & set(_text(path).split("/")):
        raise ValueError(f"the file {shorten_repr(path)} lies outside of the folder")
    if type(size) is not int or not 0 <= size <= MAX_INT64:
        raise ValueError(f"the size of {path} is {shorten_repr(size)}")
    if digest in (None, ""):
        return HubFile(path, size, "")
    if not re.fullmatch(f"[0-9a-fA-F]{{{_DIGITS[kind]}}}", digest):
        raise ValueError(f"the digest of {path} is {shorten_repr(digest)}, no {kind} of {_DIGITS[kind]} digits")
    return HubFile(path, size, f"{kind}:{digest.lower()}")


_OF_HUBS = ("modelscope_hub", "huggingface_hub", "httpx", "httpx2", "urllib3")
"""Packages whose errors come from a hub; huggingface_hub 1 uses httpx, 2 uses httpx2."""


def response_status(error: Exception) -> tuple[int | None, str]:
    """Return the HTTP status of a hub's response (None: no response), and its Retry-After in seconds.

    Raises ``error`` itself if it does not come from a hub, e.g. a full disk or a bug of ours. A UnicodeError is a
    redirect to an invalid host name.
    """
    of_hub = isinstance(error, (OSError, UnicodeError)) or type(error).__module__.partition(".")[0] in _OF_HUBS
    if not of_hub or getattr(error, "errno", None) is not None:
        raise error
    responses = [getattr(exception, "response", None) for exception in (error, error.__cause__)]
    response = next((response for response in responses if response is not None), None)
    status = getattr(response, "status_code", None) or getattr(error, "status_code", None)
    return status, getattr(response, "headers", {}).get("Retry-After", "")

"""Where published weights are fetched from: the Hugging Face hub or a mirror, ModelScope, or an address of one file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mindspeed_mm_dit.errors import not_installed

_DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.\w+$")
"""As PyTorch's hub names its files: the beginning of their SHA-256."""


class Part(NamedTuple):
    """A file, as a hub states it."""

    path: str
    size: int
    """In bytes."""
    digest: str
    """``sha256:...`` or, of a small file, ``git:...``, its name as a blob; perhaps only its beginning."""


class Listing(NamedTuple):
    """What a hub has under a name."""

    revision: str
    licence: str
    """Empty if none is stated."""
    parts: list[Part]


class Hub(Protocol):
    """A place that holds published weights."""

    endpoint: str
    page: str
    """Where a person finds the files, a format of ``endpoint`` and ``repo``."""

    def listing(self, repo: str) -> Listing:
        """Return what there is."""

    def fetch(self, repo: str, revision: str, part: Part, folder: Path) -> None:
        """Fetch a file to its path below ``folder``, from where an attempt before was broken off."""


class HuggingFace:
    """The Hugging Face hub, or the mirror that HF_ENDPOINT names."""

    page = "{endpoint}/{repo}/tree/main"

    def __init__(self) -> None:
        self.endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

    def listing(self, repo: str) -> Listing:
        from huggingface_hub import HfApi

        info = HfApi(endpoint=self.endpoint).model_info(repo, files_metadata=True)
        parts = [
            Part(file.rfilename, file.size or 0, f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}")
            for file in info.siblings or ()
        ]
        return Listing(str(info.sha), str(getattr(info.card_data, "license", None) or ""), parts)

    def fetch(self, repo: str, revision: str, part: Part, folder: Path) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(repo, part.path, revision=revision, local_dir=folder, endpoint=self.endpoint)


class Address:
    """A file at an address of its own; the name of the file holds the beginning of its digest."""

    endpoint, page = "", "{repo}"

    def listing(self, repo: str) -> Listing:
        from huggingface_hub.utils import get_session, hf_raise_for_status

        answer = get_session().request("HEAD", repo, timeout=10)  # (follows redirects, of requests and of httpx)
        hf_raise_for_status(answer)
        size, digest = int(answer.headers.get("Content-Length", 0)), _DIGEST_IN_NAME.search(repo)
        return Listing("", "", [Part(repo.rpartition("/")[2], size, f"sha256:{digest[1] if digest else ''}")])

    def fetch(self, repo: str, revision: str, part: Part, folder: Path) -> None:
        from huggingface_hub.file_download import http_get

        aside = folder / f"{part.path}.incomplete"
        with open(aside, "ab") as file:
            http_get(repo, file, resume_size=file.tell(), expected_size=part.size or None)
        aside.replace(folder / part.path)


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
        files = [file for file in self._api.list_repo_files(repo, "model") if not file.is_dir]
        licence = self._api.get_repo(repo, "model").license or ""
        return Listing("master", licence, [Part(file.path, file.size, f"sha256:{file.sha256 or ''}") for file in files])

    def fetch(self, repo: str, revision: str, part: Part, folder: Path) -> None:
        self._api.download_file(repo, "model", part.path, revision=revision, local_dir=folder, file_size=part.size)


HUBS: dict[str, type[Hub]] = {"huggingface": HuggingFace, "modelscope": ModelScope, "address": Address}


_OF_HUBS = ("modelscope_hub", "huggingface_hub", "httpx", "httpx2")
"""Packages whose errors tell of a hub; huggingface_hub 1 asks by httpx, 2 by httpx2."""


def answer_of(error: Exception) -> tuple[int | None, str]:
    """Return the HTTP status of a hub's refusal (None: it did not answer), and how many seconds it asks to wait.

    Raises ``error`` if it is no hub's: that of a full disk, say, or of our own code.
    """
    of_hub = isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _OF_HUBS
    if not of_hub or getattr(error, "errno", None) is not None:
        raise error
    answers = [getattr(one, "response", None) for one in (error, error.__cause__)]
    answer = next((one for one in answers if one is not None), None)
    status = getattr(answer, "status_code", None) or getattr(error, "status_code", None)
    return status, getattr(answer, "headers", {}).get("Retry-After", "")

"""Published weights that ``mm-dit get`` knows by name, and their repositories."""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.files import add_content, error_text
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, PlatformError, nearest
from mindspeed_mm_dit.registry import Registry
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.planning.hubs import HUBS, MIRRORS, Hub, HubFile, Listing, partial_download, response_status


@dataclass(frozen=True)
class PublishedWeights:
    """Third-party weights. Size, licence and digests come from the hub at download time."""

    summary: str
    """Its line in the list."""
    repos: Mapping[str, str]
    """Hub (``hubs.py``) -> ``owner/name`` there, or the address of a file."""
    files: tuple[str, ...] = ("*",)
    """Patterns of the files to download."""
    needs: tuple[str, ...] = ()
    """Names of the models to download with it."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Sections of model.json that cannot be read from the files (``mm-dit init --from``)."""
    draws: str = ""
    """Sampling flags of mm-dit sample that its authors recommend."""

    def folder(self, root: Path) -> Path:
        """Return its folder below ``root``: the first that exists, as hubs use different names."""
        folders = [root / folder_name(repo) for repo in self.repos.values()]
        return next((folder for folder in folders if folder.is_dir()), folders[0])


def folder_name(repo: str) -> str:
    """Return the folder name for ``owner/name``; empty for a URL, whose file gets no folder."""
    return "" if "://" in repo else repo.rpartition("/")[2]


PUBLISHED = Registry[PublishedWeights]("published_weights")


def _on(repo: str, copy: str, summary: str, *more: Any, **named: Any) -> PublishedWeights:
    """Return the record of ``repo`` on the Hugging Face hub, with its ``copy`` on ModelScope unless that is empty."""
    return PublishedWeights(summary, {"huggingface": repo} | ({"modelscope": copy} if copy else {}), *more, **named)


_DIT, _VAE = ("transformer/*", "model_index.json", "*.pt"), ("sd-vae-ft-ema",)
_SD, _WAN = "stable-diffusion-v1-5/stable-diffusion-v1-5", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
_SD35 = "stable-diffusion-3.5-medium"
_WAN22 = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
_PIPELINE = ("transformer/*", "vae/*", "text_encoder*", "tokenizer*", "model_index.json")
_FLOW = {"diffusion": {"model_id": "flow_matching", "path": "linear", "prediction_type": "velocity"}}
DIT_XL_2 = _on("facebook/DiT-XL-2-256", "AI-ModelScope/DiT-XL-2-256x256", "DiT of ImageNet, 256 pixels", _DIT, _VAE)
DIT_XL_2_512 = _on("facebook/DiT-XL-2-512", "AI-ModelScope/DiT-XL-2-512x512", "the same for 512 pixels", _DIT, _VAE)
SIT_XL_2 = _on("nyu-visionx/SiT-collections", "", "SiT of ImageNet, 256 pixels", ("SiT-XL-2-256.pt",), _VAE, _FLOW)
SD_VAE_FT_EMA = _on("stabilityai/sd-vae-ft-ema", "AI-ModelScope/sd-vae-ft-ema", "the autoencoder of DiT and SiT")
SD_VAE_FT_MSE = _on("stabilityai/sd-vae-ft-mse", "AI-ModelScope/sd-vae-ft-mse", "the same, for smoother images")
WAN2_1_1_3B = _on(_WAN, _WAN, "Wan 2.1, text to video, with its autoencoder and text encoder", _PIPELINE)
WAN2_2_5B = _on(_WAN22, _WAN22, "Wan 2.2, video from text or image, 5 B", _PIPELINE)
FLUX_1_DEV = _on(
    "black-forest-labs/FLUX.1-dev", "AI-ModelScope/FLUX.1-dev", "FLUX.1, 12 B", _PIPELINE, draws="--guidance 3.5"
)
FLUX_2_DEV = _on("black-forest-labs/FLUX.2-dev", "", "FLUX.2, 32 B", _PIPELINE)
FLUX_2_KLEIN_4B = _on("black-forest-labs/FLUX.2-klein-base-4B", "", "FLUX.2, 4 B, not distilled", _PIPELINE)
SD3_5_MEDIUM = _on(
    f"stabilityai/{_SD35}", f"AI-ModelScope/{_SD35}", "Stable Diffusion 3.5, 2.2 B", _PIPELINE, draws="--cfg-scale 4.5"
)
QWEN_IMAGE = _on(
    "Qwen/Qwen-Image", "Qwen/Qwen-Image", "Qwen-Image, 20 B", _PIPELINE, draws="--cfg-scale 4 --cfg-rescale token"
)
Z_IMAGE = _on("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image", "Z-Image, 6 B", _PIPELINE, draws="--cfg-scale 5")
UMT5 = _on(_WAN, _WAN, "the text encoder of Wan alone", ("text_encoder/*", "tokenizer/*"))
CLIP = _on(
    _SD,
    "AI-ModelScope/stable-diffusion-v1-5",
    "text encoder and autoencoder of Stable Diffusion 1.5",
    ("text_encoder/*", "tokenizer/*", "vae/*"),
)
MINILM = _on("sentence-transformers/all-MiniLM-L6-v2", "AI-ModelScope/all-MiniLM-L6-v2", "a small text encoder")
INCEPTION = PublishedWeights(
    "the network behind FID: mm-dit evaluate --inception",
    {
        "address": "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
        "weights-inception-2015-12-05-6726825d.pth"
    },
)


TRIES = 5
"""Attempts at a file that make no progress."""
WAIT_SECONDS = 1.0
_NOT_READ = re.compile(
    r"(^|/)(\.git|onnx|openvino)|\.(md|py|png|jpe?g|gif|webp|mp4|pdf|h5|msgpack|onnx|ot|tflite|gguf)$|\.(fp16|bf16|non_ema)\.",
    re.IGNORECASE,
)
"""Files of a repository that this project does not use."""
_PICKLE = re.compile(r"\.(bin|pth?|ckpt)$")


def find_published(name: str, hub: str | None) -> PublishedWeights:
    """Return the record of ``name``, which may also be ``owner/name`` of a hub; raises ConfigError if it is neither."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    alike = any(name.startswith(f"{known.partition('/')[0]}/") for known in PUBLISHED if "/" in known)
    if alike or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(
            f"mm-dit get does not know the model {name}. {nearest(name, PUBLISHED)}Give OWNER/NAME of a hub, or one of "
            "the names that mm-dit get lists."
        )
    return PublishedWeights("", {hub or "huggingface": name})


def with_dependencies(names: list[str], hub: str | None) -> dict[str, PublishedWeights]:
    """Return the records of ``names`` and of the models they depend on, by name."""
    records: dict[str, PublishedWeights] = {}
    for name in names:
        records[name] = find_published(name, hub)
        records |= with_dependencies([need for need in records[name].needs if need not in records], hub)
    return records


def fetch(name: str, record: PublishedWeights, hub: str | None, root: Path) -> None:
    """Download the files that ``root`` does not have yet.

    Raises:
        ConfigError: the model is not known to be on that hub.
        PlatformError: the hub cannot be reached or refuses, or the disk is too full.
        CheckpointError: a downloaded file does not match the hub's size or checksum.
    """
    hub_name = hub or next(iter(record.repos))
    if hub_name not in record.repos:
        raise ConfigError(
            f"--hub = {hub_name} is not known to have {name}, and {', '.join(record.repos)} has it. If it is there, "
            f"name its repository: mm-dit get OWNER/NAME --hub {hub_name}"
        )
    source, repo = HUBS[hub_name](), record.repos[hub_name]
    page, folder = source.page.format(endpoint=source.endpoint, repo=repo), root / folder_name(repo)
    with _refusals(name, page, folder):
        listing = source.listing(repo)
    parts = select_files(listing, record.files)
    if not parts:
        raise CheckpointError(f"{page} has none of the files {' '.join(record.files)} of {name}. Name another --hub.")
    echo(f"{name}: {page}, licence: {' '.join(str(listing.licence or 'none stated').split())}")
    for part in parts:
        echo(f"  {part.size / 1e6:10,.1f} MB  {part.path}  {part.digest or 'no digest stated'}")
    echo(f"  {sum(part.size for part in parts) / 1e6:10,.1f} MB  in {len(parts)} file(s), to {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlatformError(
            f"--output = {folder} cannot be made a folder: {error_text(error)}. Name a folder that you can write to."
        ) from None
    missing = [part for part in parts if _difference(folder / part.path, part)]
    need = sum(part.size - _bytes_of(partial_download(part, folder)) for part in missing)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise PlatformError(
            f"--output = {folder} has {free / 1e9:.1f} GB free, and {need / 1e9:.1f} GB are to come. Name a larger "
            "disk."
        )
    for part in missing:
        (folder / part.path).unlink(missing_ok=True)  # (a hub's client might take a damaged file for complete)
        with _refusals(name, page, folder, f"broke off {TRIES} times"):
            _fetch_whole(source, repo, listing.revision, part, folder)
        if difference := _difference(folder / part.path, part):
            (folder / part.path).unlink(missing_ok=True)
            raise CheckpointError(
                f"{folder / part.path} was not what {page} states ({difference}), and was removed. Run the same "
                "command again, or use another mirror or hub."
            )
    unstated = [part.path for part in parts if not part.digest]
    echo(f"checked: size and digest of {len(parts) - len(unstated)} file(s) in {folder}")
    if unstated:
        echo(f"not checked: the content of {', '.join(unstated)}, as the hub states no digest")


def select_files(listing: Listing, patterns: tuple[str, ...]) -> list[HubFile]:
    """Return the files to download; where a folder has .safetensors, its pickled weights are left out."""
    safe = {part.path.rpartition("/")[0] for part in listing.parts if part.path.endswith(".safetensors")}
    return [
        part
        for part in listing.parts
        if any(fnmatch(part.path, pattern) for pattern in patterns)
        and not _NOT_READ.search(part.path)
        and not (_PICKLE.search(part.path) and part.path.rpartition("/")[0] in safe and part.path not in patterns)
    ]


def _fetch_whole(source: Hub, repo: str, revision: str, part: HubFile, folder: Path) -> None:
    tries, longest = 0, -1
    while True:
        try:
            return source.fetch(repo, revision, part, folder)
        except Exception as error:
            size = _bytes_of(partial_download(part, folder))
            tries, longest = (1, size) if size > longest else (tries + 1, longest)
            if response_status(error)[0] is not None or tries == TRIES:
                raise
            if tries > 1:
                time.sleep(WAIT_SECONDS)


def _bytes_of(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _difference(file: Path, part: HubFile) -> str:
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
    """Translate errors of a hub to a PlatformError; ``broken``: what to say if it does not answer."""
    try:
        yield
    except Exception as error:
        status, wait = response_status(error)
        again = "Run the same command again, which keeps what came."
        by_hand = f"Fetch it by hand into {folder}, or name a mirror: {MIRRORS}."
        answer = {
            None: f"{broken}. {again}" if broken else f"cannot be reached. {by_hand}",
            401: "is not there, or not for everyone. If you have an account, set HF_TOKEN.",
            403: "asks for consent to its licence. Give it there, and set HF_TOKEN.",
            404: "is not there.",
            429: f"asks to wait{f' {wait} seconds' if wait.isdigit() else ''}. {again}",
        }.get(status, f"answers with status {status}. {again if status and status >= 500 else by_hand}")
        raise PlatformError(f"mm-dit get {name} failed: {page} {answer}") from None


DESCRIPTION = """\
Download published weights, with the models they depend on, into weights/. Size, licence and checksums, as the hub
states them, are shown before the download and verified after it. Interrupted downloads resume. Without a NAME: list the
names.

  mm-dit get DiT-XL/2
  mm-dit get stabilityai/sd-vae-ft-ema                any other repository of the hub
  HF_ENDPOINT=https://hf-mirror.com mm-dit get DiT-XL/2
  mm-dit get DiT-XL/2 --hub modelscope

No other command downloads anything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="model to download; without one, list the known names")
    parser.add_argument("--hub", choices=tuple(HUBS)[:2], help="where to download from (default huggingface)")
    parser.add_argument("--output", metavar="DIR", default="weights", help="folder to download into (default weights)")


def run(args: argparse.Namespace) -> int:
    """Fetch, or list the names."""
    if not args.names:
        for name, record in PUBLISHED.items():
            echo(f"  {name:<16} {record.summary}\n{'':<19}{', '.join(dict.fromkeys(record.repos.values()))}")
        return 0
    for name, record in with_dependencies(args.names, args.hub).items():
        fetch(name, record, args.hub, Path(args.output))
    return 0

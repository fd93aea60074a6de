"""Lists the images that data.json names, with their classes, and reports what is left out. No image is opened."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mindspeed_mm_dit.configs.files import error_text, is_folder, not_a_folder_reason
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.builtin import IMAGES, check_is_source, write_builtin
from mindspeed_mm_dit.data.captions import file_endings, read_sidecar_captions
from mindspeed_mm_dit.data.labels import normalize_names, parse_labels, split_names
from mindspeed_mm_dit.data.sources import first_names, left_out_note
from mindspeed_mm_dit.data.tables import JSONL, Listing, is_index, read_table
from mindspeed_mm_dit.data.transforms import READER_OF, readable_formats
from mindspeed_mm_dit.errors import DataError, nearest

UNPACK_AGAIN = "unpack the archive again with a program that turns them into folders, such as unzip"


def list_images(param: DatasetParam, labelled: bool = True, known_classes: Sequence[str] = ()) -> Listing:
    """Return every image of ``param``, the class names, and the captions that ``param`` requests.

    labelled: whether labels are requested; if not, all are 0 and folders are not classes. known_classes: class names of
    a run or cache to continue.

    Raises:
        DataError: naming the folder, or file and line.
    """
    folder, left_out = Path(param.data_folder), _OtherFiles(file_endings(param.caption_fields))
    if param.source is not None:
        write_builtin(IMAGES, param.source, folder)
    if not param.data_folder or not is_folder(folder):
        siblings = _entries(folder.parent) if folder.name and is_folder(folder.parent) else []
        hint = nearest(folder.name, [entry.name for entry in siblings if _is_link_to_folder(entry)])
        raise DataError(
            f"dataset_param.data_folder = {param.data_folder} {not_a_folder_reason(folder)}. {hint}Correct the path in "
            "data.json."
        )
    if param.index:
        listing = _list_index(folder, param, labelled, known_classes)
    elif param.single_class or not labelled:
        listing = _list_single_class(folder, left_out)
    else:
        listing = list_class_folders(folder, left_out, known_classes, param.folder_repeats)
    if file_endings(param.caption_fields):
        paths = [folder / path for path, _ in listing.rows]
        listing = listing._replace(captions=read_sidecar_captions(paths, param.caption_fields))
    if not listing.rows:
        note = f" ({listing.notes[0].partition(': ')[2]})" if listing.notes else ""
        raise DataError(
            f"dataset_param.data_folder = {folder} holds no images{note}. "
            f"{_ADVICE_FOR_VIDEOS if _VIDEO.search(note) else _advice_if_empty(folder, param.index)}"
        )
    if param.source is not None:
        check_is_source(param.source, folder, [label for _, label in listing.rows], labelled)
    return listing


_VIDEO = re.compile(r"\.(mp4|mov|mkv|webm|avi)\b", re.IGNORECASE)
_ADVICE_FOR_VIDEOS = (
    "Videos are listed in an annotation file: docs/data.md, 'Clips with captions'. mm-dit init reads images only."
)


def _advice_if_empty(folder: Path, index: str | None) -> str:
    if index:
        return f"Write a line image_path,label for each image into {index}."
    if indices := find_index_files(folder):
        return f'Set dataset_param.index to "{indices[0]}".'
    loose = [entry.name for entry in _entries(folder) if _is_image(entry.name) and not is_hidden(entry.name)]
    if flattened_images(loose):
        return f"Their names have backslashes, which do not separate folders here: {UNPACK_AGAIN}."
    advice = "Put one folder of images per class there, or name an index with image_path,label."
    return f"{advice} If all are of one class, set dataset_param.single_class to true." if loose else advice


# --- folders ----------------------------------------------------------------------------------------------------------


def list_class_folders(
    folder: Path,
    left_out: _OtherFiles | None = None,
    known_classes: Sequence[str] = (),
    folder_repeats: bool | None = None,
) -> Listing:
    """Take every sub-folder with images as a class; hidden ones are not classes."""
    left_out = left_out or _OtherFiles()
    images = {directory: left_out.images_below(directory) for directory in class_folders(folder)}
    classes = [directory for directory, paths in images.items() if paths]
    names = normalize_names(path.name for path in classes)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"{folder} has two folders {twice[0]!r}, written with different Unicode characters that look the same. Put "
            "the images of both into one."
        )
    if repeated := split_names(names, folder_repeats, known_classes):
        names = tuple(name for _, name in repeated)
    labels = parse_labels(names, str(folder), lambda number: str(classes[number]), known_classes=known_classes)
    rows = [
        (str(image.relative_to(folder)), label)
        for label, directory in zip(labels.numbers.tolist(), classes)
        for image in images[directory]
    ]
    left_out.add_loose(_entries(folder))
    lost = flattened_images(path for path, _ in rows)
    if lost and len(classes) == 1:
        raise DataError(
            f"{folder / lost[0]} and {len(lost) - 1} others have a backslash in their name, so that all images are of "
            f"the one class {names[0]}. If these were folders, {UNPACK_AGAIN}."
        )
    notes = [*left_out.notes(), *labels.notes, *_flattened_note(lost)]
    if empty := [directory.name for directory, paths in images.items() if not paths]:
        notes.append(f"note: these folders are not classes, as they hold no images: {first_names(empty)}")
    if indices := find_index_files(folder):
        unused = folder / indices[0]
        notes.append(f"note: {unused} is not used, as dataset_param.index is not set: the folders are the classes")
    return Listing(rows, labels.classes, tuple(notes))


def _list_single_class(folder: Path, left_out: _OtherFiles) -> Listing:
    """Take every image below the folder as one class, named like the folder."""
    rows = [(str(image.relative_to(folder)), 0) for image in left_out.images_below(folder)]
    notes = (*left_out.notes(), *_flattened_note(flattened_images(path for path, _ in rows)))
    return Listing(rows, normalize_names([Path(os.path.abspath(folder)).name]), notes)


def flattened_images(paths: Iterable[str]) -> list[str]:
    """Return the images whose folders became part of their names when an archive from Windows was unpacked."""
    return [path for path in paths if "\\" in os.path.basename(path)]


def _flattened_note(lost: list[str]) -> list[str]:
    if not lost:
        return []
    return [
        f"warning: {len(lost):,} image(s) have a backslash in their name, which does not separate folders here: "
        f"{lost[0]}; if these were folders, {UNPACK_AGAIN}"
    ]


def class_folders(folder: Path) -> list[Path]:
    """Return the sub-folders that can be classes, sorted; raises DataError for a broken link."""
    entries = [entry for entry in _entries(folder) if not is_hidden(entry.name)]
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path) and not _is_image(entry.name):
            raise DataError(f"{entry.path} is a link to nothing. Restore what it links to, or remove the link.")
    return sorted(Path(entry.path) for entry in entries if _is_link_to_folder(entry))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; raises DataError if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error_text(error)}. Make it readable, or move it away.") from None


def _is_link_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that goes in a circle
        return False


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in readable_formats()


def is_hidden(name: str) -> bool:
    """Return whether a folder is hidden, and so not a class: .ipynb_checkpoints, __MACOSX and the like."""
    return name.startswith((".", "__"))


class _OtherFiles:
    """Chooses images by their names, and counts the files that are neither images nor captions of the data set."""

    def __init__(self, captions: Iterable[str] = ()) -> None:
        """``captions``: endings of files of captions."""
        self._captions = {ending.lower() for ending in captions}
        self._counts: Counter[str] = Counter()

    def images_below(self, folder: Path) -> list[Path]:
        """Return the images below ``folder``, sorted, and folders that are named so; follows no links to folders."""
        images, pending = [], [folder]
        while pending:
            for entry in _entries(pending.pop()):
                if not _is_link_to_folder(entry) or _is_image(entry.name):
                    images += [Path(entry.path)] if self._is_used(Path(entry.path)) else []
                elif is_hidden(entry.name):
                    self._counts["hidden folder(s)"] += 1
                elif entry.is_symlink():
                    self._counts["link(s) to folders"] += 1
                else:
                    pending.append(Path(entry.path))
        return sorted(images)

    def _is_used(self, path: Path) -> bool:
        """Return whether ``path`` is an image by its name; if not, count it."""
        suffix = path.suffix.lower()
        if _is_image(path.name):
            self._counts["hidden image(s)"] += path.name.startswith(".")
        elif not path.name.startswith(".") and not {suffix, "".join(path.suffixes).lower()} & self._captions:
            hint = f" (to read them: pip install {READER_OF[suffix]})" if suffix in READER_OF else ""
            self._counts[(suffix or "without suffix") + hint] += 1
        return _is_image(path.name) and not path.name.startswith(".")

    def add_loose(self, entries: Iterable[os.DirEntry[str]]) -> None:
        """Count images and hidden folders next to the class folders: they could be meant as data."""
        for entry in entries:
            if not _is_link_to_folder(entry) and _is_image(entry.name) and not is_hidden(entry.name):
                self._counts["image(s) in no class folder"] += 1
            elif _is_link_to_folder(entry) and is_hidden(entry.name):
                self._counts["hidden folder(s)"] += 1

    def notes(self) -> list[str]:
        """Return one note with the counts, if any."""
        return left_out_note(+self._counts)


# --- an index ---------------------------------------------------------------------------------------------------------


def _list_index(folder: Path, param: DatasetParam, labelled: bool, known_classes: Sequence[str]) -> Listing:
    assert param.index is not None
    path, columns = folder / param.index, () if file_endings(param.caption_fields) else param.caption_fields
    if not os.path.lexists(path):
        classes = [path.name for path in class_folders(folder)]
        advice = nearest(param.index, find_index_files(folder))
        if classes:
            advice += f'Drop "index" from data.json to take the folders ({first_names(classes)}) as classes.'
        advice = advice or "Write image_path,label lines there."
        raise DataError(f"dataset_param.index = {param.index} names {path}, which does not exist. {advice}")
    listing = read_table(path, labelled, columns, known_classes)
    left_out = _count_unlisted(folder, {image for image, _ in listing.rows})
    notes = [f"note: left out: {left_out:,} image(s) that {path} does not list"] if left_out else []
    return listing._replace(notes=(*notes, *listing.notes))


def _count_unlisted(folder: Path, listed: set[str]) -> int:
    """Count the unlisted images in the folders of listed ones; other folders are not searched."""
    count = 0
    for directory in {os.path.dirname(image) for image in listed}:
        try:
            names = os.listdir(folder / directory)
        except OSError:  # (each listed file is checked by itself)
            continue
        images = (name for name in names if _is_image(name) and not name.startswith("."))
        count += sum(os.path.join(directory, name) not in listed for name in images)
    return count


def find_index_files(folder: Path) -> list[str]:
    """Return the names of the CSV and .jsonl files in ``folder`` that could be an index."""
    names = (entry.name for entry in _entries(folder) if entry.name.endswith((".csv", JSONL)))
    return sorted(name for name in names if is_index(folder / name))

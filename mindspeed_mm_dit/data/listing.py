"""Lists the images that data.json names, with their classes, and reports what is left out. No image is opened."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mindspeed_mm_dit.configs.files import is_folder, no_folder, reason_of
from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.data.builtin import IMAGES, check_is_source, provide
from mindspeed_mm_dit.data.captions import endings_of, read_sidecar_captions
from mindspeed_mm_dit.data.labels import composed, labels_of, split_names
from mindspeed_mm_dit.data.labels_csv import JSONL, Listing, is_index, read_labels
from mindspeed_mm_dit.data.rows import note_of_left_out
from mindspeed_mm_dit.data.transforms import READER_OF, readable_formats
from mindspeed_mm_dit.errors import DataError, nearest

MAX_NAMES = 5
CURE_OF_LOST_FOLDERS = "unpack the archive again with a program that turns them into folders, such as unzip"


def list_images(param: DatasetParam, labelled: bool = True, known_classes: Sequence[str] = ()) -> Listing:
    """Return every image of ``param``, the class names, and the captions that ``param`` requests.

    labelled: whether labels are requested; if not, all are 0 and folders are not classes. known_classes: class names of
    a run or cache to continue.

    Raises:
        DataError: naming the folder, or file and line.
    """
    folder = Path(param.data_folder)
    if param.source is not None:
        provide(IMAGES, param.source, folder)
    if not param.data_folder or not is_folder(folder):
        raise DataError(
            f"dataset_param.data_folder = {param.data_folder}",
            no_folder(folder),
            f"{_nearest_folder(folder)}correct the path in data.json",
        )
    listing = _listing(folder, param, labelled, known_classes)
    if endings_of(param.caption_places):
        paths = [folder / path for path, _ in listing.rows]
        listing = listing._replace(captions=read_sidecar_captions(paths, param.caption_places))
    if not listing.rows:
        left_out = f" ({listing.notes[0].partition(': ')[2]})" if listing.notes else ""
        raise DataError(
            f"dataset_param.data_folder = {folder}", f"holds no images{left_out}", _cure_of_empty(folder, param.index)
        )
    if param.source is not None:
        check_is_source(param.source, folder, [label for _, label in listing.rows], labelled)
    return listing


def _listing(folder: Path, param: DatasetParam, labelled: bool, known_classes: Sequence[str]) -> Listing:
    if param.index:
        return _list_index(folder, param, labelled, known_classes)
    left_out = _Remainder(endings_of(param.caption_places))
    if param.single_class or not labelled:
        return _list_single_class(folder, left_out)
    return of_folders(folder, left_out, known_classes, param.folder_repeats)


def _nearest_folder(folder: Path) -> str:
    siblings = _entries(folder.parent) if folder.name and is_folder(folder.parent) else []
    return nearest(folder.name, [entry.name for entry in siblings if _leads_to_folder(entry)])


def _cure_of_empty(folder: Path, index: str | None) -> str:
    if index:
        return f"write a line image_path,label for each image into {index}"
    indices = indices_in(folder)
    if indices:
        return f'set dataset_param.index to "{indices[0]}"'
    cure = "put one folder of images per class there, or name an index with image_path,label"
    loose = [entry.name for entry in _entries(folder) if _is_image(entry.name) and not is_hidden(entry.name)]
    if images_of_lost_folders(loose):
        return f"their names have backslashes, which do not separate folders here: {CURE_OF_LOST_FOLDERS}"
    if loose:
        cure += "; or set dataset_param.single_class to true: all images there are of one class"
    return cure


# --- folders ---------------------------------------------------------------------------------------------------


def of_folders(
    folder: Path,
    left_out: _Remainder | None = None,
    known_classes: Sequence[str] = (),
    folder_repeats: bool | None = None,
) -> Listing:
    """Take every sub-folder with images as a class; hidden ones are not classes."""
    left_out = left_out or _Remainder()
    images = {
        directory: sorted(path for path in _files_below(directory, left_out) if left_out.keeps(path))
        for directory in class_folders(folder)
    }
    classes = [directory for directory, paths in images.items() if paths]
    names = composed(path.name for path in classes)
    _check_names_differ(folder, names)
    if repeated := split_names(names, folder_repeats, known_classes):
        names = tuple(name for _, name in repeated)
    labels = labels_of(names, str(folder), lambda number: str(classes[number]), known_classes=known_classes)
    rows = [
        (str(image.relative_to(folder)), label)
        for label, directory in zip(labels.numbers.tolist(), classes)
        for image in images[directory]
    ]
    left_out.add_loose(_entries(folder))
    lost = images_of_lost_folders(path for path, _ in rows)
    if lost and len(classes) == 1:
        raise DataError(
            f"{folder / lost[0]}",
            f"and {len(lost) - 1} others have a backslash in their name, so that "
            f"all images are of the one class {names[0]}",
            CURE_OF_LOST_FOLDERS,
        )
    notes = [*left_out.notes(), *labels.notes, *_note_of_lost_folders(lost)]
    if empty := [directory.name for directory, paths in images.items() if not paths]:
        notes.append(
            f"note: these folders are not classes, as they hold no images: {', '.join(empty[:MAX_NAMES])}"
            f"{', ...' if len(empty) > MAX_NAMES else ''}"
        )
    if indices := indices_in(folder):
        unused = folder / indices[0]
        notes.append(f"note: {unused} is not used, as dataset_param.index is not set: the folders are the classes")
    return Listing(rows, labels.classes, tuple(notes))


def _list_single_class(folder: Path, left_out: _Remainder) -> Listing:
    """Take every image below the folder as one class, named like the folder."""
    images = sorted(path for path in _files_below(folder, left_out) if left_out.keeps(path))
    rows = [(str(image.relative_to(folder)), 0) for image in images]
    notes = (*left_out.notes(), *_note_of_lost_folders(images_of_lost_folders(path for path, _ in rows)))
    return Listing(rows, composed([Path(os.path.abspath(folder)).name]), notes)


def images_of_lost_folders(paths: Iterable[str]) -> list[str]:
    """Return the images whose folders became part of their names when an archive from Windows was unpacked."""
    return [path for path in paths if "\\" in os.path.basename(path)]


def _note_of_lost_folders(lost: list[str]) -> list[str]:
    if not lost:
        return []
    return [
        f"warning: {len(lost):,} image(s) have a backslash in their name, which does not separate folders here: "
        f"{lost[0]}; if these were folders, {CURE_OF_LOST_FOLDERS}"
    ]


def class_folders(folder: Path) -> list[Path]:
    """Return the sub-folders that can be classes, sorted; raises DataError for a broken link."""
    entries = [entry for entry in _entries(folder) if not is_hidden(entry.name)]
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path) and not _is_image(entry.name):
            raise DataError(entry.path, "is a link to nothing", "restore what it links to, or remove the link")
    return sorted(Path(entry.path) for entry in entries if _leads_to_folder(entry))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; raises DataError if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(
            str(folder), f"cannot be read: {reason_of(error)}", "give yourself the right to read it, or move it away"
        ) from None


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that goes in a circle
        return False


def _files_below(folder: Path, left_out: _Remainder) -> Iterator[Path]:
    """Yield the files below ``folder``, and folders named like images; links to folders are not followed."""
    pending = [folder]
    while pending:
        for entry in _entries(pending.pop()):
            if not _leads_to_folder(entry) or _is_image(entry.name):
                yield Path(entry.path)
            elif is_hidden(entry.name):
                left_out.add("hidden folder(s)")
            elif entry.is_symlink():
                left_out.add("link(s) to folders")
            else:
                pending.append(Path(entry.path))


class _Remainder:
    """Counts files that are neither images nor captions of the data set; ``captions``: endings of the latter."""

    def __init__(self, captions: Iterable[str] = ()) -> None:
        self._captions = {ending.lower() for ending in captions}
        self._counts: Counter[str] = Counter()

    def keeps(self, path: Path) -> bool:
        """Return whether ``path`` is an image by its name; if not, count it."""
        if path.name.startswith("."):
            if _is_image(path.name):
                self.add("hidden image(s)")
            return False
        if not _is_image(path.name):
            if not {path.suffix.lower(), "".join(path.suffixes).lower()} & self._captions:
                self.add(_kind(path.suffix.lower()))
            return False
        return True

    def add(self, kind: str) -> None:
        """Count one more of ``kind``."""
        self._counts[kind] += 1

    def add_loose(self, entries: Iterable[os.DirEntry[str]]) -> None:
        """Count images and hidden folders next to the class folders: they could be meant as data."""
        for entry in entries:
            if not _leads_to_folder(entry) and _is_image(entry.name) and not is_hidden(entry.name):
                self.add("image(s) in no class folder")
            elif _leads_to_folder(entry) and is_hidden(entry.name):
                self.add("hidden folder(s)")

    def notes(self) -> list[str]:
        """Return one note with the counts, if any."""
        return note_of_left_out(self._counts)


def _kind(suffix: str) -> str:
    hint = f" (to read them: pip install {READER_OF[suffix]})" if suffix in READER_OF else ""
    return (suffix or "without suffix") + hint


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in readable_formats()


def is_hidden(name: str) -> bool:
    """Return whether a folder is hidden, and so not a class: .ipynb_checkpoints, __MACOSX and the like."""
    return name.startswith((".", "__"))


# --- an index --------------------------------------------------------------------------------------------------


def _list_index(folder: Path, param: DatasetParam, labelled: bool, known_classes: Sequence[str]) -> Listing:
    assert param.index is not None
    path, columns = folder / param.index, () if endings_of(param.caption_places) else param.caption_places
    if not os.path.lexists(path):
        raise _no_index(folder, param.index)
    listing = read_labels(path, labelled, columns, known_classes)
    left_out = _unlisted(folder, {image for image, _ in listing.rows})
    notes = [f"note: left out: {left_out:,} image(s) that {path} does not list"] if left_out else []
    return listing._replace(notes=(*notes, *listing.notes))


def _no_index(folder: Path, index: str) -> DataError:
    """Return the error for a missing index, with a cure based on the content of ``folder``."""
    classes = [path.name for path in class_folders(folder)]
    cure = nearest(index, indices_in(folder))
    if classes:
        cure += f'drop "index" from data.json to take the folders there as classes: {_first_names(classes)}'
    return DataError(
        f"dataset_param.index = {index}", f"there is no {folder / index}", cure or "write image_path,label lines there"
    )


def _unlisted(folder: Path, listed: set[str]) -> int:
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


def indices_in(folder: Path) -> list[str]:
    """Return the names of the CSV and .jsonl files in ``folder`` that could be an index."""
    names = (entry.name for entry in _entries(folder) if entry.name.endswith((".csv", JSONL)))
    return sorted(name for name in names if is_index(folder / name))


def _check_names_differ(folder: Path, names: Sequence[str]) -> None:
    """Raise DataError if two folders have the same name in Unicode's composed form."""
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(
                f"{folder}: class {name!r}",
                "occurs twice, written with different Unicode characters that look the same",
                "put the images of both into one folder",
            )


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")

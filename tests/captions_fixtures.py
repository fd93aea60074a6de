"""A few images with captions in each layout, and configs of a small DiT that learns them."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.text_encoder_fixtures import write_bert
from tests.training.launch import Configs

CAPTIONS = [("a one", "一"), ("a seven",), ("one moves left", "seven moves"), ("seven",)] * 3
"""Of each image: in English and, of some, in another language (of which the small tokenizer knows no word)."""
WIDTH = 16
"""Of the states and the pooled vector of the small encoder."""


def png(number: int) -> bytes:
    """A picture of its own for each number."""
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)).save(content, "PNG")
    return content.getvalue()


def write_beside(folder: Path, captions=CAPTIONS) -> dict:
    """A .txt beside each image, and a .de.txt beside some; two folders, which are no classes here."""
    for number, own in enumerate(captions):
        place = folder / ("first", "second/inside")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:02d}.png").write_bytes(png(number))
        for ending, caption in zip((".txt", ".de.txt"), own):
            (place / f"{number:02d}{ending}").write_text(caption + "\n", encoding="utf-8")
    return {"captions": [".txt", ".de.txt"]}


def write_csv(folder: Path, captions=CAPTIONS) -> dict:
    """A metadata.csv as on the hub, with a column a language."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["file_name,en,de"]
    for number, own in enumerate(captions):
        (folder / f"{number:02d}.png").write_bytes(png(number))
        lines.append(",".join((f"{number:02d}.png", *own, *[""] * (2 - len(own)))))
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"index": "metadata.csv", "captions": ["en", "de"]}


def write_jsonl(folder: Path, captions=CAPTIONS) -> dict:
    """A metadata.jsonl as on the hub: an object a line, some with a list of texts."""
    write_csv(folder, captions)
    found = [{"file_name": f"{number:02d}.png", "text": list(own)} for number, own in enumerate(captions)]
    lines = [json.dumps({**line, "text": line["text"][0]} if len(line["text"]) == 1 else line) for line in found]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"index": "metadata.jsonl", "captions": "text"}


def write_lines(folder: Path, captions=CAPTIONS) -> dict:
    """A line a caption, so that an image stands in several."""
    param = write_csv(folder, captions)
    lines = [f"{number:02d}.png,{caption}" for number, own in enumerate(captions) for caption in own]
    (folder / "metadata.csv").write_text("image,caption\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return {**param, "captions": "caption"}


def write_parquet(folder: Path, captions=CAPTIONS) -> dict:
    """Lists of texts in a column."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(number), "path": None} for number in range(len(captions))]
    table = pyarrow.table({"image": images, "texts": [list(own) for own in captions]})
    parquet.write_table(table, folder / "train-00000.parquet")
    return {"dataset_type": "parquet", "captions": "texts"}


def write_tar(folder: Path, captions=CAPTIONS, json_key: str = "") -> dict:
    """KEY.png and KEY.txt with a caption a line, or KEY.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "train-00000.tar", "w") as archive:
        for number, own in enumerate(captions):
            words = json.dumps({"width": 8, json_key: list(own)}) if json_key else "\n".join(own)
            for ending, content in ((".png", png(number)), (".json" if json_key else ".txt", words.encode())):
                member = tarfile.TarInfo(f"{number:02d}{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return {"dataset_type": "webdataset", "captions": f".json:{json_key}" if json_key else ".txt"}


LAYOUTS = {"beside": write_beside, "csv": write_csv, "jsonl": write_jsonl, "lines": write_lines, "tar": write_tar,
           "parquet": write_parquet,
           "json": lambda folder, captions=CAPTIONS: write_tar(folder, captions, "caption")}  # fmt: skip


def captioned_configs(place: Path, layout: str = "beside", **data: object) -> Configs:
    """Write images, a small encoder, model.json and data.json to ``place``; ``data``: more of dataset_param."""
    if not (place / "bert").is_dir():
        write_bert(place / "bert", {"pooling_mode_mean_tokens": True})
    param = LAYOUTS[layout](place / "images")
    section = {"data_folder": str(place / "images"), "image_size": 8, "caption_dropout_prob": 0.3, **param, **data}
    model = {
        "ae": {"model_id": "pixel", "channels": 3},
        "text_encoder": {"model_id": "bert", "from_pretrained": str(place / "bert"), "max_length": 8},
        "diffusion": {"model_id": "flow_matching"},
        "predictor": {
            "model_id": "dit", "input_size": 8, "in_channels": 3, "hidden_size": 16, "num_layers": 2, "num_heads": 2,
            "learn_sigma": False, "text_dim": WIDTH, "text_length": 8, "pooled_dim": WIDTH,
        },
    }  # fmt: skip
    (place / "model.json").write_text(json.dumps(model))
    (place / "data.json").write_text(json.dumps({"dataset_param": section}))
    return Configs(place)

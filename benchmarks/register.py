"""Write the register in docs/verification.md: every network here against its published class; ``make register``.

Each row takes less than a minute on a laptop. Networks are small, and their weights random.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

from mindspeed_mm_dit import __version__
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.tools.verify.against import SMALL, compare_against
from mindspeed_mm_dit.tools.verify.table import Finding, worst

ROOT = Path(__file__).parent.parent
GOLDEN = "tests/golden/data"
CLASSES = {
    "Wan 2.1, text to video": "WanTransformer3DModel", "FLUX.1": "FluxTransformer2DModel",
    "Stable Diffusion 3": "SD3Transformer2DModel", "Qwen-Image": "QwenImageTransformer2DModel",
}  # fmt: skip
FILES = {
    "DiT": ("dit_tiny_p2.npz", "dit_tiny_p2.pt", "facebookresearch/DiT"),
    "SiT": ("sit_tiny_p2.npz", "sit_tiny_p2.pt", "willisma/SiT"),
    "LightningDiT": ("lightningdit_tiny.npz", "lightningdit_tiny.pt", "hustvl/LightningDiT"),
    "JiT": ("jit_tiny.npz", "jit_tiny.pt", "LTH14/JiT"),
    "Wan 2.2, two experts": ("wan22_t2v_tiny.npz", "wan22_t2v_tiny", "diffusers' WanTransformer3DModel"),
    "Z-Image": ("zimage_tiny.npz", "zimage_tiny", "diffusers' ZImageTransformer2DModel"),
    "FLUX.2": ("flux2_tiny.npz", "flux2_tiny", "diffusers' Flux2Transformer2DModel"),
}
BEGIN, END = "<!-- register: written by make register -->", "<!-- end of register -->"
"""What stands around it in docs/verification.md."""
HEAD = """\
Every network here is compared with the class or the values that its authors or diffusers published: outputs, losses and
every gradient. The table shows the quantity that is nearest to its bound. A share of 1 would be the bound; below it,
the difference is rounding. [prove.md](prove.md) says how bounds are measured.

Written on {today} by `make register`, with {versions}.
Each row takes less than a minute on a laptop: the networks are small, with random weights. To repeat one, run its
command in a clone of this repository.

| network | against | agree | nearest to its bound | share | command |
|---|---|---|---|---|---|
"""


def row(network: str, against: str, findings: list[Finding], command: str) -> str:
    """Return a line of the table."""
    told = [finding for finding in findings if finding.tells]
    nearest, good = worst(told), sum(finding.good for finding in findings)
    share = nearest.error / nearest.tolerance
    return f"| {network} | {against} | {good} of {len(findings)} | `{nearest.name}` | {share:.2f} | `{command}` |"


def main() -> None:
    """Compare everything and write the page."""
    activate("pytorch")
    import diffusers
    import torch

    from mindspeed_mm_dit.tools.verify.parity import compare

    rows = []
    for network, name in CLASSES.items():
        assert name in SMALL
        findings = list(compare_against(f"diffusers:{name}", 1234).findings)
        command = f"mm-dit compare --against diffusers:{name}"
        rows.append(row(network, f"diffusers' {name}", findings, command))
    for network, (reference, checkpoint, against) in FILES.items():
        command = f"mm-dit parity --reference {GOLDEN}/{reference} --checkpoint {GOLDEN}/{checkpoint}"
        findings = compare(ROOT / GOLDEN / reference, ROOT / GOLDEN / checkpoint, 1e-5, 1e-12)
        rows.append(row(network, f"{against}, recorded values", findings, command))
    versions = f"mm-dit {__version__}, diffusers {diffusers.__version__} and PyTorch {torch.__version__}"
    page = HEAD.format(today=date.today(), versions=versions) + "\n".join(rows) + "\n"
    verification = ROOT / "docs/verification.md"
    before, _, rest = verification.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    verification.write_text(f"{before}{BEGIN}\n\n{page}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

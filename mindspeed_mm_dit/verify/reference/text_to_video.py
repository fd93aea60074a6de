"""Files of reference values of MindSpeed-MM's text-to-video tutorial and of Wan 2.1, group by group."""

from __future__ import annotations

from mindspeed_mm_dit.verify.reference import video_encoders, video_step, video_times
from mindspeed_mm_dit.verify.reference.contract import Kind
from mindspeed_mm_dit.verify.reference.video_networks import network_rows
from mindspeed_mm_dit.verify.reference.video_program import TextToVideo

_GIVEN = {
    "(dit|wan)": "x|t|t_shared|text|text_len|target", "sched": "x0|noise|model_output|index",
    "sample": "start|negative_text|shift|steps", "step": "video|prompt_ids|prompt_mask|noise|t|t_index|shift",
    "vae": "video|latents_mean|latents_std", "umt5": "ids|mask|mm_mask", "prep": "[^/]+/(frames|size)",
}  # fmt: skip

TEXT_TO_VIDEO = Kind(
    signature="(dit|wan|sched|step|vae|umt5|prep|diffusers_euler)/.+",
    inputs="|".join(["config", *(f"{group}/({names})" for group, names in _GIVEN.items())]),
    program=TextToVideo,
    rows=(
        *network_rows("dit"),
        *network_rows("wan"),
        *video_times.ROWS,
        *video_step.ROWS,
        *video_encoders.ROWS,
    ),
    not_checked={"diffusers_euler/.+": "another table than MindSpeed-MM's, kept for information"},
)

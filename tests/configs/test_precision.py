"""Precision is decided from --bf16, fsdp2.yaml and what the framework offers; a contradiction is an error."""

import pytest

from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.precision import AUTOCAST, FLOAT32, SHARDED_BF16, Precision, decide_precision
from mindspeed_mm_dit.errors import UserError

PYTORCH, MINDSPORE, HOST = ("autocast", "fsdp2"), (), ("fsdp2",)


@pytest.mark.parametrize(("bf16", "fsdp2", "decided"), [
    (False, None, FLOAT32),
    (True, None, AUTOCAST),
    (False, {}, FLOAT32),
    (True, {}, AUTOCAST),
    (False, {"param_dtype": "fp32", "reduce_dtype": "fp32"}, FLOAT32),
    (False, {"param_dtype": "bf16", "reduce_dtype": "fp32"}, SHARDED_BF16),
    (True, {"param_dtype": "bf16", "reduce_dtype": "fp32"}, SHARDED_BF16),
    (True, {"param_dtype": "bf16"}, Precision("bf16", "fsdp2", reduce="bf16")),  # FSDP2's own default
    (False, {"reduce_dtype": "bf16"}, Precision(reduce="bf16")),
])  # fmt: skip
def test_flag_and_file_decide_together(bf16, fsdp2, decided):
    assert (
        decide_precision(bf16, Fsdp2Config(**fsdp2) if fsdp2 is not None else None, PYTORCH, "pytorch on cpu")
        == decided
    )


@pytest.mark.parametrize(("bf16", "fsdp2", "offered", "message"), [
    (True, {"param_dtype": "fp32"}, PYTORCH, "--bf16: contradicts fsdp2.yaml, whose param_dtype is fp32"),
    (True, {"param_dtype": "fp32"}, HOST, "contradicts fsdp2.yaml"),
    (True, {}, HOST, "whose param_dtype is null"),
    (True, None, MINDSPORE, "--bf16: mindspore on npu does not train in bfloat16"),
    (False, {"param_dtype": "bf16"}, MINDSPORE, "fsdp2.yaml: param_dtype = 'bf16': mindspore on npu does not"),
    (False, {"param_dtype": "fp16"}, PYTORCH, "param_dtype = 'fp16': float16 needs loss scaling"),
    (False, {"reduce_dtype": "fp16"}, PYTORCH, "reduce_dtype = 'fp16'"),
    (False, {"output_dtype": "fp16"}, PYTORCH, "output_dtype = 'fp16'"),
])  # fmt: skip
def test_what_contradicts_or_is_not_offered_is_refused_with_its_cure(bf16, fsdp2, offered, message):
    with pytest.raises(UserError) as caught:
        decide_precision(bf16, Fsdp2Config(**fsdp2) if fsdp2 is not None else None, offered, "mindspore on npu")
    assert message in str(caught.value) and "Cure:" in str(caught.value)

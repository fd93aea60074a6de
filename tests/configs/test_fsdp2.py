import pytest

from mindspeed_mm_dit.configs.fsdp2 import (
    AUTOCAST,
    FLOAT32,
    SHARDED_BF16,
    Fsdp2Config,
    Precision,
    decide_precision,
    load_fsdp2_config,
    resolve_paths,
)
from mindspeed_mm_dit.errors import ConfigError, UserError

NAMES = ["predictor", "predictor.blocks", *[f"predictor.blocks.{i}" for i in range(4)], "predictor.blocks.0.attn",
         "predictor.blocks.1.attn", "predictor.final_layer", "predictor.blocks.10"]  # fmt: skip


@pytest.mark.parametrize(("paths", "found"), [
    (["predictor.final_layer"], ["final_layer"]),
    (["predictor.blocks.{*}"], [f"blocks.{i}" for i in (0, 1, 2, 3, 10)]),
    (["predictor.blocks.{0-2}"], [f"blocks.{i}" for i in (0, 1, 2)]),
    (["predictor.blocks.{0-1,3,10}"], [f"blocks.{i}" for i in (0, 1, 3, 10)]),
    (["predictor.blocks.{0,1}.attn"], ["blocks.0.attn", "blocks.1.attn"]),
    (["predictor.blocks.{0-1}", "predictor.blocks.{1-2}"], [f"blocks.{i}" for i in (0, 1, 2)]),
])  # fmt: skip
def test_paths_expand_as_in_mindspeed_mm(paths, found):
    assert resolve_paths(paths, NAMES, "sub_modules_to_wrap") == [f"predictor.{name}" for name in found]


def test_path_that_matches_nothing_is_refused():
    for path, message in {
        "predictor.head": "'predictor'.* blocks, final_layer",
        "predictor.final_layr": "'predictor.final_layer'",
        "predictor.blocks.{0-9}": "'predictor.blocks.4'",
        "predictor.blocks.{3-1}": "runs backwards",
        "predictor.blocks.{a}": "neither a number nor a range",
        "a.{*}.b.{*}": "at most one pair",
    }.items():
        with pytest.raises(ConfigError, match=rf"sub_modules_to_wrap\[0\](?s:.*){message}"):
            resolve_paths([path], NAMES, "sub_modules_to_wrap")


def test_sharding_size_divides_the_ranks_and_nothing_is_every_default(tmp_path):
    assert Fsdp2Config(sharding_size="auto").shard_ranks(8) == 8
    assert Fsdp2Config().shard_ranks(8) == 1
    pytest.raises(ConfigError, Fsdp2Config(sharding_size=3).shard_ranks, 8).match(r"sharding_size = 3 .* 8 ranks")
    (tmp_path / "fsdp2.yaml").write_text("{}")
    assert load_fsdp2_config(tmp_path / "fsdp2.yaml") == load_fsdp2_config(None) == Fsdp2Config()


@pytest.mark.parametrize(("line", "message"), [
    ("shard_size: 2", "'sharding_size'"),
    ("sub_modules_to_wrap: predictor.blocks.{*}", "list"),
    ("sub_modules_to_wrap: [predictor.blocks, 3]", r"sub_modules_to_wrap\[1\] = 3"),
    ("sharding_size: atuo", "'auto' or null"),
    ("param_dtype: bfloat16", "'bf16', 'fp16', 'fp32' or null"),
    ("reshard_after_forward: 0", "reshard_after_forward = 0"),
    ("num_to_forward_prefetch: -1", "num_to_forward_prefetch = -1"),
    ("offload_to_cpu: 1", "true or false"),
    ("pin_memory: true\npin_memory: false", "'pin_memory'"),
    ("# caf\xe9", "UTF-8"),
    *((line, "empty") for line in ("", "# nothing but this\n", "---\n")),
])  # fmt: skip
def test_wrong_line_is_refused(tmp_path, line, message):
    (tmp_path / "fsdp2.yaml").write_bytes(line.encode("latin-1"))
    refused = pytest.raises(ConfigError, load_fsdp2_config, tmp_path / "fsdp2.yaml")
    refused.match(f"(?s){tmp_path}/fsdp2.yaml.*{message}")


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
    file = Fsdp2Config(**fsdp2) if fsdp2 is not None else None
    assert decide_precision(bf16, file, PYTORCH, "pytorch on cpu") == decided


@pytest.mark.parametrize(("bf16", "fsdp2", "offered", "message"), [
    (True, {"param_dtype": "fp32"}, PYTORCH, "--bf16.*param_dtype is fp32"),
    (True, {"param_dtype": "fp32"}, HOST, "fsdp2.yaml"),
    (True, {}, HOST, "param_dtype is null"),
    (True, None, MINDSPORE, "--bf16.* mindspore on npu"),
    (False, {"param_dtype": "bf16"}, MINDSPORE, "fsdp2.yaml.* param_dtype = 'bf16'.* mindspore on npu"),
    (False, {"param_dtype": "fp16"}, PYTORCH, "param_dtype = 'fp16'"),
    (False, {"reduce_dtype": "fp16"}, PYTORCH, "reduce_dtype = 'fp16'"),
    (False, {"output_dtype": "fp16"}, PYTORCH, "output_dtype = 'fp16'"),
])  # fmt: skip
def test_what_contradicts_or_is_not_offered_is_refused_with_its_cure(bf16, fsdp2, offered, message):
    file = Fsdp2Config(**fsdp2) if fsdp2 is not None else None
    pytest.raises(UserError, decide_precision, bf16, file, offered, "mindspore on npu").match(message)

"""Nothing in a folder that another library reads is run or fetched, and no library is left to ask."""

import ast
import json
from pathlib import Path

import pytest

from mindspeed_mm_dit.configs.autoencoder import AutoencoderKLConfig
from mindspeed_mm_dit.configs.files import check_names_no_code
from mindspeed_mm_dit.configs.teacher import Dinov2Config
from mindspeed_mm_dit.configs.text_encoder import BertConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import TEACHERS, TEXT_ENCODERS
from tests.conftest import ROOT

READS = {"from_pretrained", "from_single_file"}


def calls():
    """All calls of the package that let another library read a folder: (place, name, arguments by name)."""
    for file in sorted((ROOT / "mindspeed_mm_dit").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
                given = {word.arg: word.value for word in node.keywords}
                yield f"{file.name}:{node.lineno}", node.func.attr, given


def test_every_call_of_a_library_stays_on_this_machine_and_runs_no_code_of_a_folder():
    found = [*calls()]
    assert len(found) >= 5
    for place, name, given in found:
        wanted = {"local_files_only": True} | ({"trust_remote_code": False} if name == "from_pretrained" else {})
        assert {key: ast.literal_eval(given[key]) for key in wanted if key in given} == wanted, place


def test_a_key_that_names_code_is_named(tmp_path):
    for file, content, key in (
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.Words", None]}}, "auto_map"),
        ("config.json", {"_attn_implementation": "someone/attention"}, "_attn_implementation"),
        # CVE-2026-4372, of transformers 4.56 to 5.2, 4.57.1 of requirements/ among them:
        ("config.json", {"_attn_implementation_internal": "someone/code"}, "_attn_implementation_internal"),
        ("config.json", {"text_config": {"experts_implementation": "someone/code"}}, "experts_implementation"),
        ("config.json", {"_experts_implementation_internal": "someone/code"}, "_experts_implementation_internal"),
        ("config.json", {"kernel_config": {"kernel_mapping": {"RMSNorm": "someone/code:Norm"}}}, "kernel_config"),
        ("config.json", {"vision_config": {"attn_implementation": "flash_attention_2"}}, "attn_implementation"),
        ("config.json", {"parts": [{"quantization_config": {"quant_method": "mxfp4"}}]}, "quantization_config"),
        ("adapter_config.json", {"base_model_name_or_path": "someone/model"}, "base_model_name_or_path"),
        ("preprocessor_config.json", {"trust_remote_code": True}, "trust_remote_code"),
    ):
        folder = tmp_path / key
        folder.mkdir()
        (folder / file).write_text(json.dumps({"model_type": "bert", **content}))
        with pytest.raises(ConfigError, match=rf"^a\.folder = .*{file}: {key} = .*: names code"):
            check_names_no_code("a.folder", folder)


def test_a_folder_that_names_no_code_of_others_is_read(tmp_path):
    own = {"auto_map": {}, "_attn_implementation": "sdpa", "quantization_config": None, "_name_or_path": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "other.json").write_text(json.dumps({"auto_map": {"AutoModel": "own.Model"}}))
    (tmp_path / "data_config.json").write_text(json.dumps([{"name": "what MiniLM was trained on"}]))
    check_names_no_code("a.folder", tmp_path)


def text_encoder(folder):
    TEXT_ENCODERS["bert"].check_files(BertConfig(folder))


def tokenizer(folder):
    Path(folder, "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 512}))
    TEXT_ENCODERS["bert"].open_tokenizer(BertConfig(folder))


def teacher(folder):
    TEACHERS["dinov2"].check_files(Dinov2Config(from_pretrained=folder))


def autoencoder(folder):
    AutoencoderKLConfig(folder).check_files()


@pytest.mark.parametrize(
    ("check", "file"),
    [(text_encoder, "config.json"), (tokenizer, "tokenizer_config.json"), (teacher, "config.json"),
     (autoencoder, "config.json")],
)  # fmt: skip
def test_every_folder_of_a_model_is_looked_at_before_it_is_read(tmp_path, check, file):
    known = {"model_type": "dinov2", "hidden_size": 8, "_class_name": "AutoencoderKL"}
    for key, value in (("auto_map", {"AutoModel": "own.Model"}), ("_attn_implementation_internal", "someone/code")):
        (tmp_path / file).write_text(json.dumps({**known, key: value}))
        with pytest.raises(ConfigError, match=f"{file}: {key} = .*: names code, which is never run or fetched"):
            check(str(tmp_path))

"""Text encoders of transformers with few random weights, and a tokenizer for them, as folders."""

import json
import re
from pathlib import Path

CAPTIONS = ("a seven moves left", "a one", "")
_WORDS = ("a", "seven", "one", "moves", "left")


def write_bert(folder: Path, pooling: dict | None = None) -> Path:
    """Write a BERT of width 16; ``pooling``: sentence-transformers' 1_Pooling/config.json, with a Normalize after."""
    import torch
    import transformers

    _write_tokenizer(folder, ("[PAD]", "[CLS]", "[SEP]", "[UNK]"), "[CLS]", "[SEP]", "[PAD]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=16, pad_token_id=0, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    if pooling is not None:
        kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    return folder


def write_clip(folder: Path, projected: bool) -> Path:
    """Write CLIP's text model of width 16, with a projection to 12 or without."""
    import torch
    import transformers

    _write_tokenizer(folder, ("<pad>", "<s>", "<unk>", "</s>"), "<s>", "</s>", "</s>", end_last=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.CLIPTextConfig(vocab_size=9, max_position_embeddings=16, projection_dim=12, eos_token_id=8,
                                         bos_token_id=1, pad_token_id=8, **sizes)  # fmt: skip
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    kind(config).save_pretrained(folder)
    return folder


def write_t5(folder: Path, width: int = 16, kind: str = "T5") -> Path:
    """Write a whole T5 or UMT5, with its decoder."""
    import torch
    import transformers

    _write_tokenizer(folder, ("<pad>", "</s>", "<unk>"), "", "</s>", "<pad>")
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder)
    return folder


def write_language_model(folder: Path, kind: str) -> Path:
    """Write a Qwen2.5-VL ("qwen2_5_vl"), a Qwen3 ("qwen3") with its head, or a Mistral Small 3 ("mistral3") with its
    processor, of width 16 and three layers."""
    import torch
    import transformers

    _write_prompt_tokenizer(folder, kind)
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 32, "initializer_range": 0.3}  # fmt: skip
    if kind == "qwen3":
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **sizes)).save_pretrained(folder)
    elif kind == "mistral3":
        text = transformers.MistralConfig(head_dim=8, **sizes)
        eyes = transformers.PixtralVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                                num_attention_heads=2, image_size=28, patch_size=14)  # fmt: skip
        config = transformers.Mistral3Config(text_config=text, vision_config=eyes, image_token_index=5)
        transformers.Mistral3ForConditionalGeneration(config).save_pretrained(folder)
    else:
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}
        rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
        config = transformers.Qwen2_5_VLConfig(text_config={**sizes, "rope_scaling": rope}, vision_config=vision)
        transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


CHATS = {
    "qwen3": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "mistral3": "{{ bos_token }}[SYSTEM_PROMPT]{{ messages[0].content[0].text }}[/SYSTEM_PROMPT]"
    "[INST]{{ messages[1].content[0].text }}[/INST]",
}
"""The part that texts need of the templates that Qwen and Mistral publish with their tokenizers."""
_MARKS = {
    "qwen2_5_vl": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "mistral3": ("<pad>", "<s>", "</s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[INST]", "[/INST]",
                 "[IMG_BREAK]", "[IMG_END]"),
}  # fmt: skip
"""Tokens of their own: for padding, for the beginning, and for the end."""


def _write_prompt_tokenizer(folder: Path, kind: str) -> None:
    """Write a tokenizer with a token for each word, mark and line end of a prompt; Mistral's puts <s> before it."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    from mindspeed_mm_dit.configs.text_encoder import Mistral3Config, Qwen25VLConfig

    is_mistral, marks = kind == "mistral3", _MARKS[kind]
    template = (Mistral3Config if is_mistral else Qwen25VLConfig).prompt_template
    words = re.findall(r"<.*?>|\w+|[^\w ]", re.sub(r"\[.*?\]", "", template).replace("{}", " ".join(_WORDS)))
    names = dict.fromkeys([*marks, "?", *words, *_WORDS])
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+|[^\w ]"), "isolated"),
                                                       pre_tokenizers.Split(Regex(" +"), "removed")])  # fmt: skip
    tokenizer.add_special_tokens(list(marks))
    if is_mistral:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=marks[0], eos_token=marks[2], bos_token="<s>" if is_mistral else None,
        padding_side="left" if kind != "qwen3" else "right", chat_template=CHATS.get(kind),
    )  # fmt: skip
    fast.save_pretrained(folder)
    if is_mistral:
        eyes = transformers.PixtralImageProcessor()
        transformers.PixtralProcessor(eyes, fast, chat_template=CHATS[kind]).save_pretrained(folder)


def write_byte_tokenizer(folder: Path, kind: str) -> None:
    """Write a tokenizer with a token for each byte, so that nothing of a text is lost; Mistral's puts <s> before it."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    marks = list(dict.fromkeys(["<pad>", "</s>", *(mark for own in _MARKS.values() for mark in own)]))
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {name: number for number, name in enumerate([*marks, *bytes_])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(marks)
    if kind == "mistral3":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", chat_template=CHATS[kind]
    )
    fast.save_pretrained(folder)


def write_clip_tokenizer(folder: Path) -> None:
    """Write a CLIPTokenizer, as the folders of FLUX.1 and Stable Diffusion 3 have it, without merges."""
    import transformers
    from tokenizers import pre_tokenizers

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*bytes_, *(f"{byte}</w>" for byte in bytes_), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)


def _write_tokenizer(folder, special, begin, end, pad, end_last=False):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = [*(name for name in special if not end_last or name != end), *_WORDS, *([end] if end_last else [])]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=next(name for name in special if "unk" in name.lower())))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}".strip(), special_tokens=[(name, ids[name]) for name in (begin, end) if name]
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

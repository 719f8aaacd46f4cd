"""Language models of a few kilobytes, in the exact layout their authors publish: names, prefix, head, configs.

Random seeded weights as in tiny_checkpoints; the tokenizer has the tokens of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import tiny_tokenizers
from tests.support.tiny_checkpoints import (
    Draw,
    edit_json,
    qwen3_tensors,
    save_weights,
    write_json,
    write_sentence_files,
)

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PADDING = 4  # rows of the vocabulary past the tokenizer's, as Qwen's published models have 267
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_lm(
    path: Path,
    model_type: str = "llama",
    *,
    kind: str = "ForCausalLM",
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 96,
    max_positions: int = 256,
    tied: bool = False,
    seed: int = 3,
    prefix: str = "model.",
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    head: bool | None = None,
    extra: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    **sentence_files: Any,
) -> Path:
    """A causal language model.

    Args:
        model_type: a key of CLASSES.
        kind: the end of the class name; "Model" for a bare backbone.
        head_dim: None leaves it out of config.json where the family has a default of its own.
        head: whether lm_head.weight is in the file; None: where it is not tied. A tied one is the embedding again.
        sentence_files: go to `write_sentence_files`; without any there are none.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizers.byte_level(chat=True)
    tiny_tokenizers.save(tokenizer, path)
    shape: dict[str, Any] = {
        "architectures": [CLASSES[model_type] + kind],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "vocab_size": tokenizer.get_vocab_size() + PADDING,
        "bos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if model_type == "qwen3" or head_dim is not None:
        shape["head_dim"] = head_dim or 32
    if model_type == "mistral":
        shape["sliding_window"] = None
    shape |= config or {}
    write_json(path / "config.json", shape)
    write_tokenizer_config(path, max_positions)
    backbone = lm_tensors(shape, seed)
    tensors = {prefix + name: tensor for name, tensor in backbone.items()}
    if head if head is not None else (kind == "ForCausalLM" and not tied):
        own = Draw(seed + 100).matrix(shape["vocab_size"], hidden_size)
        tensors["lm_head.weight"] = backbone["embed_tokens.weight"].clone() if tied else own
    tensors = {name: tensor.to(dtype) for name, tensor in (tensors | dict(extra or {})).items()}
    save_weights(path, tensors, shards=shards)
    if sentence_files:
        write_sentence_files(path, hidden_size, **sentence_files)
    return path


def write_tokenizer_config(path: Path, max_length: int, **changes: Any) -> None:
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, **special}
    write_json(path / "tokenizer_config.json", config | {"chat_template": CHAT_TEMPLATE} | changes)


def write_generation_config(path: Path, **values: Any) -> None:
    write_json(path / "generation_config.json", values)


def lm_tensors(shape: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Under the names of the bare model (LlamaModel, Qwen2Model, MistralModel, Qwen3Model)."""
    model_type, d, inner = shape["model_type"], shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head = shape.get("head_dim") or d // heads
    tensors = qwen3_tensors({**shape, "head_dim": head, "attention_bias": False}, seed)
    if model_type == "qwen3":
        return tensors
    tensors = {name: tensor for name, tensor in tensors.items() if "q_norm" not in name and "k_norm" not in name}
    draw, biased = Draw(seed + 50), shape.get("attention_bias") or model_type == "qwen2"
    for n in range(shape["num_hidden_layers"]):
        if biased:
            for part, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
                tensors[f"layers.{n}.self_attn.{part}_proj.bias"] = draw.bias(rows)
        if shape.get("attention_bias"):
            tensors[f"layers.{n}.self_attn.o_proj.bias"] = draw.bias(d)
        if shape.get("mlp_bias"):
            for part, rows in (("gate", inner), ("up", inner), ("down", d)):
                tensors[f"layers.{n}.mlp.{part}_proj.bias"] = draw.bias(rows)
    return tensors


def sample_ids(path: Path) -> dict[str, int]:
    """Ids of the tokens that tests name."""
    tokenizer = tiny_tokenizers.byte_level(chat=True)
    return {token: int(tokenizer.token_to_id(token)) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}


def drop_chat_template(path: Path) -> None:
    edit_json(path / "tokenizer_config.json", chat_template=None)

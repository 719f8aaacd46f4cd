"""Qwen3.5 of a few kilobytes, in the layouts that are published: the text model's own, and inside a multimodal one.

Random seeded weights as in tiny_checkpoints. Gates are drawn so that the state fades over tens of tokens: neither is
the recurrence a constant, nor does it forget at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import tiny_tokenizers
from tests.support.tiny_checkpoints import Draw, save_weights, write_json, write_sentence_files
from tests.support.tiny_language_models import PADDING, write_tokenizer_config

# layout -> (class name, model_type, whether config.json nests the text model's, prefix of its tensors)
LAYOUTS = {
    "text": ("Qwen3_5ForCausalLM", "qwen3_5_text", False, "model."),
    "bare_text": ("Qwen3_5TextModel", "qwen3_5_text", False, ""),
    "multimodal": ("Qwen3_5ForConditionalGeneration", "qwen3_5", True, "model.language_model."),
    "bare_multimodal": ("Qwen3_5Model", "qwen3_5", True, "language_model."),
}


def tiny_qwen3_5(
    path: Path,
    layout: str = "text",
    *,
    hidden_size: int = 48,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 32,
    intermediate_size: int = 64,
    max_positions: int = 512,
    tied: bool = True,
    seed: int = 11,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    outer: Mapping[str, Any] | None = None,
    **sentence_files: Any,
) -> Path:
    """
    Args:
        layout: a key of LAYOUTS; the multimodal ones also hold a few tensors of a vision tower, and all of them those
            of a layer that guesses further tokens.
        dtype: of the weights; A_log and the gated norm stay in fp32, as in the release checkpoints.
        config: keys of the text model's config. outer: keys of the object around it.
        sentence_files: go to `write_sentence_files`; without any there are none.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizers.byte_level(chat=True)
    tiny_tokenizers.save(tokenizer, path)
    write_tokenizer_config(path, max_positions)
    name, model_type, nested, prefix = LAYOUTS[layout]
    shape: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "vocab_size": tokenizer.get_vocab_size() + PADDING,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "attn_output_gate": True,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "dtype": str(dtype).removeprefix("torch."),
    }
    shape |= config or {}
    top: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    vision = {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48}
    top |= {"text_config": shape, "vision_config": vision, "tie_word_embeddings": tied} if nested else shape | top
    write_json(path / "config.json", top | dict(outer or {}))
    tensors = {prefix + key: tensor.to(dtype) for key, tensor in qwen3_5_tensors(shape, seed).items()}
    for key in tensors:
        if key.endswith(("A_log", "linear_attn.norm.weight")):
            tensors[key] = tensors[key].float()
    draw = Draw(seed + 100)
    if name.startswith("Qwen3_5For"):
        if not tied:
            tensors["lm_head.weight"] = draw.matrix(shape["vocab_size"], hidden_size).to(dtype)
        tensors["mtp.fc.weight"] = draw.matrix(hidden_size, 2 * hidden_size).to(dtype)
        tensors["mtp.layers.0.mlp.down_proj.weight"] = draw.matrix(hidden_size, intermediate_size).to(dtype)
    if nested:
        tower = "model.visual." if prefix.startswith("model.") else "visual."
        tensors[tower + "patch_embed.proj.bias"] = draw.bias(16).to(dtype)
        tensors[tower + "blocks.0.attn.qkv.weight"] = draw.matrix(48, 16).to(dtype)
    save_weights(path, tensors | dict(extra or {}), shards=shards)
    if sentence_files:
        write_sentence_files(path, hidden_size, **sentence_files)
    return path


def qwen3_5_tensors(shape: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Under the names of Qwen3_5TextModel. Norm weights are what a gain is above one."""
    draw, d, inner = Draw(seed), shape["hidden_size"], shape["intermediate_size"]
    tensors = {"embed_tokens.weight": draw.table(shape["vocab_size"], d)}
    for n, kind in enumerate(shape["layer_types"]):
        layer = f"layers.{n}"
        tensors[f"{layer}.input_layernorm.weight"] = draw.bias(d)
        mixer = _delta_net(draw, shape) if kind == "linear_attention" else _attention(draw, shape)
        tensors |= {f"{layer}.{key}": tensor for key, tensor in mixer.items()}
        tensors[f"{layer}.post_attention_layernorm.weight"] = draw.bias(d)
        for part in ("gate", "up"):
            tensors[f"{layer}.mlp.{part}_proj.weight"] = draw.matrix(inner, d)
        tensors[f"{layer}.mlp.down_proj.weight"] = draw.matrix(d, inner)
    tensors["norm.weight"] = draw.bias(d)
    return tensors


def _attention(draw: Draw, shape: Mapping[str, Any]) -> dict[str, Tensor]:
    d, head = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    rows = {"q": 2 * heads * head, "k": kv_heads * head, "v": kv_heads * head}
    tensors = {f"self_attn.{part}_proj.weight": draw.matrix(n, d) for part, n in rows.items()}
    tensors["self_attn.o_proj.weight"] = draw.matrix(d, heads * head)
    if shape["attention_bias"]:
        tensors |= {f"self_attn.{part}_proj.bias": draw.bias(n) for part, n in rows.items()}
        tensors["self_attn.o_proj.bias"] = draw.bias(d)
    return tensors | {f"self_attn.{part}_norm.weight": draw.bias(head) for part in ("q", "k")}


def _delta_net(draw: Draw, shape: Mapping[str, Any]) -> dict[str, Tensor]:
    d, values = shape["hidden_size"], shape["linear_num_value_heads"]
    width = values * shape["linear_value_head_dim"]
    channels = 2 * shape["linear_num_key_heads"] * shape["linear_key_head_dim"] + width
    rows = {"qkv": channels, "z": width, "b": values, "a": values}
    tensors = {f"linear_attn.in_proj_{part}.weight": draw.matrix(n, d) for part, n in rows.items()}
    taps = shape["linear_conv_kernel_dim"]
    tensors["linear_attn.conv1d.weight"] = draw.matrix(channels, taps).unsqueeze(1)
    tensors["linear_attn.A_log"] = torch.rand(values, generator=draw.generator).mul(4).add(0.1).log()
    tensors["linear_attn.dt_bias"] = draw.bias(values) * 10 - 3
    tensors["linear_attn.norm.weight"] = draw.scale(shape["linear_value_head_dim"])
    tensors["linear_attn.out_proj.weight"] = draw.matrix(d, width)
    return tensors

"""A Llama language model out of a GGUF file as a folder in the Transformers layout: names, order of rows, configs.

GGUF keeps the rows of q and k in the order in which llama.cpp rotates neighbours; Transformers rotates halves. Knows
names and JSON; knows neither packages nor blocks of bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rose.errors import PullError
from rose.hub.byte_bpe import SMOLLM_SPLITS, ByteBPE
from rose.hub.gguf_tensors import GgufFile
from rose.hub.safetensors_file import LazyArray

_CONTROL = 3  # of tokenizer.ggml.token_type


def llama_config(file: GgufFile) -> dict[str, Any]:
    """config.json.

    Raises:
        PullError: another architecture, or a missing key.
    """
    if file.key("general.architecture") != "llama":
        raise PullError(f"the GGUF file holds a {file.key('general.architecture')!r}, expected a 'llama'")
    if "output.weight" in file.names:
        raise PullError("the GGUF file has a head of its own, and only tied ones are read")
    hidden, heads = int(file.key("llama.embedding_length")), int(file.key("llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(file.key("llama.feed_forward_length")),
        "num_hidden_layers": int(file.key("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.key("llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "vocab_size": len(file.key("tokenizer.ggml.tokens")),
        "max_position_embeddings": int(file.key("llama.context_length")),
        # The decimal number that was meant, not its float32 neighbour.
        "rms_norm_eps": float(str(np.float32(file.key("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(file.key("llama.rope.freq_base")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_token_ids(file),
        "dtype": "float32",
    }


def llama_tensors(file: GgufFile, config: Mapping[str, Any]) -> dict[str, LazyArray]:
    """Under the names of LlamaForCausalLM.

    Raises:
        PullError: the file holds a tensor that has no place here.
    """
    d, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    places: dict[str, tuple[str, tuple[int, ...], int]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], d), 0),
        "output_norm.weight": ("model.norm.weight", (d,), 0),
    }
    # GGUF's name -> (Transformers' name, shape, heads whose rows are in another order).
    layer: dict[str, tuple[str, tuple[int, ...], int]] = {
        "attn_norm": ("input_layernorm", (d,), 0),
        "attn_q": ("self_attn.q_proj", (heads * head, d), heads),
        "attn_k": ("self_attn.k_proj", (kv_heads * head, d), kv_heads),
        "attn_v": ("self_attn.v_proj", (kv_heads * head, d), 0),
        "attn_output": ("self_attn.o_proj", (d, heads * head), 0),
        "ffn_norm": ("post_attention_layernorm", (d,), 0),
        "ffn_gate": ("mlp.gate_proj", (inner, d), 0),
        "ffn_up": ("mlp.up_proj", (inner, d), 0),
        "ffn_down": ("mlp.down_proj", (d, inner), 0),
    }
    for n in range(config["num_hidden_layers"]):
        for short, (name, shape, turned) in layer.items():
            places[f"blk.{n}.{short}.weight"] = (f"model.layers.{n}.{name}.weight", shape, turned)
    unknown = sorted(set(file.names) - set(places))
    if unknown:
        raise PullError(f"the GGUF file holds {unknown[0]!r}, which has no place in this Llama")
    return {name: _of(file, source, shape, turned) for source, (name, shape, turned) in places.items()}


def _of(file: GgufFile, source: str, shape: tuple[int, ...], turned: int) -> LazyArray:
    if not turned:
        return LazyArray(shape, lambda: file.tensor(source, shape))
    return LazyArray(shape, lambda: halves_first(file.tensor(source, shape), turned))


def halves_first(rows: Any, heads: int) -> Any:
    """Rows of each head in the order 0, 2, 4, ..., 1, 3, 5, ...: neighbours that are rotated together end up half a
    head apart."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def smollm_vocabulary(file: GgufFile) -> ByteBPE:
    """
    Raises:
        PullError: a tokenizer of another kind.
    """
    kind = (file.key("tokenizer.ggml.model"), file.key("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise PullError(f"the GGUF file's tokenizer is {kind}, expected ('gpt2', 'smollm')")
    tokens, kinds = file.key("tokenizer.ggml.tokens"), file.key("tokenizer.ggml.token_type")
    return ByteBPE(
        # Control tokens are pieces too, as in the published tokenizer.
        pieces={token: index for index, token in enumerate(tokens)},
        merges=[_pair(merge) for merge in file.key("tokenizer.ggml.merges")],
        special={token: i for i, (token, of) in enumerate(zip(tokens, kinds, strict=True)) if of == _CONTROL},
        splits=SMOLLM_SPLITS,
    )


def tokenizer_facts(file: GgufFile) -> dict[str, Any]:
    """What tokenizer_config.json says beside the class."""
    tokens = file.key("tokenizer.ggml.tokens")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{role}_token": tokens[int(file.key(f"tokenizer.ggml.{key}_token_id"))] for role, key in roles.items()}
    limit = int(file.key("llama.context_length"))
    return {"model_max_length": limit, **named, "chat_template": file.key("tokenizer.chat_template")}


def write_llama_files(folder: Path, file: GgufFile, config: Mapping[str, Any]) -> None:
    """config.json and generation_config.json."""
    for name, value in (("config.json", config), ("generation_config.json", _token_ids(file))):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _token_ids(file: GgufFile) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{role}_token_id": int(file.key(f"tokenizer.ggml.{key}_token_id")) for role, key in keys.items()}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right

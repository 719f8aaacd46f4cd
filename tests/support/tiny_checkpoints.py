"""Whole model folders of a few kilobytes: random seeded weights, a real tokenizer, sentence-transformers files.

Written without transformers, so that they cost milliseconds; transformers and sentence-transformers load them all the
same (tests/models/test_parity_*.py), which is what makes them references. Weights are large enough (standard deviation
near 1 / sqrt(width)) that attention, positions and activations all matter to the result.

    folder = tiny_bert(tmp_path / "bert", pooling="cls", dense=[Dense(64, 96)], prompts={"query": "query: "})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support import tiny_tokenizers

LEGACY_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class Dense:
    """One Dense module behind the pooling."""

    in_features: int
    out_features: int
    bias: bool = True
    activation: str | None = "torch.nn.modules.activation.Tanh"
    residual: bool = False


class Draw:
    """Seeded random tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * columns**-0.5

    def table(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator)

    def bias(self, n: int) -> Tensor:
        return torch.randn(n, generator=self.generator) * 0.1

    def scale(self, n: int) -> Tensor:
        return 1 + torch.randn(n, generator=self.generator) * 0.1


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; a value of None takes the key away."""
    value = read_json(path) | changes
    write_json(path, {key: entry for key, entry in value.items() if entry is not None})


def save_weights(path: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    """model.safetensors, or `shards` numbered files with their index; neighbours land in different shards."""
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata=metadata)
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    placed = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if placed[n] == file}, path / file, metadata=metadata)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": placed})


def write_sentence_files(
    path: Path,
    width: int,
    *,
    pooling: str | Sequence[str] | None = "mean",
    include_prompt: bool = True,
    legacy: bool = True,
    dense: Sequence[Dense] = (),
    normalize: bool = True,
    quantizer: bool = False,
    prompts: Mapping[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_seq_length: int | None = None,
    seed: int = 7,
) -> None:
    """modules.json and the folders it names.

    Args:
        pooling: a mode or several, by their sentence-transformers names; None writes no sentence-transformers file.
        legacy: the older schema (booleans, `sentence_transformers.models.X`), else the newer one.
        quantizer: end in the pplx-embed module `st_quantize.FlexibleQuantizer`.
    """
    if pooling is None:
        return
    modes = [pooling] if isinstance(pooling, str) else list(pooling)
    old, new = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."
    base = "sentence_transformers.base.modules."
    kinds = [("", old + "Transformer" if legacy else base + "transformer.Transformer")]
    kinds.append(("1_Pooling", old + "Pooling" if legacy else new + "pooling.Pooling"))
    _write_pooling(path / "1_Pooling", width, modes, include_prompt, legacy)
    draw = Draw(seed)
    for module in dense:
        folder = f"{len(kinds)}_Dense"
        kinds.append((folder, old + "Dense" if legacy else base + "dense.Dense"))
        _write_dense(path / folder, module, draw)
    if normalize:
        folder = f"{len(kinds)}_Normalize"
        (path / folder).mkdir(exist_ok=True)
        kinds.append((folder, old + "Normalize" if legacy else base + "normalize.Normalize"))
    if quantizer:
        kinds.append(("", "st_quantize.FlexibleQuantizer"))
    modules = [{"idx": i, "name": str(i), "path": p, "type": kind} for i, (p, kind) in enumerate(kinds)]
    write_json(path / "modules.json", modules)
    if prompts is not None or default_prompt_name is not None:
        write_json(
            path / "config_sentence_transformers.json",
            {
                "prompts": dict(prompts or {}),
                "default_prompt_name": default_prompt_name,
                "similarity_fn_name": "cosine",
            },
        )
    if max_seq_length is not None:
        write_json(path / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})


def _write_pooling(folder: Path, width: int, modes: list[str], include_prompt: bool, legacy: bool) -> None:
    config: dict[str, Any]
    if legacy:
        config = {"word_embedding_dimension": width} | {flag: name in modes for name, flag in LEGACY_FLAGS.items()}
    else:
        config = {"embedding_dimension": width, "pooling_mode": modes[0] if len(modes) == 1 else modes}
    write_json(folder / "config.json", config | {"include_prompt": include_prompt})


def _write_dense(folder: Path, module: Dense, draw: Draw) -> None:
    config: dict[str, Any] = {
        "in_features": module.in_features,
        "out_features": module.out_features,
        "bias": module.bias,
    }
    if module.activation is not None:
        config["activation_function"] = module.activation
    if module.residual:
        config["use_residual"] = True
    write_json(folder / "config.json", config)
    tensors = {"linear.weight": draw.matrix(module.out_features, module.in_features)}
    if module.bias:
        tensors["linear.bias"] = draw.bias(module.out_features)
    if module.residual and module.in_features != module.out_features:
        tensors["residual.weight"] = draw.matrix(module.out_features, module.in_features)
    save_file(tensors, folder / "model.safetensors")


def tiny_bert(
    path: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 96,
    max_positions: int = 128,
    seed: int = 0,
    prefix: str = "",
    shards: int = 1,
    extra: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    **sentence_files: Any,
) -> Path:
    """A BERT embedder (WordPiece, lower case).

    Args:
        prefix: put before every name of the backbone. extra: further tensors of the same file, by their full names.
        sentence_files: go to `write_sentence_files`.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizers.word_piece()
    tiny_tokenizers.save(tokenizer, path)
    special = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    _write_tokenizer_config(path, max_positions, special, do_lower_case=True)
    shape = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": intermediate_size,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": max_positions,
        "type_vocab_size": 2,
        "vocab_size": tokenizer.get_vocab_size(),
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    shape |= config or {}
    write_json(path / "config.json", shape)
    tensors = {prefix + name: tensor for name, tensor in bert_tensors(shape, seed).items()}
    save_weights(path, tensors | dict(extra or {}), shards=shards)
    write_sentence_files(path, hidden_size, **sentence_files)
    return path


def tiny_xlm_roberta(
    path: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    intermediate_size: int = 96,
    max_positions: int = 128,
    seed: int = 1,
    prefix: str = "",
    shards: int = 1,
    extra: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    **sentence_files: Any,
) -> Path:
    """An XLM-RoBERTa embedder (Unigram, positions from pad id + 1); `max_positions` tokens can be served."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizers.unigram()
    tiny_tokenizers.save(tokenizer, path)
    special = {
        "bos": "<s>",
        "cls": "<s>",
        "eos": "</s>",
        "sep": "</s>",
        "pad": "<pad>",
        "unk": "<unk>",
        "mask": "<mask>",
    }
    _write_tokenizer_config(path, max_positions, special)
    shape = {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "hidden_act": "gelu",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": intermediate_size,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": max_positions + 2,
        "type_vocab_size": 1,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    shape |= config or {}
    write_json(path / "config.json", shape)
    tensors = {prefix + name: tensor for name, tensor in bert_tensors(shape, seed).items()}
    save_weights(path, tensors | dict(extra or {}), shards=shards)
    write_sentence_files(path, hidden_size, **{"pooling": "cls"} | sentence_files)
    return path


def tiny_qwen3(
    path: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 96,
    max_positions: int = 256,
    bidirectional: bool = False,
    tied: bool = True,
    seed: int = 2,
    prefix: str = "",
    shards: int = 1,
    chat: bool = False,
    extra: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    **sentence_files: Any,
) -> Path:
    """A Qwen3 embedder: causal with last-token pooling (as Qwen3-Embedding), or bidirectional with mean pooling
    and the pplx-embed quantiser. head_dim differs from hidden_size / num_heads on purpose."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizers.byte_level(append_end=not (bidirectional or chat), chat=chat)
    tiny_tokenizers.save(tokenizer, path)
    # pplx-embed's tokenizer_config.json states 131072, four times what the model takes; one token has three roles.
    special = {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}
    if bidirectional:
        special["sep"] = "<|endoftext|>"
    _write_tokenizer_config(path, 131072 if bidirectional else max_positions, special)
    shape: dict[str, Any] = {
        "architectures": ["PPLXQwen3Model" if bidirectional else "Qwen3ForCausalLM"],
        "model_type": "bidirectional_pplx_qwen3" if bidirectional else "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "vocab_size": tokenizer.get_vocab_size() + 4,
        "torch_dtype": "float32",
    }
    if bidirectional:
        shape["use_bidirectional_attention"] = True
    shape |= config or {}
    write_json(path / "config.json", shape)
    tensors = {prefix + name: tensor for name, tensor in qwen3_tensors(shape, seed).items()}
    save_weights(path, tensors | dict(extra or {}), shards=shards)
    ends = {"pooling": "mean", "normalize": False, "quantizer": True} if bidirectional else {"pooling": "lasttoken"}
    write_sentence_files(path, hidden_size, **ends | sentence_files)
    return path


def bert_tensors(shape: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Under the names BertModel and XLMRobertaModel save them."""
    draw, d, inner = Draw(seed), shape["hidden_size"], shape["intermediate_size"]
    tensors: dict[str, Tensor] = {}

    def linear(name: str, out: int, into: int) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.matrix(out, into), draw.bias(out)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = draw.scale(d), draw.bias(d)

    tensors["embeddings.word_embeddings.weight"] = draw.table(shape["vocab_size"], d)
    tensors["embeddings.position_embeddings.weight"] = draw.table(shape["max_position_embeddings"], d)
    tensors["embeddings.token_type_embeddings.weight"] = draw.table(shape["type_vocab_size"], d)
    norm("embeddings.LayerNorm")
    for n in range(shape["num_hidden_layers"]):
        layer = f"encoder.layer.{n}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", d, d)
        linear(f"{layer}.attention.output.dense", d, d)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", inner, d)
        linear(f"{layer}.output.dense", d, inner)
        norm(f"{layer}.output.LayerNorm")
    return tensors


def qwen3_tensors(shape: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Under the names Qwen3Model saves them; Qwen3ForCausalLM puts "model." before them."""
    draw, d, inner = Draw(seed), shape["hidden_size"], shape["intermediate_size"]
    head, heads, kv_heads = shape["head_dim"], shape["num_attention_heads"], shape["num_key_value_heads"]
    tensors = {"embed_tokens.weight": draw.table(shape["vocab_size"], d)}
    for n in range(shape["num_hidden_layers"]):
        layer = f"layers.{n}"
        tensors[f"{layer}.input_layernorm.weight"] = draw.scale(d)
        for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{layer}.self_attn.{part}_proj.weight"] = draw.matrix(rows * head, d)
        tensors[f"{layer}.self_attn.o_proj.weight"] = draw.matrix(d, heads * head)
        tensors[f"{layer}.self_attn.q_norm.weight"] = draw.scale(head)
        tensors[f"{layer}.self_attn.k_norm.weight"] = draw.scale(head)
        tensors[f"{layer}.post_attention_layernorm.weight"] = draw.scale(d)
        for part in ("gate", "up"):
            tensors[f"{layer}.mlp.{part}_proj.weight"] = draw.matrix(inner, d)
        tensors[f"{layer}.mlp.down_proj.weight"] = draw.matrix(d, inner)
    tensors["norm.weight"] = draw.scale(d)
    if shape.get("attention_bias"):
        for n in range(shape["num_hidden_layers"]):
            for part, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head), ("o", d)):
                tensors[f"layers.{n}.self_attn.{part}_proj.bias"] = draw.bias(rows)
    return tensors


def _write_tokenizer_config(path: Path, max_length: int, special: Mapping[str, str], **more: Any) -> None:
    tokens = {f"{role}_token": text for role, text in special.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    write_json(path / "tokenizer_config.json", config | tokens | more)
    write_json(path / "special_tokens_map.json", tokens)

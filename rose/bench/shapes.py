"""Checkpoint folders of the published models' exact shapes, with seeded random weights, made on the spot.

Speed depends on shapes, not on values; real weights take their place where a folder is given. The folders are ordinary
ones: ROSE, transformers and other servers read them. Knows shapes; knows neither engines nor clocks.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.bench.made_tokenizers import write_tokenizer
from rose.bench.made_weights import write_weights
from rose.hub import default_cache

SEED = 20260904


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One model to build.

    Attributes:
        config: config.json, as the published checkpoint has it where speed or loading depends on it.
        pooling: mode of 1_Pooling; None for a language model, which has no sentence-transformers files.
        normalize: whether a Normalize module follows.
        transformers_class: class of transformers whose parameter names and shapes the checkpoint has.
    """

    config: Mapping[str, Any]
    pooling: str | None
    normalize: bool = False
    transformers_class: str


_XLM_R = {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-05,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "type_vocab_size": 1,
    "position_embedding_type": "absolute",
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "torch_dtype": "bfloat16",
}
_BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "torch_dtype": "bfloat16",
}
_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3Model"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
_PPLX = {
    **_QWEN3,
    "model_type": "bidirectional_pplx_qwen3",
    "architectures": ["PPLXQwen3Model"],
    "use_bidirectional_attention": True,
}

# Numbers of the published checkpoints' config.json files.
SHAPES: Mapping[str, Shape] = {
    "bge-m3": Shape(
        config={
            **_XLM_R,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "vocab_size": 250002,
            "max_position_embeddings": 8194,
        },
        pooling="cls",
        normalize=True,
        transformers_class="XLMRobertaModel",
    ),
    "pplx-embed-0.6b": Shape(
        config={
            **_PPLX,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
        },
        pooling="mean",
        normalize=False,
        transformers_class="Qwen3Model",
    ),
    "pplx-embed-4b": Shape(
        config={
            **_PPLX,
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
        },
        pooling="mean",
        normalize=False,
        transformers_class="Qwen3Model",
    ),
    "qwen3-embedding-0.6b": Shape(
        config={
            **_QWEN3,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
        },
        pooling="lasttoken",
        normalize=True,
        transformers_class="Qwen3Model",
    ),
    "e5-small": Shape(
        config={
            **_BERT,
            "hidden_size": 384,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
            "vocab_size": 250037,
            "max_position_embeddings": 512,
        },
        pooling="mean",
        normalize=True,
        transformers_class="BertModel",
    ),
    "minilm": Shape(
        config={
            **_BERT,
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
            "vocab_size": 30522,
            "max_position_embeddings": 512,
        },
        pooling="mean",
        normalize=True,
        transformers_class="BertModel",
    ),
    # For trying the loads where there is no GPU.
    "tiny-qwen3-embedding": Shape(
        config={
            **_QWEN3,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 96,
            "vocab_size": 1000,
            "max_position_embeddings": 8192,
        },
        pooling="lasttoken",
        normalize=True,
        transformers_class="Qwen3Model",
    ),
    "tiny-bert": Shape(
        config={
            **_BERT,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 1000,
            "max_position_embeddings": 512,
        },
        pooling="mean",
        normalize=True,
        transformers_class="BertModel",
    ),
    "tiny-bge-m3": Shape(
        config={
            **_XLM_R,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 1000,
            "max_position_embeddings": 8194,
        },
        pooling="cls",
        normalize=True,
        transformers_class="XLMRobertaModel",
    ),
    "tiny-pplx-embed": Shape(
        config={
            **_PPLX,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 96,
            "vocab_size": 1000,
            "max_position_embeddings": 8192,
        },
        pooling="mean",
        normalize=False,
        transformers_class="Qwen3Model",
    ),
}


def made_folder() -> Path:
    """Where made checkpoints are kept if nobody says otherwise: "shapes" of the user's own cache, which no other user
    of the machine can write to."""
    return default_cache() / "shapes"


def build_checkpoint(name: str, folder: Path, *, seed: int = SEED, shapes: Mapping[str, Shape] | None = None) -> Path:
    """Write the folder of `name` unless it is there already; returns it. Who asks meanwhile waits for it.

    Args:
        shapes: where to look the name up; SHAPES if not given.

    Raises:
        KeyError: no such shape.
    """
    shape = (SHAPES if shapes is None else shapes)[name]
    with one_maker(folder):
        if (folder / "complete").exists():
            return folder
        folder.mkdir(exist_ok=True)
        _write_files(shape, folder)
        config = dict(shape.config)
        if shape.transformers_class == "Qwen3Model":
            config["model_type"] = "qwen3"
        write_weights(config, shape.transformers_class, folder, seed, language_model=shape.pooling is None)
        (folder / "complete").touch()  # last, so that a folder half written is written again
        return folder


@contextmanager
def one_maker(folder: Path) -> Iterator[None]:
    """One process at a time makes what lies in `folder`; a lock is gone with who holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _write_files(shape: Shape, folder: Path) -> None:
    _dump(folder / "config.json", shape.config)
    write_tokenizer(folder, shape.config, append_end=shape.pooling == "lasttoken")
    if shape.pooling is None:
        return
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + ([("2_Normalize", "Normalize")] * shape.normalize)
    _dump(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _dump(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": shape.config["hidden_size"],
            "pooling_mode_cls_token": shape.pooling == "cls",
            "pooling_mode_mean_tokens": shape.pooling == "mean",
            "pooling_mode_lasttoken": shape.pooling == "lasttoken",
        },
    )


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

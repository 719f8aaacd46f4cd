"""multilingual-e5-small as a sentence-transformers folder: its tensors' names, its configs, its prompts.

Two layouts of the same weights. BERT counts positions from 0; XLM-RoBERTa counts them from its padding id + 1, so two
rows that no token reaches go before the table. Knows names and JSON; knows neither packages nor files' formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rose.errors import PullError
from rose.hub.e5s1 import E5S1File
from rose.hub.safetensors_file import Float32, LazyArray

_POSITIONS = "embeddings.position_embeddings.weight"
_XLMR_PADDING = 1
# What its authors say to put before every text.
_PROMPTS = {"query": "query: ", "passage": "passage: "}
_MODULES = ("Transformer", "Pooling", "Normalize")


def e5_tensors(container: E5S1File) -> dict[str, LazyArray]:
    """Under BertModel's names, without a pooler, which mean pooling does not use.

    Raises:
        PullError: the container holds a tensor that has no place here.
    """
    sizes = container.sizes
    d, inner = sizes.hidden_size, sizes.intermediate_size
    places: dict[str, tuple[str, tuple[int, ...]]] = {
        "emb.word": ("embeddings.word_embeddings.weight", (sizes.vocab_size, d)),
        "emb.pos": (_POSITIONS, (sizes.max_position_embeddings, d)),
        "emb.type": ("embeddings.token_type_embeddings.weight", (sizes.type_vocab_size, d)),
        "emb.ln.w": ("embeddings.LayerNorm.weight", (d,)),
        "emb.ln.b": ("embeddings.LayerNorm.bias", (d,)),
    }
    linears = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value"}
    linears |= {"ao": "attention.output.dense", "fi": "intermediate.dense", "fo": "output.dense"}
    shapes = {"fi": (inner, d), "fo": (d, inner)}
    norms = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}
    for layer in range(sizes.num_hidden_layers):
        for short, name in linears.items():
            shape = shapes.get(short, (d, d))
            places[f"l{layer}.{short}.w"] = (f"encoder.layer.{layer}.{name}.weight", shape)
            places[f"l{layer}.{short}.b"] = (f"encoder.layer.{layer}.{name}.bias", shape[:1])
        for short, name in norms.items():
            places[f"l{layer}.{short}.w"] = (f"encoder.layer.{layer}.{name}.weight", (d,))
            places[f"l{layer}.{short}.b"] = (f"encoder.layer.{layer}.{name}.bias", (d,))
    unknown = sorted(set(container.names) - set(places))
    if unknown:
        raise PullError(f"the E5S1 container holds {unknown[0]!r}, which has no place in a BERT encoder")
    return {name: _of(container, source, shape) for source, (name, shape) in places.items()}


def _of(container: E5S1File, source: str, shape: tuple[int, ...]) -> LazyArray:
    return LazyArray(shape, lambda: container.tensor(source, shape))


def xlmr_tensors(bert: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """The same tensors with the rows before the position table that XLM-RoBERTa counts past."""
    table = bert[_POSITIONS]
    unused = _XLMR_PADDING + 1

    def shifted() -> Float32:
        return np.concatenate([np.zeros((unused, table.shape[1]), dtype=np.float32), table.read()])

    return {**bert, _POSITIONS: LazyArray((table.shape[0] + unused, table.shape[1]), shifted)}


def e5_config(container: E5S1File) -> dict[str, Any]:
    sizes = container.sizes
    shape = {name: getattr(sizes, name) for name in sizes.__dataclass_fields__ if name != "unk_token_id"}
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        **shape,
        "torch_dtype": "float32",
    }


def xlmr_config(bert: Path) -> dict[str, Any]:
    """config.json for the weights of the BERT folder in the other layout."""
    config: dict[str, Any] = json.loads((bert / "config.json").read_text(encoding="utf-8"))
    return {
        **config,
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "max_position_embeddings": config["max_position_embeddings"] + _XLMR_PADDING + 1,
    }


def write_e5_files(folder: Path, config: Mapping[str, Any]) -> None:
    """Everything but weights and tokenizer: config.json and the files of sentence-transformers."""
    width = config["hidden_size"]
    max_tokens = config["max_position_embeddings"] - (2 if config["model_type"] == "xlm-roberta" else 0)
    _write(folder / "config.json", config)
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(_MODULES)
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    prompts = {"prompts": _PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    _write(folder / "config_sentence_transformers.json", prompts)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

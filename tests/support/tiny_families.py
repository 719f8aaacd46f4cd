"""The families people serve, each as a folder of a few kilobytes in the layout its authors publish.

Built on the backbones of tiny_checkpoints; random seeded weights, real tokenizers, exact file and tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import tiny_tokenizers
from tests.support.tiny_checkpoints import (
    Draw,
    edit_json,
    tiny_bert,
    tiny_qwen3,
    tiny_xlm_roberta,
    write_json,
)

QWEN3_QUERY = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"  # no space behind
)
# The chat template of Qwen3-Reranker's newer revisions, in words of its own; it ends in two line ends.
RERANKER_TEMPLATE = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first \
| default("Given a web search query, retrieve relevant passages that answer the query") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""


def tiny_bge_m3(
    path: Path, *, heads: Sequence[str] = ("sparse", "colbert"), colbert_dim: int | None = None, **arguments: Any
) -> Path:
    """BAAI/bge-m3: XLM-R, CLS, Normalize, and two heads as pickled state dicts; `heads` says which are there."""
    tiny_xlm_roberta(path, **{"pooling": "cls", "normalize": True} | arguments)
    width = arguments.get("hidden_size", 64)
    draw = Draw(31)
    sparse = {"weight": draw.matrix(1, width), "bias": draw.bias(1)}
    out = colbert_dim or width
    colbert = {"weight": draw.matrix(out, width), "bias": draw.bias(out)}
    if "sparse" in heads:
        torch.save(sparse, path / "sparse_linear.pt")
    if "colbert" in heads:
        torch.save(colbert, path / "colbert_linear.pt")
    return path


def tiny_pplx(path: Path, **arguments: Any) -> Path:
    """perplexity-ai/pplx-embed-v1: bidirectional Qwen3, mean, quantiser; head_dim is not hidden_size / num_heads."""
    return tiny_qwen3(path, bidirectional=True, **arguments)


def tiny_pplx_context(path: Path, **arguments: Any) -> Path:
    """perplexity-ai/pplx-embed-context-v1: the same with another class, and no sentence-transformers files."""
    config = {"architectures": ["PPLXQwen3ContextualModel"]} | dict(arguments.pop("config", {}))
    return tiny_qwen3(path, bidirectional=True, config=config, **{"pooling": None} | arguments)


def tiny_qwen3_embedding(path: Path, **arguments: Any) -> Path:
    """Qwen/Qwen3-Embedding: causal language model, last token, Normalize, a query prompt, an end token appended."""
    return tiny_qwen3(path, **{"prompts": {"query": QWEN3_QUERY, "document": ""}} | arguments)


def tiny_e5(path: Path, *, xlm_roberta: bool = False, **arguments: Any) -> Path:
    """intfloat/multilingual-e5: mean, Normalize; in a BERT folder (small) or an XLM-R one (large); prefixes by hand."""
    make = tiny_xlm_roberta if xlm_roberta else tiny_bert
    return make(path, **{"pooling": "mean", "normalize": True} | arguments)


def tiny_cross_encoder_bert(path: Path, *, labels: int = 1, **arguments: Any) -> Path:
    """cross-encoder/ms-marco-MiniLM: BertForSequenceClassification with its pooler; token types in the pair."""
    draw, width = Draw(41), arguments.get("hidden_size", 64)
    head = {
        "bert.pooler.dense.weight": draw.matrix(width, width),
        "bert.pooler.dense.bias": draw.bias(width),
        "classifier.weight": draw.matrix(labels, width) * 3,
        "classifier.bias": draw.bias(labels),
    }
    config = {"architectures": ["BertForSequenceClassification"]} | _labels(labels) | dict(arguments.pop("config", {}))
    tiny_bert(path, prefix="bert.", extra=head, config=config, **{"pooling": None} | arguments)
    names = ["input_ids", "token_type_ids", "attention_mask"]  # what BertTokenizer means by itself
    edit_json(path / "tokenizer_config.json", model_input_names=names)
    return path


def tiny_cross_encoder_xlmr(path: Path, *, labels: int = 1, **arguments: Any) -> Path:
    """BAAI/bge-reranker-v2-m3: XLMRobertaForSequenceClassification, no pooler, a classifier of two layers."""
    draw, width = Draw(42), arguments.get("hidden_size", 64)
    head = {
        "classifier.dense.weight": draw.matrix(width, width),
        "classifier.dense.bias": draw.bias(width),
        "classifier.out_proj.weight": draw.matrix(labels, width) * 3,
        "classifier.out_proj.bias": draw.bias(labels),
    }
    shape = {"architectures": ["XLMRobertaForSequenceClassification"]} | _labels(labels)
    config = shape | dict(arguments.pop("config", {}))
    return tiny_xlm_roberta(path, prefix="roberta.", extra=head, config=config, **{"pooling": None} | arguments)


def tiny_qwen3_reranker(path: Path, *, tied: bool = True, logit_score: bool = True, **arguments: Any) -> Path:
    """Qwen/Qwen3-Reranker: a language model under the prefix "model.", 0.6B and 4B tied, 8B untied.

    Args:
        logit_score: the newer revision, with 1_LogitScore and a chat template; the older one has neither.
    """
    arguments = {"max_positions": 1024} | arguments
    extra = dict(arguments.pop("extra", {}))
    if not tied:
        extra["lm_head.weight"] = Draw(51).matrix(_chat_vocabulary() + 4, arguments.get("hidden_size", 64))
    tiny_qwen3(path, chat=True, prefix="model.", tied=tied, extra=extra, **{"pooling": None} | arguments)
    edit_json(path / "tokenizer_config.json", padding_side="left")
    if logit_score:
        _write_logit_score(path)
    return path


def tiny_qwen3_classifier(path: Path, *, labels: int = 1, weight: Tensor | None = None, **arguments: Any) -> Path:
    """A converted reranker: Qwen3ForSequenceClassification with `score.weight` on the last token."""
    width = arguments.get("hidden_size", 64)
    score = Draw(61).matrix(labels, width) * 3 if weight is None else weight
    shape = {"architectures": ["Qwen3ForSequenceClassification"], "pad_token_id": _chat_id("<|endoftext|>")} | _labels(
        labels
    )
    config = shape | dict(arguments.pop("config", {}))
    further = {"pooling": None, "max_positions": 1024} | arguments
    return tiny_qwen3(path, chat=True, prefix="model.", extra={"score.weight": score}, config=config, **further)


def _labels(count: int) -> Mapping[str, Any]:
    """As transformers writes it: two labels, which is its default, are left out."""
    if count == 2:
        return {}
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


def _chat_vocabulary() -> int:
    return tiny_tokenizers.byte_level(chat=True).get_vocab_size()


def _chat_id(token: str) -> int:
    found = tiny_tokenizers.byte_level(chat=True).token_to_id(token)
    assert found is not None
    return int(found)


def _write_logit_score(path: Path) -> None:
    (path / "chat_template.jinja").write_text(RERANKER_TEMPLATE, encoding="utf-8")
    write_json(
        path / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_LogitScore",
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
    )
    ids = {"true_token_id": _chat_id("yes"), "false_token_id": _chat_id("no")}
    write_json(path / "1_LogitScore/config.json", ids)
    write_json(
        path / "config_sentence_transformers.json",
        {
            "model_type": "CrossEncoder",
            "prompts": {"query": "Given a web search query, retrieve relevant passages that answer the query"},
            "default_prompt_name": "query",
            "activation_fn": "torch.nn.modules.activation.Sigmoid",
        },
    )
    write_json(
        path / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
            "unpad_inputs": False,
        },
    )

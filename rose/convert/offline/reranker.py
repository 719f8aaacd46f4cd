"""A reranker's head and prompt, as choices and as the files that carry them.

The yes and no rows of a language model become one row, `score.weight` of a ForSequenceClassification folder: the same
score, without a matrix of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.config.reranker import CALLER, QWEN3_INSTRUCTION, QWEN3_PREFIX, QWEN3_SUFFIX, RerankerConfig
from rose.config.tokenizer_files import TokenizerFiles
from rose.convert.offline.choices import Choice, flag
from rose.convert.offline.names import Tensors
from rose.convert.offline.source import Source
from rose.errors import CheckpointError

_ACTIVATIONS = {"sigmoid": "torch.nn.modules.activation.Sigmoid", "none": "torch.nn.modules.linear.Identity"}
_TRANSFORMER = "sentence_transformers.models.Transformer"


def reranker_choices(reranker: RerankerConfig | None, tensors: Tensors) -> tuple[Choice, ...]:
    """How the score is made and how a pair is written."""
    assert reranker is not None
    head = {
        "pooled": "classifier on the first token",
        "last": "score.weight on the last token",
        "yes_no": f"one row: {tensors.head} of {reranker.yes_id} (yes)"
        + ("" if reranker.no_id is None else f" minus {reranker.no_id} (no)"),
    }[reranker.head]
    form = "the tokenizer's own" if reranker.form == "pair" else "Qwen3-Reranker's prompt"
    # What the caller chose, by the flags that say it here.
    head_source = f"{flag('to')} reranker" if reranker.source == CALLER else reranker.source
    form_source = flag("rerank-template") if reranker.form_source == CALLER else reranker.form_source
    return (
        Choice("head", head, head_source),
        Choice("labels", ", ".join(reranker.labels), "the head"),
        Choice("activation", reranker.activation, reranker.activation_source),
        Choice("pair", form, form_source),
    )


def reranker_files(
    source: Source, reranker: RerankerConfig, config: dict[str, Any], max_tokens: int, *, asked: bool
) -> Mapping[str, Any]:
    """Files besides config.json, which is completed in place: one label and its activation.

    Args:
        asked: the prompt was settled by a flag.
    """
    activation = _ACTIVATIONS[reranker.activation]
    if reranker.head == "yes_no":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": _pad(source, config)}
    config["sentence_transformers"] = {"activation_fn": activation}
    lowers = source.transformer_config.flag("do_lower_case", False)
    if reranker.form == "pair":
        return {"sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": lowers}}
    logits = {"method": "forward", "method_output_name": "logits"}
    files: dict[str, Any] = {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": _TRANSFORMER}],
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "prompts": {"query": reranker.instruction},
            "default_prompt_name": "query",
            "activation_fn": activation,
        },
        "sentence_bert_config.json": {
            "max_seq_length": max_tokens,
            "do_lower_case": lowers,
            "transformer_task": "sequence-classification",
            "modality_config": {"text": logits, "message": logits | {"format": "flat"}},
            "module_output_name": "scores",
        },
    }
    # Without the flag, a template about pairs was found to be this prompt; with it, its own counts for nothing.
    if asked or QWEN3_PREFIX.splitlines()[1].split(" Note")[0] not in TokenizerFiles(source.tokenizer).chat_template:
        files["chat_template.jinja"] = _template()
    return files


def _pad(source: Source, config: Mapping[str, Any]) -> int:
    """transformers' classifiers look for the last token that is no padding."""
    stated = config.get("pad_token_id")
    pad = stated if isinstance(stated, int) else TokenizerFiles(source.tokenizer).role_id("pad")
    if pad is None:
        raise CheckpointError(f"neither config.json nor the tokenizer's files of {source.tokenizer} name a pad token")
    return pad


def _template() -> str:
    """The prompt as a chat template: the model's own words around the roles that sentence-transformers fills."""

    def role(name: str) -> str:
        return f'messages | selectattr("role", "eq", "{name}") | map(attribute="content") | first'

    body = (
        f'<Instruct>: {{{{ {role("system")} | default("{QWEN3_INSTRUCTION}") }}}}\n'
        f"<Query>: {{{{ {role('query')} }}}}\n<Document>: {{{{ {role('document')} }}}}"
    )
    # A template loses one line end at its end; an empty expression behind them keeps both.
    return f'{QWEN3_PREFIX}{body}{QWEN3_SUFFIX}{{{{ "" }}}}'

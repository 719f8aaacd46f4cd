"""How a folder scores a query against a document: which head, how the pair is written, what its labels mean.

Reads config.json, 1_LogitScore/config.json, config_sentence_transformers.json and the tokenizer's files. Knows neither
weights nor tokenising: the front writes the pair, the engine only sees ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rose.config.architecture import ArchitectureConfig
from rose.config.json_file import JsonFile
from rose.config.sentence_transformers import LogitScoreConfig
from rose.config.tokenizer_files import TokenizerFiles

Task = Literal["embed", "rerank", "generate"]

# The text around a pair as Qwen3-Reranker's authors have it (github.com/QwenLM/Qwen3-Embedding, README), verbatim:
# the two line ends at the end are the last token, whose row is scored.
_JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
QWEN3_PREFIX = (
    f'<|im_start|>system\n{_JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# What a chat template must hold, in this order, to be that prompt. Template engines drop line ends at a file's end,
# so a template writes the last ones in ways of its own.
_PIECES = (QWEN3_PREFIX, "<Instruct>: ", "\n<Query>: ", "\n<Document>: ", QWEN3_SUFFIX.rstrip("\n"))
_MARKERS = {"<Instruct>: ", "<Query>: ", "<Document>: "}
_MARKER = re.compile(r"<[A-Za-z]\w*>: ")
_ACTIVATIONS: dict[str, Literal["sigmoid", "none"]] = {"Sigmoid": "sigmoid", "Identity": "none"}
# Sources that are no file.
CALLER = "the caller's choice"
_NAME = "the name Qwen3-Reranker"
_SETTLE_PROMPT = "settle it with --rerank-template qwen3 (Qwen3-Reranker's prompt)"
_SETTLE_TEMPLATE = f"{_SETTLE_PROMPT} or none (the tokenizer's own pair)"
_OTHER_PROMPT = (
    "that is not Qwen3-Reranker's prompt, and no other is served; --rerank-template qwen3 writes that one anyway"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerConfig:
    """How pairs are written and what the score means.

    Attributes:
        form: "pair": the tokenizer's own pair of (query, document), with token types where the family has them;
            "template": prefix + body + suffix, each tokenised by itself without special tokens being added, and the
            special tokens in prefix and suffix recognised.
        head: "pooled": pooler and classifier on the first token; "last": `score.weight` on the last token;
            "yes_no": difference of two rows of the language model's head on the last token.
        labels: of the columns of the score, in order; one label is a relevance, several are classes.
        activation: what turns the raw score into the one that is shown: "sigmoid" or "none".
        activation_source: the file that states it, or the default.
        prefix, suffix: template: text before and after the body, verbatim.
        instruction: template: put into the body where the request has none.
        yes_id, no_id: yes_no: rows of the head; without a `no_id` the score is the `yes_id` logit itself.
        source: what said that this is a reranker, for the start-up print.
        form_source: what said how its pairs are written.
    """

    form: Literal["pair", "template"]
    head: Literal["pooled", "last", "yes_no"]
    labels: tuple[str, ...] = ("LABEL_0",)
    activation: Literal["sigmoid", "none"] = "sigmoid"
    activation_source: str = "default for one label"
    prefix: str = ""
    suffix: str = ""
    instruction: str = ""
    yes_id: int | None = None
    no_id: int | None = None
    source: str
    form_source: str

    def body(self, query: str, document: str, instruction: str | None = None) -> str:
        """The user's part of a template: between prefix and suffix.

        Args:
            instruction: None means the model's own.
        """
        task = self.instruction if instruction is None else instruction
        return f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"


def read_reranker(
    config: JsonFile,
    architecture: ArchitectureConfig,
    logit_score: LogitScoreConfig | None,
    sentence_config: JsonFile,
    tokens: TokenizerFiles,
    *,
    name: str,
    task: Task | None = None,
    template: str | None = None,
) -> RerankerConfig | None:
    """None for a folder that is no reranker.

    Args:
        logit_score: of modules.json, or None.
        name: of the folder; "Qwen3-Reranker" in it stands for the files that its first revisions lack.
        task: settles what the folder is for; only "rerank" makes a reranker of it. How a pair is written is
            another matter.
        template: "qwen3" or "none" settles how a pair is written.

    Raises:
        CheckpointError: asked to rerank without a head that could, an unknown template or activation, no yes or no in
            the vocabulary, or a folder that does not say how a pair is written.
    """
    if template not in (None, "qwen3", "none"):
        raise config.error(f"rerank template {template!r} is not served; there are qwen3, none")
    kind = architecture.architecture
    known = "qwen3-reranker" in f"{name} {config.text('_name_or_path', '')}".lower()
    if task not in (None, "rerank"):
        return None
    if kind.endswith("ForSequenceClassification"):
        return _classifier(config, architecture, sentence_config, tokens, known=known, template=template)
    if logit_score is None and task is None and not (known and kind.endswith("ForCausalLM")):
        return None
    if not kind.endswith("ForCausalLM"):
        raise config.error(
            f"{kind} has no head that scores a pair: neither a classifier nor a language model's, so it cannot rerank"
        )
    if template == "none":
        raise config.error("a language model's yes or no needs a template; leave --rerank-template out")
    if logit_score is not None:
        yes_id, no_id, source = logit_score.true_token_id, logit_score.false_token_id, logit_score.source
    else:
        yes_id, no_id = (_vocabulary_id(config, tokens, word) for word in ("yes", "no"))
        source = _NAME if known else CALLER
    form_source = _prompt_source(config, tokens, known=known, template=template)
    if form_source is None:
        raise config.error(f"it does not say how a pair is written; {_SETTLE_PROMPT}")
    activation, where = _activation(config, sentence_config, 1)
    return RerankerConfig(
        form="template",
        head="yes_no",
        labels=("yes",),
        activation=activation,
        activation_source=where,
        prefix=QWEN3_PREFIX,
        suffix=QWEN3_SUFFIX,
        instruction=_instruction(sentence_config),
        yes_id=yes_id,
        no_id=no_id,
        source=source,
        form_source=form_source,
    )


def _classifier(
    config: JsonFile,
    architecture: ArchitectureConfig,
    sentence_config: JsonFile,
    tokens: TokenizerFiles,
    *,
    known: bool,
    template: str | None,
) -> RerankerConfig:
    labels = _labels(config)
    decoder = architecture.rope_theta is not None
    form_source = "the tokenizer's files"
    if template is not None or decoder:
        found = _prompt_source(config, tokens, known=known, template=template)
        if found is None:
            raise config.error(f"it does not say how a pair is written; {_SETTLE_TEMPLATE}")
        form_source = found
    templated = template == "qwen3" or (template is None and decoder)
    activation, where = _activation(config, sentence_config, len(labels))
    return RerankerConfig(
        form="template" if templated else "pair",
        head="last" if decoder else "pooled",
        labels=labels,
        activation=activation,
        activation_source=where,
        prefix=QWEN3_PREFIX if templated else "",
        suffix=QWEN3_SUFFIX if templated else "",
        instruction=_instruction(sentence_config) if templated else "",
        source=f"config.json: {architecture.architecture}",
        form_source=form_source,
    )


def _prompt_source(config: JsonFile, tokens: TokenizerFiles, *, known: bool, template: str | None) -> str | None:
    """What settles how a pair is written; None where nothing does. Raises CheckpointError as `_says_qwen3` does."""
    if template is not None:
        return CALLER
    if _says_qwen3(config, tokens):
        return "the chat template"
    return _NAME if known else None


def _says_qwen3(config: JsonFile, tokens: TokenizerFiles) -> bool:
    """Whether the folder's chat template is Qwen3-Reranker's prompt; False where it is not about pairs at all.

    Raises:
        CheckpointError: it is about pairs, but another prompt, whatever the folder is called.
    """
    # Pieces may stand in the template's own string literals, which spell a line end and a quote with a backslash.
    text = tokens.chat_template.replace("\\n", "\n").replace('\\"', '"')
    markers = {*_MARKER.findall(text)}
    if _JUDGE not in text and not markers & _MARKERS:
        return False
    place = 0
    for piece in _PIECES:
        found = text.find(piece, place)
        if found < 0:
            raise config.error(f"its chat template judges pairs, but has no {piece!r} where it is due; {_OTHER_PROMPT}")
        place = found + len(piece)
    if markers != _MARKERS:
        further = ", ".join(sorted(markers - _MARKERS))
        raise config.error(f"its chat template has further fields ({further}); {_OTHER_PROMPT}")
    return True


def _labels(config: JsonFile) -> tuple[str, ...]:
    """Names of the classifier's rows. Two labels are what the format means by silence, and not written out."""
    named = config.child("id2label")
    if named.data:
        if sorted(named.data, key=int) != [str(i) for i in range(len(named.data))]:
            raise config.error("id2label does not number its labels 0, 1, 2, ...")
        return tuple(named.text(str(i)) for i in range(len(named.data)))
    return tuple(f"LABEL_{i}" for i in range(config.integer("num_labels", 2)))


def _activation(config: JsonFile, sentence_config: JsonFile, labels: int) -> tuple[Literal["sigmoid", "none"], str]:
    """What sentence-transformers would apply, from whichever of its three places states it."""
    for file, key in (
        (sentence_config, "activation_fn"),
        (config.child("sentence_transformers"), "activation_fn"),
        (config, "sbert_ce_default_activation_function"),
    ):
        name = file.text(key, "")
        if not name:
            continue
        last = name.rsplit(".", 1)[-1]
        if not name.startswith("torch.nn.") or last not in _ACTIVATIONS:
            raise file.error(f"{key} {name!r} is not served; there are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[last], f"{file.path.name}: {key}"
    return ("sigmoid", "default for one label") if labels == 1 else ("none", "default for several labels")


def _instruction(sentence_config: JsonFile) -> str:
    """A cross-encoder's default prompt is its instruction."""
    name = sentence_config.text("default_prompt_name", "")
    prompts = sentence_config.child("prompts")
    return prompts.text(name) if name in prompts else QWEN3_INSTRUCTION


def _vocabulary_id(config: JsonFile, tokens: TokenizerFiles, word: str) -> int:
    found = tokens.id_of(word)
    if found is None:
        raise config.error(f"the vocabulary has no token {word!r}, which the score is read from; it cannot rerank")
    return found

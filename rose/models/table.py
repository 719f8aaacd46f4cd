"""The table of what is served, as Markdown: one row a class name of config.json, made from the registry.

Knows the registry; knows no folder, so what a folder decides is said to be its decision.
"""

from __future__ import annotations

from rose.models.registry import BACKBONES, Entry

_HEAD = (
    "`architectures`",
    "`model_type`",
    "Answers",
    "Pooling or head",
    "Attention",
    "dtypes",
    "Compared with",
    "in tests/models",
)
_CONTEXTUAL = "PPLXQwen3ContextualModel"
_LLAMAS = ("Llama", "Mistral", "Qwen2")
_YES_NO = "yes minus no of the language model's head on the last token"
_CLASSIFIERS = {
    "bert": "pooler, tanh and classifier on the first token",
    "roberta": "dense, tanh and out_proj on the first token",
    "last": "`score.weight` on the last token",
}


def model_table() -> str:
    """Lines of the table, each ended."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for model_type, entry in BACKBONES.items():
        rows += [_row(model_type, entry, name, *_embeds(model_type, name)) for name in entry.architectures]
        for name in entry.generates:
            rows.append(_row(model_type, entry, name, "text", "language model's head"))
            if entry.classifiers:
                rows.append(_row(model_type, entry, name, "score", _YES_NO))
        rows += [_row(model_type, entry, n, "score", _CLASSIFIERS[entry.classifier]) for n in entry.classifiers]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _embeds(model_type: str, name: str) -> tuple[str, str]:
    if name == _CONTEXTUAL:
        return "dense, int8, binary; one a chunk", "mean of each chunk, by the class"
    if name.startswith("PPLX"):
        return "dense, int8, binary", "as the folder says (mean)"
    if name == "XLMRobertaModel":
        return "dense; sparse and colbert where the folder has their heads", "as the folder says"
    return "dense", "as the folder says"


def _row(model_type: str, entry: Entry, name: str, answers: str, head: str) -> tuple[str, ...]:
    refused = "; float16 refused" if entry.refused else ""
    apart = {"FlagEmbedding": name == "XLMRobertaModel", "sentence-transformers": answers != "text"}
    oracles = [oracle for oracle in entry.oracles if apart.get(oracle, True)]
    return (
        f"`{name}`",
        f"`{model_type}`",
        answers,
        head,
        entry.attention,
        f"{', '.join(entry.dtypes)}{refused}",
        ", ".join(oracles),
        ", ".join(f"`{test}`" for test in _tests(name, answers)),
    )


def _tests(name: str, answers: str) -> tuple[str, ...]:
    if name.startswith("Qwen3_5"):
        own = {"text": ("test_qwen3_5.py", "test_qwen3_5_paged.py"), "score": ("test_qwen3_5_reranker.py",)}
        return own.get(answers, ("test_qwen3_5_embedder.py",))
    if answers == "text":
        return ("test_causal_lm.py", "test_smollm2.py") if name == "LlamaForCausalLM" else ("test_causal_lm.py",)
    if name.startswith(_LLAMAS):
        return ("test_llama_heads.py",) if answers == "score" else ("test_llama.py", "test_llama_heads.py")
    if answers == "score":
        return ("test_rerankers.py",)
    if name.startswith("PPLX"):
        return ("test_pplx.py",)
    common = ("test_backbone_parity.py", "test_served_families.py")
    return (*common, "test_bge_m3.py") if name == "XLMRobertaModel" else common

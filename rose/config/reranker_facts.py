"""What a reranker is, as lines for whoever starts or inspects it: nothing of it may be a surprise in the scores.

Knows the reranker's configuration; knows neither weights nor requests.
"""

from __future__ import annotations

from rose.config.reranker import RerankerConfig

_HEADS = {
    "pooled": "pooler and classifier on the first token",
    "last": "score.weight on the last token",
    "yes_no": "rows of the language model's head on the last token",
}
_SHOWN_LABELS = 20


def reranker_facts(reranker: RerankerConfig) -> list[tuple[str, str]]:
    """(name, value) of everything that decides a score, with its source where it could be doubted."""
    labels = reranker.labels
    more = f", ... ({len(labels)} in all)" if len(labels) > _SHOWN_LABELS else ""
    rows = [
        ("head", f"{_HEADS[reranker.head]} ({reranker.source})"),
        ("labels", ", ".join(labels[:_SHOWN_LABELS]) + more),
        ("activation", f"{reranker.activation} ({reranker.activation_source})"),
    ]
    if reranker.head == "yes_no":
        no = "none: the logit of yes is the score" if reranker.no_id is None else reranker.no_id
        rows.insert(1, ("yes and no ids", f"{reranker.yes_id}, {no}"))
    if reranker.form == "pair":
        return [*rows, ("pair", "the tokenizer's own pair of query and document")]
    return [
        *rows,
        ("pair", f"template qwen3 ({reranker.form_source})"),
        ("prefix", repr(reranker.prefix)),
        ("suffix", repr(reranker.suffix)),
        ("instruction", f"{reranker.instruction!r} (where a request has none)"),
    ]

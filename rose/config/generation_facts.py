"""What a generating model is, as lines for whoever starts or inspects it: nothing of it may be a surprise in the text.

Knows the folder's configuration; knows neither weights nor requests.
"""

from __future__ import annotations

from rose.config.generation import GenerationConfig


def generation_facts(generation: GenerationConfig, vocab_size: int) -> list[tuple[str, str]]:
    """(name, value) of everything that decides a text, with its source where it could be doubted.

    Args:
        vocab_size: rows of the head.
    """
    ends = ", ".join(map(str, generation.end_ids)) or "none: only length and stops end a text"
    templates = ", ".join(generation.templates) or "none: no chats, only completions"
    rows = [
        ("task", f"generate ({generation.source})"),
        ("end tokens", f"{ends} ({generation.end_source})"),
        ("chat templates", templates),
        ("begins with", _begin(generation)),
    ]
    if generation.vocab_limit < vocab_size:
        rows.append(("never drawn", f"ids from {generation.vocab_limit} on: the tokenizer has no such tokens"))
    if generation.defaults:
        rows.append(("defaults", ", ".join(f"{name} {value:g}" for name, value in generation.defaults.items())))
    if generation.passed_over:
        rows.append(("not applied", f"{', '.join(generation.passed_over)} (generation_config.json)"))
    return rows


def _begin(generation: GenerationConfig) -> str:
    if generation.bos_id is None:
        return "nothing"
    token = f"{generation.special_tokens.get('bos_token', '')!r} (id {generation.bos_id})"
    return f"{token}, added by the tokenizer" if generation.adds_bos else f"nothing; {token} is not added by itself"

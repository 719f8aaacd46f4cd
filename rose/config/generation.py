"""What a folder says about continuing texts: end tokens, chat templates, which ids its tokenizer knows, its defaults.

Reads generation_config.json, config.json and the tokenizer's files. Knows neither weights nor how a template is
rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rose.config.architecture import ArchitectureConfig
from rose.config.json_file import JsonFile
from rose.config.tokenizer_files import TokenizerFiles

# Class names of config.json that end in one of these have a language model's head.
HEADS = ("ForCausalLM", "ForConditionalGeneration")
_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
# What a request may leave to the folder, by the names of generation_config.json, and which values can be served.
_DEFAULTS: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < 1e38,
    "top_p": lambda value: 1e-38 < value <= 1,
    "top_k": lambda value: -1 <= value < 1 << 31,
    "min_p": lambda value: 0 <= value <= 1,
}
# Keys there that change what transformers generates and have no counterpart here, with the value that does nothing.
_WITHOUT_EFFECT = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How a folder's texts are continued.

    Attributes:
        end_ids: tokens that end a text, ascending; empty where no file names one.
        end_source: the files they come from.
        vocab_limit: ids below it are the tokenizer's; rows of the head from there on are padding, never drawn.
        templates: name -> Jinja source of the chat templates; "default" is the one for plain chats.
        special_tokens: what templates call them ("bos_token", ...) -> their text.
        bos_id: of the token that begins a text, or None where no file names one.
        adds_bos: tokenizer.json puts it before every text by itself; the text of a rendered chat has its own.
        defaults: temperature, top_p, top_k and min_p, as far as generation_config.json states some that can be served.
        passed_over: keys of generation_config.json that change what transformers generates, and have no effect here;
            among them defaults that no request could have: every one that leaves them out would be refused for them.
        source: what said that this folder generates.
    """

    end_ids: tuple[int, ...]
    end_source: str
    vocab_limit: int
    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    bos_id: int | None = None
    adds_bos: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    source: str


def has_lm_head(architecture: ArchitectureConfig) -> bool:
    """Whether the class has a language model's head, whatever else the folder puts behind the backbone."""
    return architecture.architecture.endswith(HEADS)


def read_generation(
    config: JsonFile, architecture: ArchitectureConfig, tokens: TokenizerFiles, *, source: str
) -> GenerationConfig:
    """
    Args:
        source: what said that this folder generates.

    Raises:
        CheckpointError: no language model's head, attention that is not causal, or an end token outside the vocabulary.
    """
    name = architecture.architecture
    if not has_lm_head(architecture):
        raise config.error(f"{name} has no language model's head, so it cannot generate")
    if not architecture.causal:
        raise config.error(
            f"its attention is bidirectional ({architecture.causal_source}), and a text is continued causally"
        )
    generation = JsonFile.read_if_there(config.path.parent / "generation_config.json")
    end_ids, end_source = _end_ids(config, generation, tokens, architecture.vocab_size)
    special = {f"{role}_token": text for role in _ROLES if (text := tokens.text_of(role)) is not None}
    bos_id = tokens.role_id("bos")
    if bos_id is None and "bos_token_id" in config:
        bos_id = config.count("bos_token_id")
    known = tokens.size
    stated = {key: generation.number(key) for key in _DEFAULTS if key in generation}
    defaults = {key: value for key, value in stated.items() if _DEFAULTS[key](value)}
    changed = [key for key, nothing in _WITHOUT_EFFECT.items() if generation.data.get(key, nothing) != nothing]
    return GenerationConfig(
        end_ids=end_ids,
        end_source=end_source,
        vocab_limit=architecture.vocab_size if known is None else min(known, architecture.vocab_size),
        templates=tokens.chat_templates,
        special_tokens=special,
        bos_id=bos_id,
        adds_bos=bos_id is not None and tokens.id_of(tokens.first_added) == bos_id,
        defaults=defaults,
        passed_over=(*changed, *(key for key in stated if key not in defaults)),
        source=source,
    )


def _end_ids(
    config: JsonFile, generation: JsonFile, tokens: TokenizerFiles, vocab_size: int
) -> tuple[tuple[int, ...], str]:
    """generation_config.json's, else config.json's, and the tokenizer's own: fine-tuned chats often name only that."""
    found: set[int] = set()
    sources: list[str] = []
    stated = next((file for file in (generation, config) if "eos_token_id" in file), None)
    if stated is not None:
        found |= {*_ids(stated, vocab_size)}
        sources.append(f"{stated.path.name}: eos_token_id")
    own = tokens.role_id("eos")
    if own is not None and own < vocab_size and own not in found:
        found.add(own)
        sources.append("the tokenizer's eos_token")
    return tuple(sorted(found)), " and ".join(sources) or "no file names one"


def _ids(file: JsonFile, vocab_size: int) -> list[int]:
    value: Any = file.data["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size:
            raise file.error(f"eos_token_id {one!r} is no id of a vocabulary of {vocab_size}")
    return ids

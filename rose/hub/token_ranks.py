"""Byte-pair vocabularies as ranked bytes: of all neighbours, the pair whose union has the lowest rank is merged first.

    one line a token: its bytes in base 64, a space, its rank

A list of merges, which is what tokenizer.json has, is made of it: a token's merge is that of the two parts which
tokens of lower rank leave of it. Some tokens have no such two parts; they get every pair of tokens that makes them, and
the vocabulary says that a word which is a token is that token. Knows bytes; knows no model but Qwen's.
"""

from __future__ import annotations

import base64
import binascii
from itertools import pairwise
from typing import Any

from rose.errors import PullError
from rose.hub.byte_bpe import ByteBPE, split_at

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}| ?[^\s{others}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_WORDS = _WORDS.format(letters=r"\p{L}", others=r"\p{L}")
# Marks belong to the letters before them.
_QWEN3_5_WORDS = _WORDS.format(letters=r"[\p{L}\p{M}]", others=r"\p{L}\p{M}")
_NO_RANK = 1 << 62

# In the order of their ids, which follow the ranks'. The second tuple's are text to a decoder, not special.
_BEGIN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPECIAL = (
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_TEXT = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
_SPOKEN = (
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    "<|audio_pad|>",
)
QWEN3, QWEN3_5 = 151_643, 248_044  # ranks


def read_ranks(data: bytes, count: int) -> dict[bytes, int]:
    """Bytes -> rank.

    Raises:
        PullError: a line that is none, ranks that are not 0, 1, 2, ..., or another number of them.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        coded, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(coded, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise PullError(f"line {number} of the ranks is no token: {line[:40]!r}") from None
    if len(ranks) != count or sorted(ranks.values()) != list(range(count)):
        raise PullError(f"the vocabulary has {len(ranks)} ranks, expected {count}, each once")
    return ranks


def qwen_vocabulary(ranks: dict[bytes, int]) -> ByteBPE:
    """Qwen3's or Qwen3.5's, told apart by their number of ranks."""
    newer = len(ranks) == QWEN3_5
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges, odd = _merges(ranks)
    special, tokens = (*_BEGIN, *_SPECIAL, *(_SPOKEN if newer else ())), [*_BEGIN, *_SPECIAL, *_TEXT]
    tokens += _SPOKEN if newer else ()
    ids = {token: len(ranks) + index for index, token in enumerate(tokens)}
    return ByteBPE(
        pieces={spelled[token]: rank for token, rank in ranks.items()},
        merges=[(spelled[left], spelled[right]) for left, right in merges],
        special={token: ids[token] for token in special},
        added={token: ids[token] for token in tokens if token not in special},
        splits=(split_at(_QWEN3_5_WORDS if newer else _QWEN3_WORDS),),
        nfc=True,
        ignore_merges=odd > 0,
    )


def qwen_tokenizer_config(ranks: dict[bytes, int]) -> dict[str, Any]:
    limit = 262_144 if len(ranks) == QWEN3_5 else 131_072
    return {"model_max_length": limit, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def byte_letters() -> dict[int, str]:
    """A printable letter for each byte, as GPT-2 spells them: itself where it is one, else from U+0100 on."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def _merges(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], int]:
    """(merges in order, how many tokens no two parts of lower rank make)."""
    merges: list[tuple[bytes, bytes]] = []
    odd = 0
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = _parts(token, rank, ranks)
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
            continue
        odd += 1
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        made = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(made, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges, odd


def _parts(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """What merging makes of a token's bytes with tokens of lower rank alone."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, _NO_RANK) for left, right in pairwise(parts)]
        best = min(found)
        if best >= rank:
            break
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts

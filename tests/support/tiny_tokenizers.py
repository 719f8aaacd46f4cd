"""Small real tokenizers, one of each kind the families use, built in milliseconds from the sentences below.

The library's own trainers break ties at random; these vocabularies are the same in every process.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CORPUS = (
    "The harbour was quiet before the first ferry came in.",
    "She measured the flour twice and forgot the salt.",
    "Packed batches carry no padding, so every token is real work.",
    "A short query waits behind a long document only if the scheduler lets it.",
    "Le marché ouvre à sept heures, même sous la pluie.",
    "Der Zug nach Freiburg hält heute auf Gleis neun.",
    "El río baja crecido después de la tormenta.",
    "Снег лежал до самого апреля.",
    "猫在窗台上睡着了。",
    "雨が上がったら散歩に行こう。",
    "The quick reply took three milliseconds; the slow one took thirty.",
    "Numbers such as 128, 512 and 4096 appear in every benchmark.",
    "query: where does the river meet the sea?",
    "passage: the river meets the sea south of the old lighthouse.",
)


def word_piece() -> Tokenizer:
    """BERT's: lower case, [CLS] text [SEP], the second text of a pair with token type 1."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = _words(tokenizer)
    letters = sorted(set("".join(words)))
    endings = sorted({"##" + word[cut:] for word in words for cut in range(1, len(word)) if len(word) - cut <= 3})
    beginnings = sorted({word[:3] for word in words if len(word) > 3 and word not in letters})
    pieces = [*special, *letters, *("##" + letter for letter in letters), *beginnings, *endings, *sorted(words)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def unigram() -> Tokenizer:
    """XLM-RoBERTa's: <s> text </s>, with <pad> = 1 and <unk> = 3."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    counts: Counter[str] = Counter()
    for word, times in _words(tokenizer).items():
        for size in (1, 2, 3, len(word)):
            counts.update({word[i : i + size]: times for i in range(len(word) - size + 1)})
    kept = sorted(piece for piece, times in counts.items() if len(piece) == 1 or times > 2)
    total = sum(counts[piece] for piece in kept)
    scored = [(piece, math.log(counts[piece] / total)) for piece in kept]
    tokenizer.model = models.Unigram([(piece, 0.0) for piece in special] + scored, unk_id=3, byte_fallback=False)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


def byte_level(*, append_end: bool = False, num_merges: int = 200, chat: bool = False) -> Tokenizer:
    """Qwen's: byte-level BPE over NFC. With `append_end` every text ends in <|endoftext|>, else nothing is added.

    With `chat` it has the tokens of a chat, and "yes" and "no" are tokens of their own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merges = _merges(_words(tokenizer), num_merges)
    if chat:
        merges += [pair for pair in (("y", "e"), ("ye", "s"), ("n", "o")) if pair not in merges]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer.model = models.BPE(vocabulary, merges)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    if chat:
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.add_tokens(["<think>", "</think>"])
    if append_end:
        end = tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
        )
    return tokenizer


def _words(tokenizer: Tokenizer) -> Counter[str]:
    """The corpus as the tokenizer's own normaliser and splitter see it."""
    words: Counter[str] = Counter()
    for text in CORPUS:
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        words.update(piece for piece, _ in pieces)
    return words


def _merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """Byte-pair merges (arXiv:1508.07909); among equally frequent pairs the alphabetically first."""
    split = {word: list(word) for word in words}
    merges: list[tuple[str, str]] = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts in split.values():
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))

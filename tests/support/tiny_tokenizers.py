"""Small real tokenizers, one of each kind the families use, trained in milliseconds on the sentences below."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

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


def word_piece(vocab_size: int = 400) -> Tokenizer:
    """BERT's: lower case, [CLS] text [SEP], the second text of a pair with token type 1."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def unigram(vocab_size: int = 400) -> Tokenizer:
    """XLM-RoBERTa's: <s> text </s>, with <pad> = 1."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    return tokenizer


def byte_level(vocab_size: int = 500, *, append_end: bool = False) -> Tokenizer:
    """Qwen's: byte-level BPE over NFC. With `append_end` every text ends in <|endoftext|>, else nothing is added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if append_end:
        end = tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
        )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))

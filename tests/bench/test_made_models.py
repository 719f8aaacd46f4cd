"""Folders made on the spot: tokenizers of a family's kind and size, texts of exact lengths, weights in shards."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rose.bench import made_weights, shapes
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.made_tokenizers import write_tokenizer
from rose.bench.pseudo_texts import common_words, exact_texts, words
from rose.bench.shapes import SHAPES, build_checkpoint
from rose.bench.texts import english_words
from rose.gateway.tokenizer import TextTokenizer

FULL = ("bge-m3", "minilm", "qwen3-embedding-0.6b")


@pytest.fixture(scope="module", params=FULL)
def made(request, tmp_path_factory):
    """(config, folder with a tokenizer) of a model in its published size."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = SHAPES[request.param]
    write_tokenizer(folder, shape.config, append_end=shape.pooling == "lasttoken")
    return shape.config, folder


def test_a_made_tokenizer_has_its_familys_size_and_special_tokens(made):
    config, folder = made
    tokenizer = TextTokenizer(folder)
    (ids,) = tokenizer.encode(["ba dofi"])
    opening_closing = {"xlm-roberta": ([0], [2]), "bert": ([2], [3]), "qwen3": ([], [151643])}[config["model_type"]]
    size = json.loads((folder / "tokenizer.json").read_text())
    entries = len(size["model"]["vocab"]) + sum(t["id"] >= len(size["model"]["vocab"]) for t in size["added_tokens"])
    assert entries == (151644 if config["model_type"] == "qwen3" else config["vocab_size"])
    assert ids[: len(opening_closing[0])].tolist() == opening_closing[0]
    assert ids[len(ids) - len(opening_closing[1]) :].tolist() == opening_closing[1]
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert reference("ba dofi zuzeko")["input_ids"] == tokenizer.encode(["ba dofi zuzeko"])[0].tolist()


def test_texts_have_exactly_the_tokens_asked_for_and_words_are_whole_or_cut(made):
    config, folder = made
    tokenizer = TextTokenizer(folder)

    def count(some):
        return [len(ids) for ids in tokenizer.encode(some)]

    texts = exact_texts(512, 6, count, words(1))
    assert set(count(texts)) == {512}
    assert len(set(texts)) == 6
    assert texts == exact_texts(512, 6, count, words(1)), "the same every time"
    ids = {i for text in texts for i in tokenizer.encode([text])[0].tolist()}
    assert max(ids) < config["vocab_size"]
    assert len(ids) > 700, "a text that hardly varies shows nothing"
    per_word = 512 / (sum(len(text.split()) for text in texts) / len(texts))
    assert 1.1 < per_word < 1.8, "as a language has with its own tokenizer"


def test_english_texts_of_exact_lengths_for_real_tokenizers(minilm_folder):
    tokenizer = TextTokenizer(minilm_folder, lower_case=True)
    texts = exact_texts(128, 3, lambda some: [len(ids) for ids in tokenizer.encode(some)], english_words(1))
    assert [len(ids) for ids in tokenizer.encode(texts)] == [128] * 3


def test_a_length_that_no_words_give_is_an_error():
    with pytest.raises(ValueError, match="exactly 5"):
        exact_texts(5, 1, lambda some: [2 * len(text.split()) for text in some], words(1))


def test_words_are_counted_once_and_texts_that_do_not_add_up_are_made_again():
    """Letters joined over words, as a tokenizer may: two words in alphabetical order have one token less."""
    asked = []

    def count(some):
        asked.extend(some)
        pairs = [text.split() for text in some]
        return [2 + sum(map(len, one)) - sum(a < b for a, b in pairwise(one)) for one in pairs]

    texts = exact_texts(40, 5, count, words(3))
    assert count(texts) == [40] * 5
    singles = [text for text in asked if len(text.split()) == 2]
    assert len(singles) == len(set(singles)) > 100, "no word was counted twice"


def test_common_words_are_distinct():
    assert len(set(common_words(20_000))) == 20_000


def test_shards_hold_what_one_file_holds(tmp_path, monkeypatch):
    whole = build_checkpoint("tiny-qwen3", tmp_path / "whole", shapes=LLM_SHAPES)
    monkeypatch.setattr(made_weights, "SHARD_BYTES", 60_000)
    cut = build_checkpoint("tiny-qwen3", tmp_path / "cut", shapes=LLM_SHAPES)
    index = json.loads((cut / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    with safe_open(whole / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(index)
        for name, shard in index.items():
            with safe_open(cut / shard, "pt") as part:
                assert torch.equal(part.get_tensor(name), file.get_tensor(name))


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_a_made_language_model_does_not_repeat_itself(name, tmp_path):
    """Else a check of its tokens would show neither places nor caches."""
    folder = build_checkpoint(name, tmp_path / name, shapes=LLM_SHAPES)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(20, 60)[None]
    with torch.inference_mode():
        best = model(input_ids=torch.cat([ids, ids.flip(1)])).logits.argmax(-1)
    assert (best[:, :-1] != best[:, 1:]).float().mean() > 0.7
    assert len(best.unique()) > 30


def test_a_folder_half_written_is_written_again(tmp_path):
    folder = build_checkpoint("tiny-bert", tmp_path / "m")
    (folder / "complete").unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    build_checkpoint("tiny-bert", folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) > 20


def test_two_that_make_one_folder_make_it_once(tmp_path, monkeypatch):
    """The second waits, and finds it whole."""
    write, began, made = shapes.write_weights, threading.Event(), []

    def slowly(config, cls, folder, *more, **options):
        began.set()
        assert not second.done()
        write(config, cls, folder, *more, **options)
        made.append(folder)

    monkeypatch.setattr(shapes, "write_weights", slowly)
    folder = tmp_path / "cache" / "tiny-bert"
    with ThreadPoolExecutor(2) as pool:
        gate = threading.Event()
        second = pool.submit(lambda: gate.wait(20) and build_checkpoint("tiny-bert", folder))
        first = pool.submit(build_checkpoint, "tiny-bert", folder)
        assert began.wait(20)
        gate.set()
        assert first.result(60) == second.result(60) == folder
    assert made == [folder]

"""What a folder says about generating: which one does, its end tokens, templates, defaults and vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, processors

from rose.config import read_model_folder, served_task
from rose.config.generation_facts import generation_facts
from rose.errors import CheckpointError
from tests.support.tiny_checkpoints import edit_json, tiny_bert, write_json
from tests.support.tiny_families import tiny_cross_encoder_bert, tiny_qwen3_embedding, tiny_qwen3_reranker
from tests.support.tiny_language_models import (
    CHAT_TEMPLATE,
    PADDING,
    sample_ids,
    tiny_lm,
    write_generation_config,
    write_tokenizer_config,
)


def generation(path, **reading):
    return read_model_folder(path, **reading).generation


@pytest.mark.parametrize(
    ("make", "arguments", "reading", "task", "reason"),
    [
        (tiny_lm, {}, {}, "generate", "config.json: LlamaForCausalLM, and no file names a pooling or a score"),
        (tiny_lm, {"pooling": "lasttoken"}, {}, "embed", "pooling of 1_Pooling/config.json"),
        (tiny_lm, {}, {"pooling": "last"}, "embed", "pooling of the caller's choice"),
        (tiny_lm, {}, {"task": "rerank", "template": "qwen3"}, "rerank", "the caller's choice"),
        (tiny_lm, {"pooling": "lasttoken"}, {"task": "generate"}, "generate", "the caller's choice"),
        (tiny_qwen3_embedding, {}, {}, "embed", "pooling of 1_Pooling/config.json"),
        (tiny_qwen3_reranker, {}, {}, "rerank", "1_LogitScore/config.json"),
        (tiny_qwen3_reranker, {}, {"task": "generate"}, "generate", "the caller's choice"),
        (tiny_bert, {}, {}, "embed", "pooling of 1_Pooling/config.json"),
        (tiny_cross_encoder_bert, {}, {}, "rerank", "config.json: BertForSequenceClassification"),
    ],
)
def test_what_a_folder_is_served_as_and_why(tmp_path, make, arguments, reading, task, reason):
    folder = read_model_folder(make(tmp_path / "m", **arguments), **reading)
    found = served_task(folder)
    assert (found.task, found.reason) == (task, reason)
    assert [folder.pooling is not None, folder.reranker is not None, folder.generation is not None] == [
        task == "embed",
        task == "rerank",
        task == "generate",
    ]


def test_a_generating_folder_has_no_vector(tmp_path):
    folder = read_model_folder(tiny_lm(tmp_path / "m"))
    assert (folder.dimension, folder.max_tokens) == (0, 256)
    with pytest.raises(CheckpointError, match="a generating model pools nothing; leave --pooling out"):
        read_model_folder(tmp_path / "m", task="generate", pooling="mean")


def test_the_tokenizers_own_limit_cuts_no_conversation(tmp_path):
    """Chat models are published with a model_max_length below what they take; it is about cutting texts."""
    path = tiny_lm(tmp_path / "m")
    write_tokenizer_config(path, 64)
    assert read_model_folder(path).max_tokens == 256
    assert read_model_folder(path, pooling="last").max_tokens == 64


@pytest.mark.parametrize(
    ("stated", "configs", "own", "expected", "source"),
    [
        ([3, 4], 9, "<|im_end|>", [3, 4, "<|im_end|>"], "generation_config.json: eos_token_id and the tokenizer's"),
        (3, 9, None, [3], "generation_config.json: eos_token_id"),
        (None, 9, None, [9], "config.json: eos_token_id"),
        (None, [9, 8, 9], None, [8, 9], "config.json: eos_token_id"),
        (None, None, "<|im_end|>", ["<|im_end|>"], "the tokenizer's eos_token"),
        (None, None, None, [], "no file names one"),
    ],
)
def test_end_tokens(tmp_path, stated, configs, own, expected, source):
    path = tiny_lm(tmp_path / "m")
    write_generation_config(path, eos_token_id=stated)
    edit_json(path / "config.json", eos_token_id=configs)
    write_tokenizer_config(path, 256, eos_token=own)
    found = generation(path)
    assert found.end_ids == tuple(sorted(sample_ids(path).get(token, token) for token in expected))
    assert found.end_source.startswith(source)


@pytest.mark.parametrize("wrong", [-1, 100_000, True, "2", [2, None], 1.5])
def test_an_end_token_that_is_none_is_refused(tmp_path, wrong):
    path = tiny_lm(tmp_path / "m")
    write_generation_config(path, eos_token_id=wrong)
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id .* is no id of a vocabulary"):
        read_model_folder(path)


def test_defaults_of_the_folder(tmp_path):
    path = tiny_lm(tmp_path / "m")
    assert generation(path).defaults == {}
    write_generation_config(
        path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, typical_p=1.0
    )
    found = generation(path)
    assert found.defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert found.passed_over == ("repetition_penalty",)
    write_generation_config(path, temperature="hot")
    with pytest.raises(CheckpointError, match="temperature is 'hot', and must be a number"):
        read_model_folder(path)


def test_ids_past_the_tokenizers_are_padding(tmp_path):
    """Report C63 (vllm#13175): the head has more rows than the tokenizer has tokens."""
    path = tiny_lm(tmp_path / "m")
    folder = read_model_folder(path)
    assert folder.architecture.vocab_size - folder.generation.vocab_limit == PADDING
    assert folder.generation.vocab_limit == Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    (path / "tokenizer.json").unlink()
    assert generation(path).vocab_limit == folder.architecture.vocab_size


def test_chat_templates_wherever_they_are_kept(tmp_path):
    path = tiny_lm(tmp_path / "m")
    assert generation(path).templates == {"default": CHAT_TEMPLATE}
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    edit_json(path / "tokenizer_config.json", chat_template=named)
    assert generation(path).templates == {"default": "plain", "tool_use": "with tools"}
    (path / "chat_template.jinja").write_text("of its own", encoding="utf-8")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/rag.jinja").write_text("about documents", encoding="utf-8")
    assert generation(path).templates == {"default": "of its own", "tool_use": "with tools", "rag": "about documents"}
    edit_json(path / "tokenizer_config.json", chat_template=None)
    (path / "chat_template.jinja").unlink()
    assert generation(path).templates == {"rag": "about documents"}


def test_defaults_that_no_request_could_have_are_passed_over(tmp_path):
    """Else every request that leaves them to the model would be refused for what it did not say."""
    path = tiny_lm(tmp_path / "m")
    write_generation_config(path, temperature=-1, top_p=0, top_k=-2, min_p=1.5, repetition_penalty=1.1)
    found = generation(path)
    assert found.defaults == {}
    assert found.passed_over == ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")
    write_generation_config(path, temperature=0, top_p=1, top_k=-1, min_p=0)
    found = generation(path)
    assert found.defaults == {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0}
    assert found.passed_over == ()


def test_special_tokens_and_who_puts_the_first(tmp_path):
    path = tiny_lm(tmp_path / "m")
    ids = sample_ids(path)
    found = generation(path)
    assert found.special_tokens == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert (found.bos_id, found.adds_bos) == (ids["<|endoftext|>"], False)
    edit_json(path / "tokenizer_config.json", add_bos_token=True)  # a promise that tokenizer.json does not keep
    assert not generation(path).adds_bos
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    begin = ("<|endoftext|>", ids["<|endoftext|>"])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[begin])]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    assert generation(path).adds_bos
    write_tokenizer_config(path, 256, bos_token=None)
    write_json(path / "special_tokens_map.json", {})
    assert generation(path).bos_id == ids["<|endoftext|>"]  # of config.json


def test_facts_tell_what_would_be_a_surprise(tmp_path):
    path = tiny_lm(tmp_path / "m")
    write_generation_config(path, temperature=0.6, repetition_penalty=1.1)
    folder = read_model_folder(path)
    facts = dict(generation_facts(folder.generation, folder.architecture.vocab_size))
    end, begin = sample_ids(path)["<|im_end|>"], sample_ids(path)["<|endoftext|>"]
    assert facts == {
        "task": "generate (config.json: LlamaForCausalLM, and no file names a pooling or a score)",
        "end tokens": f"{end} (config.json: eos_token_id)",
        "chat templates": "default",
        "begins with": f"nothing; '<|endoftext|>' (id {begin}) is not added by itself",
        "never drawn": f"ids from {folder.generation.vocab_limit} on: the tokenizer has no such tokens",
        "defaults": "temperature 0.6",
        "not applied": "repetition_penalty (generation_config.json)",
    }
    write_tokenizer_config(path, 256, chat_template=None, eos_token=None)
    edit_json(path / "config.json", eos_token_id=None)
    facts = dict(generation_facts(generation(path), 0))
    assert facts["end tokens"] == "none: only length and stops end a text (no file names one)"
    assert facts["chat templates"] == "none: no chats, only completions"

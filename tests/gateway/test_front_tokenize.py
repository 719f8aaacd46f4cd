"""POST /v1/tokenize and /v1/detokenize: the ids that the model would see, and ids back into text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from rose.proto.convert import tokens_from_proto
from tests.gateway.conftest import card_for, live_front
from tests.gateway.generating import MAX_TOKENS, generating_front, make_folder

TEXT = "where does the river meet the sea?"


@pytest.fixture(scope="module")
def bare(text_folder):
    return Tokenizer.from_file(str(text_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with generating_front(make_folder(tmp_path_factory.mktemp("tokenize") / "tiny")) as chat:
        yield chat


def tokenize(live, **fields):
    response = live.client.post("/v1/tokenize", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def refused(live, path="/v1/tokenize", status=400, **fields):
    response = live.client.post(path, json=fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["index"], error["message"]


def test_a_text_gives_the_ids_that_are_embedded(shared, bare):
    encoding = bare.encode(TEXT)
    answer = tokenize(shared, prompt=TEXT, return_token_strs=True)
    assert answer == {
        "count": len(encoding.ids),
        "max_model_len": shared.engines[0].card.max_tokens,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens,
    }
    assert "token_strs" not in tokenize(shared, prompt=TEXT)
    assert shared.embed(TEXT).json()["usage"]["prompt_tokens"] == answer["count"]
    for path in ("/tokenize", "/v1/tokenize"):
        assert shared.client.post(path, json={"prompt": TEXT}).json()["tokens"] == encoding.ids


def test_a_list_gives_lists_in_its_order(shared, bare):
    texts = ["salt", TEXT, "salt"]
    answer = tokenize(shared, prompt=texts, return_token_strs=True)
    encodings = [bare.encode(text) for text in texts]
    assert answer["tokens"] == [one.ids for one in encodings]
    assert answer["token_strs"] == [one.tokens for one in encodings]
    assert answer["count"] == [len(one.ids) for one in encodings]
    assert tokenize(shared, prompt=["salt"])["tokens"] == [bare.encode("salt").ids]


def test_special_tokens_and_prompts(shared, bare):
    assert (
        tokenize(shared, prompt="salt", add_special_tokens=False)["tokens"]
        == bare.encode("salt", add_special_tokens=False).ids
    )
    assert tokenize(shared, prompt="salt", prompt_name="query")["tokens"] == bare.encode("query: salt").ids
    sep = bare.token_to_id("[SEP]")
    assert tokenize(shared, prompt="a [SEP] b")["tokens"].count(sep) == 2
    assert tokenize(shared, prompt="a [SEP] b", split_special_tokens=True)["tokens"].count(sep) == 1


def test_a_text_may_be_longer_than_the_model_takes(shared, bare):
    text = "salt " * 5000
    answer = tokenize(shared, prompt=text)
    assert answer["tokens"] == bare.encode(text).ids
    assert answer["count"] > answer["max_model_len"]


@pytest.fixture(scope="module")
def whole(text_folder, bare):
    """A front whose card knows all of the tokenizer's ids."""
    with live_front(text_folder, card_for(text_folder, vocab_size=bare.get_vocab_size())) as live:
        yield live


def test_ids_become_text_again(whole, bare):
    ids = bare.encode(TEXT).ids

    def back(tokens, **fields):
        response = whole.client.post("/v1/detokenize", json={"tokens": tokens, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    assert back(ids) == {"prompt": bare.decode(ids, skip_special_tokens=False)}
    assert back(ids, skip_special_tokens=True) == {"prompt": bare.decode(ids)}
    assert back([ids, ids[1:3]], skip_special_tokens=True) == {"prompt": [bare.decode(ids), bare.decode(ids[1:3])]}
    many = ids[1:-1] * 2000  # from the pool
    assert back(many)["prompt"] == bare.decode(many)


def test_messages_give_the_ids_that_a_chat_prompts_with(tiny):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <|im_end|>"}]
    assert tiny.client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    answer = tokenize(tiny, messages=messages)
    assert answer["tokens"] == tiny.prompt()
    assert (answer["count"], answer["max_model_len"]) == (len(tiny.prompt()), MAX_TOKENS)
    shorter = tokenize(tiny, messages=messages, add_generation_prompt=False)["tokens"]
    assert shorter == answer["tokens"][: len(shorter)]
    assert len(shorter) < answer["count"]
    assert tiny.complete("hello there").status_code == 200
    assert tokenize(tiny, prompt="hello there")["tokens"] == tiny.prompt()


@pytest.mark.parametrize(
    ("fields", "param", "index", "words"),
    [
        ({}, "prompt", None, "either a prompt or messages"),
        ({"prompt": "a", "messages": []}, "prompt", None, "either a prompt or messages"),
        ({"prompt": [1, 2]}, "prompt", None, "token ids already"),
        ({"prompt": ["a", ""]}, "prompt", 1, "empty"),
        ({"prompt": ["a", 3]}, "prompt", 1, "expected a text"),
        ({"prompt": 7}, "prompt", None, "expected a text or a list"),
        ({"prompt": "a", "prompt_name": "nothing"}, "prompt_name", None, "it has: passage, query"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", None, "is about messages"),
        ({"prompt": "a" * ((1 << 21) + 1)}, "prompt", 0, "the limit is 2097152 characters"),
        ({"messages": [{"role": "user", "content": "a"}]}, "model", None, "continues no text"),
        ({"messages": [], "split_special_tokens": True}, "split_special_tokens", None, "is about a prompt"),
    ],
)
def test_bad_requests_name_their_field(shared, fields, param, index, words):
    told = refused(shared, **fields)
    assert told[:2] == (param, index)
    assert words in told[2]


@pytest.mark.parametrize(
    ("tokens", "index", "words"),
    [
        (None, None, "null"),
        ("a", None, "got text"),
        (["a"], None, "got text"),
        ([], None, "empty"),
        ([1, 400], 0, "outside the vocabulary 0..399"),
        ([[1], [-1]], 1, "token id -1 at position 0"),
    ],
)
def test_bad_ids_name_their_place(shared, tokens, index, words):
    told = refused(shared, "/v1/detokenize", tokens=tokens)
    assert told[:2] == ("tokens", index)
    assert words in told[2]


def test_requests_have_a_size(text_folder):
    with live_front(text_folder, card_for(text_folder), max_items=3, max_request_tokens=20) as live:
        assert refused(live, status=413, prompt=["a"] * 4)[0] == "prompt"
        assert refused(live, status=413, prompt="salt " * 40)[0] == "prompt"
        assert refused(live, "/v1/detokenize", 413, tokens=[5] * 21)[0] == "tokens"
        assert refused(live, status=404, prompt="a", model="other")[0] == "model"
        assert len(tokenize(live, prompt=["a"] * 3)["tokens"]) == 3


def test_nothing_is_asked_of_the_engine(text_folder):
    with live_front(text_folder, card_for(text_folder)) as live:
        tokenize(live, prompt=TEXT)
        live.client.post("/v1/detokenize", json={"tokens": [5]})
        assert not live.engines[0].seen
        live.embed(TEXT)
        (request,) = live.engines[0].seen
        (ids,) = tokens_from_proto(request.tokens)
        assert ids.tolist() == tokenize(live, prompt=TEXT)["tokens"]

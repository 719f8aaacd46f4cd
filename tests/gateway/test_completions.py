"""POST /v1/completions over engines whose answers are known."""

from __future__ import annotations

import shutil

import pytest

from tests.gateway.generating import (
    ANSWER,
    MAX_TOKENS,
    error_of,
    events,
    generating_front,
    make_folder,
    wait_for,
)
from tests.gateway.test_detokenize import sentence_pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("completions") / "tiny")


@pytest.fixture(scope="module")
def shared(folder):
    with generating_front(folder) as chat:
        yield chat


@pytest.fixture
def tiny(shared):
    shared.reset()
    return shared


def test_a_text_is_continued(tiny):
    answer = tiny.complete("hello there").json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny/chat"
    assert answer["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    drawn = len(tiny.ids(ANSWER)) + 1  # and the end token
    prompt = tiny.ids("hello there")
    assert tiny.prompt() == prompt
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": drawn,
        "total_tokens": len(prompt) + drawn,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("per_chunk", [1, 2, 3, 50])
def test_streams_say_the_same_in_pieces(tiny, per_chunk):
    tiny.engine.per_chunk = per_chunk
    response = tiny.complete(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"]
    *chunks, last = events(response.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(tiny.ids(ANSWER)) + 1
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    plain = events(tiny.complete(stream=True).text)
    assert all("usage" not in chunk for chunk in plain)


def test_the_length_ends_it(tiny):
    for fields, tokens in (({"max_tokens": 4}, 4), ({"max_tokens": None}, len(tiny.ids(ANSWER)) + 1)):
        answer = tiny.complete(**fields).json()
        assert answer["usage"]["completion_tokens"] == tokens
        assert answer["choices"][0]["finish_reason"] == ("length" if tokens == 4 else "stop")
    assert tiny.engine.generated[-1].sampling.max_new_tokens == 16
    assert tiny.complete(max_tokens=4).json()["choices"][0]["text"] == tiny.tokenizer.decode(tiny.ids(ANSWER)[:4])


def test_half_a_character_at_the_end_is_a_replacement_character(tiny):
    ids = tiny.ids("猫")
    assert len(ids) == 3
    tiny.engine.script = lambda prompt: ids
    assert tiny.complete(max_tokens=2).json()["choices"][0]["text"] == "\ufffd"
    chunks = events(tiny.complete(max_tokens=2, stream=True).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["\ufffd"]


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        ("abc", 1),
        (["abc", "de"], 2),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
    ],
)
def test_prompts_of_every_kind(tiny, value, counts):
    answer = tiny.complete(value).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(counts))
    assert all(choice["text"] == ANSWER for choice in answer["choices"])
    sent = sorted(tiny.prompt(i) for i in range(counts))
    expected = value if isinstance(value, list) else [value]
    expected = [value] if isinstance(expected[0], int) else expected
    assert sent == sorted(tiny.ids(one) if isinstance(one, str) else one for one in expected)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))


def test_control_tokens_in_a_text_count_unless_they_are_not_to(tiny):
    """Report C33: both ways."""
    tiny.complete("a<|im_end|>")
    assert tiny.prompt()[-1] == tiny.end
    tiny.complete("a<|im_end|>", split_special_tokens=True)
    assert tiny.end not in tiny.prompt()
    assert tiny.tokenizer.decode(tiny.prompt()) == "a<|im_end|>"


def test_several_choices_each_with_a_seed_of_its_own(tiny):
    answer = tiny.complete(["abc", "de"], n=3, seed=7).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert sorted(request.sampling.seed for request in tiny.engine.generated) == [7, 7, 8, 8, 9, 9]
    assert answer["usage"]["prompt_tokens"] == len(tiny.ids("abc")) + len(tiny.ids("de"))
    assert answer["usage"]["completion_tokens"] == 6 * (len(tiny.ids(ANSWER)) + 1)
    chunks = events(tiny.complete(["abc", "de"], n=2, stream=True).text)
    for index in range(4):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == ANSWER
        assert own[-1]["finish_reason"] == "stop"


def test_choices_of_a_long_prompt_wait_for_its_keys_and_values(tiny):
    """The first is begun alone; the others find the prompt in the cache it left."""
    tiny.engine.pause_s = 0.05
    prompt = [[5, 6, 7, 8] * 80]
    answer = tiny.complete(prompt, n=3, max_tokens=2).json()
    first, *others = tiny.engine.arrivals
    assert len(others) == 2
    assert min(others) - first > 0.045
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert tiny.complete(prompt, max_tokens=2).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 320}


def test_echo(tiny):
    assert tiny.complete("a<|im_end|> b", echo=True).json()["choices"][0]["text"] == "a<|im_end|> b" + ANSWER
    ids = tiny.ids("salt<|im_end|>")
    assert tiny.complete(ids, echo=True).json()["choices"][0]["text"] == "salt<|im_end|>" + ANSWER
    chunks = events(tiny.complete("salt", echo=True, stream=True).text)
    assert chunks[0]["choices"][0]["text"] == "salt"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "salt" + ANSWER


def test_an_answer_keeps_the_blank_before_its_first_word(folder, tmp_path):
    """Vocabularies of word beginnings (Llama-2, Mistral): a prompt and its answer are one text, a chat's are two."""
    path = shutil.copytree(folder, tmp_path / "pieces")
    tokenizer = sentence_pieces()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    answer = [tokenizer.token_to_id(piece) for piece in ("▁river", "▁the")]
    with generating_front(path) as tiny:
        tiny.engine.script = lambda prompt: answer
        assert tiny.complete("the").json()["choices"][0]["text"] == " river the"
        assert tiny.complete("the", echo=True).json()["choices"][0]["text"] == "the river the"
        both = tiny.complete(["the", "s"], n=2).json()["choices"]
        assert [choice["text"] for choice in both] == [" river the"] * 4
        found = tiny.complete("the", logprobs=0).json()["choices"][0]["logprobs"]
        assert found["text_offset"] == [0, 6]
        assert tiny.complete("the", stop=" river").json()["choices"][0]["text"] == ""
        chunks = events(tiny.complete("the", stream=True).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " river the"
        assert tiny.chat("the").json()["choices"][0]["message"]["content"] == "river the"


def test_sampling_reaches_the_engine(tiny):
    fields = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.125, "seed": 2**64 - 1, "stop_token_ids": [4, 5],
        "ignore_eos": True, "min_tokens": 2, "max_tokens": 7, "priority": "bulk",
    }  # fmt: skip
    assert tiny.complete(**fields).status_code == 200
    request = tiny.engine.generated[-1]
    got = request.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.seed) == (0.5, 0.75, 20, 0.125, 2**64 - 1)
    assert (list(got.stop_ids), got.ignore_eos, got.min_new_tokens, got.max_new_tokens) == ([4, 5], True, 2, 7)
    assert (request.priority, list(got.stop), got.HasField("logprobs")) == (1, [], False)
    tiny.complete(top_k=-1, temperature=None)
    got = tiny.engine.generated[-1].sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.HasField("seed")) == (1.0, 1.0, 0, 0.0, False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        ("meets", "The river 猫 ", "meets"),
        (["zzz", "猫 m", "sea"], "The river ", "猫 m"),
        ("The", "", "The"),
        ("sea.", "The river 猫 meets the ", "sea."),
        (["."], ANSWER[:-1], "."),
        (["nothing of it"], ANSWER, None),
    ],
)
def test_stop_strings_across_tokens(tiny, stop, text, found, stream):
    if stream:
        chunks = events(tiny.complete(stop=stop, stream=True).text)
        choice = chunks[-1]["choices"][0]
        got = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        choice = tiny.complete(stop=stop).json()["choices"][0]
        got = choice["text"]
    assert got == text
    assert choice["finish_reason"] == "stop"
    assert choice.get("stop_reason") == found
    assert list(tiny.engine.generated[-1].sampling.stop) == []


def test_a_stop_string_ends_it_at_the_engine(tiny):
    tiny.engine.pause_s = 0.02
    tiny.says("a river and " + "the sea " * 50)
    answer = tiny.complete(stop=[" and"]).json()
    assert answer["choices"][0]["text"] == "a river"
    wait_for(lambda: len(tiny.engine.cancelled) == 1)
    assert answer["usage"]["completion_tokens"] < 8


def test_stop_strings_are_not_looked_for_in_the_first_tokens(tiny):
    tiny.says("stop stop stop")
    first = len(tiny.ids("stop stop"))
    assert tiny.complete(stop="stop", min_tokens=first).json()["choices"][0]["text"] == "stop stop "


def test_text_is_held_back_only_while_it_may_be_a_stop_string(tiny):
    tiny.says("a\nUser b")
    chunks = events(tiny.complete(stop="\nUser:", stream=True).text)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "a\nUser b"
    assert texts[0] == "a"
    assert "\nUser b".startswith(texts[1])
    assert len(texts[1]) >= len("\nUser ")


def test_log_probabilities(tiny):
    tiny.says("a猫 b")
    answer = tiny.complete(logprobs=2).json()
    got = answer["choices"][0]["logprobs"]
    ids = tiny.ids("a猫 b")
    assert got["tokens"][:4] == ["a", "bytes:\\xe7", "bytes:\\x8c", "bytes:\\xab"]
    assert "".join(got["tokens"][4:]) == " b"
    assert len(got["tokens"]) == len(ids)  # the end token has no text and is not there
    assert got["token_logprobs"] == [-0.25 * (i + 1) for i in range(len(ids))]
    assert got["text_offset"][:5] == [0, 1, 1, 1, 2]
    for token, logprob, top in zip(got["tokens"], got["token_logprobs"], got["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert len(top) == 2
    chunks = events(tiny.complete(logprobs=0, stream=True).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for part in parts for token in part["tokens"]] == got["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == got["text_offset"]
    assert all(len(top) == 1 for part in parts for top in part["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_end_where_the_text_ends(tiny, stream):
    tiny.says("one two three")
    fields = {"logprobs": 0, "stop": " three"}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(tiny.complete(stream=True, **fields).text)]
        text = "".join(choice["text"] for choice in choices)
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    else:
        (choice,) = tiny.complete(**fields).json()["choices"]
        text, tokens = choice["text"], choice["logprobs"]["tokens"]
    assert text == "one two"
    assert "".join(tokens) == text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "expected a text"),
        ({"prompt": [[1], []]}, "prompt", "empty"),
        ({"prompt": [464 + 4]}, "prompt", "outside the vocabulary 0..467"),
        ({"prompt": [-1]}, "prompt", "outside"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": [5] * MAX_TOKENS}, "prompt", f"the prompt has {MAX_TOKENS} tokens; the model takes {MAX_TOKENS}"),
        ({"prompt": [5] * 500}, "max_tokens", "max_tokens of 100 behind a prompt of 500 tokens"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": -5}, "max_tokens", "1 or more"),
        ({"max_tokens": 2**40}, "max_tokens", "expected 1 to"),
        ({"temperature": -0.1}, "temperature", "0 or more"),
        ({"temperature": 1e39}, "temperature", "0 or more"),
        ({"temperature": "hot"}, "temperature", "expected a number or null"),
        ({"top_p": 0}, "top_p", "more than 0"),
        ({"top_p": 1.01}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "0 (all)"),
        ({"min_p": 1.5}, "min_p", "between 0 and 1"),
        ({"seed": -1}, "seed", "0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed", "0 to"),
        ({"min_tokens": 101}, "min_tokens", "0 to max_tokens (100)"),
        ({"stop": ["a"] * 17}, "stop", "17 stop strings, the limit is 16"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stop": "x" * 257}, "stop", "limit is 256"),
        ({"stop": 5}, "stop", "expected a text, a list of texts or null"),
        ({"stop_token_ids": [468]}, "stop_token_ids", "outside the vocabulary"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "limit is 128"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"logprobs": -1}, "logprobs", "0 to 20"),
        ({"logprobs": 1, "echo": True}, "logprobs", "echo"),
        ({"n": 0}, "n", "1 or more"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"frequency_penalty": 0.1}, "frequency_penalty", "not served"),
        ({"presence_penalty": -1}, "presence_penalty", "not served"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not served"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not served"),
        ({"best_of": 3}, "best_of", "not served, and the number 3 would change the answer: leave it out, or send 1"),
        ({"suffix": "x"}, "suffix", "not served"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not served"),
        ({"guided_json": {}}, "guided_json", "not served"),
        ({"priority": "now"}, "priority", "is the text 'now': expected 'bulk', 'online' or null"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_name_their_field(tiny, fields, param, words, stream):
    body = {"prompt": "hello", "max_tokens": 100, **fields}
    if stream and "stream_options" not in fields:
        body["stream"] = True
    response = tiny.client.post("/v1/completions", json=body)
    error = error_of(response)
    assert response.status_code == 400, error
    assert response.headers["content-type"] == "application/json"
    assert (error["param"], error["code"]) == (param, "invalid_input")
    assert words in error["message"]
    assert not tiny.engine.generated


def test_too_many_answers(tiny):
    response = tiny.complete(["a"] * 43, n=3)
    assert response.status_code == 413
    assert "129 answers in one request, the limit is 128" in error_of(response)["message"]


def test_fields_that_change_nothing_are_taken(tiny):
    fields = {
        "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "best_of": 1,
        "suffix": "", "response_format": {"type": "text"}, "user": "u", "stream": False, "stop": None, "n": None,
        "logprobs": None, "seed": None, "echo": False, "model": "chat", "unknown": 3, "stream_options": None,
    }  # fmt: skip
    assert tiny.complete(**fields).status_code == 200
    assert tiny.complete(n=2, best_of=2).status_code == 200


def test_the_number_of_the_prompt_that_is_too_long(tiny):
    error = error_of(tiny.complete([[5], [6] * 600]))
    assert (error["param"], error["index"]) == ("prompt", 1)
    assert error_of(tiny.complete(["x", ""]))["index"] == 1


def test_a_length_that_nobody_asked_for_refuses_nothing(tiny):
    """16 tokens are the default of the route; near the model's end it is what is left, prompt by prompt."""
    prompts = [[5], [5] * (MAX_TOKENS - 1), [5] * (MAX_TOKENS - 3)]
    assert tiny.complete(prompts, max_tokens=None).status_code == 200
    assert sorted(request.sampling.max_new_tokens for request in tiny.engine.generated) == [1, 3, 16]
    error = error_of(tiny.complete([5] * (MAX_TOKENS - 3), max_tokens=16))
    assert (error["param"], "which leaves 3" in error["message"]) == ("max_tokens", True)
    assert error_of(tiny.complete([5] * MAX_TOKENS, max_tokens=None))["param"] == "prompt"


def test_metrics_of_generation(tiny):
    before = {
        name: tiny.live.metric(name) for name in ("rose_generated_tokens_total", "rose_first_token_seconds_count")
    }
    tiny.complete(n=2)
    drawn = 2 * (len(tiny.ids(ANSWER)) + 1)
    assert tiny.live.metric("rose_generated_tokens_total") == before["rose_generated_tokens_total"] + drawn
    assert tiny.live.metric("rose_first_token_seconds_count") == before["rose_first_token_seconds_count"] + 1


def test_embedding_routes_say_what_the_model_is_for(tiny):
    """Report C161: and the other way round, an embedder says that it continues no text."""
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/contextualizedembeddings", {"input": [["a"]]}),
    ):
        response = tiny.client.post(path, json=body)
        assert response.status_code == 400
        assert "'tiny/chat' continues texts" in error_of(response)["message"]
        assert "/v1/chat/completions" in error_of(response)["message"]
    (model,) = tiny.client.get("/v1/models").json()["data"]
    assert (model["task"], model["chat"], model["dimension"], model["outputs"]) == ("generate", True, None, [])
    assert (model["end_token_ids"], model["max_model_len"], model["max_running"]) == ([tiny.end], MAX_TOKENS, 64)


def test_an_embedder_continues_nothing(request):
    shared = request.getfixturevalue("embedder")
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": []})):
        response = shared.client.post(path, json=body)
        assert response.status_code == 400
        assert "'tiny/embedder' continues no text" in error_of(response)["message"]
        assert "/v1/embeddings" in error_of(response)["message"]
    assert shared.client.get("/v1/models").json()["data"][0]["task"] == "embed"


def test_the_length_told_is_that_of_an_answer_and_not_of_a_batch(folder):
    with generating_front(folder, card={"max_batch_tokens": 64}) as tiny:
        assert tiny.client.get("/v1/models").json()["data"][0]["max_model_len"] == MAX_TOKENS
        assert tiny.complete([5] * (MAX_TOKENS - 4), max_tokens=4).status_code == 200


@pytest.fixture
def embedder(text_folder):
    from tests.gateway.conftest import card_for, live_front

    with live_front(text_folder, card_for(text_folder)) as live:
        yield live

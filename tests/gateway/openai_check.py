"""What any OpenAI client does with an embeddings server, run by the client package that is first on the path.

    python openai_check.py http://127.0.0.1:8080 MODEL DIMENSION

Imports nothing of this project, so that the same file runs under every version of the client.
"""

import struct
import sys

import openai


def check(url, model, dimension):
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    check_models(client, model)
    check_shapes(client, model, dimension)
    check_encodings(client, model)
    check_errors(client, model, dimension)


def check_models(client, model):
    assert [one.id for one in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def check_shapes(client, model, dimension):
    """A text, texts, ids and lists of ids; the client asks for base64 by itself and decodes it."""
    for value, count in (("salt", 1), (["a", "b c", " d\n"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2)):
        answer = client.embeddings.create(model=model, input=value)
        assert [item.index for item in answer.data] == list(range(count))
        assert all(len(item.embedding) == dimension for item in answer.data)
        assert all(isinstance(number, float) for number in answer.data[0].embedding)
        assert answer.model == model
        assert answer.object == "list"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    short = client.embeddings.create(model=model, input="salt", dimensions=8, user="someone")
    assert len(short.data[0].embedding) == 8
    raw = client.embeddings.with_raw_response.create(model=model, input="salt", extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert "compute;dur=" in raw.headers["server-timing"]


def check_encodings(client, model):
    """The same float32 numbers, whichever way they travel."""
    by_default = client.embeddings.create(model=model, input=["a", "b"])
    as_numbers = client.embeddings.create(model=model, input=["a", "b"], encoding_format="float")
    as_text = client.embeddings.create(model=model, input=["a", "b"], encoding_format="base64")
    for one, two, three in zip(by_default.data, as_numbers.data, as_text.data, strict=True):
        packed = struct.pack(f"<{len(one.embedding)}f", *one.embedding)
        assert packed == struct.pack(f"<{len(two.embedding)}f", *two.embedding)
        if isinstance(three.embedding, str):
            import base64

            assert base64.b64decode(three.embedding) == packed
    assert by_default.data[0].embedding != by_default.data[1].embedding


def check_errors(client, model, dimension):
    bad = [
        {"input": ""},
        {"input": ["a", ""]},
        {"input": []},
        {"input": [10**9]},
        {"input": "salt " * 3000},
        {"input": "a", "dimensions": dimension + 1},
        {"input": "a", "encoding_format": "nope"},
    ]
    for fields in bad:
        error = fails(openai.BadRequestError, lambda fields=fields: client.embeddings.create(model=model, **fields))
        assert error.status_code == 400
        assert error.body["type"] == "invalid_request_error"
        assert error.code == "invalid_input"
        assert error.param in ("input", "dimensions", "encoding_format")
    error = fails(openai.NotFoundError, lambda: client.embeddings.create(model="text-embedding-3-small", input="a"))
    assert error.code == "unknown_model"
    fails(openai.NotFoundError, lambda: client.models.retrieve("other"))
    error = fails(openai.APIStatusError, lambda: client.embeddings.create(model=model, input=["a"] * 2049))
    assert error.status_code == 413
    assert "2048" in error.message
    client.embeddings.create(model=model, input="still served")


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    check(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print("openai", openai.__version__, "ok")

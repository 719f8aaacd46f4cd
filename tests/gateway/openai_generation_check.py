"""What any OpenAI client does with a generating server, run by the client package that is first on the path.

    python openai_generation_check.py http://127.0.0.1:8080 MODEL ANSWER

Imports nothing of this project, so that the same file runs under every version of the client.
"""

import asyncio
import sys

import openai

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def check(url, model, answer):
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    check_chat(client, model, answer)
    check_completions(client, model, answer)
    check_errors(client, model)
    asyncio.run(check_async(openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0), model, answer))


def check_chat(client, model, answer):
    done = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1, extra_body={"top_k": 5}
    )
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", answer, "stop")
    assert bytes(byte for token in choice.logprobs.content for byte in token.bytes).decode() == answer
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens >= 0
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2
    )
    texts, finishes, usage, roles = {0: "", 1: ""}, {}, None, {}
    for chunk in stream:
        usage = chunk.usage or usage
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
            roles.setdefault(one.index, one.delta.role)
            finishes[one.index] = one.finish_reason
    assert texts == {0: answer, 1: answer}
    assert (finishes, roles) == ({0: "stop", 1: "stop"}, {0: "assistant", 1: "assistant"})
    assert usage.completion_tokens == 2 * done.usage.completion_tokens


def check_completions(client, model, answer):
    done = client.completions.create(model=model, prompt=["a", "b"], max_tokens=64, logprobs=1, temperature=0)
    assert [choice.text for choice in done.choices] == [answer, answer]
    assert len(done.choices[0].logprobs.tokens) == len(done.choices[0].logprobs.token_logprobs)
    stream = client.completions.create(model=model, prompt=[5, 6], max_tokens=64, stream=True, stop=answer[4:9])
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer[:4]
    assert chunks[-1].choices[0].finish_reason == "stop"
    short = client.completions.create(model=model, prompt="a", max_tokens=2)
    assert short.choices[0].finish_reason == "length"


def check_errors(client, model):
    for wrong, kind in (
        ({"model": "other"}, openai.NotFoundError),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError),
        ({"stream": True, "temperature": -1}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**{"model": model, "messages": MESSAGES, **wrong})
        except kind:
            continue
        raise AssertionError(wrong)


async def check_async(client, model, answer):
    done = await client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=64)
    assert done.choices[0].message.content == answer
    async with await client.chat.completions.create(model=model, messages=MESSAGES, stream=True) as stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer
    done = await client.completions.create(model=model, prompt="a", max_tokens=64)
    assert done.choices[0].text == answer
    text = ""
    async for chunk in await client.completions.create(model=model, prompt="a", max_tokens=64, stream=True):
        text += chunk.choices[0].text
    assert text == answer
    await client.close()


if __name__ == "__main__":
    check(*sys.argv[1:])

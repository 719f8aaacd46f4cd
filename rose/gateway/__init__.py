"""The front process ("Ivy"): text in, vectors out, over HTTP and gRPC; free of torch.

    run.py                 a front alone: listen, drain at SIGTERM
    supervise.py           a front and its engine processes as one thing
    engine_process.py      one engine process as a child
    front.py, carriers.py  the parts put together; the listeners around them
    lifecycle.py           takes requests or drains; how many are open

    asgi.py, app.py        one HTTP request; routes and the error boundary
    embeddings.py          POST /v1/embeddings; embedding_request.py reads it, vectors.py writes its numbers
    pages.py, openapi.py   health, readiness, models, metrics, the API document (schemas.py) and its page
    http_errors.py         the error table as OpenAI clients know it
    grpc_front.py          rose.v1.Rose, health and reflection

    service.py             checks, prompt, tokens, replicas: what every carrier shares
    inputs.py              texts or token ids, told apart and checked
    tokenizer.py           text to ids; control_tokens.py for text from strangers
    replicas.py            who takes which part; replica.py one engine process; parts.py cutting and joining
    metrics.py             what is counted

Knows text, JSON and gRPC; knows neither models nor torch.
"""

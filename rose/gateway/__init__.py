"""The front process ("Ivy"): text in, vectors, scores and text out, over HTTP and gRPC; free of torch.

    run.py                 a front alone: listen, drain at SIGTERM
    supervise.py           a front and its engine processes as one thing; socket_folder.py where their sockets lie
    fronts.py              several fronts on the same ports, as children (__main__.py is one of them)
    keeper.py              a child that is started again when it dies; child_process.py is the child
    front.py, carriers.py  the parts put together; the listeners around them
    lifecycle.py           takes requests or drains; how many are open

    asgi.py, app.py        one HTTP request; routes and the error boundary; body_budget.py room for all bodies
    json_body.py           a JSON body as a request type, or an error that names the field
    misfits.py             what of a body does not fit its type, in words
    embeddings.py          POST /v1/embeddings; embedding_request.py reads it, vectors.py writes its numbers
    forms.py               floats, bytes and bits; named_outputs.py several outputs side by side
    contextual_route.py    POST /v1/contextualizedembeddings (schemas_context.py); contextual.py joins and bounds chunks
    tokenize_routes.py     POST /v1/tokenize, /v1/detokenize; schemas_tokenize.py has their types
    rank_routes.py         POST /v1/rerank, /v1/score; rank_request.py reads them, schemas_rank.py has their types
    completions.py, chat.py  POST /v1/completions, /v1/chat/completions; generate_request.py reads them,
                           generate_reply.py writes JSON or events, schemas_generate.py has their types,
                           logprob_shapes.py both dialects' log probabilities
    pages.py, openapi.py   health, readiness, models, metrics, the API document (schemas.py) and its page
    http_errors.py         the error table as OpenAI clients know it
    grpc_front.py          rose.v1.Rose, health and reflection; grpc_calls.py and grpc_generate.py what its calls do

    service.py             checks, prompt, tokens, replicas: what every carrier shares
    ranking.py             scores of pairs: methods.py which way, pairs.py both texts as one sequence, comparing.py
                           each by itself; scoring.py the formulas; rank_job.py what goes in and out
    generating.py          prompts and their answers, what every carrier shares; sampling.py how tokens are drawn,
                           answer.py one answer as it comes, streams.py from which replica
    chat_prompt.py         messages to ids: chat_template.py the model's template, template_sandbox.py where it runs,
                           chat_marks.py control tokens that messages contain
    detokenize.py          ids back into text as they come; stop_strings.py what ends it
    facts.py               what the model's folder says of pairs, chats and chunks
    outputs.py             the outputs of a model card; pieces.py over-long inputs in pieces
    inputs.py              texts or token ids, told apart and checked
    tokenizer.py           text to ids; text_bounds.py how much of a text, tokenizer_pool.py the threads for long ones,
                           control_tokens.py for text from strangers, pair_layout.py for two texts
    replicas.py            who takes which part; replica.py one engine process; parts.py cutting and joining
    metrics.py             what is counted

Knows text, JSON and gRPC; knows neither models nor torch.
"""

"""The engine process: the light link in, one single-threaded reactor around the engine, results out.

    run.py                start-up: folder → model → engine → reactor; what is served, printed; signals
    reactor.py            the loop: sockets, service, waiting for whichever comes first
    listener.py           where connections come from
    connection.py         one client's bytes, both ways, bounded
    service.py            frames → requests, errors → frames; each request answered exactly once
    ledger.py             what is open, by client and by deadline
    work.py               which parts make an embedding, and which a generating process
    pacing.py             tokens a second
    stats.py              counters

    embedding.py          embed requests: validate.py, requests.py (open ones), answers.py (their rows)
    batches.py            finished batches: rows to answers, faults to those at fault
    card.py, selfcheck.py the model card; what is tried before a client is let in

    generating.py         generate requests: validate_generate.py, chunks, slow clients
    generations.py        steps: tokens and failures to the requests they belong to
    start_generation.py   start-up of a language model, its self-check; generation_card.py its card

Knows token ids; knows neither text, JSON, HTTP nor gRPC.
"""

"""The engine process: the light link in, one single-threaded reactor around the engine, results out.

    run.py         start-up: folder → model → engine → reactor; what is served, printed; signals
    reactor.py     the loop: sockets, service, waiting for whichever comes first
    listener.py    where connections come from
    connection.py  one client's bytes, both ways, bounded
    service.py     frames → engine requests → answers, each exactly once
    validate.py    the one validator of embed requests
    answers.py     rows of one request, gathered over several batches
    batches.py     finished batches: rows to answers, faults to those at fault
    pacing.py      when a batch is expected to end, tokens a second
    card.py        the model card
    stats.py       counters

Knows token ids; knows neither text, JSON, HTTP nor gRPC.
"""

"""Generating: pages, continuous batching, sampling, tokens on their way.

Beside the engine for embedders and rerankers, with the same surface (`add`, `abort`, `step`, `idle`) and the same
executors and graphs. Knows token ids; knows neither text nor carriers.
"""

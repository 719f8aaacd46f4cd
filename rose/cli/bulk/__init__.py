"""Many texts from a file through a server into a file: what `rose embed` and `rose rerank` stand on.

Knows files, the HTTP API and how to go on after an interruption; knows neither models nor tokens.
"""

"""Architectures, one a file, readable top to bottom; heads by composition; a table from config.json's names to classes.

Knows layers and batches; knows neither graphs, nor quantisation, nor which attention backend runs.
"""

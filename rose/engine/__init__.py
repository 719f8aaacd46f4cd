"""Requests in, lazy results out: scheduler, staging, execution, graphs, and the `step()` that joins them.

Knows token ids and devices; knows neither text nor carriers.
"""

"""Operations on packed tokens, one a file: `x_ref` in plain torch, the GPU kernel, and
the public `x` that picks by device.

Knows tensors; knows neither models nor batches. Shape letters as in rose/batch.py.
"""

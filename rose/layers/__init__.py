"""Modules that hold weights, under the checkpoint's own parameter names, and call the kernels.

Knows weights and batches; does not know which model it is part of, nor where the weights come from.
"""

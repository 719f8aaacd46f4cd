"""ROSE: one runtime that serves embedders, rerankers and LLMs from the same kernels, layers and conversion routines."""

__version__ = "0.1.0"

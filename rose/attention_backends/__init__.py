"""Attention backends behind one surface: `supports(spec)`, `plan(batch, slot)`, and the plan's `run(q, k, v, layer)`.

Every backend is imported only when asked for by name; "unsupported" is a reason in words. Knows shapes and lengths;
knows neither weights nor models.
"""

from rose.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    KeepsPlans,
    Paged,
    WarmsUp,
    WorkspaceReport,
    available_backends,
    backend_names,
    can_capture,
    load_backend,
    paged_backend_names,
)
from rose.attention_backends.kv_cache import KVCache

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "KVCache",
    "KeepsPlans",
    "Paged",
    "WarmsUp",
    "WorkspaceReport",
    "available_backends",
    "backend_names",
    "can_capture",
    "load_backend",
    "paged_backend_names",
]

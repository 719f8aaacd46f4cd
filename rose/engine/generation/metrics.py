"""What a generating engine counts.

Knows names and numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class GenerationMetrics:
    """Counters since start.

    Attributes:
        batches: launched; decode_batches: of them, those without a chunk of a prompt.
        prefill_tokens, decode_tokens: computed, dummies left out.
        padding_tokens: computed for dummies.
        generated_tokens: brought to the host and reported.
        expired_requests, aborted_requests: ended by their deadline, and by their caller.
        non_finite_requests: ended because no token could be told from their logits.
        failed_batches: whose staging or forward raised.
    """

    batches: int = 0
    decode_batches: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    generated_tokens: int = 0
    expired_requests: int = 0
    aborted_requests: int = 0
    non_finite_requests: int = 0
    failed_batches: int = 0

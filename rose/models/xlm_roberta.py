"""XLM-RoBERTa (arXiv:1911.02116), RoBERTa and CamemBERT: BERT, with the first token of each sequence at position row
pad_token_id + 1.

The offset is ArchitectureConfig.position_offset, added where the row is looked up: a batch's positions count from 0 in
each packed sequence, whatever the family.
"""

from __future__ import annotations

from rose.models.bert import Bert as XLMRoberta

__all__ = ["XLMRoberta"]

"""FlashInfer's fa3 kernels (Hopper): warp-specialised, persistent, with a schedule balanced on the host.

The fastest here on batches of sequences of about 512 tokens. Knows how large a schedule of fa3 gets; the rest is in
flashinfer_ragged.
"""

from __future__ import annotations

from rose.attention_backends.flashinfer_ragged import FlashInferRagged, aligned, sm_count

# Above it FlashInfer writes one schedule for all heads instead of one for each.
_SHARED_SCHEDULE_TILES = 4096


class FlashInfer3(FlashInferRagged):
    name = "flashinfer3"
    kernels = "fa3"
    capability = ((9, 0), (10, 0))

    def plan_bytes(self, tokens: int, sequences: int) -> int:
        """Seven int32 for each work item (a query tile of one head), and where each multiprocessor's items start."""
        tile = 192 if self._spec.head_dim == 64 else 128
        tiles = -(-tokens // tile) + sequences
        items = tiles if tiles > _SHARED_SCHEDULE_TILES else tiles * self._spec.num_heads
        return aligned(*[4 * items] * 7, 4 * (sm_count(self._spec.device) + 1)) + 256

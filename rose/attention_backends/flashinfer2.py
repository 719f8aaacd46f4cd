"""FlashInfer's fa2 kernels: any tensor-core GPU, and the one backend whose loads are masked row by row.

Knows how large a schedule of fa2 gets; the rest is in flashinfer_ragged.
"""

from __future__ import annotations

from rose.attention_backends.flashinfer_ragged import FlashInferRagged, aligned, sm_count


class FlashInfer2(FlashInferRagged):
    name = "flashinfer2"
    kernels = "fa2"
    capability = ((8, 0), None)

    def plan_bytes(self, tokens: int, sequences: int) -> int:
        """Three int32 and one bool for each block of the grid, and the offsets.

        In graph mode FlashInfer sizes its query tile for the longest sequence that could come (16, 64 or 128 rows with
        the group's heads packed) and launches at least two blocks for each multiprocessor.
        """
        group = self._spec.num_heads // self._spec.num_kv_heads
        longest = max(tokens - sequences + 1, 1) * group
        tile = 16 if longest <= 16 else 64
        blocks = max(2 * sm_count(self._spec.device) // self._spec.num_kv_heads, -(-tokens * group // tile) + sequences)
        return aligned(4 * blocks, 4 * blocks, 4 * blocks, blocks, 4 * (sequences + 1)) + 256

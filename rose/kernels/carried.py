"""State that a sequence brings from an earlier batch and leaves for a later one: rows of a pool, one a sequence.

Knows rows and lengths; knows neither what the state is nor who hands out the rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Carried(NamedTuple):
    """
    Attributes:
        pool: [rows, ...], contiguous within a row; read where a sequence continues, written for every sequence.
        rows: [B] int32: row of each sequence. Sequences that share a row leave it with the state of any one of them.
        lengths: [B] int32: tokens of each sequence up to the end of this batch. A sequence that has no more tokens
            than its own in this batch starts here, from zero, whatever its row holds.
    """

    pool: Tensor
    rows: Tensor
    lengths: Tensor

    def since(self, sequence: int) -> Carried:
        """The same of the sequences from `sequence` on."""
        return Carried(self.pool, self.rows[sequence:], self.lengths[sequence:])

    def until(self, sequence: int) -> Carried:
        """The same of the first `sequence` sequences."""
        return Carried(self.pool, self.rows[:sequence], self.lengths[:sequence])


def check_carried(carried: Carried, sequences: int, row: tuple[int, ...]) -> None:
    """
    Args:
        row: shape of one sequence's state.

    Raises:
        ValueError: the pool or the rows do not have these shapes, or a pool that is not contiguous within a row.
    """
    pool, rows, lengths = carried
    if tuple(pool.shape[1:]) != row or not pool[0].is_contiguous():
        raise ValueError(f"a row of the pool must be {row} and contiguous; the pool is {tuple(pool.shape)}")
    if rows.shape != (sequences,) or lengths.shape != (sequences,):
        raise ValueError(
            f"{sequences} sequences have a row and a length each; there are {tuple(rows.shape)} and "
            f"{tuple(lengths.shape)}"
        )

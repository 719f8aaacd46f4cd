"""What an embed call gives back: numpy views of the answer, by output name.

Knows messages and arrays; knows no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rose.errors import InternalError
from rose.proto import rose_pb2 as pb
from rose.proto.convert import AnyArray, tensor_from_proto


class Timing(NamedTuple):
    """Where the engine process spent its time on one request.

    Attributes:
        queue_s: from arrival at the engine to the launch of its first batch, in seconds.
        compute_s: from that launch to the last result on the host, in seconds.
        batches: batches the request's items were spread over.
    """

    queue_s: float
    compute_s: float
    batches: int


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """The answer to one request.

    Attributes:
        outputs: output name -> [items, dimension], or [rows, dimension] for outputs with splits; read-only.
        splits: of per-token outputs, and of pooled ones if spans were asked for: item i takes rows splits[i] ..
            splits[i + 1].
        prompt_tokens: tokens of the request.
        payload: the bytes of the message that all this was read from, where they were asked for.
    """

    outputs: Mapping[str, AnyArray]
    splits: Mapping[str, tuple[int, ...]]
    prompt_tokens: int
    timing: Timing
    payload: bytes = b""

    @property
    def vectors(self) -> AnyArray:
        """The only output, or the first that was asked for."""
        return next(iter(self.outputs.values()))

    def item(self, name: str, index: int) -> AnyArray:
        """One item of one output: [dimension], or, where the output has splits, its rows: [n, dimension]."""
        splits = self.splits.get(name)
        return self.outputs[name][index] if splits is None else self.outputs[name][splits[index] : splits[index + 1]]

    @staticmethod
    def from_message(message: pb.EmbedResponse, payload: bytes = b"") -> EmbedResult:
        """Raises InternalError if the answer holds no output."""
        outputs: dict[str, AnyArray] = {}
        splits: dict[str, tuple[int, ...]] = {}
        for output in message.outputs:
            outputs[output.name] = tensor_from_proto(output.values)
            if output.splits:
                splits[output.name] = tuple(output.splits)
        if not outputs:
            raise InternalError("the server's answer holds no output")
        spent = message.timing
        timing = Timing(spent.queue_us / 1e6, spent.compute_us / 1e6, spent.batches)
        return EmbedResult(outputs, splits, message.prompt_tokens, timing, payload)

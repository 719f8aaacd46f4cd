"""One forward on the real device before anybody is served.

A kernel that gives NaN on this machine, an output of a shape the model does not declare or a device that is out of
memory is found here and not by the first client. Knows the engine's surface and output specs.
"""

from __future__ import annotations

import numpy as np

from rose.engine.request import Request
from rose.errors import StartupError
from rose.models.base import ServedModel
from rose.server.answers import faulty_rows
from rose.server.ports import EnginePort

# Short, and longer than any special tokens.
TOKENS = 8


def self_check(engine: EnginePort, model: ServedModel) -> None:
    """Run every output the model has, on two sequences of one batch.

    Raises:
        StartupError: an output cannot be computed, or is not finite.
    """
    names = tuple(name for name, spec in model.outputs.items() if spec.unavailable is None)
    ids = np.arange(TOKENS, dtype=np.int32) % model.vocab_size
    try:
        engine.add(Request(id=0, sequences=[ids, ids[: TOKENS // 2]], outputs=names))
        results = [result for result in engine.step() if result.items]
        outputs = {name: output.result() for result in results for name, output in result.outputs.items()}
    except Exception as error:
        raise StartupError(f"the model does not run here: {type(error).__name__}: {error}") from error
    for name in names:
        if faulty_rows(outputs[name], model.outputs[name]).size:
            raise StartupError(f"output {name!r} is not finite on this device: refusing to serve it")

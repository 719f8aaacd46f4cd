"""What is written tensor by tensor is what the library reads, and reads back the same."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from rose.hub.safetensors_file import LazyArray, read_tensors, write_tensors


def lazy(values: np.ndarray) -> LazyArray:
    return LazyArray(values.shape, lambda: values)


TENSORS = {
    "b.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a": np.array([-0.0, 1e-45, 3e38], np.float32),
    "column": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    "empty": np.empty((0, 4), np.float32),
}


def test_the_library_reads_it(tmp_path):
    seen: list[int] = []
    write_tensors(tmp_path / "w.safetensors", {name: lazy(v) for name, v in TENSORS.items()}, seen.append)
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == set(TENSORS)
    for name, values in TENSORS.items():
        assert found[name].tobytes() == np.ascontiguousarray(values).tobytes(), name
        assert found[name].shape == values.shape
    assert seen == [48, 60, 84, 84]


def test_read_back_in_order_and_lazily(tmp_path):
    path = tmp_path / "w.safetensors"
    write_tensors(path, {name: lazy(values) for name, values in TENSORS.items()})
    found = read_tensors(path)
    assert list(found) == list(TENSORS)
    for name, values in TENSORS.items():
        assert np.array_equal(found[name].read(), values)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        found["a"].read()


def test_a_tensor_that_comes_in_another_shape_is_a_fault(tmp_path):
    wrong = LazyArray((2, 2), lambda: np.zeros((4,), np.float32))
    with pytest.raises(ValueError, match=r"announced as \(2, 2\) and came as \(4,\)"):
        write_tensors(tmp_path / "w.safetensors", {"w": wrong})

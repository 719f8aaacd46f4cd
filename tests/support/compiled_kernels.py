"""What every kernel compiled for sm_90 has to have, and operands that exist for their types alone."""

from __future__ import annotations

import torch


def bf16(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


def check(compiled, count):
    """So many kernels, each with dependent launch, within shared memory, through ptxas."""
    assert len(compiled) == count
    for kernel in compiled:
        text = kernel.asm["ptx"]
        assert "griddepcontrol.wait" in text
        assert "griddepcontrol.launch_dependents" in text
        assert kernel.metadata.shared <= 227 * 1024
        assert len(kernel.asm["cubin"]) > 0

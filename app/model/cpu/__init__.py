"""What a network's operations do on a CPU; ``app.model.network`` runs passes in ``CpuKernels``.

operations  what stands in for PyTorch's operations, and where a pass gives way to others
norms       group and instance norms, compiled
"""

from app.model.cpu.norms import norm_groups
from app.model.cpu.operations import CpuKernels

__all__ = ["CpuKernels", "norm_groups"]

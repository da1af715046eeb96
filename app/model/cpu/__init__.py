"""What a network's operations do on a CPU; ``app.model.network`` runs passes in ``CpuKernels``.

operations  what stands in for PyTorch's operations, and where a pass gives way to others
heads       a last layer of which the scores alone are computed
norms       group and instance norms, compiled
"""

from app.model.cpu.heads import Head, find_head, find_last_convolution
from app.model.cpu.norms import norm_groups
from app.model.cpu.operations import CpuKernels

__all__ = ["CpuKernels", "Head", "find_head", "find_last_convolution", "norm_groups"]

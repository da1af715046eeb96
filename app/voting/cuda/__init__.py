"""The stages of voting that run on CUDA, by kernels in Triton; ``app.voting`` calls them.

They also run in Triton's interpreter on any machine, which is how they are tested without a device.
Kernels have no annotations: their types are those of their first call.

votes          field -> votes
votes_kernels  its kernels
modes          votes -> sums around modes
modes_kernels  its kernels
"""

"""The filter of votes on CUDA, in Triton; ``app.voting.votes`` calls it.

The kernel also runs in Triton's interpreter on any machine, which is how it is tested without a
device. It has no annotations: its types are those of its first call.

votes          field -> votes
votes_kernels  its kernel
"""

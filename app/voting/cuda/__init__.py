"""The filter of votes on CUDA, in Triton; ``app.voting.votes`` calls it.

The kernels also run in Triton's interpreter on any machine, which is how they are tested without a
device. They have no annotations: their types are those of their first call.

votes          field -> votes
votes_kernels  its kernels
"""

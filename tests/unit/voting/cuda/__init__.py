"""Tests of the kernels for CUDA, which run in Triton's interpreter where there is no device."""

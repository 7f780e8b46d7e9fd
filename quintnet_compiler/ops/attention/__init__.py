"""Attention as an operator, which parts of it there are, and the kernels that compute them."""

"""The backward of single operators, proven on numbers before it is used as a pattern.

The templates of :mod:`...passes.autodiff.vector_jacobian` say what an operator's backward looks like; none is trusted.
The first time that a program has a template, it is compared with autograd of the eager operator on drawn values,
with the dtypes and memory formats that the program's values and gradients have. Large operands are made smaller, in
proportion, and so are indices and sizes among the arguments; where an operator does not take them, they stay. Operators
that depend on a rank have no eager counterpart; their few transposes are written down in :mod:`.of_ranks`.
"""

"""What a rank keeps: parameters, gradients, buckets, and digests of their values.

Imports ``transport`` and below.
"""

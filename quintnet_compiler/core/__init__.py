"""Basic types: errors, meshes, sharding types, slices, random numbers.

Imports nothing else of the package.
"""

"""Types and helpers that everything else uses: errors, meshes, sharding types, slices, random numbers.

Imports nothing else of the package.
"""

"""Closed forms of a decoder: parameters, arithmetic, kernels, memory and time of a step, from its sizes alone."""

"""The parts of ``benchmarks/first_gpu.py``: what one GPU can prove in half an hour.

A part is a module here whose function ``run`` yields what it finds (:mod:`.entries`). Each runs in a process of its
own, and what it has found until then is kept if it fails (:mod:`.driver`).
"""

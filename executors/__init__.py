"""Executors start workers, send one call to all of them, gather the results and watch them.

Torch-free.
"""

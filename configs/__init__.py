"""Arguments, frozen configuration, sampling parameters, errors, model files.

Imports nothing else of headrace.
"""

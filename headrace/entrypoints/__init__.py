"""Alias of the entry points, under the import paths that people type."""

"""Aliases of the engines, under the import paths that people type."""

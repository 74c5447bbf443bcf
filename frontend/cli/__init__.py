"""The `headrace` command; a module per sub-command."""

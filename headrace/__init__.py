"""headrace: LLM inference and serving. Public names are imported when first used, so that this import is cheap."""

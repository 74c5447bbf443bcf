"""The options of an engine, one dataclass per group; `EngineArgs` inherits them all."""

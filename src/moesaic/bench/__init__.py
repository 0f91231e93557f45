"""How fast a model runs in an engine, beside the dense one."""

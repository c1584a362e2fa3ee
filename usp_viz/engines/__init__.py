"""Who can run a scenario. Each engine is one small module with the interface of `base.Engine`."""

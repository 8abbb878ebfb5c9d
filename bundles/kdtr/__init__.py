"""Numpy reference of the engine and generators of its weight bundles; see bundles/README.md."""

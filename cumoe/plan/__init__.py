"""The drawing office: which kernel, which grid. Pure functions from values to values."""

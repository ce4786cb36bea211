"""The gate: loads cubins, allocates in the caller's framework, launches on the caller's stream."""

"""The counter: the public functions. Each checks, plans and runs; none holds a threshold."""

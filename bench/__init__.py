"""Measurements and records of GPU runs."""

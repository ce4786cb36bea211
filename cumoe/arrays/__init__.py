"""Customs: foreign arrays in, facts out. Nothing here looks at a value or copies silently."""

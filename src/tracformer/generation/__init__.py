"""Filling holes: samplers, orders, the loop, search, and text with blanks in it."""

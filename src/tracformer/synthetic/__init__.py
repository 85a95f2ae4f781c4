"""Text that the package writes itself, with rules that can be checked."""

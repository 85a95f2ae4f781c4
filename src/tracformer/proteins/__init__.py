"""Protein families: wild types in a family's columns, scores of mutants, designs, arDCA."""

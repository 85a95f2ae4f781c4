"""Speed and memory, as ratios, in one run: machine limits, attention, training, generation, long
sequences, against rivals.

A part is a file: its `pieces` say what is measured (each in a fresh process), its `rows` turn the
saved figures into lines of the table.
"""

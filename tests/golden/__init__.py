"""Recorded figures of every model family and every task.

`figures.json` holds a few numbers of each with the schema under which they were recorded; `models`
holds the small folders of weights from which they are computed. A change of the numbers fails the
tests until the schema of the family or task is raised and `python -m tests.golden.record` is run.
"""

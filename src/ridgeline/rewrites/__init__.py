"""PIPELINE: the rewrites in order. Exact ones first, the mutating one last.

Each is a function `apply(graph_module) -> sites changed` in a file of its own; `compiler` runs those a recipe names.
"""

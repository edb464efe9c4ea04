"""Build the verified window out of draft candidates."""

from eagle_kit.kernels.tree_build.reference import Tree, top_scores, tree_build

__all__ = ["Tree", "top_scores", "tree_build"]

"""Build the verified window out of draft candidates."""

from eagle_kit.kernels.tree_build.reference import Tree, chain_build, top_scores, tree_build

__all__ = ["Tree", "chain_build", "top_scores", "tree_build"]

"""Trees that are none: whatever a library would follow out of its memory, or for ever, is found by looking."""

from __future__ import annotations

import numpy as np
import pytest

from model_handlers.trees.soundness import check_lightgbm, check_tree, check_xgboost

HEAD = "tree\nversion=v4\nnum_class=1\nnum_tree_per_iteration=1\nmax_feature_idx=2\ntree_sizes={sizes}\n\n"
TREE = (
    "Tree=0\nnum_leaves=3\nnum_cat=0\nsplit_feature=0 2\nthreshold=0.5 1.5\ndecision_type=2 2\n"
    "left_child=1 -1\nright_child=-2 -3\nleaf_value=1 2 3\n\n\n"
)
CATEGORIES = (
    "Tree=0\nnum_leaves=2\nnum_cat=1\nsplit_feature=0\nthreshold=0\ndecision_type=1\nleft_child=-1\nright_child=-2\n"
    "leaf_value=1 2\ncat_boundaries=0 1\ncat_threshold=5\n\n\n"
)


def lightgbm(tree=TREE, **changes):
    """A model of one tree, with lines of it changed."""
    for name, value in changes.items():
        lines = [f"{name}={value}" if line.startswith(f"{name}=") else line for line in tree.split("\n")]
        tree = "\n".join(lines)
    return HEAD.format(sizes=len(tree)) + tree + "end of trees\n"


@pytest.mark.parametrize(
    ("left", "right", "split"),
    [
        ([-1], [-1], [0]),
        ([1, -1, -1], [2, -1, -1], [2, 0, 0]),
        ([2, 3, -1, -1, -1], [1, 4, -1, -1, -1], [0, 1, 9, 9, 9]),
    ],
    ids=["a leaf", "a stump", "in another order"],
)
def test_trees_are_trees(left, right, split):
    """Of one leaf, of a split, of splits in any order; what a leaf has for a feature is nobody's business."""
    check_tree(0, np.array(left), np.array(right), np.array(split), 3)


@pytest.mark.parametrize(
    ("left", "right", "split", "sentence"),
    [
        ([1, -1, -1], [3, -1, -1], [0, 0, 0], "children in tree 7 are from 1 to 3, and there are 2"),
        ([1, -1, -1], [-2, -1, -1], [0, 0, 0], "children in tree 7 are from -2 to 1"),
        ([0, -1, -1], [2, -1, -1], [0, 0, 0], "children in tree 7 are from 0 to 2"),
        ([1, -1, -1], [1, -1, -1], [0, 0, 0], "two of its nodes have the same child"),
        ([1, 2, 1, -1], [3, -1, -1, -1], [0, 0, 0, 0], "children in tree 7 are from -1 to 3"),
        ([1, -1, -1], [2, -1, -1], [3, 0, 0], "features that tree 7 asks for are from 3 to 3, and there are 3"),
        ([1, -1, -1], [2, -1, -1], [-1, 0, 0], "features that tree 7 asks for are from -1 to -1"),
        ([1, -1, -1], [2, -1], [0, 0, 0], "tree 7 has 3 left children, 2 right ones and 3 splits"),
        ([], [], [], "tree 7 has 0 left children"),
    ],
)
def test_what_is_no_tree_is_refused(left, right, split, sentence):
    """Children that are not there, or have two parents, or lead back; features that no row has; lists cut short."""
    with pytest.raises(ValueError, match=sentence):
        check_tree(7, np.array(left, int), np.array(right, int), np.array(split, int), 3)


@pytest.mark.parametrize(
    "text", [lightgbm(), lightgbm(CATEGORIES), lightgbm("Tree=0\nnum_leaves=1\nleaf_value=1\n\n\n")]
)
def test_lightgbms_trees_are_trees(text):
    """With splits by number, with one by category, with none."""
    check_lightgbm(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (lightgbm(left_child="2 -1"), "children in tree 0 are from -1 to 2"),
        (lightgbm(left_child="1 -4"), "children in tree 0 are from -4 to 1"),
        (lightgbm(left_child="0 -1"), "children in tree 0 are from 0 to"),
        (lightgbm(right_child="-1 -3"), "two of its nodes have the same child"),
        (lightgbm(split_feature="0 3"), "features that tree 0 asks for are from 0 to 3"),
        (lightgbm(num_leaves="4"), "tree 0 has 4 leaves, and 2 other nodes"),
        (lightgbm(left_child="1 x"), "invalid literal"),
        (lightgbm(CATEGORIES, threshold="1"), "sets of categories in tree 0 are from 1 to 1"),
        (lightgbm(CATEGORIES, cat_boundaries="0 2"), "bounds of categories in tree 0 are from 0 to 2"),
        (lightgbm(CATEGORIES, cat_boundaries="0"), "has 1 sets of categories, and 1 bounds"),
        (lightgbm().replace("tree_sizes=", "tree_sizes=9"), "tree_sizes are not those of its trees") ,
        (lightgbm().replace("tree_sizes=", "tree_sizes=1 "), "tree_sizes are not those of its trees") ,
        (lightgbm().replace("num_tree_per_iteration=1", "num_tree_per_iteration=3"), "1 trees, 3 a round, for 1 classes"),
    ],
)  # fmt: skip
def test_lightgbms_trees_that_are_none_are_refused(text, sentence):
    """By what LightGBM would do with them."""
    with pytest.raises(ValueError, match=sentence):
        check_lightgbm(text)


def ubj(**arrays):
    """As much of a model of XGBoost in UBJSON as is looked at."""
    parts = []
    for name, numbers in arrays.items():
        of_nodes = name in STUMP
        data = [np.array(number, ">i4").tobytes() for number in numbers]
        kind, between = (b"[$l#L", b"") if of_nodes else (b"[#L", b"l")
        parts.append(name.encode() + kind + len(numbers).to_bytes(8, "big") + b"".join(between + each for each in data))
    return b"".join(parts)


STUMP = {"left_children": [1, -1, -1], "right_children": [2, -1, -1], "split_indices": [0, 0, 0]}
PARAMETERS = {"num_feature": "3", "num_class": "0", "num_target": "1"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        ({"left_children": [5, -1, -1]}, "children in tree 0"),
        ({"split_indices": [3, 0, 0]}, "features that tree 0 asks for"),
        ({"tree_info": [1]}, "classes of trees are from 1 to 1"),
        ({"tree_info": [0, 0]}, "it has 1 trees, 2 classes of trees"),
        ({"iteration_indptr": [0, 2]}, "trees of rounds are from 0 to 2"),
        ({"iteration_indptr": [1, 0]}, "it has 1 trees"),
        ({"weight_drop": [1, 1]}, "it has 1 trees, 1 classes of trees and 2 weights of trees"),
    ],
)
def test_xgboosts_trees_are_looked_through(changes, sentence):
    """Trees, and which class and which round each belongs to."""
    model = ubj(**{**STUMP, "tree_info": [0], "iteration_indptr": [0, 1], **changes})
    if not sentence:
        check_xgboost(model, PARAMETERS)
        return
    with pytest.raises(ValueError, match=sentence):
        check_xgboost(model, PARAMETERS)

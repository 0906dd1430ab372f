"""Whether trees are trees: children are there and have one parent, features and classes are among those known. PURE.

Libraries check little of that. They follow whatever numbers a file has for children, for ever where those lead back,
and read whatever lies where a number out of range points to. Numbers of splits and leaves may be damaged all the same:
answers are wrong then, and nothing else is harmed. What is wrong is a ValueError that says so, what is missing a
KeyError.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model_handlers.tensor import Array

_LEAF = -1
_UBJ_ARRAY = re.compile(rb"(left_children|right_children|split_indices)\[\$(.)#L(.{8})", re.DOTALL)
_UBJ_LIST = re.compile(rb"(tree_info|iteration_indptr|weight_drop)\[#L(.{8})", re.DOTALL)
_UBJ_TYPES = {b"U": ">u1", b"i": ">i1", b"I": ">i2", b"l": ">i4", b"L": ">i8", b"d": ">f4", b"D": ">f8"}


def check_tree(number: int, left: Array, right: Array, split: Array, features: int) -> None:
    """Look through one tree: of each node its children, -1 for a leaf, and its feature. Node 0 is the root.

    The root is the child of no node, and no node the child of two: so what can be reached from it has no circle.
    """
    nodes = len(left)
    if not nodes or len(right) != nodes or len(split) != nodes:
        raise ValueError(f"tree {number} has {nodes} left children, {len(right)} right ones and {len(split)} splits")
    inner = left != _LEAF
    children = np.concatenate((left[inner], right[inner])).astype(np.int64)
    _within(children, 1, nodes, f"children in tree {number}")
    if len(np.unique(children)) < len(children):
        raise ValueError(f"tree {number} is none: two of its nodes have the same child")
    _within(split[inner], 0, features, f"features that tree {number} asks for")


def check_xgboost(model: bytes | bytearray, parameters: Mapping[str, str]) -> None:
    """Look through a model as XGBoost, having read it, writes it in UBJSON, with its `learner_model_param`.

    Texts of its author (names of features) that look like an array only add one, which is looked through as well, or
    make the numbers of arrays differ, which is refused.
    """
    arrays: dict[bytes, list[Array]] = {}
    for match in _UBJ_ARRAY.finditer(model):
        count = int.from_bytes(match[3], "big")
        arrays.setdefault(match[1], []).append(np.frombuffer(model, _UBJ_TYPES[match[2]], count, match.end()))
    lists = {match[1]: _ubj_list(model, match.end(), match[2]) for match in _UBJ_LIST.finditer(model)}
    features = int(parameters["num_feature"])
    nodes = [arrays.get(name, []) for name in (b"left_children", b"right_children", b"split_indices")]
    for number, (left, right, split) in enumerate(zip(*nodes, strict=True)):
        check_tree(number, left, right, split, features)
    trees, none = len(nodes[0]), np.zeros(0)
    groups, rounds = lists.get(b"tree_info", none), lists.get(b"iteration_indptr", none)
    weights = lists.get(b"weight_drop", groups)
    _within(groups, 0, max(int(parameters["num_class"]), int(parameters["num_target"]), 1), "classes of trees")
    _within(rounds, 0, trees + 1, "trees of rounds")
    if len(groups) != trees or len(weights) != trees or (np.diff(rounds) < 0).any():
        raise ValueError(f"it has {trees} trees, {len(groups)} classes of trees and {len(weights)} weights of trees")


def _ubj_list(model: bytes | bytearray, at: int, size: bytes) -> Array:
    numbers = []
    for _ in range(int.from_bytes(size, "big")):
        kind = np.dtype(_UBJ_TYPES[bytes(model[at : at + 1])])
        numbers.append(float(np.frombuffer(model, kind, 1, at + 1)[0]))
        at += 1 + kind.itemsize
    return np.array(numbers)


def check_lightgbm(text: str) -> None:
    """Look through a model of LightGBM, as its file has it."""
    head, *trees = text.split("\nTree=")
    told = _fields(head)
    features, classes = int(told["max_feature_idx"]) + 1, int(told["num_class"])
    if classes < 1 or int(told["num_tree_per_iteration"]) != classes or len(trees) % classes:
        raise ValueError(f"it has {len(trees)} trees, {told['num_tree_per_iteration']} a round, for {classes} classes")
    sizes = [int(size) for size in told.get("tree_sizes", "").split()]
    if sizes and not _are_sizes(text, len(head) + 1, sizes):
        raise ValueError("its tree_sizes are not those of its trees")
    for number, tree in enumerate(trees):
        _check_lightgbm_tree(number, _fields(tree), features)


def _are_sizes(text: str, at: int, sizes: list[int]) -> bool:
    for number, size in enumerate(sizes):
        if not text.startswith(f"Tree={number}\n", at):
            return False
        at += size
    return text.startswith("end of trees", at)


def _check_lightgbm_tree(number: int, tree: Mapping[str, str], features: int) -> None:
    leaves = int(tree["num_leaves"])
    inner = leaves - 1
    if inner == 0:
        return
    left, right, split, kinds = (
        _integers(tree.get(name, "")) for name in ("left_child", "right_child", "split_feature", "decision_type")
    )
    for children in (left, right):
        _within(children, -leaves, inner, f"children in tree {number}")
    # Leaves have numbers of their own there, ~n for the nth: they are put behind the other nodes.
    of_leaf = np.full(leaves, _LEAF)
    left, right = (
        np.concatenate((np.where(children < 0, inner + ~children, children), of_leaf)) for children in (left, right)
    )
    check_tree(number, left, right, np.concatenate((split, of_leaf)), features)
    if len(left) != inner + leaves or len(kinds) not in {0, inner}:
        raise ValueError(f"tree {number} has {leaves} leaves, and {len(left) - leaves} other nodes")
    _check_categories(number, tree, kinds)
    _within(_integers(tree.get("leaf_features", "")), 0, features, f"features of leaves of tree {number}")


def _check_categories(number: int, tree: Mapping[str, str], kinds: Array) -> None:
    # Splits by category hold the number of a set, which lies between two bounds.
    sets = int(tree.get("num_cat", "0"))
    chosen = (kinds & 1).astype(bool)
    asked = np.array(tree.get("threshold", "").split(), np.float64)[chosen] if chosen.any() else np.zeros(0)
    _within(asked, 0, sets, f"sets of categories in tree {number}")
    if sets:
        bounds, words = _integers(tree["cat_boundaries"]), _integers(tree["cat_threshold"])
        _within(bounds, 0, len(words) + 1, f"bounds of categories in tree {number}")
        if len(bounds) != sets + 1 or (np.diff(bounds) < 0).any():
            raise ValueError(f"tree {number} has {sets} sets of categories, and {len(bounds)} bounds of them")


def check_treelite(model: Any) -> None:
    header = model.get_header_accessor()
    targets, classes = int(header.get_field("num_target")[0]), header.get_field("num_class")
    shape = header.get_field("leaf_vector_shape")
    target_of, class_of = header.get_field("target_id"), header.get_field("class_id")
    if len(target_of) != model.num_tree or len(class_of) != model.num_tree or len(classes) != targets:
        raise ValueError(f"it has {model.num_tree} trees, and {len(target_of)} targets of trees")
    _within(target_of, -1, targets, "targets of trees")
    _within(class_of, -1, max(classes.max(), 1), "classes of trees")
    for number in range(model.num_tree):
        tree = model.get_tree_accessor(number)
        left, right, split = (tree.get_field(name) for name in ("cleft", "cright", "split_index"))
        check_tree(number, left, right, split, model.num_feature)
        for of in ("leaf_vector", "category_list"):
            begin, end = tree.get_field(f"{of}_begin").astype(np.int64), tree.get_field(f"{of}_end").astype(np.int64)
            _within(begin, 0, len(tree.get_field(of)) + 1, f"{of}s of tree {number}")
            _within(end, 0, len(tree.get_field(of)) + 1, f"{of}s of tree {number}")
            sizes = set((end - begin).tolist())
            if min(sizes, default=0) < 0 or (of == "leaf_vector" and sizes - {0, int(np.prod(shape))}):
                raise ValueError(f"a {of} of tree {number} ends where it should not")


def _fields(block: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("=") for line in block.splitlines())}


def _integers(text: str) -> Array:
    return np.array(text.split(), np.int64)


def _within(numbers: Array, low: int, high: int, what: str) -> None:
    if len(numbers) and not (low <= numbers.min() and numbers.max() < high):
        raise ValueError(f"{what} are from {numbers.min():g} to {numbers.max():g}, and there are {high - max(low, 0)}")

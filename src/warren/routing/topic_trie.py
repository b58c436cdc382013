"""Which topic bindings match a routing key: a trie of words.

A pattern's words are separated by dots; `*` stands for one word, `#` for any number, none included. The empty key has no
words, so `#` matches it and `*` does not; `a.` has two, of which the second is empty, and `*` matches an empty word.

A pattern is a path from the root, one node a word:

    stock.*.nyse       root - stock - * - nyse
    stock.#            root - stock - #

Rules:

1. To add or remove a pattern walks its own words and nothing else, however many patterns there are. A node that leads
   to no binding any more is taken out, so a trie that was emptied is as small as a new one.
2. Matching goes through the key once, word by word, with the set of nodes that the words so far can have reached. A `#`
   node stays in the set whatever comes. A node is in the set once, however many ways lead to it: patterns like
   `#.a.#.a.#` cost words times nodes, and not the number of ways.
"""

from __future__ import annotations

from collections.abc import Iterator

from warren.routing.binding import Binding

_ONE = "*"
_ANY = "#"


class _Node:
    __slots__ = ("bindings", "children", "repeats")

    def __init__(self, repeats: bool) -> None:
        self.children: dict[str, _Node] | None = None  # by word; None where there are none: leaves are the most
        self.bindings: Binding | dict[Binding, None] | None = None  # whose pattern ends here; an only one by itself
        self.repeats = repeats  # a `#`


class TopicTrie:
    """The bindings of a topic exchange.

    >>> trie = TopicTrie()
    >>> trie.add(Binding("stocks", "queue", "new-york", "stock.*.nyse"))
    >>> trie.add(Binding("stocks", "queue", "all", "#"))
    >>> sorted(binding.destination for binding in trie.match("stock.ibm.nyse"))
    ['all', 'new-york']
    >>> [binding.destination for binding in trie.match("stock.ibm")]
    ['all']
    """

    def __init__(self) -> None:
        self._root = _Node(repeats=False)
        self.visited = 0  # nodes that were looked at since the start: what an operation costs, for tests and metrics

    def add(self, binding: Binding) -> None:
        """Requires: it is not in the trie."""
        node = self._root
        for word in words(binding.routing_key):
            self.visited += 1
            if node.children is None:
                node.children = {}
            child = node.children.get(word)
            if child is None:
                child = node.children[word] = _Node(repeats=word == _ANY)
            node = child
        if node.bindings is None:
            node.bindings = binding
        elif isinstance(node.bindings, dict):
            node.bindings[binding] = None
        else:
            node.bindings = {node.bindings: None, binding: None}

    def remove(self, binding: Binding) -> None:
        """Requires: it is in the trie."""
        path: list[tuple[_Node, str]] = []
        node = self._root
        for word in words(binding.routing_key):
            self.visited += 1
            assert node.children is not None
            path.append((node, word))
            node = node.children[word]
        if isinstance(node.bindings, dict):
            del node.bindings[binding]
            if not node.bindings:
                node.bindings = None
        else:
            assert node.bindings == binding
            node.bindings = None
        for parent, word in reversed(path):
            if node.bindings is not None or node.children is not None:
                break
            assert parent.children is not None
            del parent.children[word]
            if not parent.children:
                parent.children = None
            node = parent

    def match(self, routing_key: str) -> Iterator[Binding]:
        """Every binding whose pattern matches, each once."""
        # A dict is the set: its order is that of arrival, so the answer does not depend on addresses in memory.
        reached: dict[_Node, None] = {}
        _reach(self._root, reached)
        for word in words(routing_key):
            self.visited += len(reached)
            after: dict[_Node, None] = {}
            for node in reached:
                if node.repeats:
                    _reach(node, after)
                children = node.children
                if children is not None:
                    child = children.get(word)
                    if child is not None:
                        _reach(child, after)
                    child = children.get(_ONE)
                    if child is not None:
                        _reach(child, after)
            if not after:
                return
            reached = after
        for node in reached:
            here = node.bindings
            if isinstance(here, dict):
                yield from here
            elif here is not None:
                yield here

    def node_count(self) -> int:
        """Nodes below the root. Walks all of them: for tests."""
        count = 0
        stack = [self._root]
        while stack:
            children = (stack.pop().children or {}).values()
            count += len(children)
            stack.extend(children)
        return count


def words(key: str) -> list[str]:
    """The words of a pattern or routing key.

    >>> words("a.b"), words(""), words("a.")
    (['a', 'b'], [], ['a', ''])
    """
    return key.split(".") if key else []


def _reach(node: _Node, reached: dict[_Node, None]) -> None:
    """Add a node, and the `#` below it, which needs no word."""
    while node not in reached:
        reached[node] = None
        child = None if node.children is None else node.children.get(_ANY)
        if child is None:
            return
        node = child

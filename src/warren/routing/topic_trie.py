"""Which topic bindings match a routing key: a trie of words.

A pattern's words are separated by dots; `*` stands for one word, `#` for any number, none included. The empty key has no
words, so `#` matches it and `*` does not; `a.` has two, of which the second is empty, and `*` matches an empty word.

A pattern is a path from the root, one node a word, as far as it shares its way with others. From there on a binding is
alone and stands for the rest of its path itself:

    stock.*.nyse       root - stock - * - [stock.*.nyse]
    stock.*.nasdaq     root - stock - * - [stock.*.nasdaq]
    device-7.#         root - [device-7.#]

Rules:

1. To add or remove a pattern walks its own words and nothing else, however many patterns there are. A node has at least
   two bindings below it: with the last but one it goes, so a trie that was emptied is as small as a new one, and most of
   100,000 bindings cost no node at all.
2. Matching goes through the key once, word by word, with the set of nodes that the words so far can have reached. A `#`
   node stays in the set whatever comes. A node is in the set once, however many ways lead to it: patterns like
   `#.a.#.a.#` cost words times nodes, and not the number of ways. The rest of a path that a binding stands for is unfolded
   into nodes for as long as the match takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from warren.routing.binding import Binding

_ONE = "*"
_ANY = "#"


class _Node:
    __slots__ = ("bindings", "children", "depth", "repeats")

    def __init__(self, depth: int, repeats: bool) -> None:
        self.children: dict[str, _Node | Binding] | None = None  # by word; a binding where it is the only one below
        self.bindings: Binding | dict[Binding, None] | None = None  # whose pattern ends here; an only one by itself
        self.depth = depth  # words from the root to here
        self.repeats = repeats  # a `#`

    def put(self, binding: Binding, path: list[str]) -> None:
        """As the only one below. `path` is all of its words."""
        if len(path) == self.depth:
            self.bindings = binding
        else:
            self.children = {path[self.depth]: binding}

    def only(self) -> Binding | None:
        """The binding that is alone here and below."""
        if self.children is None:
            return None if isinstance(self.bindings, dict) else self.bindings
        if self.bindings is None and len(self.children) == 1:
            [child] = self.children.values()
            return child if isinstance(child, Binding) else None
        return None


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
        self._root = _Node(0, repeats=False)
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
                node.children[word] = binding
                return
            if isinstance(child, Binding):  # it is not alone any more
                alone = child
                child = node.children[word] = _Node(node.depth + 1, repeats=word == _ANY)
                child.put(alone, words(alone.routing_key))
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
            child = node.children[word]
            if isinstance(child, Binding):
                assert child == binding
                del node.children[word]
                if not node.children:
                    node.children = None
                break
            path.append((node, word))
            node = child
        else:
            if isinstance(node.bindings, dict):
                del node.bindings[binding]
                if len(node.bindings) == 1:
                    [node.bindings] = node.bindings
            else:
                assert node.bindings == binding
                node.bindings = None
        for parent, word in reversed(path):
            alone = node.only()
            if alone is None:
                return
            assert parent.children is not None
            parent.children[word] = alone
            node = parent

    def match(self, routing_key: str) -> Iterator[Binding]:
        """Every binding whose pattern matches, each once."""
        # A dict is the set: its order is that of arrival, so the answer does not depend on addresses in memory.
        reached: dict[_Node, None] = {}
        unfolded: dict[int, _Node] = {}
        _reach(self._root, reached, unfolded)
        for word in words(routing_key):
            self.visited += len(reached)
            after: dict[_Node, None] = {}
            for node in reached:
                if node.repeats:
                    _reach(node, after, unfolded)
                if node.children is not None:
                    for step in (word, _ONE):
                        child = _child(node, step, unfolded)
                        if child is not None:
                            _reach(child, after, unfolded)
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
        """Nodes below the root, bindings that stand for the rest of their path among them. Walks all: for tests."""
        count = 0
        stack = [self._root]
        while stack:
            children = (stack.pop().children or {}).values()
            count += len(children)
            stack += [child for child in children if isinstance(child, _Node)]
        return count


def words(key: str) -> list[str]:
    """The words of a pattern or routing key.

    >>> words("a.b"), words(""), words("a.")
    (['a', 'b'], [], ['a', ''])
    """
    return key.split(".") if key else []


def _child(node: _Node, word: str, unfolded: dict[int, _Node]) -> _Node | None:
    child = None if node.children is None else node.children.get(word)
    if isinstance(child, Binding):
        # The same nodes each time that a match comes by, or it would be in the set more than once.
        found = unfolded.get(id(child))
        return _unfold(child, node.depth, unfolded) if found is None else found
    return child


def _unfold(binding: Binding, depth: int, unfolded: dict[int, _Node]) -> _Node:
    """The path of a binding from `depth` on, as nodes; the first of them."""
    path = words(binding.routing_key)
    first = node = _Node(depth + 1, repeats=path[depth] == _ANY)
    for word in path[depth + 1 :]:
        child = _Node(node.depth + 1, repeats=word == _ANY)
        node.children = {word: child}
        node = child
    node.bindings = binding
    unfolded[id(binding)] = first
    return first


def _reach(node: _Node, reached: dict[_Node, None], unfolded: dict[int, _Node]) -> None:
    """Add a node, and the `#` below it, which needs no word."""
    while node not in reached:
        reached[node] = None
        child = _child(node, _ANY, unfolded)
        if child is None:
            return
        node = child

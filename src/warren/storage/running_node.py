"""Where the node is that runs on a data directory: it leaves a file there, for those who find the directory in use."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

NODE_FILE = "node.json"


class RunningNode(NamedTuple):
    """A node by its own word."""

    pid: int
    url: str  # of its status page

    def __str__(self) -> str:
        return f"the broker of process {self.pid} (status page {self.url})"


def running_node(data_directory: str) -> RunningNode | None:
    """The node that says it runs here; None: there is none, or it was killed and its file stayed behind."""
    try:
        with open(os.path.join(data_directory, NODE_FILE), encoding="utf-8") as file:
            said = json.load(file)
        node = RunningNode(int(said["pid"]), str(said["http"]))
        os.kill(node.pid, 0)
    except PermissionError:  # it lives, and is somebody else's
        return node
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    return node


def node_of_vhost(root: str) -> RunningNode | None:
    """The same, by a vhost's directory."""
    return running_node(os.path.dirname(os.path.dirname(os.path.abspath(root))))

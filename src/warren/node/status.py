"""What the status page shows of a vhost."""

from __future__ import annotations

import os
from typing import Any

from warren.node.status_page import QueueStatus, VhostStatus

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | str = "self") -> int:
    """The memory of a process; 0 where there is none of this number."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def total_memory_bytes() -> int:
    """What this machine has, or what the container may use of it."""
    machine = os.sysconf("SC_PHYS_PAGES") * _PAGE
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(machine, int(text))
    return machine


def vhost_status(info: dict[str, Any]) -> VhostStatus:
    return {
        "name": info["name"],
        "state": info["state"],
        "pid": info["pid"],
        "connections": info["connections"],
        "channels": info["channels"],
        "memory_bytes": resident_bytes(info["pid"]),
        "queues": [queue_status(queue) for queue in info["queues"]],
    }


def queue_status(info: dict[str, Any]) -> QueueStatus:
    inside = info["backing"]
    return {
        "name": info["name"],
        "durable": info["durable"],
        "messages_ready": info["messages_ready"],
        "messages_unacknowledged": info["messages_unacknowledged"],
        "consumers": info["consumers"],
        "publish_rate": inside.get("avg_ingress_rate", 0.0),
        "deliver_rate": inside.get("avg_egress_rate", 0.0),
        "ack_rate": inside.get("avg_ack_egress_rate", 0.0),
        "q1": inside.get("q1", 0),
        "q2": inside.get("q2", 0),
        "delta": inside.get("delta", 0),
        "q3": inside.get("q3", 0),
        "q4": inside.get("q4", 0),
        "ram_bytes": inside.get("ram_bytes", 0),
    }

"""Regions of ``torch.autocast`` in a traced graph, which are operators with a graph of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ...compat.torch import HigherOrderOperator
from ...core.annotations import is_getitem


def regions(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, bool, fx.GraphModule, tuple[Any, ...]]]:
    """Yield the regions of ``gm``: operator, whether autocast is on, body, and values of the body's inputs."""
    for node in list(gm.graph.nodes):
        if isinstance(node.target, HigherOrderOperator) and str(node.target) == "wrap_with_autocast":
            _, _, enabled, _, body, *inputs = node.args
            yield node, bool(enabled), getattr(gm, body.target), tuple(inputs)


def inline_where_off(gm: fx.GraphModule) -> None:
    """Inline the regions that switch autocast off where it is off already."""
    graph = gm.graph
    for node, enabled, body, arguments in regions(gm):
        if enabled:
            continue
        inline_where_off(body)
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        env: dict[fx.Node, Any] = dict(zip(inputs, arguments, strict=True))
        with graph.inserting_before(node):
            for n in body.graph.nodes:
                if n.op not in ("placeholder", "output"):
                    env[n] = new = graph.node_copy(n, lambda x: env[x])  # noqa: B023
                    if n.op == "get_attr":  # the body of a region within
                        new.target = f"region_{sum(1 for _ in gm.children())}"
                        gm.add_module(new.target, getattr(body, n.target))
        returned: Any = body.graph.output_node().args[0]
        returned = returned if isinstance(returned, (tuple, list)) else (returned,)
        for user in list(node.users):
            assert is_getitem(user)
            user.replace_all_uses_with(env[returned[user.args[1]]])
            graph.erase_node(user)
        whole: Any = node.args[4]
        graph.erase_node(node)
        if not whole.users:
            graph.erase_node(whole)
    gm.recompile()

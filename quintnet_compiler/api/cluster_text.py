"""A cluster as a person writes it: ``h100``, ``a100:2+h100:1``, ``rtx-4090,rtx-3090``, a JSON file, or a mapping."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.errors import CompileError
from ..core.files import path_of
from ..cost_models.cluster import Cluster
from ..cost_models.hardware import GB

Count = Annotated[int, Field(ge=1)]
FORM = "KIND[:NODES[:GPUS_PER_NODE]], joined by +, as a100:2+h100:1; KIND of a node of unlike cards: rtx-4090,rtx-3090"


class _NodesDocument(BaseModel):
    """Nodes of one kind. ``gpu``: the name of a device, numbers that describe one, or a list with one of these for each
    device of a node."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    gpu: str | dict[str, Any] | list[str | dict[str, Any]]
    nodes: Count = 1
    gpus_per_node: Count | None = None
    network_gb_per_second: Annotated[float, Field(gt=0)] | None = None

    def cluster(self) -> Cluster:
        rate = None if self.network_gb_per_second is None else self.network_gb_per_second * GB
        return Cluster(self.gpu, self.nodes, self.gpus_per_node, network_bytes_per_second=rate)


class _ClusterDocument(BaseModel):
    """``parts``: nodes of each kind, in the order of ranks. ``network_gb_per_second`` of a part: of all adapters of a
    node together, one way."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parts: Annotated[list[_NodesDocument], Field(min_length=1)]
    rail: Count = 32
    oversubscription: Annotated[float, Field(ge=1)] = 1.0


def read_cluster(
    description: str | os.PathLike[str] | Mapping[str, Any], nodes: int = 1, gpus_per_node: int | None = None
) -> Cluster:
    """Return the cluster that is described: see :data:`FORM`; a mapping, or a file that ends in ``.json``, describes a
    device (see :mod:`..cost_models.hardware_numbers`) or has ``parts``. ``nodes``, ``gpus_per_node``: where it says
    nothing of them.

    Raises:
        CompileError: QN210 for what describes no cluster.
    """
    if isinstance(description, Mapping):
        return _of_mapping(description, "the mapping", nodes, gpus_per_node)
    text = description if isinstance(description, str) else str(path_of(description, "QN210"))
    if text.endswith(".json"):
        try:
            document = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            document = None  # what is wrong with it is said where devices are read
        return _of_mapping(document, text, nodes, gpus_per_node) if isinstance(document, dict) else Cluster(text)
    parts = text.split("+")
    if len(parts) > 1 and (nodes, gpus_per_node) != (1, None):
        raise CompileError(
            "QN210", f"{text} says how many nodes there are of each kind",
            fix="leave --nodes and --gpus-per-node out, and write NODES behind each kind, as a100:2+h100:1",
        )  # fmt: skip
    clusters = [_part(part, nodes, gpus_per_node) for part in parts]
    return Cluster.of(*clusters) if len(clusters) > 1 else clusters[0]


def _of_mapping(description: Mapping[str, Any], what: str, nodes: int, gpus_per_node: int | None) -> Cluster:
    if "parts" not in description:
        return Cluster(description, nodes, gpus_per_node)
    if (nodes, gpus_per_node) != (1, None):
        raise CompileError(
            "QN210", f"{what} says how many nodes there are of each kind", fix="leave --nodes and --gpus-per-node out"
        )
    try:
        document = _ClusterDocument.model_validate(dict(description))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        said = f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"
        fields = ", ".join(_NodesDocument.model_fields)
        raise CompileError(
            "QN210", f"{what} describes no cluster: {said}", fix=f"give parts, a list of mappings with {fields}"
        ) from None
    clusters = [part.cluster() for part in document.parts]
    return Cluster.of(*clusters, rail=document.rail, oversubscription=document.oversubscription)


def _part(text: str, nodes: int, gpus_per_node: int | None) -> Cluster:
    name, *numbers = text.split(":")
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise CompileError("QN210", f"{text!r} is not {FORM}", fix="write for example a100:2+h100:1")
    if numbers:
        if (nodes, gpus_per_node) != (1, None):
            raise CompileError(
                "QN210", f"{text} says how many nodes there are", fix="leave --nodes and --gpus-per-node out"
            )
        nodes, gpus_per_node = int(numbers[0]), int(numbers[1]) if numbers[1:] else None
    cards = name.split(",")
    return Cluster(cards if len(cards) > 1 else name, nodes, gpus_per_node)

"""Reading a checkpoint, part by part: what ranks agree on, and which bytes a part is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from quintnet_compiler.checkpoint.documents import IndexEntry, StoredBox
from quintnet_compiler.checkpoint.manifest import WrittenFiles
from quintnet_compiler.checkpoint.parts import SavedPart
from quintnet_compiler.checkpoint.pieces import Digest
from quintnet_compiler.checkpoint.reading.open_files import Damaged, VanishedError
from quintnet_compiler.checkpoint.reading.stored_tensors import StoredTensors
from quintnet_compiler.checkpoint.reading.together import attempted, raised_together
from quintnet_compiler.checkpoint.stores.disk_reading import open_folder_to_read
from quintnet_compiler.checkpoint.tensor_file import buffers
from quintnet_compiler.core.errors import CheckpointError


def _messages_of(*others: Exception | None) -> Callable[[str], tuple[str, ...]]:
    """Return what gives a rank the texts of other ranks that raised these errors, after its own."""
    texts: list[str] = []
    for error in others:
        if error is None:
            texts.append("")
            continue

        def tell(text: str) -> tuple[str, ...]:
            texts.append(text)
            return (text,)

        with pytest.raises((CheckpointError, VanishedError)), raised_together(tell, "QN601"):
            raise error
    return lambda text: (text, *texts)


REFUSED = CheckpointError("QN602", "it is another model's", fix="load another")


@pytest.mark.parametrize("mine", [None, VanishedError("a was removed"), Damaged("a is not what was written")])
@pytest.mark.parametrize("other", [VanishedError("b was removed"), REFUSED, OSError(5, "Input/output error")])
def test_what_one_rank_raises_all_raise(mine: Exception | None, other: Exception) -> None:
    """A checkpoint is looked for again only if that is all that failed."""
    again = isinstance(other, VanishedError)
    words = "was removed|not what was written" if again else "another model|Input/output error"
    kind = VanishedError if again else CheckpointError
    with pytest.raises(kind, match=words), raised_together(_messages_of(None, other), "QN601"):
        if mine is not None:
            raise mine


def test_the_first_rank_that_failed_is_named() -> None:
    with pytest.raises(CheckpointError) as raised, raised_together(_messages_of(None, REFUSED, REFUSED), "QN601"):
        pass
    assert (raised.value.code, raised.value.fix) == ("QN602", "load another") and "(rank 2)" in str(raised.value)
    with raised_together(_messages_of(None, None), "QN601"):
        pass


def test_an_attempt_is_told_when_it_is_asked_for() -> None:
    assert attempted(lambda: 3)() == 3
    later = attempted(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        later()


def test_a_part_is_read_from_the_boxes_that_overlap_it(tmp_path: Path) -> None:
    """Two files have the upper and the lower rows; the part is a block of both, in which a wrong byte is found."""
    whole = torch.arange(24.0).view(6, 4)
    digests, stored = {}, []
    for name, first, last in (("upper", 0, 2), ("lower", 2, 6)):
        data = b"".join(buffers({"0": whole[first:last]}))
        (tmp_path / name).write_bytes(data)
        digests[name] = Digest(len(data), (xxhash.xxh3_128_hexdigest(data),))
        stored.append(StoredBox((first, 0), (last - first, 4), name, "0"))
    index = {"x": IndexEntry("F32", (6, 4), tuple(stored)), "unread": IndexEntry("F32", (0,), ())}
    columns = torch.tensor([1, 3])

    def read() -> torch.Tensor:
        local = torch.zeros(3, 2)
        with open_folder_to_read(tmp_path) as files:
            tensors = StoredTensors(WrittenFiles(files, digests), index)
            assert tensors.metadata["x"].size == (6, 4) and tensors.metadata["unread"].size == (0,)
            tensors.plan_reading({"x": SavedPart.of(local, (6, 4), [torch.arange(1, 4), columns])}).fill_parts()
        return local

    assert torch.equal(read(), whole[1:4, columns])
    data = bytearray((tmp_path / "lower").read_bytes())
    data[-1] ^= 1
    (tmp_path / "lower").write_bytes(data)
    with pytest.raises(Damaged, match="lower is not what was written"):
        read()

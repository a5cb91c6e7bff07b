"""An artefact of made-up bytes, and a store that gives them slowly, wrongly or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from hf_cachegen.artifact import Artifact, ArtifactWriter, Identity, LevelRecord
from hf_cachegen.errors import StoreError
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.stores import LocalStore

N_LAYERS, N_CHUNKS, CHUNK_TOKENS = 4, 3, 8

Segment = Callable[[int, int, int], bytes]


@pytest.fixture(scope="session")
def segment() -> Segment:
    """``segment(chunk, level, layer)``: the bytes of a segment."""

    def segment(chunk: int, level: int, layer: int) -> bytes:
        return f"chunk {chunk}, level {level}, layer {layer};".encode() * (10 * (level + 1))

    return segment


MakeUp = Callable[[Sequence[LevelRecord], int, Segment], Path]


@pytest.fixture(scope="session")
def make_up(tmp_path_factory: pytest.TempPathFactory) -> MakeUp:
    """``make_up(levels, n_chunks, segment)``: an artefact of four layers."""

    def make_up(levels: Sequence[LevelRecord], n_chunks: int, segment: Segment) -> Path:
        tensor = TensorSpec(name="keys", heads=2, dim=64)
        layer = LayerSpec(kind="full_attention", tensors=(tensor,))
        identity = Identity(
            model_id="org/model",
            weights="ab" * 16,
            config="cd" * 16,
            architecture="LlamaForCausalLM",
            layout=KVLayout(dtype="float32", ropes={}, layers=(layer,) * N_LAYERS),
        )
        target = tmp_path_factory.mktemp("streams") / "artefact"
        tokens = list(range(n_chunks * CHUNK_TOKENS))
        with ArtifactWriter(target, identity, levels, CHUNK_TOKENS, tokens) as writer:
            for plan in writer.missing_chunks():
                segments = [
                    [segment(plan.position, level, layer) for layer in range(N_LAYERS)]
                    for level in range(len(levels))
                ]
                writer.add_chunk(plan, segments)
            writer.commit()
        return target

    return make_up


@pytest.fixture(scope="session")
def made_up(make_up: MakeUp, segment: Segment) -> Path:
    """Three chunks, two levels, four layers of made-up bytes."""
    levels = [LevelRecord(name=name, codec="raw", exact=True) for name in ("low", "high")]
    return make_up(levels, N_CHUNKS, segment)


class SlowStore(LocalStore):
    """Gives chunks in small pieces, and waits at each chunk for ``gate``."""

    def __init__(self, folder: Path, *, gated: bool = False, damage: int = 0) -> None:
        super().__init__(folder)
        self.reads: list[tuple[int, int]] = []  # of segments
        self._index_bytes = Artifact.open(LocalStore(folder), tokens=False).index_bytes
        self.gate = threading.Semaphore(0 if gated else 1_000_000)
        self.closed = False
        self._damage = damage

    def close(self) -> None:
        self.closed = True
        self.gate.release(1000)

    def damage_next(self, count: int) -> None:
        """Give the next transfers a wrong first byte."""
        self._damage = count

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        data = b"".join(super()._pieces(path, offset, size, max_bytes))
        if path.startswith("chunks/"):
            head = max(self._index_bytes - offset, 0)
            yield data[:head]
            if head == len(data) > 0:
                return
            data = data[head:]
            self.gate.acquire()
            self.reads.append((offset + head, len(data)))
            if self.closed:
                raise StoreError("the store was closed")
            if self._damage:
                self._damage -= 1
                data = b"#" + data[1:]
        yield from (data[start : start + 50] for start in range(0, len(data), 50))


@pytest.fixture(scope="session")
def slow_store() -> type[SlowStore]:
    """``slow_store(folder, **tricks)``, see :class:`SlowStore`."""
    return SlowStore

"""A store of bundles: a reader sees a whole bundle or none, whatever is interrupted, repeated or damaged."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from build_scripts.spec import BuildError
from build_scripts.trtllm import publish as module
from build_scripts.trtllm.publish import bundle_name, fetch, list_bundles, publish
from engines import gpu_bundle
from engines.bundle_base import MANIFEST, TOKENIZER, BundleMismatch
from engines.gpu_bundle import open_gpu_bundle, read_gpu_manifest
from tests.engines.gpu_bundles import ENGINE_FILES, HOST, engine_bundle, torch_bundle


class BrokenError(RuntimeError):
    """What a store's client raises: none of ours, no OSError."""


class Flaky(MemoryFileSystem):
    """A store in memory that breaks in the middle of the `breaks_at`-th write, leaving what it had."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class has it
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    writes: list[str] = []  # noqa: RUF012
    breaks_at: int | None = None

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._write(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._write(path, value)

    def _write(self, path: str, content: bytes) -> None:
        Flaky.writes.append(path)
        broken = len(Flaky.writes) - 1 == Flaky.breaks_at
        super().pipe_file(path, content[: len(content) // 2] if broken else content)
        if broken:
            raise BrokenError("the line went dead")


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def _empty_stores() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    reset()


def reset(breaks_at: int | None = None, *, keep: bool = False) -> None:
    Flaky.writes, Flaky.breaks_at = [], breaks_at
    if not keep:
        Flaky.store.clear()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return engine_bundle(tmp_path / "bundle")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_bundle(tmp_path_factory.mktemp("bundles") / "bundle")


@pytest.fixture(params=["memory", "file", "path"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"memory": "memory://store", "file": f"file://{tmp_path}/store", "path": f"{tmp_path}/store/"}[
        request.param
    ]


def another(path: Path, **changes: Any) -> Path:
    """A bundle of other contents: other steps, or what `changes` says."""
    return engine_bundle(path, lambda m: m.model_copy(update={"steps": {"convert": path.name}, **changes}))


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.endswith(".sha256")
    }


def test_what_was_published_is_fetched(bundle: Path, store: str, tmp_path: Path) -> None:
    url = publish(bundle, store)
    bundle_id = read_gpu_manifest(bundle).bundle_id
    assert url == f"{store.rstrip('/')}/bundles/tiny-qwen-trtllm/{bundle_id}"
    for number, source in enumerate((url, url.rpartition("/")[0], f"{url}/")):
        opened = fetch(source, tmp_path / str(number), host=HOST)
        assert opened.fingerprint == bundle_id
        assert contents(opened.path) == contents(bundle)


def test_every_stored_file_has_its_digest_beside_it(bundle: Path, tmp_path: Path) -> None:
    url = publish(bundle, str(tmp_path / "store"))
    for entry in read_gpu_manifest(bundle).files:
        assert (Path(url) / f"{entry.name}.sha256").read_text().split() == [
            entry.sha256,
            Path(entry.name).name,
        ]
    assert not [file for file in Path(url).rglob("*") if "part" in file.name]


def test_bundles_are_listed_and_the_last_is_latest(bundle: Path, store: str, tmp_path: Path) -> None:
    assert list_bundles(store) == ()
    first, second = publish(bundle, store), publish(another(tmp_path / "b"), store)
    third = publish(torch_bundle(tmp_path / "c"), store)
    listed = list_bundles(store)
    assert {one.url for one in listed} == {first, second, third}
    assert {one.url for one in listed if one.latest} == {second, third}
    publish(bundle, store)
    assert {one.url for one in list_bundles(store) if one.latest} == {first, third}


def test_the_name_tells_model_precision_and_backend(bundle: Path, tmp_path: Path) -> None:
    manifest = read_gpu_manifest(bundle)
    assert bundle_name(manifest) == "tiny-qwen-trtllm"
    assert bundle_name(read_gpu_manifest(torch_bundle(tmp_path / "c"))) == "tiny-qwen-trtllm_torch"
    fp8 = manifest.backend.model_copy(update={"quantisation": "fp8"})
    named = manifest.model.model_copy(update={"name": "Some Org/../My Model"})
    assert bundle_name(manifest.model_copy(update={"backend": fp8, "model": named})) == "My-Model-fp8-trtllm"
    with pytest.raises(BuildError, match="can't be one in a store"):
        publish(bundle, "memory://store", name="../up")


# ----------------------------------------------------------------- interruptions


def writes_of(bundle: Path) -> int:
    reset()
    publish(bundle, "flaky://store")
    return len(Flaky.writes)


def test_the_manifest_comes_after_all_files_and_the_pointer_last(pristine: Path) -> None:
    writes_of(pristine)
    assert Flaky.writes[-2].endswith(MANIFEST)
    assert Flaky.writes[-1].endswith("latest")
    assert len(Flaky.writes) == 2 * len(ENGINE_FILES) + 2


@pytest.mark.parametrize("at", range(2 * len(ENGINE_FILES) + 2))
def test_an_upload_that_breaks_anywhere_shows_no_half_bundle_and_goes_on(
    pristine: Path, at: int, tmp_path: Path
) -> None:
    total = writes_of(pristine)
    folder = f"flaky://store/bundles/tiny-qwen-trtllm/{read_gpu_manifest(pristine).bundle_id}"
    reset(breaks_at=at)
    with pytest.raises(BuildError, match="the line went dead") as caught:
        publish(pristine, "flaky://store")
    assert "flaky://store/bundles/tiny-qwen-trtllm/" in str(caught.value)
    assert "again" in str(caught.value)
    reset(keep=True)
    if at < total - 2:  # before the manifest: there is nothing to see
        assert list_bundles("flaky://store") == ()
        with pytest.raises(BuildError, match="no bundle is here"):
            fetch(folder, tmp_path / "early", host=HOST)
    publish(pristine, "flaky://store")
    sent = {path.rpartition("/")[2] for path in Flaky.writes}
    assert len(Flaky.writes) <= total - 2 * (at // 2) + (at // 2 >= len(ENGINE_FILES))
    assert "latest" in sent
    assert contents(fetch(folder, tmp_path / "late", host=HOST).path) == contents(pristine)


def test_publishing_twice_sends_nothing_but_the_pointer(pristine: Path) -> None:
    writes_of(pristine)
    reset(keep=True)
    publish(pristine, "flaky://store")
    assert [path.rpartition("/")[2] for path in Flaky.writes] == ["latest"]
    reset(keep=True)
    publish(pristine, "flaky://store", again=True)
    assert len(Flaky.writes) == 2 * len(ENGINE_FILES) + 1


def test_a_broken_manifest_in_an_object_store_is_written_again(pristine: Path, tmp_path: Path) -> None:
    """Half a manifest is refused by whoever reads it, and replaced by the next who publishes."""
    total = writes_of(pristine)
    reset(breaks_at=total - 2)
    with pytest.raises(BuildError):
        publish(pristine, "flaky://store")
    reset(keep=True)
    url = list_bundles("flaky://store")[0].url
    with pytest.raises(BuildError, match="publish it again"):
        fetch(url, tmp_path / "early", host=HOST)
    publish(pristine, "flaky://store")
    fetch(url, tmp_path / "late", host=HOST)


def test_on_a_file_system_nothing_half_written_has_its_name(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.local import LocalFileSystem

    def broken(self: Any, lpath: str, rpath: str, **options: Any) -> None:
        Path(rpath).write_bytes(Path(lpath).read_bytes()[:10])
        raise BrokenError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "put_file", broken)
        with pytest.raises(BuildError, match="no space"):
            publish(bundle, str(tmp_path / "store"))
    assert not [file for file in (tmp_path / "store").rglob("*") if file.is_file()]
    publish(bundle, str(tmp_path / "store"))


# ----------------------------------------------------------------- damage


def stored(url: str, name: str) -> Path:
    return Path(url) / name


@pytest.mark.parametrize("name", ENGINE_FILES)
def test_a_file_that_was_damaged_in_the_store_is_told_and_mended_by_publishing_again(
    bundle: Path, tmp_path: Path, name: str
) -> None:
    url = publish(bundle, str(tmp_path / "store"))
    content = stored(url, name).read_bytes()
    stored(url, name).write_bytes(bytes(len(content)))
    with pytest.raises(BuildError, match="damaged") as caught:
        fetch(url, tmp_path / "got", host=HOST)
    assert f"{url}/{name}" in str(caught.value)
    assert not (tmp_path / "got" / MANIFEST).exists()
    publish(bundle, str(tmp_path / "store"), again=True)
    assert contents(fetch(url, tmp_path / "got", host=HOST).path) == contents(bundle)


@pytest.mark.parametrize("damage", ["size", "digest", "no digest", "gone"])
def test_a_file_that_does_not_match_is_sent_again(bundle: Path, tmp_path: Path, damage: str) -> None:
    url = publish(bundle, str(tmp_path / "store"))
    file, beside = stored(url, TOKENIZER), stored(url, f"{TOKENIZER}.sha256")
    if damage == "size":
        file.write_bytes(b"{} ")
    elif damage == "digest":
        file.write_bytes(b"[]")
        beside.write_text("0" * 64)
    elif damage == "no digest":
        file.write_bytes(b"[]")
        beside.unlink()
    else:
        file.unlink()
    publish(bundle, str(tmp_path / "store"))
    assert contents(fetch(url, tmp_path / "got", host=HOST).path) == contents(bundle)


def test_a_manifest_under_another_id_is_refused(bundle: Path, tmp_path: Path) -> None:
    url = publish(bundle, str(tmp_path / "store"))
    shutil.copytree(url, Path(url).parent / ("0" * 64))
    with pytest.raises(BuildError, match="publish both again"):
        fetch(str(Path(url).parent / ("0" * 64)), tmp_path / "got", host=HOST)


@pytest.mark.parametrize("latest", ["", "nonsense", "0" * 64])
def test_a_pointer_to_nothing_is_told(bundle: Path, tmp_path: Path, latest: str) -> None:
    url = publish(bundle, str(tmp_path / "store"))
    (Path(url).parent / "latest").write_text(latest)
    with pytest.raises(BuildError, match=r"no bundle is here|is not here"):
        fetch(str(Path(url).parent), tmp_path / "got", host=HOST)


# ----------------------------------------------------------------- fetching


@settings(max_examples=30)
@given(st.sampled_from(ENGINE_FILES), st.integers(0, 4096), st.booleans())
def test_a_broken_download_goes_on_and_is_never_trusted(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory, name: str, size: int, right: bool
) -> None:
    """Whatever an earlier download left of a file, right bytes or wrong ones, the bundle is the same."""
    base = tmp_path_factory.mktemp("fetch")
    url = publish(pristine, "memory://broken-downloads")
    part = base / "got" / f"{name}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    content = (pristine / name).read_bytes() if right else bytes(4096)
    part.write_bytes(content[:size])
    assert contents(fetch(url, base / "got", host=HOST).path) == contents(pristine)


def test_what_is_there_is_not_read_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = publish(bundle, str(tmp_path / "store"))
    fetch(url, tmp_path / "got", host=HOST)
    (tmp_path / "got" / TOKENIZER).write_bytes(b"[]")
    read: list[str] = []
    receive = module._receive

    def spy(place: Any, file: Any, *rest: Any) -> str:
        read.append(file.name)
        return receive(place, file, *rest)

    monkeypatch.setattr(module, "_receive", spy)
    fetch(url, tmp_path / "got", host=HOST)
    assert read == [TOKENIZER]


def test_a_directory_with_another_bundle_is_left_alone(bundle: Path, tmp_path: Path) -> None:
    url = publish(another(tmp_path / "b"), str(tmp_path / "store"))
    before = contents(bundle)
    with pytest.raises(BuildError, match="empty directory"):
        fetch(url, bundle, host=HOST)
    assert contents(bundle) == before


def test_a_machine_that_it_does_not_fit_is_told_before_anything_is_read(bundle: Path, tmp_path: Path) -> None:
    url = publish(bundle, str(tmp_path / "store"))
    other = dataclasses.replace(HOST, gpus=())
    with pytest.raises(BundleMismatch, match=r"gpu\.name"):
        fetch(url, tmp_path / "got", host=other)
    assert list((tmp_path / "got").iterdir()) == []
    assert fetch(url, tmp_path / "got", any_host=True).path == tmp_path / "got"


def test_large_files_get_their_digest_on_both_sides(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundle, "DIGEST_BYTES", 2000)
    monkeypatch.setattr(module, "DIGEST_BYTES", 2000)
    url = publish(bundle, str(tmp_path / "store"))
    got = fetch(url, tmp_path / "got", host=HOST).path
    for path in (bundle, got):
        assert (path / "sp/rank0.engine.sha256").is_file()
        assert not (path / f"{TOKENIZER}.sha256").exists()
    open_gpu_bundle(got, host=HOST, full=True)


# ----------------------------------------------------------------- many at once


def test_publishers_of_the_same_bundle_do_not_disturb_each_other(bundle: Path, tmp_path: Path) -> None:
    store, errors = str(tmp_path / "store"), []
    start = threading.Barrier(4)

    def run(work: Callable[[], object]) -> None:
        start.wait()
        try:
            work()
        except Exception as error:  # told below: a thread's own would be lost
            errors.append(error)

    copies = [bundle] + [Path(shutil.copytree(bundle, tmp_path / f"copy{n}")) for n in range(3)]
    threads = [
        threading.Thread(target=run, args=(lambda path=path: publish(path, store, again=True),))
        for path in copies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    (found,) = list_bundles(store)
    assert found.latest
    assert contents(fetch(found.url, tmp_path / "got", host=HOST).path) == contents(bundle)
    assert not list((tmp_path / "store").rglob("*.part"))


# ----------------------------------------------------------------- what is refused


def test_progress_counts_bytes_up_to_the_whole(bundle: Path, store: str, tmp_path: Path) -> None:
    total = sum(file.size_bytes for file in read_gpu_manifest(bundle).files)
    sent: list[tuple[str, int, int]] = []
    got: list[tuple[str, int, int]] = []
    url = publish(bundle, store, told=lambda *news: sent.append(news))
    fetch(url, tmp_path / "got", host=HOST, told=lambda *news: got.append(news))
    for news in (sent, got):
        through = [done for _, done, _ in news]
        assert through == sorted(through)
        assert through[-1] == total
        assert {whole for _, _, whole in news} == {total}
        assert {name for name, _, _ in news} == set(ENGINE_FILES)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("s3://bucket/x", "pip install s3fs"),
        ("gs://bucket/x", "pip install gcsfs"),
        ("zzz://x", "s3://bucket"),
    ],
)
def test_a_url_that_can_t_be_used_names_the_remedy(
    bundle: Path, url: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for client in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, client, None)
    with pytest.raises(BuildError) as caught:
        publish(bundle, url)
    assert url in str(caught.value)
    assert remedy in str(caught.value)


def test_what_is_not_ready_is_not_published(bundle: Path, tmp_path: Path) -> None:
    raw = another(tmp_path / "raw", cost=None)
    with pytest.raises(BuildError, match="not calibrated"):
        publish(raw, "memory://store")
    (bundle / "sp/rank0.engine").write_bytes(bytes(2048))
    with pytest.raises(BundleMismatch, match="rank0"):
        publish(bundle, "memory://store")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / MANIFEST).write_text('{"backend": {"name": "openvino_cpu"}}')
    with pytest.raises(BuildError, match="openvino_cpu"):
        publish(tmp_path / "cpu", "memory://store")
    assert MemoryFileSystem.store == {}


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no bundle is here"):
        fetch(str(tmp_path / "nothing"), tmp_path / "got", host=HOST)
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="can't"):
        publish(engine_bundle(tmp_path / "b"), str(tmp_path / "file"))

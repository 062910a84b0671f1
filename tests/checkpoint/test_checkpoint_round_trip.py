"""A checkpoint is written and read back whole or in ranges; what was left out, doubled or misfit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_fakes import FakeUnit, content, fake_buffers, fake_state, fake_units, names_in, require_content

from infinity.checkpoint.manifest import FileRecord, state_from_json, state_to_json
from infinity.checkpoint.reader import open_checkpoint
from infinity.checkpoint.specs import TensorSpec
from infinity.checkpoint.writer import required_bytes, write_checkpoint
from infinity.errors import CheckpointError, CheckpointIncomplete, CheckpointMismatch, ConfigError


def save(directory: Path, step: int, keep: int | None = None) -> Path:
    return write_checkpoint(directory, fake_units(step), fake_state(step), buffers=fake_buffers(step), keep=keep)


def test_every_byte_and_the_state_come_back(tmp_path: Path) -> None:
    """Weights, planes, buffers, counters, data position and random state are read as they were written (C104)."""
    path = save(tmp_path / "run" / "checkpoints", 12)
    assert path.name == "step-00000012"
    assert names_in(path) == ["buffers.safetensors", "manifest.json", "units"]
    assert names_in(path / "units") == ["00000.safetensors", "00001.safetensors"]
    for given in (path, path.parent):
        with open_checkpoint(given) as checkpoint:
            assert checkpoint.path == path
            require_content(checkpoint)


def test_a_load_reads_tiles_of_its_own_choice(tmp_path: Path) -> None:
    """Any range of any plane lands in a torch tensor of that dtype, whatever tiles were written (C108)."""
    save(tmp_path, 3)
    spec = TensorSpec("master_low/embed.weight", "int16", (31, 7))
    into = torch.zeros(50, dtype=torch.int16)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.read("embed.weight", "master_low", 99, 50, into)
    assert into.numpy().tobytes() == content(3, spec)[198:298]


def test_kinds_are_listed_with_their_specs(tmp_path: Path) -> None:
    """A load can ask which parameters have a plane and which buffers are stored."""
    save(tmp_path, 3)
    with open_checkpoint(tmp_path) as checkpoint:
        assert dict(checkpoint.specs("master_low")).keys() == {"embed.weight", "block.fc.weight"}
        assert dict(checkpoint.specs("weight")).keys() == {"embed.weight", "block.fc.weight", "block.scale"}
        assert dict(checkpoint.specs("buffer")) == {
            "norm.running_mean": TensorSpec("buffer/norm.running_mean", "float32", (9,))
        }


def test_unit_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Standard tools open a unit's file; there are tensors and JSON only, no pickled classes (C123)."""
    path = save(tmp_path, 4)
    found = safetensors.torch.load_file(path / "units" / "00001.safetensors")
    assert found["weight/block.scale"].shape == ()
    assert found["weight/block.fc.weight"].dtype == torch.bfloat16
    expected = content(4, TensorSpec("exp_avg/block.fc.weight", "float32", (5, 9, 3)))
    assert found["exp_avg/block.fc.weight"].numpy().tobytes() == expected
    assert sorted({file.suffix for file in path.rglob("*") if file.is_file()}) == [".json", ".safetensors"]


def test_required_bytes_is_what_the_files_take(tmp_path: Path) -> None:
    """The size announced before a save is what its safetensors files take in whole pages (C119)."""
    path = save(tmp_path, 1)
    taken = sum(-(-file.stat().st_size // 4096) * 4096 for file in path.rglob("*.safetensors"))
    assert required_bytes(fake_units(1), fake_buffers(1)) == taken


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """With keep 2 the older complete ones go; incomplete ones do not count and stay to be seen (C129)."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000099").mkdir()
    save(tmp_path, 4, keep=2)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004", "step-00000099"]


def test_the_one_just_written_is_kept_beside_newer_steps(tmp_path: Path) -> None:
    """A run restarted in a directory with later steps never removes what it just wrote."""
    save(tmp_path, 50)
    save(tmp_path, 2, keep=1)
    assert names_in(tmp_path) == ["step-00000002"]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    """The same step written twice leaves one checkpoint, the second."""
    save(tmp_path, 5)
    state = replace(fake_state(5), data_position="second")
    write_checkpoint(tmp_path, fake_units(5), state)
    assert names_in(tmp_path) == ["step-00000005"]
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.state == state
        assert not dict(checkpoint.specs("buffer"))


def test_a_step_is_replaced_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without atomic exchange gets the same result by plain renames."""
    import ctypes
    import errno

    class Refusing:
        def renameat2(self, *_: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    save(tmp_path, 5)
    monkeypatch.setattr("infinity.checkpoint.directory._libc", Refusing())
    write_checkpoint(tmp_path, fake_units(5), replace(fake_state(5), data_position="second"))
    assert names_in(tmp_path) == ["step-00000005"]
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.state.data_position == "second"


def test_keep_must_leave_the_new_one(tmp_path: Path) -> None:
    """keep 0 is refused before anything is touched."""
    with pytest.raises(ConfigError, match="keep is 0"):
        save(tmp_path / "new", 1, keep=0)
    assert not (tmp_path / "new").exists()


class Forgetful(FakeUnit):
    """Leaves out its second piece."""

    def pieces(self):  # type: ignore[no-untyped-def]
        for index, piece in enumerate(super().pieces()):
            if index != 1:
                yield piece


class Chatty(FakeUnit):
    """Gives a tensor that it did not announce."""

    def pieces(self):  # type: ignore[no-untyped-def]
        yield "weight/other", 0, b"1234"


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Forgetful, "were never written"), (Chatty, "gave a piece of weight/other, which it did not announce")],
)
def test_a_faulty_source_leaves_no_checkpoint(tmp_path: Path, kind: type[FakeUnit], message: str) -> None:
    """Forgotten and unannounced pieces fail the save; the partial directory goes, the earlier checkpoint stays."""
    save(tmp_path, 1)
    good = fake_units(2)
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path, [good[0], kind(good[1].name, good[1].specs, 2)], fake_state(2))
    assert names_in(tmp_path) == ["step-00000001"]


def test_a_tensor_of_two_units_is_refused(tmp_path: Path) -> None:
    """One name in two units would be read from an arbitrary one."""
    with pytest.raises(CheckpointError, match=r"weight/embed\.weight belongs to two units, embed and embed"):
        write_checkpoint(tmp_path, [fake_units(1)[0], fake_units(1)[0]], fake_state(1))


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), b"raw", {"a": {1, 2}}])
def test_state_that_json_would_change_is_refused(tmp_path: Path, value: object) -> None:
    """Tuples, number keys, NaN and bytes are an error at the save, not another value at the resume."""
    state = replace(fake_state(1), rng_state=value)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="state"):
        write_checkpoint(tmp_path, fake_units(1), state)
    assert names_in(tmp_path) == []


def test_the_state_travels_in_a_manifest_of_the_store() -> None:
    """The store commits swap files with a manifest of JSON values; the state comes back equal, damage is named."""
    values = json.loads(json.dumps(state_to_json(fake_state(3))))
    assert state_from_json(values, where="committed.json") == fake_state(3)
    values["counters"]["global_step"] = "3"
    with pytest.raises(CheckpointError, match=r"committed\.json is damaged: key counters\.global_step"):
        state_from_json(values, where="committed.json")


def test_a_commit_in_place_names_swap_files(tmp_path: Path) -> None:
    """Swap files take the place of units: their lengths are checked, buffers are read, and no unit is."""
    swap = tmp_path / "swap.bin"
    swap.write_bytes(bytes(4096))
    record = FileRecord(str(swap), 4096, None)
    path = write_checkpoint(tmp_path / "run", (), fake_state(6), buffers=fake_buffers(6), swap_files=[record], keep=1)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.manifest.swap_files == (record,)
        assert [name for name, _ in checkpoint.specs("buffer")] == ["norm.running_mean"]
        with pytest.raises(CheckpointMismatch, match=r"holds no weight of embed\.weight"):
            checkpoint.read("embed.weight", "weight", 0, 1, bytearray(2))
    swap.write_bytes(bytes(8192))
    with pytest.raises(CheckpointIncomplete, match=r"swap\.bin has another length: expected 4096 bytes, found 8192"):
        open_checkpoint(path)
    swap.unlink()
    with pytest.raises(CheckpointIncomplete, match=r"swap\.bin is missing"):
        open_checkpoint(path)
    swap.write_bytes(bytes(4096))
    write_checkpoint(tmp_path / "run", fake_units(7), fake_state(7), keep=1)
    assert names_in(tmp_path / "run") == ["step-00000007"]
    assert swap.stat().st_size == 4096


def test_the_first_differing_parameter_is_named(tmp_path: Path) -> None:
    """A model with another shape, dtype, parameter or tie is refused with both sides."""
    save(tmp_path, 1)
    mine = fake_state(1).fingerprint
    first, second, third = mine.parameters
    cases = [
        ((replace(first, shape=(32, 7)), second, third), mine.aliases,
         r"embed\.weight is bfloat16\[31, 7\] in the checkpoint and bfloat16\[32, 7\]"),
        ((first, second, replace(third, dtype="bfloat16")), mine.aliases, r"scale is float32\[\] .* and bfloat16\[\]"),
        ((first, second), mine.aliases, r"block\.scale is float32\[\] in the checkpoint and absent"),
        ((first, TensorSpec("new", "float32", (2,)), second, third), mine.aliases, r"new is absent .* and float32\[2\]"),
        (mine.parameters, {}, r"head\.weight is tied to embed\.weight in the checkpoint and to nothing"),
        (mine.parameters, {"head.weight": "block.scale"}, r"to embed\.weight in the checkpoint and to block\.scale"),
    ]  # fmt: skip
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.require_match(mine)
        for parameters, aliases, message in cases:
            with pytest.raises(CheckpointMismatch, match=message):
                checkpoint.require_match(replace(mine, parameters=parameters, aliases=aliases))

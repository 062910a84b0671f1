"""Bytes of files as tokens, and the windows training takes from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from infinity.data.corpus import Corpus, open_corpus, require_sequences, standard_library
from infinity.data.sampler import EvenWindows, RandomWindows
from infinity.errors import DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """b.txt, a/z.txt, an empty file and hidden ones."""
    (tmp_path / "a").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bbbbb")
    (tmp_path / "a" / "z.txt").write_bytes(b"zzz")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"secret")
    (tmp_path / ".git" / "object").write_bytes(b"secret")
    return tmp_path


def text(corpus: Corpus) -> bytes:
    return corpus.read(0, corpus.num_bytes).tobytes()


def test_a_directory_is_read_in_sorted_order_without_hidden_entries(tree: Path) -> None:
    """Files of a directory come before those of its children, each level sorted; hidden and empty ones are left out."""
    assert text(open_corpus([tree])) == b"bbbbbzzz"
    assert text(open_corpus([tree / "a" / "z.txt", tree / "b.txt"])) == b"zzzbbbbb"


def test_every_range_is_the_slice_of_the_whole(tree: Path) -> None:
    """A read over file borders gives the same bytes as slicing the concatenation, also in a split."""
    corpus = open_corpus([tree])
    whole = text(corpus)
    for start in range(8):
        for end in range(start, 9):
            assert corpus.read(start, end - start).tobytes() == whole[start:end]
    kept, held_out = corpus.split(0.25)
    assert (text(kept), text(held_out)) == (b"bbbbbz", b"zz")


def test_missing_and_special_paths_are_named(tmp_path: Path) -> None:
    """A path that is not there, and one that is no file, are DataErrors with the path."""
    with pytest.raises(DataError, match="nothing-here does not exist"):
        open_corpus([tmp_path / "nothing-here"])
    with pytest.raises(DataError, match="/dev/null is neither"):
        open_corpus([Path("/dev/null")])


def test_too_little_data_says_found_and_needed(tree: Path) -> None:
    """Data shorter than one sequence says how many bytes were found and how many are needed."""
    corpus = open_corpus([tree])
    require_sequences(corpus, 7, "data")
    with pytest.raises(DataError, match=r"found 8 bytes in 2 files, needed 9 \(one sequence of 8"):
        require_sequences(corpus, 8, "data")


def test_a_file_that_shrinks_is_named(tree: Path) -> None:
    """A file cut short while training runs is an error that names it, not a short window."""
    corpus = open_corpus([tree])
    (tree / "b.txt").write_bytes(b"b")
    with pytest.raises(DataError, match=r"b\.txt had 5 bytes"):
        corpus.read(0, 8)


def test_the_default_text_is_the_standard_library() -> None:
    """The default corpus has megabytes of Python source and nothing from site-packages."""
    corpus = standard_library()
    assert corpus.num_bytes > 5_000_000
    assert all(source.path.suffix == ".py" and "-packages" not in str(source.path) for source in corpus.sources)


def test_windows_depend_on_seed_step_and_micro_batch_only(tree: Path) -> None:
    """The same triple gives the same window in any order; another seed, step or micro-batch gives another one."""
    (tree / "b.txt").write_bytes(bytes(range(256)) * 64)
    corpus = open_corpus([tree / "b.txt"])
    windows = RandomWindows(corpus, seed=1, seq_len=16, micro_batch_size=3)
    later, first = windows.tokens(7, 1), windows.tokens(0, 0)
    assert first.shape == (3, 17)
    assert first.dtype == np.uint8
    assert np.array_equal(windows.tokens(0, 0), first)
    assert np.array_equal(RandomWindows(corpus, 1, 16, 3).tokens(7, 1), later)
    others = [windows.tokens(0, 1), windows.tokens(1, 0), RandomWindows(corpus, 2, 16, 3).tokens(0, 0)]
    assert not any(np.array_equal(first, other) for other in others)
    assert np.array_equal((first[:, :-1].astype(int) + 1) % 256, first[:, 1:])


def test_a_corpus_of_exactly_one_sequence_serves(tree: Path) -> None:
    """With seq_len + 1 bytes there is one window, and every draw is that one."""
    corpus = open_corpus([tree])
    assert (RandomWindows(corpus, 0, 7, 2).tokens(3, 0) == np.frombuffer(b"bbbbbzzz", np.uint8)).all()


def test_evaluation_windows_span_the_corpus(tree: Path) -> None:
    """Evaluation batches reach from the first byte to the last and are the same each time."""
    windows = EvenWindows(open_corpus([tree]), seq_len=2, micro_batch_size=2, num_batches=2)
    rows = [bytes(row) for batch in (0, 1) for row in windows.tokens(batch)]
    assert rows == [b"bbb", b"bbb", b"bbz", b"zzz"]

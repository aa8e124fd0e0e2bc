"""Sentences become numbers of words, the same every time; what is no such file is refused by its line."""

import os
from pathlib import Path

import pytest
import torch

from helpers.sentences import write_sst2
from specguard.data import Augmentation, Sentences, Text, Vocabulary, sst2
from specguard.data.text import PADDING, UNKNOWN, lengths
from specguard.errors import ConfigError, DataError


def test_the_vocabulary_is_by_frequency_then_by_the_alphabet_without_rare_words():
    known = Vocabulary.of(["b a B", "a  c\tb", "d d"])
    assert known.words == ("b", "a", "d")
    assert len(known) == 5
    assert Vocabulary.of(["a b"], least=1).words == ("a", "b")


def test_words_have_numbers_from_two_on_unknown_ones_one_and_padding_zero():
    known = Vocabulary(("film", "good"))
    found = known.encode(["Good film", "bad film good film", "good"], 3)
    assert found.tolist() == [[3, 2, PADDING], [UNKNOWN, 2, 3], [3, PADDING, PADDING]]
    assert lengths(found).tolist() == [2, 3, 1]


def test_a_vocabulary_comes_back_from_its_record_and_anything_else_is_refused():
    known = Vocabulary(("film", "é"))
    assert Vocabulary.from_record(known.record(), Path("v.json")) == known
    assert known.fingerprint != Vocabulary(("é", "film")).fingerprint
    for record in ({}, {"words": "film"}, {"words": [1]}, {"words": ["a"], "more": 1}, {"words": ["a", "a"]}):
        with pytest.raises(DataError):
            Vocabulary.from_record(record, Path("v.json"))


def test_sst2_is_read_with_the_vocabulary_of_its_training_sentences(tmp_path):
    data = sst2(write_sst2(tmp_path), tokens=4)
    assert (len(data.train), len(data.test), data.shape, data.classes) == (80, 12, (4,), ("negative", "positive"))
    assert data.test.labels.tolist() == [i % 2 for i in range(12)]
    assert int(lengths(data.train.words).max()) == 4  # five words and six are cut
    again = sst2(tmp_path, 4, data.vocabulary)
    assert again.fingerprint() == data.fingerprint()
    assert sst2(tmp_path, 4, Vocabulary(("film",))).fingerprint() != data.fingerprint()
    assert set(sst2(tmp_path, 4, Vocabulary(("film",))).test.words.unique().tolist()) == {PADDING, UNKNOWN, 2}


def test_quotes_are_letters_and_lines_may_end_as_on_windows(tmp_path):
    write_sst2(tmp_path)
    (tmp_path / "dev.tsv").write_bytes(b'sentence\tlabel\r\n"a film \t1\r\na film" of\t0\r\n')
    assert len(sst2(tmp_path).test) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "does not begin with the line"),
        (b"label\tsentence\nx\t1\n", "does not begin with the line"),
        (b"sentence\tlabel\n", "holds no sentences"),
        (b"sentence\tlabel\nfine\t1\nfine\t2\n", "line 3 of"),
        (b"sentence\tlabel\nfine\n", "line 2 of"),
        (b"sentence\tlabel\nfine\tfilm\t1\n", "line 2 of"),
        (b"sentence\tlabel\n \t1\n", "line 2 of"),
        (b"sentence\tlabel\nfine\t1\n\nfine\t1\n", "line 3 of"),
        (b"sentence\tlabel\nfin\xff\t1\n", "is not UTF-8"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path, content, said):
    write_sst2(tmp_path)
    (tmp_path / "dev.tsv").write_bytes(content)
    with pytest.raises(DataError, match=said):
        sst2(tmp_path)


def test_a_missing_file_and_no_tokens_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        sst2(tmp_path)
    with pytest.raises(ConfigError, match="tokens"):
        sst2(write_sst2(tmp_path), tokens=0)


@pytest.mark.parametrize("words", [[[0, 0, 0]], [[2, 0, 3]], [[0, 2, 0]], [[2, -1, 0]]])
def test_a_sentence_without_words_or_with_a_hole_is_refused(words):
    with pytest.raises(DataError, match="padding behind the last"):
        Sentences(torch.tensor(words), torch.tensor([0]))


def test_labels_and_words_beyond_what_there_is_are_refused():
    words, known = Sentences(torch.tensor([[2, 1, 0]]), torch.tensor([1])), Vocabulary(("film",))
    with pytest.raises(DataError, match="labels"):
        Text("few", words, words, ("only",), known)
    beyond = Sentences(torch.tensor([[3, 1, 0]]), torch.tensor([1]))
    with pytest.raises(DataError, match="beyond the vocabulary"):
        Text("few", words, beyond, ("no", "yes"), known)


def test_augmentation_leaves_sentences_alone_and_refuses_to_do_more(generator):
    words, labels = torch.tensor([[2, 1, 0], [4, 0, 0]]), torch.tensor([1, 0])
    same, targets = Augmentation()(words, labels, 2, generator)
    assert torch.equal(same, words)
    assert targets.dtype == torch.float32
    with pytest.raises(ConfigError, match="not for sentences"):
        Augmentation(flip=True)(words, labels, 2, generator)


@pytest.mark.data
def test_the_real_sst2_has_its_official_sizes():
    folder = Path(os.environ["SPECGUARD_DATA"]) / "sst2"
    if not folder.is_dir():
        pytest.skip("SPECGUARD_DATA holds no sst2")
    data = sst2(folder)
    assert (len(data.train), len(data.test)) == (67349, 872)
    assert torch.bincount(data.test.labels).tolist() == [428, 444]
    assert int(lengths(data.test.words).max()) == 32

"""The list of mutants fits the source, and the committed table belongs to the list."""

import ast
import json

import pytest

from mutation.gate import EVERY, TABLE, UNJUDGED, judged, key, page
from mutation.mutant import SOURCE, Mutant


def test_there_are_enough_mutants_of_the_prover_and_no_two_are_one():
    assert len([mutant for mutant in EVERY if not mutant.of_checker]) >= 60
    assert len({key(mutant) for mutant in EVERY}) == len(EVERY)


@pytest.mark.parametrize("mutant", EVERY, ids=[f"{m.file}: {m.breaks}" for m in EVERY])
def test_every_mutant_is_one_change_of_the_source_that_can_be_read(mutant):
    text = (SOURCE / mutant.file).read_text()
    changed = mutant.apply(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert mutant.breaks


def test_a_text_that_is_missing_or_stands_twice_is_an_error():
    for text in ("", "a b a"):
        with pytest.raises(ValueError, match="not once"):
            Mutant("a.py", "a", "b", "").apply(text)


def test_the_committed_table_belongs_to_the_list_and_nothing_survives():
    rows = json.loads(TABLE.read_text())
    assert [row["key"] for row in rows] == [key(mutant) for mutant in judged()]
    assert TABLE.with_suffix(".md").read_text() == page(rows)
    assert not [row["breaks"] for row in rows if row["fate"] == "survived"]


def test_what_is_not_judged_is_in_the_list():
    assert set(json.loads(UNJUDGED.read_text())) <= {key(mutant) for mutant in EVERY}

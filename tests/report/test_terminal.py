"""What is printed about certificates: numbers where there are some, and why there are none where there are not."""

from specguard.report import certification_tables, certification_verdict


def share(count, n=10):
    return {"count": count, "n": n, "value": count / n, "interval95": [0.0, 1.0]}


def result(certified, median, vacuous=0, search=True):
    row = {"radius": 0.1, "attacked": share(9), "certified": share(certified), "by": {"local": share(certified)}}
    return {
        "n": 10,
        "clean": share(9),
        "radii": [{**row, "broken": 1, "unknown": 9 - certified}],
        "largest": {"local": {"median": median, "vacuous": vacuous}},
        "vacuous_below": 2.0**-24,
        "limits": [{"term": "blocks.1.mlp: bend", "images": 9}],
        "growth": [{"step": "blocks.0.attention", "images": 9, "factor": 123.4}],
        "seconds_per_image": {"local": 0.001},
        "settings": {"norm": "l2", "search": search},
    }


def test_where_little_is_certified_the_radius_the_term_and_the_block_are_named():
    lines = certification_verdict(result(0, 3.2e-5, 2))
    assert lines == [
        "radius 0.1: 0 certified, 1 broken, 0 both, of 10",
        "median certified radius: 3.2e-05 (local); vacuous for 2 of 9 images",
        "what margins lose most by: blocks.1.mlp: bend (9 images)",
        "where radii grow most: blocks.0.attention (x 123, 9 images)",
    ]
    assert certification_verdict(result(0, None, search=False))[1].startswith("what margins lose most by")


def test_a_radius_below_rounding_is_vacuous_and_never_a_small_number():
    for median in (0.0, 1e-12, 2.0**-25):
        found = result(0, median, 9)
        assert "median certified radius: vacuous (local); vacuous for 9 of 9 images" in certification_verdict(found)
        (table,) = certification_tables(found)
        assert list(table.columns[-2].cells)[2] == "vacuous"
    (table,) = certification_tables(result(0, 2.0**-23))
    assert list(table.columns[-2].cells)[2] == "1.19e-07"


def test_where_much_is_certified_there_is_nothing_to_explain():
    assert len(certification_verdict(result(5, 0.2))) == 1

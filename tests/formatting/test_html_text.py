"""HTML of small tables: all text is escaped, and every table has its rows."""

from intaglio.formatting.html_text import definition_list, element, folded_text, html_table

NASTY = "<img src=x onerror=alert(1)>&"
ESCAPED = "&lt;img src=x onerror=alert(1)&gt;&amp;"


def test_text_is_escaped():
    for made in (
        element("h4", NASTY),
        html_table([NASTY], [[NASTY]], caption=NASTY),
        definition_list([(NASTY, NASTY)]),
        folded_text(NASTY, NASTY),
    ):
        assert "<img" not in made
        assert ESCAPED in made


def test_a_table_has_a_head_and_a_row_for_each_entry():
    made = html_table(["name", "size"], [["a", 1], ["b", 2]], caption="sizes")
    assert made.startswith("<table><caption")
    assert made.count("<tr>") == 3
    assert '<td style="text-align:left">b</td><td style="text-align:right">2</td>' in made

from analysis.log.plain_text import plain


def test_control_characters_are_spelled_and_other_text_stays() -> None:
    assert plain("[red]é\x1b[31m\n") == r"[red]é\x1b[31m\x0a"

from pathlib import Path

import pytest

from analysis.report.figures import COLORS, colors_of, figure_style, new_figure, save_svg, set_log_ticks


def test_a_figure_has_its_panels_row_by_row():
    _, panels = new_figure(4.0, 3.0, rows=2)
    assert len(panels) == 2
    assert panels[0].get_position().y0 > panels[1].get_position().y0


def test_more_names_than_colors_repeat_them():
    names = [str(number) for number in range(len(COLORS) + 1)]
    assert colors_of(names)[names[-1]] == COLORS[0]


def test_log_ticks_read_as_plain_numbers():
    _, (axes,) = new_figure(4.0, 3.0)
    axes.set_xscale("log")
    set_log_ticks(axes.xaxis, 0.4, 30.0, (1, 2, 5))
    assert axes.get_xticks().tolist() == pytest.approx([0.5, 1, 2, 5, 10, 20])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "1", "2", "5", "10", "20"]


def test_close_log_ticks_give_way_to_earlier_factors():
    _, (axes,) = new_figure(4.0, 3.0)
    axes.set_xscale("log")
    set_log_ticks(axes.xaxis, 0.9, 11.0, (1, 5, 1.2), min_distance=0.1)
    assert axes.get_xticks().tolist() == pytest.approx([1, 5, 10])


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path):
    for name in ("one.svg", "two.svg"):
        with figure_style():
            figure, (axes,) = new_figure(4.0, 3.0)
            axes.plot([1, 2], [3, 4])
            save_svg(figure, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()

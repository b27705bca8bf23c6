"""Pictures of recorded runs."""

import itertools
import json
import sys

import pytest

from veloxquant import VeloxQuantError
from veloxquant.bench.plot_style import new_figure
from veloxquant.bench.plot_style import place_labels
from veloxquant.bench.plot_style import spread_labels
from veloxquant.bench.records import Result
from veloxquant.bench.records import Writer
from veloxquant.bench.records import new_run
from veloxquant.cli import main

pytest.importorskip("matplotlib")
Text = pytest.importorskip("matplotlib.text").Text


def quality(arm, kl, share, method=None, role="method", **more):
    figures = {"mean_kl": kl, "mean_kl_interval": [0.8 * kl, 1.3 * kl], "after_prompt": {"share": share}, **more}
    return Result(kind="quality", arm=arm, method=method or arm, role=role, figures=figures)


QUALITY = [
    quality("plain", 0.0, 1.0, role="reference"),
    quality("QuantizedKVCache 4 bits", 0.1, 0.16, "QuantizedKVCache", "reference"),
    quality("coarse", 0.02, 0.25),
    quality("newest", 0.9, 0.25, "recent rows", "reference", beside="coarse"),
    quality("top", 0.001, 1.0, "top rows", "reference", beside="coarse"),
    quality("theirs", 0.0, 0.5, role="peer"),
]
LENGTHS = [
    Result(kind=kind, arm=arm, method=arm, figures={"length": length, figure: length * factor})
    for kind, figure in (("speed", "seconds"), ("memory", "bytes_held"))
    for arm, factor in (("plain", 2.0), ("coarse", 1.0))
    for length in (4096, 1024, 32768)
]


@pytest.fixture
def recorded(tmp_path):
    def write(name, results, **fields):
        file = tmp_path / name
        run = new_run("quality", **{"model": "tiny", "dtype": "float32", "arguments": {"tokens": 4}, **fields})
        with Writer(run, file) as writer:
            for result in results:
                writer.add(result)
        return str(file)

    return write


def test_three_pictures_in_two_forms(recorded, tmp_path, capsys):
    file = recorded("runs.jsonl", [*QUALITY, *LENGTHS])
    assert main(["bench", "plot", file, "--output", str(tmp_path / "new" / "folder"), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    names = [name.rpartition("/")[2] for name in files]
    assert names == ["quality.png", "quality.svg", "speed.png", "speed.svg", "memory.png", "memory.svg"]
    for name in files:
        with open(name, "rb") as stream:
            start = stream.read(200)
        assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in start


def test_pictures_name_their_arms_and_what_they_depend_on(recorded, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    file = recorded("runs.jsonl", [*QUALITY, *LENGTHS])
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert main(["bench", "plot", file, "--output", str(tmp_path)]) == 0
    quality, speed = ((tmp_path / f"{name}.svg").read_text() for name in ("quality", "speed"))
    for text in ("QuantizedKVCache 4 bits", ">coarse<", ">theirs<", "first and newest rows", "best choice", "mlx-lm"):
        assert text in quality, text
    assert ">plain<" not in quality
    for text in (">plain<", ">coarse<", "32,768", "ms a step", "tiny, float32"):
        assert text in speed, text


def test_runs_of_other_models_get_pictures_of_their_own(recorded, tmp_path):
    files = [recorded("a.jsonl", QUALITY), recorded("b.jsonl", QUALITY, model="other"), recorded("c.jsonl", QUALITY)]
    assert main(["bench", "plot", *files, "--output", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == ["quality-2.png", "quality.png"]


def test_the_same_figures_give_the_same_file(recorded, tmp_path):
    file = recorded("a.jsonl", [*QUALITY, *LENGTHS])
    for folder in ("one", "two"):
        assert main(["bench", "plot", file, "--output", str(tmp_path / folder)]) == 0
    for name in ("quality.svg", "speed.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_what_cannot_be_drawn_is_said(recorded, tmp_path, capsys, monkeypatch):
    assert main(["bench", "plot", recorded("a.jsonl", QUALITY[:1]), "--output", str(tmp_path)]) == 2
    assert "nothing to draw" in capsys.readouterr().err
    assert main(["bench", "plot", str(tmp_path / "absent.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["bench", "plot", recorded("b.jsonl", QUALITY), "--output", str(tmp_path / "file")]) == 2
    assert "cannot write the pictures" in capsys.readouterr().err


def test_without_matplotlib_one_sentence_names_the_extra(recorded, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "plot", recorded("a.jsonl", QUALITY), "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err == "error: drawing needs matplotlib; run: pip install 'veloxquant[bench]'\n"


def test_an_error_is_one_of_ours():
    from veloxquant.bench.plot import draw

    with pytest.raises(VeloxQuantError):
        draw([], ".")


def overlapping(texts, renderer):
    """Pairs of labels of which one covers the other by more than a pixel."""
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts]
    return [
        (name, other)
        for (name, one), (other, two) in itertools.combinations(boxes, 2)
        if min(one.x1, two.x1) - max(one.x0, two.x0) > 1 and min(one.y1, two.y1) - max(one.y0, two.y0) > 1
    ]


def test_labels_of_many_lines_stay_apart_and_below_the_title():
    figure, axes = new_figure("title", "note")
    ends = [(1.0, 1 + 0.01 * place, f"arm {place}", "black") for place in range(24)]
    axes.plot([0, 1], [0, 1.3])
    spread_labels(figure, axes, ends)
    figure.draw_without_rendering()
    renderer = figure._get_renderer()
    assert len(axes.texts) == 24
    assert overlapping(axes.texts, renderer) == []
    top = axes.title.get_window_extent(renderer).y0
    assert all(Text.get_window_extent(text, renderer).y1 <= top for text in axes.texts)


def test_labels_of_many_points_do_not_cover_each_other():
    figure, axes = new_figure("title", "note")
    points = [(0.3 * (place % 4), 0.1 * (place // 4), f"an arm {place}", "black") for place in range(16)]
    axes.plot([-1, 6], [-1, 3], linestyle="none")
    place_labels(figure, axes, points)
    figure.draw_without_rendering()
    assert len(axes.texts) == 16
    assert overlapping(axes.texts, figure._get_renderer()) == []

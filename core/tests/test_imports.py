import json
import subprocess
import sys

import pytest

import veloxquant


def loaded_by(code):
    """Names of all modules that a fresh process has loaded after running ``code``."""
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", ["import veloxquant", "import veloxquant; veloxquant.methods()"])
def test_importing_and_listing_load_neither_mlx_lm_nor_cattrs_nor_a_plugin(code):
    modules = loaded_by(code)
    heavy = {"mlx_lm", "cattrs", "transformers", "numpy", "typer", "rich", "huggingface_hub"}
    assert not modules & heavy
    assert not [name for name in modules if name.startswith("veloxquant_")]


def test_lazy_names_are_real_and_listed():
    for name in veloxquant.__all__:
        assert getattr(veloxquant, name) is not None
    assert set(veloxquant._LAZY) < set(veloxquant.__all__)
    assert dir(veloxquant) == sorted(veloxquant.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = veloxquant.nothing


def test_a_missing_back_end_is_one_sentence_that_names_the_extra():
    code = (
        "import sys\nsys.modules['mlx.core'] = None\n"
        "try:\n    import veloxquant\nexcept ImportError as error:\n    print(error)\nelse:\n    print('imported')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "veloxquant[cpu]" in run.stdout
    assert len(run.stdout.splitlines()) == 1

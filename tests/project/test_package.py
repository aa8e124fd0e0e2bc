"""The package itself: its public names are there when asked for, and cost nothing before."""

import subprocess
import sys

import pytest

import specguard


def test_every_public_name_is_found_and_no_other():
    for name in specguard.__all__:
        assert getattr(specguard, name) is not None
    assert set(specguard.__all__) <= set(dir(specguard))
    with pytest.raises(AttributeError, match="has no attribute 'ViTT'"):
        _ = specguard.ViTT


def test_importing_it_or_asking_for_a_version_does_not_import_torch():
    modules = "specguard, specguard.cli, specguard.report, specguard.records.store"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "False\n"

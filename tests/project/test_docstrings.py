"""Every public name documents how it is called: Args, Returns, and an example that runs."""

import doctest
import importlib
import inspect
import re
from collections.abc import Callable

import pytest
from torch import nn

PACKAGES = (
    "specguard",
    *(
        f"specguard.{name}"
        for name in (
            "attacks",
            "certificates",
            "data",
            "evaluation",
            "geometry",
            "inputs",
            "linalg",
            "models",
            "nn",
            "penalties",
            "report",
            "spectrum",
            "studies",
            "testing",
            "train",
        )
    ),
)
EXEMPT = {
    "specguard.__version__": "constant",
    "specguard.attacks.FGSM": "constant: an instance of PGD",
    "specguard.certificates.METHODS": "constant",
    "specguard.inputs.BallLike": "type alias",
    "specguard.inputs.ImagesLike": "type alias",
    "specguard.inputs.LabelsLike": "type alias",
    "specguard.data.AnyData": "type alias",
    "specguard.data.Split": "type alias",
    "specguard.linalg.UNIT": "constant",
    "specguard.nn.CERTIFIABLE": "constant",
    "specguard.nn.Classifier": "type alias",
    "specguard.nn.PRESETS": "constant",
    "specguard.nn.TEXT_PRESETS": "constant",
}
# Examples that cannot run here; every other example has a line that does.
SKIPPED = {
    "specguard.models.convert": "needs a library of models",
    "specguard.models.export": "needs the folder of a run",
    "specguard.models.from_huggingface": "needs transformers",
    "specguard.models.from_run": "needs the folder of a run",
    "specguard.models.from_timm": "needs timm",
    "specguard.models.from_torchvision": "needs torchvision",
    "specguard.models.timm_model": "needs timm",
    "specguard.models.timm_weights": "needs timm",
    "specguard.models.untrained": "needs the folder of a run",
    "specguard.models.warm_start": "needs the folder of a run",
    "specguard.studies.checked_study": "needs a finished study",
}
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Example")


def exported(package: str) -> dict[str, object]:
    """The names in `__all__`; of a module without one, the functions and classes that it defines."""
    module = importlib.import_module(package)
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == package]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return {name: getattr(module, name) for name in names}


def public() -> dict[str, object]:
    """Every public object under the name of the subpackage that exports it; each object once."""
    found: dict[int, tuple[str, object]] = {}
    for package in (*PACKAGES[1:], PACKAGES[0]):
        for name, thing in exported(package).items():
            found.setdefault(id(thing), (f"{package}.{name}", thing))
    return dict(sorted(found.values(), key=lambda pair: pair[0]))


def sections(text: str) -> dict[str, str]:
    """The body of every section of a docstring, by its title."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", inspect.cleandoc(text), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(body: str) -> list[str]:
    """The names in the body of an Args section, in order: those at its first level of indentation."""
    lines = inspect.cleandoc("\n" + body).splitlines()
    heads = [re.match(r"\*{0,2}([A-Za-z]\w*(?:, \*{0,2}[A-Za-z]\w*)*)(?: \([^)]*\))?: ", line) for line in lines]
    return [name.strip("* ") for head in heads if head for name in head[1].split(",")]


def undocumented(thing: Callable[..., object]) -> list[str]:
    """What the docstring of a function or class lacks, one sentence each."""
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    if not text or text.startswith(f"{thing.__name__}("):  # dataclass writes one of its own where there is none
        return ["it has no docstring"]
    found = sections(text)
    if inspect.isclass(thing) and issubclass(thing, Exception):  # it takes a message
        return [] if ">>> " in found.get("Example", "") else ["it has no Example: with a line that starts with >>>"]
    signature = inspect.signature(thing)
    parameters = [name for name in signature.parameters if name != "self"]
    if getattr(thing, "__init__", None) is nn.Module.__init__:  # a layer without settings
        parameters = []
    if getattr(thing, "_is_protocol", False):
        parameters = []
    named = documented(found.get("Args", ""))
    lacks = [f"Args: does not name {name}" for name in parameters if name not in named]
    lacks += [f"Args: names {name}, which is no parameter" for name in named if name not in parameters]
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    if returns and not inspect.isclass(thing) and not found.keys() & {"Returns", "Yields"}:
        lacks.append("it returns something and has no Returns:")
    if ">>> " not in found.get("Example", ""):
        lacks.append("it has no Example: with a line that starts with >>>")
    return lacks


def run_example(thing: object, name: str) -> tuple[int, str]:
    """How many statements of the docstring of a function or class were run, and the report of those that failed.

    As with `python -m doctest`, they start from the names of the module that defines it.
    """
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    names = dict(vars(importlib.import_module(thing.__module__)))
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", names, name, None, None)
    result = runner.run(test, out=report.append)
    return result.attempted - getattr(result, "skipped", 0), "".join(report) if result.failed else ""


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize(("name", "thing"), public().items(), ids=public().keys())
def test_it_says_how_it_is_called_and_its_example_runs(name, thing, tmp_path, monkeypatch):
    if name in EXEMPT:
        return
    assert inspect.isfunction(thing) or inspect.isclass(thing), f"{name} needs a reason in EXEMPT"
    assert not undocumented(thing)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")
    attempted, failures = run_example(thing, name)
    assert attempted or name in SKIPPED, "every line of the example is skipped"
    assert not failures, failures
    assert not list(tmp_path.iterdir()), "the example leaves files in the working directory"


def test_no_class_is_exempt_since_its_help_shows_a_call():
    assert not [name for name, thing in public().items() if inspect.isclass(thing) and name in EXEMPT]


def test_every_exemption_is_of_a_public_name():
    assert EXEMPT.keys() | SKIPPED.keys() <= public().keys()


def area(width: float, height: float = 1.0) -> float:
    """The area of a rectangle.

    Args:
        width: in meters
        depth (float): a parameter of the past

    Example:
        >>> area(2.0)
        3.0
    """
    return width * height


def test_a_missing_and_a_stale_parameter_a_missing_section_and_a_wrong_output_are_noticed():
    assert undocumented(area) == [
        "Args: does not name height",
        "Args: names depth, which is no parameter",
        "it returns something and has no Returns:",
    ]
    attempted, failures = run_example(area, "area")
    assert attempted == 1
    assert "Expected:\n    3.0\nGot:\n    2.0" in failures
    assert undocumented(lambda: None) == ["it has no docstring"]

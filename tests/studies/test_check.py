"""Certificates are checked: true ones pass, and a claim that is too good is an error that names its image."""

import copy
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from specguard.attacks import APGD
from specguard.certificates import prepare
from specguard.certificates.attention import local as tightened
from specguard.certificates.attention import point as attention
from specguard.certificates.layers import affine, sll
from specguard.certificates.layers import curves as activations
from specguard.certificates.methods import radii as output_radius
from specguard.certificates.methods import zonotope
from specguard.certificates.problem import MarginLoss
from specguard.checker import Image, read
from specguard.data import Data, Dataset
from specguard.errors import RunError, SoundnessError
from specguard.nn import CertifiableConfig, Network, ViT, ViTConfig, fingerprint
from specguard.records.accuracy import Accuracy
from specguard.records.base import About, plain
from specguard.records.certificate import LARGEST_LOSSES, CertificateRecord, CertifySettings, CertifyStudy, fits
from specguard.records.check import CheckRecord, CheckSettings, CheckStudy, CheckSummary, summarize
from specguard.records.io import each_record, read_record, rewrite_records, write_record
from specguard.records.store import described
from specguard.studies import check as module
from specguard.studies import checked_study, run_certify, run_check
from specguard.studies.recheck import Prover, prove_again

CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=4, dim=6, depth=2, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,),
    norm="smoothproject", activation="squareplus", pool="mean",
)  # fmt: skip
LOFAST = CertifiableConfig(
    image=4, patch=2, channels=1, classes=4, dim=6, depth=1, heads=2, mean=(0.4,), std=(0.3,),
    mixing="residual", projection="layer", feedforward="sll", value_norm=0.5, hidden=9,
)  # fmt: skip
SETTINGS = CertifySettings(radii=(0.001, 0.03), batch=4)
QUICK = msgspec.structs.replace(SETTINGS, search=False)
ATTACK = APGD(steps=8, loss="margin")


def model() -> ViT:
    made, g = ViT(CONFIG), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.35 * torch.randn(parameter.shape, generator=g))
    return made.eval()


def data(count: int = 5, made: ViT | Network | None = None) -> Dataset:
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        labels = (made or model())(images).argmax(1)
    labels[1] = (labels[1] + 1) % 4  # one is wrong
    return Dataset((images * 255).round().to(torch.uint8), labels)


def about(made: ViT | Network, n: int = 5) -> About:
    return About(model=fingerprint(made), data="the data", dataset="noise", n=n)


def certified(folder: Path, settings: CertifySettings = SETTINGS, **changes) -> Path:
    made, split = changes.get("model", model()), changes.get("split", data())
    run_certify(made, split, folder, settings, about=about(made, len(split)), device=CPU)
    return folder / "records.jsonl"


def verified(file: Path, **changes) -> tuple[CheckSummary, int]:
    options = {"data": "the data", "device": CPU, "attack": ATTACK, "settings": CheckSettings()} | changes
    folder, claimed = options.pop("folder", file.parent / "checked"), checked_study(file)
    return run_check(claimed, options.pop("model", model()), options.pop("split", data()), folder, **options)


@pytest.fixture(scope="module")
def true(tmp_path_factory) -> Path:
    return certified(tmp_path_factory.mktemp("true") / "study").parent


@pytest.fixture
def study(true, tmp_path) -> Path:
    return shutil.copytree(true, tmp_path / "study")


def changed(study: Path, change) -> Path:
    """The records with something done to that of image 0, which is certified."""
    file = study / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records[0]["radii"][0]["verdict"] == "certified"
    change(records[0])
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_true_certificates_are_right(study):
    result, believed = verified(study / "records.jsonl")
    records = [json.loads(line) for line in (study / "records.jsonl").read_text().splitlines()]
    certified = sum(max(record["largest"].values()) > 0 for record in records)
    assert certified >= sum(record["radii"][0]["verdict"] == "certified" for record in records) >= 3
    lines = [json.loads(line) for line in (study / "checked" / "records.jsonl").read_text().splitlines()]
    for line, record in zip(lines, records, strict=True):  # attacked where it is certified farthest
        curve = [row["radius"] for row in record["radii"] if row["verdict"] == "certified"]
        assert (line["attacked"] or 0.0) == max([*record["largest"].values(), *curve])
    assert (result.n, result.attacked) == (5, certified)
    assert result.claims == sum(line["claims"] for line in lines) > 100 * certified
    assert result.least_room == min(line["room"] for line in lines if line["room"] is not None) > 0
    assert (result.third_party, believed) == (0, 0)
    assert read_record(study / "checked" / "summary.json", CheckSummary) == result
    assert verified(study / "records.jsonl", resume=True) == (result, 5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_linf_balls_and_single_methods_too(norm, tmp_path):
    settings = CertifySettings(radii=(0.002,), norm=norm, methods=("adjoint",), search=norm == "l2", batch=5)
    assert verified(certified(tmp_path / "study", settings))[0].claims > 0


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    """A study of linf balls: radii of zonotope are linf radii, those of local are l2 radii."""
    settings = CertifySettings(radii=(0.004,), norm="linf", methods=("local", "zonotope"), batch=5)
    return certified(tmp_path_factory.mktemp("native") / "study", settings).parent


def test_native_radii_are_checked_in_their_own_norm(native, tmp_path):
    study = shutil.copytree(native, tmp_path / "study")
    records = [json.loads(line) for line in (study / "records.jsonl").read_text().splitlines()]
    summary, _ = verified(study / "records.jsonl")
    lines = [json.loads(line) for line in (study / "checked" / "records.jsonl").read_text().splitlines()]
    correct = [record for record in records if record["predicted"] == record["label"]]
    assert summary.attacked == len(correct) >= 3
    for line, record in zip(lines, records, strict=True):
        if record in correct:
            assert record["method"] == "zonotope"
            assert line["attacked"] == max(record["largest"]["zonotope"], 0.004)
            assert record["largest"]["zonotope"] > record["largest"]["local"] / 4 > 0  # sqrt(16)
            proof = record["proofs"]["zonotope"]
            assert "radii" not in proof or not proof["radii"]
            assert sum(proof["terms"].values()) == pytest.approx(proof["loss"], rel=1e-9)
            assert {"input", "rounding"} <= proof["terms"].keys()


NATIVE_FORGED = {
    "a radius of the other norm": lambda record: record["largest"].update(
        zonotope=4 * record["largest"]["zonotope"]
    ),
    "a bound": lambda record: record["radii"][0]["lower"].update(zonotope=record["margin"]),
    "a smaller loss": lambda record: record["losses"].update({next(iter(record["losses"])): 1e-9}),
    "a smaller loss of the proof": lambda record: record["proofs"]["zonotope"].update(
        loss=record["proofs"]["zonotope"]["loss"] * 0.99
    ),
    "a class bound": lambda record: record["proofs"]["zonotope"]["lower"].__setitem__(
        (record["label"] + 1) % 4, 9.0
    ),
    "no proof": lambda record: record["proofs"].pop("zonotope"),
    "radii of layers": lambda record: record["proofs"]["zonotope"].update(radii={"head": 1.0}),
    "errors of no layer": lambda record: record["proofs"]["zonotope"]["terms"].update(
        {"blocks.9: errors": record["proofs"]["zonotope"]["terms"].pop("input")}
    ),
    "another method": lambda record: record.update(method="local"),
    "a failure": lambda record: record.update(failures={"zonotope": "zonotopes are not for this model"}),
    "no bounds of classes": lambda record: record["proofs"]["zonotope"].pop("lower"),
}


@pytest.mark.parametrize("name", NATIVE_FORGED)
def test_forged_claims_of_native_methods_are_errors(name, native, tmp_path):
    study = shutil.copytree(native, tmp_path / "study")
    file = changed(study, NATIVE_FORGED[name])
    with pytest.raises((SoundnessError, RunError), match="image 0"):
        verified(file)


def test_bounds_in_the_box_are_not_bounds_without_it(native, tmp_path):
    """The images' darkest pixels move half as far in the box: a study that drops the box claims too much."""
    study = shutil.copytree(native, tmp_path / "study")
    header = json.loads((study / "study.json").read_text())
    assert header["settings"]["box"] is True
    header["settings"]["box"] = False
    (study / "study.json").write_text(json.dumps(header))
    (study / "summary.json").unlink()
    with pytest.raises(SoundnessError, match="image"):
        verified(study / "records.jsonl")


def first(record, *path):
    for key in path[:-1]:
        record = record[key]
    return record, path[-1]


CLAIMS = {
    "a lower bound": ("radii", 0, "lower", "local"),
    "a lower bound of the adjoint": ("radii", 0, "lower", "adjoint"),
    "a lower bound of the zonotope": ("radii", 0, "lower", "zonotope"),
    "a largest radius": ("largest", "local"),
    "the radius of a proof": ("proofs", "local", "radius"),
    "a margin": ("margin",),
    "the margin of a proof": ("proofs", "adjoint", "margin"),
}
SIZES = {
    "a norm": ("norms", "head", "norm"),
    "zeta": ("norms", "blocks.0.attention.branch.inner", "zeta"),
    "the derivative's norm": ("norms", "blocks.0.attention.branch.inner", "derivative_norm"),
    "a radius": ("proofs", "local", "radii", "blocks.1.mlp"),
    "a radius of the adjoint": ("proofs", "adjoint", "radii", "blocks.1.mlp"),
    "a radius of the mixed proof": ("proofs", "mixed", "radii", "blocks.1.mlp"),
    "a loss": ("proofs", "adjoint", "loss"),
    "a remainder": ("proofs", "adjoint", "terms", "blocks.0.mlp.branch.inner.activation: bend"),
    "attention's remainder": ("proofs", "adjoint", "terms", "blocks.1.attention.branch.inner: together"),
    "a remainder of the mixed proof": ("proofs", "mixed", "terms", "first order"),
    "the first order": ("proofs", "adjoint", "terms", "first order"),
    "a loss of the zonotope": ("proofs", "zonotope", "loss"),
    "a term of the zonotope": ("proofs", "zonotope", "terms", "input"),
}


@pytest.mark.parametrize("name", CLAIMS | SIZES)
def test_a_claim_that_is_too_good_is_an_error(name, study):
    def change(record):
        holder, key = first(record, *{**CLAIMS, **SIZES}[name])
        factor = 1.01 if name in CLAIMS else 0.99
        assert holder[key] > 0
        holder[key] *= factor

    with pytest.raises(SoundnessError, match="image 0"):
        verified(changed(study, change))


def other_pixels(record):
    record["input"] = "0" * 64


def other_class(record):
    record["predicted"] = (record["predicted"] + 1) % 4


def larger_radius(record):
    """Certified at the second radius by word alone."""
    record["radii"][1] = {**copy.deepcopy(record["radii"][0]), "radius": record["radii"][1]["radius"]}
    record["proofs"] = {}
    record["largest"] = dict.fromkeys(record["largest"], 0.0)


def no_other_class(record):
    record["proofs"]["local"]["other_class"] = record["label"]


def a_layer_less(record):
    record["proofs"]["local"]["radii"].popitem()


def a_term_less(record):
    record["proofs"]["adjoint"]["terms"].pop("blocks.0.mlp.branch.inner.activation: bend")


def fewer_heads(record):
    record["norms"]["blocks.0.attention.branch.inner"]["mu"].pop()


def no_norms(record):
    del record["norms"]


def a_norm_less(record):
    del record["norms"]["blocks.0.attention.branch.inner"]["zeta"]


def a_norm_of_no_layer(record):
    record["norms"]["blocks.7"] = {"norm": 1.0}


def a_proof_less(record):
    del record["proofs"]["adjoint"]


def a_class_less(record):
    record["proofs"]["local"]["lower"].pop()


def a_better_class(record):
    lower = record["proofs"]["local"]["lower"]
    lower[(record["label"] + 1) % 4] += 0.1


def a_term_moved(record):
    """From one layer to another, where nobody looks."""
    terms = record["proofs"]["mixed"]["terms"]
    terms["blocks.9: bend"] = terms.pop("first order") * 1.01


FORGED = (
    other_pixels,
    other_class,
    larger_radius,
    no_other_class,
    a_layer_less,
    a_term_less,
    fewer_heads,
    no_norms,
    a_norm_less,
    a_norm_of_no_layer,
    a_proof_less,
    a_class_less,
    a_better_class,
    a_term_moved,
)


@pytest.mark.parametrize("change", FORGED)
def test_a_record_that_was_forged_is_an_error(change, study):
    with pytest.raises(SoundnessError, match="image 0"):
        verified(changed(study, change))


OTHER_FORMS = {
    "no largest radii": lambda record: record.pop("largest"),
    "no method": lambda record: record.pop("method"),
    "no bounds": lambda record: record["radii"][0].pop("lower"),
    "no radii": lambda record: record.update(radii=[]),
    "no pixels": lambda record: record.pop("input"),
    "a word of before": lambda record: record.update(family=record.pop("method")),
    "one field more": lambda record: record.update(third_party=False),
    "one field more in a row": lambda record: record["radii"][0].update(certified=True),
    "one field more in a proof": lambda record: record["proofs"]["local"].update(rival=1),
    "methods that stop early": lambda record: record["radii"][0].update(
        proved=[{"method": "local", "classes": [1], "lower": 1.0}]
    ),
    "another label": lambda record: record.update(label=(record["label"] + 1) % 4),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_record_of_another_form_is_an_error(name, study):
    with pytest.raises(
        RunError, match=r"the record of image 0 is not one|line 1 of .*records\.jsonl is not a valid record"
    ):
        verified(changed(study, OTHER_FORMS[name]))


# One field after the other ---------------------------------------------------------------------------------------

VALUES = (
    None,
    True,
    "x",
    "\ud800",
    float("nan"),
    float("inf"),
    1e308,
    -1e308,
    1e-320,
    0,
    -1,
    10**400,
    [],
    {},
    [1],
    "gone",
)


def fields(value, path=()):
    """The paths of all values of a record, leaves and containers."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from fields(each, (*path, key))


def harmless(path, old, new):
    """Whether a claim only became weaker, or was none: how much is rounding is merely told."""
    if new == old or str(path[-1]).endswith(": rounding"):
        return True
    if new == "gone":
        return path[0] == "proofs" and path[-1] == "lower"  # as in records of an earlier version
    if path[-2] in ("lower", "largest"):
        return new is None or (old is not None and new <= old)
    if new is None:
        return path[0] == "losses"  # an infinite one
    return path[0] in ("norms", "proofs", "losses") and not isinstance(old, dict | list) and new > old


@pytest.fixture(scope="module")
def checked(true):
    """The first record, and its image as the checker sees it, which remembers its proofs."""
    record = json.loads((true / "records.jsonl").read_text().splitlines()[0])
    images, labels = data().batch(slice(0, 1))
    image, known = Image.of(read(model()), images[0].double().numpy(), int(labels[0])), {}

    class Remembered:
        def __getattr__(self, name):
            return getattr(image, name)

        def proof(self, *given, **distances):
            asked = repr((given, distances))
            if asked not in known:
                known[asked] = image.proof(*given, **distances)
            return known[asked]

    return record, Remembered(), images[0].double().numpy()


def test_no_field_can_be_changed_into_nonsense_or_into_a_better_claim(checked, true, tmp_path):
    record, image, pixels = checked
    study, file = read_record(true / "study.json", CertifyStudy), tmp_path / "records.jsonl"
    tried, decoded, passed = 0, 0, []
    for path in fields(record):
        for value in VALUES:
            tried += 1
            if tried % 5:  # a fifth of all, evenly
                continue
            forged = copy.deepcopy(record)
            holder, key = first(forged, *path)
            old = holder[key]
            if value == "gone":
                del holder[key]
            else:
                holder[key] = value
            file.write_text(json.dumps(forged) + "\n")
            try:
                (found,) = each_record(file, CertificateRecord)
            except RunError as error:  # any other is a defect
                if not str(error).startswith(f"line 1 of {file} is not a valid record"):
                    passed.append((path, old, value))
                continue
            decoded += 1
            if (found.sample, found.label) == (0, image.label) and fits(found, study):
                try:
                    prove_again(image, found, pixels, study, box=True)
                except SoundnessError:  # which names the image, as above
                    continue
                if not harmless(path, old, value):
                    passed.append((path, old, value))
    assert not passed
    assert tried > 4000
    assert decoded > 100


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": {"radii": [float("inf"), 0.03]}}, r"study\.json .* malformed"),
        ({"settings": {"radii": ["1"]}}, r"study\.json .* got `str` .*settings\.radii"),
        ({"settings": {"radii": [-0.1, 0.03]}}, r"study\.json .* >= 0.*settings\.radii"),
        ({"settings": {"radii": [1e301, 0.03]}}, r"study\.json .*settings\.radii"),
        ({"settings": {"radii": [0.03, 0.03]}}, r"study\.json .* twice"),
        ({"settings": {"methods": ["magic"]}}, r"study\.json .* 'magic'"),
        ({"settings": {"methods": [["local"]]}}, r"study\.json .*settings\.methods"),
        ({"settings": {"norm": "l1"}}, r"study\.json .* 'l1'"),
        ({"settings": {"families": ["local"]}}, r"study\.json .* unknown field `families`"),
        ({"settings": {"stop_early": True}}, "record of image 0 is not one of this study"),
        ({"settings": {"radii": [0.001, 0.02]}}, "record of image 0 is not one of this study"),
        ({"settings": {"methods": ["local"]}}, "record of image 0 is not one of this study"),
        ({"about": {"n": "5"}}, r"study\.json .*about\.n"),
        ({"about": {"n": True}}, r"study\.json .*about\.n"),
        ({"about": {"n": 4}}, "5 records of 4"),
        ({"about": {"subset": {"rule": "stratified", "seed": 0, "of": 9}}}, "about other images"),
        ({"about": {"subset": {"rule": "best", "seed": 0, "of": 9}}}, r"study\.json .* 'best'"),
        ({"failure_probability": 1e-3}, r"study\.json .* unknown field `failure_probability`"),
        ({"arithmetic": "float32"}, r"study\.json .* 'float32'"),
        ({"verifiers": {"oracle": "hearsay"}}, r"study\.json .* need stop_early"),
        ({"kind": "smooth"}, r"study\.json"), ({"kind": "magic"}, r"study\.json .* 'magic'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_study_that_cannot_be_is_refused(change, named, study):
    stated(study, change)
    with pytest.raises(RunError, match=named):
        verified(study / "records.jsonl")


def stated(study: Path, change: dict) -> None:
    """Change what study.json says."""
    path = study / "study.json"
    header = json.loads(path.read_text())
    nested = {key: header[key] | value for key, value in change.items() if key in ("about", "settings")}
    path.write_text(json.dumps(header | change | nested))


def test_records_in_another_order_twice_or_cut_short_are_refused(study):
    file = study / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    forged = ([lines[1], lines[0], *lines[2:]], [lines[0], *lines[:-1]], [*lines, lines[0]])
    for number, changed_lines in enumerate(forged):
        file.write_text("".join(changed_lines))
        with pytest.raises(RunError, match=r"image [01]|6 records of 5"):
            verified(file, folder=study / f"checked{number}")
    file.write_text("".join(lines)[:-9])
    with pytest.raises(RunError, match="4 records of 5"):
        verified(file)


def test_what_was_found_right_before_is_not_taken_on_trust(study):
    whole = plain(verified(study / "records.jsonl")[0])
    summary, lines = study / "checked" / "summary.json", study / "checked" / "records.jsonl"
    with pytest.raises(RunError, match="holds results of an earlier check, which are not trusted"):
        verified(study / "records.jsonl")
    for change in ({"claims": whole["claims"] + 1}, {"attacked": 0}, {"least_room": 9.0}, {"third_party": 1}):
        summary.write_text(json.dumps(whole | change))
        with pytest.raises(
            RunError, match=f"does not hold the summary of this study: {next(iter(change))} differs"
        ):
            verified(study / "records.jsonl", resume=True)
    for change in ({"n": 4}, {"clams": 1}, {"kind": "certify"}, {"claims": True}, {"least_room": -1.0}):
        summary.write_text(json.dumps(whole | change))
        with pytest.raises(RunError, match=r"checked/summary\.json is malformed"):
            verified(study / "records.jsonl", resume=True)
    summary.unlink()
    found = json.loads(lines.read_text().splitlines()[0])
    rest = lines.read_text().splitlines()[1:]
    for change in (
        {"clams": 1}, {"attacked": 2 * found["attacked"]}, {"attacked": None}, {"third_party": True},
        {"room": -1.0}, {"room": 0.0}, {"claims": -1}, {"claims": True}, {"third_party": 0}, {"sample": 5},
        {"sample": 1}, {"label": (found["label"] + 1) % 4},
    ):  # fmt: skip
        lines.write_text("\n".join([json.dumps(found | change), *rest]) + "\n")
        with pytest.raises(RunError, match=r"does not belong to this study|line 1 of .* is not a valid record"):
            verified(study / "records.jsonl", resume=True)
    lines.write_text("\n".join([json.dumps(found), *rest, rest[0]]) + "\n")
    with pytest.raises(RunError, match="holds 6 records of a study of 5 images"):
        verified(study / "records.jsonl", resume=True)


def test_a_check_with_another_seed_or_attack_or_of_other_records_is_not_resumed(study):
    file = study / "records.jsonl"
    verified(file)
    with pytest.raises(RunError, match=r"another study \(settings\.seed: 1 before, 2 now"):
        verified(file, settings=CheckSettings(seed=2), resume=True)
    with pytest.raises(RunError, match=r"another study \(attack\.steps: 8 before, 1 now"):
        verified(file, attack=replace(ATTACK, steps=1), resume=True)
    changed(study, lambda record: record["largest"].update(local=record["largest"]["local"] / 2))
    with pytest.raises(RunError, match=r"another study \(records: "):
        verified(file, resume=True)


def test_a_finished_check_that_comes_with_a_run_is_not_believed(study):
    """Its author may have written it by hand: thousands of claims, of which none was proved."""
    file = changed(study, lambda record: record["largest"].update(adjoint=9.0))
    folder = study / "checked"
    header = CheckStudy(
        about=about(model()),
        records=hashlib.sha256(file.read_bytes()).hexdigest(),
        settings=CheckSettings(),
        attack=described(ATTACK),
    )
    lines = [
        CheckRecord(sample=i, label=label, claims=9999, room=0.1, attacked=None, third_party=False)
        for i, label in enumerate(data().labels.tolist())
    ]
    (folder / "shards" / "1-of-2").mkdir(parents=True)
    write_record(folder / "study.json", header)
    hidden = {
        folder / "records.jsonl": lambda path: rewrite_records(path, lines),
        folder / "summary.json": lambda path: write_record(path, summarize(lines, header)),
        folder / "shards" / "1-of-2" / "records.jsonl": lambda path: rewrite_records(path, lines[:1]),
    }
    for path, write in hidden.items():
        write(path)
        with pytest.raises(RunError, match="holds results of an earlier check, which are not trusted"):
            verified(file)
        path.unlink()
    for path, write in hidden.items():
        write(path)
    with pytest.raises(RunError, match="does not belong to this study"):  # what was attacked is not what is claimed
        verified(file, resume=True)


FORGED_SUMMARIES = {
    "clean": lambda old: plain(Accuracy.of(5, 5)),
    "radii": lambda old: [old[0], old[0] | {"radius": 0.03}],
    "largest": lambda old: {method: each | {"median": 1.0} for method, each in old.items()},
    "limits": lambda old: [{"term": "nothing", "images": 4}],
    "growth": lambda old: [],
    "vacuous_below": lambda old: 1e-3,
    "failures": lambda old: [{"method": "local", "reason": "none", "images": 1}],
    "study": lambda old: old | {"settings": old["settings"] | {"seed": 7}},
}


@pytest.mark.parametrize("key", FORGED_SUMMARIES)
def test_a_summary_that_does_not_say_what_its_records_say_is_an_error(study, key):
    summary = json.loads((study / "summary.json").read_text())
    (study / "summary.json").write_text(json.dumps(summary | {key: FORGED_SUMMARIES[key](summary.get(key))}))
    with pytest.raises(SoundnessError, match=rf"study/summary\.json .* {key} differs from its records"):
        verified(study / "records.jsonl")
    assert not (study / "checked" / "summary.json").exists()


@pytest.fixture(scope="module")
def of_two_images(tmp_path_factory) -> Path:
    """The quickest study to check: the summary comes after the proofs."""
    settings = msgspec.structs.replace(QUICK, methods=("local",))
    return certified(tmp_path_factory.mktemp("two") / "study", settings, split=data(2)).parent


@pytest.mark.parametrize(
    "change",
    [
        lambda summary: summary["clean"].update(count=2),
        lambda summary: summary["clean"].update(interval95=[0.9, 1.0]),
        lambda summary: summary["study"]["settings"].update(radii=[0.001, 0.3]),
        lambda summary: summary.update(n=4),
        lambda summary: summary.pop("radii"),
        lambda summary: summary.pop("n"),
        lambda summary: summary.update(certified=1.0),
        lambda summary: summary["radii"][0].update(extra=1),
        lambda summary: summary["radii"][0]["certified"].update(count=True),
        lambda summary: summary["clean"].update(count="\ud800"),
        lambda summary: summary.update({"\ud800": 1}),
        lambda summary: summary.update(kind="check"),
        lambda summary: summary.clear(),
    ],
)
def test_a_summary_that_contradicts_itself_or_says_more_than_its_records_is_an_error(
    of_two_images, tmp_path, change
):
    study = shutil.copytree(of_two_images, tmp_path / "study")
    summary = json.loads((study / "summary.json").read_text())
    change(summary)
    (study / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(SoundnessError, match=r"study/summary\.json (is malformed|does not hold)"):
        verified(study / "records.jsonl", split=data(2))
    assert not (study / "checked" / "summary.json").exists()


def test_an_honest_summary_of_two_images_is_right(of_two_images, tmp_path):
    study = shutil.copytree(of_two_images, tmp_path / "study")
    assert verified(study / "records.jsonl", split=data(2))[0].n == 2


def test_a_summary_is_compared_when_a_check_is_resumed_too(study):
    verified(study / "records.jsonl")
    summary = json.loads((study / "summary.json").read_text())
    (study / "summary.json").write_text(json.dumps(summary | {"growth": []}))
    with pytest.raises(SoundnessError, match="growth differs from its records"):
        verified(study / "records.jsonl", resume=True)


def test_records_without_a_summary_are_checked(study):
    (study / "summary.json").unlink()
    assert verified(study / "records.jsonl")[0].n == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda losses: {name: value / 2 for name, value in losses.items()},
        lambda losses: {"head: radius": sum(losses.values())},
        lambda losses: dict(list(losses.items())[1:]),
        lambda losses: {},
        lambda losses: dict(reversed(losses.items())),
        lambda losses: {"nowhere: rounding": 1e9, **losses},
    ],
    ids=["smaller", "of another layer", "without the largest", "nothing", "turned round", "nowhere"],
)
def test_a_loss_that_the_checker_does_not_find_is_an_error(study, change):
    file = changed(study, lambda record: record.update(losses=change(record["losses"])))
    with pytest.raises(SoundnessError, match=r"image 0: its margin losses by|limits differs"):
        verified(file)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A study whose enclosures are much wider than the checker's, as those of few symbols are."""
    made = kinked()
    settings = CertifySettings(radii=(0.001,), methods=("zonotope", "mixed"), search=False, batch=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zonotope, "RESERVE", 10.0)
        folder = tmp_path_factory.mktemp("wide") / "study"
        return certified(folder, settings, model=made, split=data(made=made)).parent


def kinked() -> ViT:
    made = ViT(replace(CONFIG, norm="layerproject", activation="relu"))
    made.load_state_dict(model().state_dict())
    return made.eval()


def test_losses_of_a_wider_enclosure_are_right(wide, tmp_path):
    """The checker's own identity begins at another step, and misses terms of the record."""
    study, made = shutil.copytree(wide, tmp_path / "study"), kinked()
    split = data(made=made)
    assert verified(study / "records.jsonl", model=made, split=split)[0].claims > 0
    claimed = checked_study(study / "records.jsonl")
    record, pixels = claimed.records[3], split.images[3].float().div(255).double().numpy()
    image = Image.of(read(made), pixels, record.label)
    best = list(image.losses(0.001, "mixed", torch.inf, 1e-7, image.zonotope("l2", 0.001).distances))
    assert record.method == "mixed"
    assert all(
        record.losses.keys() - {f"{layer}: {term}" if layer else term for layer, term in own} for own in best
    )


def test_losses_of_a_margin_that_loses_less_are_an_error(wide):
    """Another step to begin at, or another margin, does not say what the smallest margin loses."""
    made, claimed = kinked(), checked_study(wide / "records.jsonl")
    record, pixels = claimed.records[3], data(made=made).images[3].float().div(255).double().numpy()
    prover = Prover(Image.of(read(made), pixels, record.label), claimed.study.settings, True)
    lost = prover.image.margins.min() - record.radii[0].lower["mixed"]
    own = min(prover.losses("mixed", 0.001), key=lambda terms: sum(terms.values()))
    assert sum(own.values()) < 0.9 * lost
    named = {f"{layer}: {term}" if layer else term: value for (layer, term), value in own.items()}
    losses = dict(sorted(named.items(), key=lambda item: -item[1])[:LARGEST_LOSSES])
    forged = msgspec.structs.replace(record, losses=losses)
    assert prove_again(prover.image, record, pixels, claimed.study, box=True)[0] > 0
    with pytest.raises(SoundnessError, match="its margin losses by mixed"):
        prove_again(prover.image, forged, pixels, claimed.study, box=True)


def test_a_wrong_image_is_called_broken_and_a_certified_one_is_not(study):
    file = study / "records.jsonl"
    honest = file.read_text()
    records = [json.loads(line) for line in honest.splitlines()]
    assert records[1]["predicted"] != records[1]["label"]
    for row in records[1]["radii"]:
        row["verdict"] = "unknown"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(SoundnessError, match="image 1: it is misclassified without an attack"):
        verified(file)
    file.write_text(honest)

    def broken(record):
        for row in record["radii"]:
            row.update(verdict="broken", lower=dict.fromkeys(row["lower"]))
        record.update(largest=dict.fromkeys(record["largest"], 0.0), proofs={})

    with pytest.raises(SoundnessError, match=r"image 0: its verdict is broken at radius 0\.001, which"):
        verified(changed(study, broken), folder=study / "again")


@pytest.mark.parametrize(
    "change",
    [{"settings": {"radii": []}}, {"settings": {"methods": []}}, {"verifiers": None}, {"verifiers": False}],
    ids=str,
)
def test_settings_of_nothing_are_one_sentence(study, change):
    stated(study, change)
    with pytest.raises(RunError, match=r"study\.json is malformed: [^\n]+$"):
        verified(study / "records.jsonl")


def half(function):
    return lambda *arguments, **options: function(*arguments, **options) * 0.5


PLANTED = {
    "a norm of weights": (affine, "upper_norm", lambda old: lambda W: 0.9 * old(W)),
    "the softmax's constant": (attention, "upper_softmax_slope", half),
    "T1": (tightened, "upper_t1", half),
    "spectral norms of activations": (attention, "upper_spectral", half),
    "sqrt 2": (output_radius, "output_loss", lambda old: lambda p, radii: MarginLoss(
        radii.out[..., None, :].expand(p.margins.shape), {})),
    "a curvature": (activations, "Activation", lambda old: lambda *a, **k: old(*a[:3], a[3] / 2, *a[4:], **k)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_prover_that_is_wrong_is_found_out(name, tmp_path, monkeypatch):
    where, attribute, planted = PLANTED[name]
    monkeypatch.setattr(where, attribute, planted(getattr(where, attribute)))
    file = certified(tmp_path / "study", QUICK)
    monkeypatch.undo()
    with pytest.raises(SoundnessError, match="image"):
        verified(file)


def test_certificates_of_a_network_with_sll_are_right(tmp_path):
    made = LOFAST.fresh(0)
    subject = {"model": made, "split": data(made=made)}
    result, _ = verified(certified(tmp_path / "study", **subject), **subject)
    assert result.attacked >= 3
    assert result.least_room > 0


PLANTED_IN_SLL = {
    "T": (sll, "SLLNode", lambda old: lambda x, inner, B, *a: old(x, inner, B / 0.9, *a), "its margin"),
    "the factor 2": (sll, "SLLNode", lambda old: lambda x, inner, B, *a: old(x, inner, B / 2, *a), "its margin"),
    "its spread": (sll.SLLNode, "propagate", half, "claims a"),
    "its remainder": (sll.SLLNode, "vjp", lambda old: lambda self, g: replace(
        old(self, g), remainder=old(self, g / 2).remainder), "adjoint claims a"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED_IN_SLL)
def test_a_prover_that_is_wrong_about_sll_is_found_out(name, tmp_path, monkeypatch):
    where, attribute, planted, named = PLANTED_IN_SLL[name]
    made = LOFAST.fresh(0)
    subject = {"model": made, "split": data(made=made)}
    monkeypatch.setattr(where, attribute, planted(getattr(where, attribute)))
    if named == "its margin":  # the prover finds this out by itself
        with pytest.raises(SoundnessError, match="computes something else than its layers say"):
            certified(tmp_path / "by itself", QUICK, **subject)
    monkeypatch.setattr(prepare, "_check_same_logits", lambda *arguments: None)
    monkeypatch.setattr(zonotope, "_check_contained", lambda *arguments: None)
    file = certified(tmp_path / "study", QUICK, **subject)
    monkeypatch.undo()
    with pytest.raises(SoundnessError, match=named):
        verified(file, **subject)


def test_an_image_that_breaks_is_found_by_the_attack_alone(study):
    """The attack comes first, so that it is heard although the proof of such a claim would fail as well."""
    file = changed(study, lambda record: record["radii"][1].update(copy.deepcopy(record["radii"][0])))
    stated(study, {"settings": {"radii": [0.001, 3.0]}})
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        record["radii"][1]["radius"] = 3.0
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(SoundnessError, match="image 0 is certified at radius 3, and an attack succeeds"):
        verified(file)


def test_another_model_other_data_and_missing_records_are_refused(study):
    other = model()
    with torch.no_grad():
        other.head.bias[0] += 1e-6
    file = study / "records.jsonl"
    with pytest.raises(SoundnessError, match="another model"):
        verified(file, model=other)
    with pytest.raises(SoundnessError, match="other data"):
        verified(file, data="other")
    with pytest.raises(RunError, match="holds 5 records, and there are 4 images"):
        verified(file, split=data(4))
    images, labels = data().batch(slice(0, 5))
    moved = Dataset(images.clone(), labels)
    moved.images[0, 0, 0, 0] = (moved.images[0, 0, 0, 0] + 0.5) % 1.0
    with pytest.raises(SoundnessError, match="image 0"):
        verified(file, split=moved, folder=study / "moved")
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(RunError, match="4 records of 5"):
        verified(file)
    file.write_text("")
    with pytest.raises(RunError, match="holds no certificates"):
        verified(file)
    file.write_text("\n".join(lines) + "\n")
    (study / "study.json").write_text("{}")
    with pytest.raises(RunError, match=r"study\.json is malformed"):
        verified(file)
    (study / "study.json").unlink()
    with pytest.raises(RunError, match=r"there is no study\.json"):
        verified(file)


RENAMED = {
    "method": "family", "losses": "loses", "loss": "fall", "other_class": "rival", "methods": "families",
    "robust": "attacked",
}  # fmt: skip


def as_before(value):
    """JSON in the words of the version before."""
    if isinstance(value, dict):
        return {RENAMED.get(key, key): as_before(each) for key, each in value.items()}
    return [as_before(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def earlier(study) -> Path:
    """The same study as the version before would have written it."""
    header = json.loads((study / "study.json").read_text())
    settings = {**header["about"], **as_before(header["settings"]), "attack": header["attack"]}
    del settings["stop_early"]
    settings |= {"arithmetic": "float64, rounding included", "failure_probability": 0.0}
    (study / "certification.json").write_text(json.dumps(settings))
    (study / "study.json").unlink()
    summary = as_before(json.loads((study / "summary.json").read_text()))
    for name in ("kind", "study", "seconds"):
        del summary[name]
    summary |= {"settings": settings, "seconds_per_image": {"network": 1.0}}
    (study / "summary.json").write_text(json.dumps(summary))
    file = study / "records.jsonl"
    records = [as_before(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return study


def test_certificates_of_an_earlier_version_are_right_too(earlier, true):
    result, believed = verified(earlier / "records.jsonl")
    assert believed == 0
    assert result.claims == verified(true / "records.jsonl", folder=earlier / "new")[0].claims > 0


@pytest.mark.parametrize(
    "name", ["a lower bound", "a largest radius", "the margin of a proof", "a norm", "a radius"]
)
def test_a_claim_of_an_earlier_version_that_is_too_good_is_an_error(earlier, name):
    def change(record):
        holder, key = first(record, *{**CLAIMS, **SIZES}[name])
        holder[key] *= 1.01 if name in CLAIMS else 0.99

    with pytest.raises(SoundnessError, match="image 0"):
        verified(changed(earlier, change))


def test_a_summary_of_an_earlier_version_that_says_more_or_something_else_is_an_error(earlier):
    summary = json.loads((earlier / "summary.json").read_text())
    for number, change in enumerate(
        ({"certified": 1.0}, {"limits": []}, {"settings": summary["settings"] | {"seed": 9}})
    ):
        (earlier / "summary.json").write_text(json.dumps(summary | change))
        with pytest.raises(SoundnessError, match="summary"):
            verified(earlier / "records.jsonl", folder=earlier / f"checked{number}")


def test_probabilistic_certificates_of_an_earlier_version_are_refused(earlier):
    path = earlier / "certification.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failure_probability": 1e-3}))
    with pytest.raises(RunError, match="probabilistic"):
        verified(earlier / "records.jsonl")


def test_images_of_another_subset_than_the_records_name_are_refused(study):
    """Who named another choice of images than he has certified would be free to choose them."""
    some = data(9)
    chosen = Data("noise", some, some, tuple("abcd"), by_class=True).take(5, seed=3)
    assert chosen.subset is not None
    with pytest.raises(RunError, match="is about other images than those"):
        verified(study / "records.jsonl", split=chosen)


def test_killed_it_continues(study, monkeypatch):
    whole, _ = verified(study / "records.jsonl")
    monkeypatch.setattr(module, "_BATCH", 2)

    def dying(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    folder = study / "other"
    with pytest.raises(KeyboardInterrupt):
        verified(study / "records.jsonl", folder=folder, watch=dying)
    assert len((folder / "records.jsonl").read_text().splitlines()) == 4
    with pytest.raises(RunError, match="holds results of an earlier check, which are not trusted"):
        verified(study / "records.jsonl", folder=folder)
    again, believed = verified(study / "records.jsonl", folder=folder, resume=True)
    assert believed == 4
    for name in ("study", "n", "claims", "attacked", "third_party", "least_room"):
        assert getattr(again, name) == getattr(whole, name)
    found = (folder / "records.jsonl").read_text()
    (folder / "summary.json").unlink()
    (folder / "records.jsonl").write_text("".join(found.splitlines(keepends=True)[:3]))
    _, believed = verified(study / "records.jsonl", folder=folder, resume=True)
    assert believed == 2  # in whole batches
    assert (folder / "records.jsonl").read_text() == found

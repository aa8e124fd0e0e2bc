"""The rule from numbers to a verdict: every branch, and that nothing is claimed beyond what was measured."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.sample_runs import MODEL, about, sample_run
from specguard.records.accuracy import Accuracy, RadiusAccuracy
from specguard.records.attack import (
    AttackSettings,
    AttackStudy,
    AttackSummary,
    BallAccuracy,
    ClassAccuracy,
    FlagRecord,
    NamedAttack,
)
from specguard.records.base import About, BallRecord, Environment
from specguard.records.certificate import CertificateSummary, CertifySettings, CertifyStudy, Failure, RadiusSummary
from specguard.records.smoothing import FailureProbability, SmoothSettings, SmoothStudy, SmoothSummary
from specguard.records.training import ModelRecord
from specguard.report import Run, Verdict, read_run, verdict
from specguard.report.evidence import evidence, radius_text
from specguard.report.examples import example_run
from specguard.report.run import FoundAttack, FoundCertificates, FoundStudy

FLAG = FlagRecord(name="zero gradients", message="the margin has no slope at 9 of 9 images")
CUSTOMARY = {"linf": 4 / 255, "l2": 0.25}
RECORD = ModelRecord(config={}, fingerprint=MODEL, weights="raw", classes=())


def attacked(
    left: dict[tuple[Any, float], int],
    clean: int = 80,
    n: int = 100,
    names: tuple[str, ...] = ("pgd",),
    **more: Any,
) -> FoundAttack:
    balls = tuple(BallRecord(norm=norm, radius=radius) for norm, radius in left)
    study = AttackStudy(
        about=more.pop("about", about(n)),
        attacks=tuple(NamedAttack(name=name, settings={}) for name in names),
        stop_early=False,
        balls=balls,
        settings=AttackSettings(diagnose=more.pop("diagnose", True)),
    )
    worst = tuple(
        BallAccuracy(norm=norm, radius=radius, accuracy=Accuracy.of(count, n))
        for (norm, radius), count in left.items()
    )
    summary = AttackSummary(
        study=study,
        n=n,
        clean=Accuracy.of(clean, n),
        attacks=(),
        worst_case=worst,
        distances={},
        per_class=tuple(ClassAccuracy(name=str(k), n=0) for k in range(10)),
        **more,
    )
    return FoundAttack("attacks/one", summary)


def proved(
    counts: dict[float, int], norm: Any = "l2", clean: int = 80, n: int = 100, broken: int = 20, **more: Any
) -> FoundCertificates:
    settings = CertifySettings(radii=tuple(counts), methods=("local",), norm=norm)
    summary = CertificateSummary(
        study=CertifyStudy(about=about(n), settings=settings, attack={"type": "PGD"}),
        n=n,
        clean=Accuracy.of(clean, n),
        radii=tuple(
            RadiusSummary(
                radius=radius,
                robust=Accuracy.of(n - broken, n),
                certified=Accuracy.of(count, n),
                broken=broken,
                unknown=n - broken - count,
                by={"local": Accuracy.of(count, n)},
            )
            for radius, count in counts.items()
        ),
        **more,
    )
    return FoundCertificates("certificates/one", summary)


def smoothed(count: int, n: int = 100) -> FoundStudy[SmoothSummary]:
    summary = SmoothSummary(
        study=SmoothStudy(about=about(n), settings=SmoothSettings(radii=(0.25,))),
        n=n,
        failure_probability=FailureProbability(per_image=0.001, any_of_all=0.1),
        clean=Accuracy.of(80, n),
        abstained=Accuracy.of(0, n),
        radii=(RadiusAccuracy(radius=0.25, certified=Accuracy.of(count, n)),),
        median_radius=0.3,
    )
    return FoundStudy("smoothing/one", summary)


def run(*attacks: FoundAttack, **more: Any) -> Run:
    return Run("mine", model=RECORD, fingerprint=MODEL, attacks=attacks, path=Path("runs/mine"), **more)


def judge(*attacks: FoundAttack, **more: Any) -> Verdict:
    found = verdict(run(*attacks, **more))
    assert found is not None
    assert len(found.sentences) <= 3
    return found


def test_a_run_without_any_study_has_no_verdict():
    assert verdict(Run("empty")) is None


def test_low_clean_accuracy_comes_first():
    found = judge(attacked({("l2", 0.25): 30}, clean=33))
    assert found.headline.startswith("Undertrained: without any attack only 33.0 % [24.6, 42.7], n = 100")
    assert found.command is not None
    assert found.command.startswith("specguard train runs/mine ")


def test_signs_of_obfuscated_gradients_that_nobody_looked_for_are_not_taken_as_absent():
    """Without them, that attacks left a model robust says less."""
    alone = attacked({("linf", 4 / 255): 78}, diagnose=False)
    assert judge(alone).sentences[0].endswith("; signs of obfuscated gradients were not looked for.")
    looked = attacked({("l2", 0.1): 79})
    for found in (judge(looked), judge(alone, looked)):
        assert "were not looked for" not in str(found)


def test_few_images_do_not_make_a_model_undertrained():
    assert not judge(attacked({("l2", 0.25): 3}, clean=5, n=10)).headline.startswith("Undertrained")


def test_a_clean_accuracy_of_more_images_counts_for_the_whole_model():
    study = attacked({("l2", 0.25): 5}, clean=6, n=6)
    run = Run("a", attacks=(study,))
    counted = verdict(run, clean=Accuracy.of(50, 1000))
    assert counted is not None
    assert counted.headline.startswith("Undertrained: without any attack only 5.0 %")
    assert "of 5.0 %" in counted.sentences[0]
    assert verdict(run, clean=Accuracy.of(0, 3)) == verdict(run)


def test_adversarial_examples_decide_also_where_gradients_are_suspicious():
    found = judge(attacked({("linf", 4 / 255): 2, ("l2", 0.25): 8}, flags=(FLAG,)))
    assert found.headline == "Not robust: attacks at linf 4/255 leave 2.0 % [0.6, 7.0], n = 100 of 80.0 % clean."
    assert found.command is not None
    assert "--norm linf --radius 4/255" in found.command
    assert "zero gradients: the margin has no slope" in found.sentences[0]


def test_success_at_a_smaller_radius_decides_too():
    assert judge(attacked({("linf", 1 / 255): 2})).headline.startswith("Not robust: attacks at linf 1/255")


@pytest.mark.parametrize(
    ("names", "suite"), [(("pgd",), "full"), (("apgd-t", "square"), "autoattack"), (("autoattack",), None)]
)
def test_signs_of_obfuscated_gradients_make_robust_accuracy_unclear(names, suite):
    found = judge(attacked({("linf", 8 / 255): 78}, names=names, flags=(FLAG,)))
    assert found.headline.startswith("Unclear: attacks leave 78.0 %")
    assert "zero gradients" in found.headline
    if suite is None:
        assert found.command is None
    else:
        assert found.command == f"specguard attack runs/mine --norm linf --radius 8/255 --suite {suite}"


def test_a_proof_stands_whatever_gradients_do():
    found = judge(attacked({("l2", 0.25): 78}, flags=(FLAG,)), certificates=(proved({36 / 255: 70}),))
    assert found.headline == "Certified: at l2 36/255, 70.0 % [60.4, 78.1], n = 100 of 80.0 % clean are proved."


def test_robust_to_attacks_is_not_called_proved():
    found = judge(attacked({("linf", 4 / 255): 60}))
    assert found.headline.startswith(
        "Robust to the attacks tried at linf 4/255, where 60.0 % [50.2, 69.1], n = 100"
    )
    assert found.headline.endswith("this is not proved.")
    assert found.sentences[1] == "Proved: nothing, as no certification was run."
    assert found.command == "specguard certify runs/mine --norm linf --radius 2/255"


def test_robustness_in_one_norm_is_not_claimed_of_the_other():
    found = judge(attacked({("l2", 0.25): 60, ("linf", 4 / 255): 3}))
    assert "Robust to the attacks tried at l2 0.25" in found.headline
    assert "but not at linf 4/255" in found.headline


def test_proofs_that_fail_lead_to_smoothing_and_then_to_training_for_certificates():
    attack, failed = attacked({("linf", 4 / 255): 60}), proved({0.1: 0})
    assert judge(attack, certificates=(failed,)).command == "specguard smooth runs/mine --sigma 0.25"
    after = judge(attack, certificates=(failed,), smoothing=(smoothed(50),))
    assert after.command is not None
    assert after.command.startswith("specguard train --recipe certifiable --data digits --run ")
    assert "the smoothed classifier, another function, keeps 50.0 %" in after.sentences[1]


def test_certified_accuracy_at_a_tiny_radius_does_not_make_a_model_certified():
    found = judge(attacked({("l2", 0.25): 60}), certificates=(proved({0.001: 80}),))
    assert found.headline.startswith("Robust to the attacks tried")
    assert "80.0 % [71.1, 86.7], n = 100 at l2 0.001 (local)" in found.sentences[1]


def test_a_certified_model_is_checked_and_then_exported():
    some = (proved({0.25: 60}),)
    unchecked = judge(certificates=some)
    assert unchecked.command == "specguard check runs/mine/certificates/one --model runs/mine"
    check = example_checks(100)
    assert judge(certificates=some, checks=check).command == (
        "specguard export runs/mine runs/mine.safetensors --to state_dict"
    )


def example_checks(n: int) -> Any:
    class Summary:
        study = type("Study", (), {"about": about(n)})

    summary: Any = Summary()
    summary.n = n
    return (FoundStudy("checks/one", summary),)


def test_what_was_not_applied_is_said_with_its_reason():
    why = Failure(method="zonotope", reason="model.fc has no rule for zonotopes", images=100)
    found = judge(attacked({("l2", 0.25): 60}), certificates=(proved({0.1: 0}, failures=(why,)),))
    assert found.sentences[1] == "Proved: nothing even at l2 0.1 of 100 images."
    assert "80 of 100 images at l2 0.1, neither proved nor attacked" in found.sentences[2]
    assert "zonotope was not applied: model.fc has no rule for zonotopes" in found.sentences[2]


def test_radii_below_the_customary_ones_leave_the_question_open():
    found = judge(attacked({("linf", 0.5 / 255): 75}))
    assert found.headline.startswith("Open:")
    assert found.headline.endswith("larger radii were not attacked.")
    assert found.command == "specguard attack runs/mine --norm linf --radius 4/255 --suite full"


def test_too_few_images_leave_the_question_open():
    found = judge(attacked({("linf", 4 / 255): 4}, clean=8, n=10))
    assert found.headline.startswith("Open: 40.0 % [16.8, 68.7], n = 10")
    assert found.command == "specguard diagnose runs/mine --images 40 --minutes 60"


def test_success_beyond_the_customary_radius_does_not_decide():
    found = judge(attacked({("linf", 16 / 255): 0}))
    assert found.headline.startswith("Open:")
    assert found.command == "specguard attack runs/mine --norm linf --radius 4/255 --suite full"


def test_every_number_of_a_headline_has_its_n_and_interval():
    for left in ({("linf", 4 / 255): 2}, {("linf", 4 / 255): 70}, {("l2", 0.01): 70}):
        assert ", n = 100" in judge(attacked(left)).headline


def test_spectra_alone_give_the_clean_accuracy_no_verdict_and_training_alone_asks_for_attacks(tmp_path):
    only = replace(example_run(), attacks=(), certificates=(), smoothing=())
    assert verdict(only) is None
    folder = sample_run(tmp_path / "run")
    (folder / "arguments.json").write_text("{}")  # of the command line, which knows the data
    trained = read_run(folder, "run")
    found = verdict(replace(trained, attacks=(), certificates=()))
    assert found is not None
    assert "no attack has been tried" in found.headline
    assert found.command == f"specguard diagnose {folder}"


def test_the_verdict_of_a_directory_rests_on_its_studies(tmp_path):
    found = verdict(read_run(sample_run(tmp_path / "run"), "run"))
    assert found is not None
    assert "blocks." in found.sentences[2]


def test_studies_of_another_model_count_for_nothing():
    other = About(model="other", data="f00d", dataset="digits", n=100)
    found = judge(attacked({("linf", 4 / 255): 0}, about=other), attacked({("linf", 4 / 255): 70}))
    assert found.headline.startswith("Robust")


def test_larger_studies_replace_smaller_ones_and_never_by_a_kinder_number():
    points = evidence(run(attacked({("l2", 0.25): 60}), attacked({("l2", 0.25): 50}))).attacked
    assert [point.accuracy.count for point in points] == [50]
    more = evidence(run(attacked({("l2", 0.25): 50}), attacked({("l2", 0.25): 500}, clean=800, n=1000))).attacked
    assert [point.accuracy.n for point in more] == [1000]


def test_a_weak_attack_on_many_images_does_not_hide_a_strong_one_on_fewer():
    strong = attacked({("linf", 4 / 255): 5}, names=("apgd-ce", "square"))
    weak = attacked({("linf", 4 / 255): 700}, clean=800, n=1000, names=("fgsm",))
    for both in ((strong, weak), (weak, strong)):
        found = judge(*both)
        assert found.headline.startswith("Not robust: attacks at linf 4/255 leave 5.0 %")
        assert "apgd-ce, square" in found.sentences[0]


def test_the_clean_accuracy_of_the_training_counts_only_beside_studies_of_the_same_data(tmp_path):
    trained = read_run(sample_run(tmp_path / "run"), "run")
    assert trained.training is not None
    own = trained.attacks[0].summary
    about_other = msgspec.structs.replace(own.study.about, data="elsewhere")
    study = msgspec.structs.replace(own.study, about=about_other)
    few = msgspec.structs.replace(own, study=study, clean=Accuracy.of(3, own.n))
    none = dict.fromkeys(("certificates", "smoothing", "spectra", "sensitivity", "checks"), ())
    assert evidence(replace(trained, attacks=(FoundAttack("attacks/elsewhere", few),), **none)).clean == few.clean


def test_an_attack_of_one_step_makes_no_model_robust_but_breaks_one():
    found = judge(attacked({("linf", 4 / 255): 75}, names=("fgsm",)))
    assert found.headline == (
        "Open: 75.0 % [65.7, 82.5], n = 100, remain at linf 4/255 under fgsm, too weak an attack to decide."
    )
    assert found.command == "specguard attack runs/mine --norm linf --radius 4/255 --suite full"
    assert judge(attacked({("linf", 4 / 255): 75}, names=("fgsm", "pgd"))).headline.startswith("Robust")
    assert judge(attacked({("linf", 4 / 255): 2}, names=("fgsm",))).headline.startswith("Not robust")


def test_a_check_of_other_images_leaves_the_certificates_to_be_checked():
    some = (proved({0.25: 60}),)
    other = example_checks(1000)  # of other certificates
    assert judge(certificates=some, checks=other).command == judge(certificates=some).command


def test_the_command_names_the_model_as_the_study_did():
    command = "specguard diagnose timm:vit_tiny --weights 'my weights.pt' --data cifar10 --data-root d --minutes 5"
    found = replace(
        attacked({("linf", 4 / 255): 2}),
        environments=(Environment(command=command),),
    )
    told = verdict(Run("x", attacks=(found,), path=Path("runs/timm-x")))
    assert told is not None
    assert told.command is not None
    assert told.command.startswith(
        "specguard train timm:vit_tiny --weights 'my weights.pt' --data cifar10 --data-root d --recipe robust-"
    )
    assert "--minutes" not in told.command


def test_a_model_of_python_gets_a_command_with_placeholders():
    told = verdict(Run("x", attacks=(attacked({("linf", 4 / 255): 70}),)))
    assert told is not None
    assert told.command == "specguard certify MODEL --data DATA --norm linf --radius 2/255"


@pytest.mark.parametrize(
    ("radius", "text"),
    [
        (4 / 255, "4/255"),
        (0.25, "0.25"),
        (36 / 255, "36/255"),
        (0.1, "0.1"),
        (0.123456, "0.123"),
        (0.5 / 255, "0.5/255"),
    ],
)
def test_radii_are_written_as_people_write_them(radius, text):
    assert radius_text(radius) == text


def test_the_verdict_is_text_that_ends_with_the_command():
    found = judge(attacked({("linf", 4 / 255): 2}))
    assert str(found).splitlines()[0] == found.headline
    assert str(found).splitlines()[-1] == f"next: {found.command}"


def test_no_torch_is_imported():
    code = "import sys; import specguard.report.verdict; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

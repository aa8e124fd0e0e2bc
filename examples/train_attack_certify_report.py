"""The whole chain on real digits: train against an attacker, attack, certify, and write a report to look at.

python examples/train_attack_certify_report.py [FOLDER]
"""

import sys
from pathlib import Path

import torch

from specguard import PGD, Ball, SpectralNorm, ViT, from_run, preset
from specguard.attacks import Suite
from specguard.data import Dataset, digits
from specguard.records.attack import AttackSettings
from specguard.records.certificate import CertifySettings
from specguard.report import write_report
from specguard.studies import about_study, run_attack, run_certify, write_gallery
from specguard.train import AdamW, PGDTraining, Training, train

CPU = torch.device("cpu")


def main(folder: Path, epochs: int = 4) -> None:
    data = digits()
    ball = Ball("l2", 0.1)
    training = Training(
        epochs=epochs,
        batch=64,
        optimizer=AdamW(lr=5e-3),
        objective=PGDTraining(ball, steps=3, ramp=2.0),
        penalties=(SpectralNorm(0.03),),
    )
    run = folder / "robust"
    train(
        ViT(preset("tiny_smooth"), torch.Generator().manual_seed(0)), data, run, training, device=CPU, resume=True
    )

    model = from_run(run)
    test = Dataset(data.test.images[:60], data.test.labels[:60])
    about, balls = about_study(model, data, test), (ball, Ball("l2", 0.5))
    suite, settings = Suite((("pgd", PGD(steps=20)),)), AttackSettings(diagnose=False)
    run_attack(model, test, data.classes, run / "attacks", suite, balls, settings, about=about, device=CPU)
    write_gallery(model, test, data.classes, run / "attacks", suite, balls, settings, device=CPU)
    proofs = CertifySettings((0.02, 0.05, 0.1), methods=("lofast", "adjoint"))
    result = run_certify(model, test, run / "proofs", proofs, about=about, device=CPU)

    last = result.radii[-1]
    verdicts = f"{last.certified.count} certified, {last.broken} misclassified under attack, {last.unknown} unknown"
    print(f"{verdicts}, of {result.n}")
    print(f"report in {write_report({'robust': run}, folder / 'report.html')}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example"))

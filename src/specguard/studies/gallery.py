"""A few adversarial examples of a study, stored for viewing.

gallery/pictures.json        which images, by which attack, and the predictions before and after
gallery/images.safetensors   clean and adversarial images, and attention rollouts, in the same order
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from specguard.attacks import Suite
from specguard.data import Dataset
from specguard.errors import RunError
from specguard.geometry import Ball
from specguard.records.attack import AttackRecord, AttackSettings, Gallery, Outcome, Picture
from specguard.records.files import folder_below, locked
from specguard.records.io import each_record, write_record
from specguard.records.ledger import RECORDS
from specguard.records.shards import WHOLE, Shard, StudyFolder
from specguard.records.store import write_tensors
from specguard.studies.rollout import attention_rollout

_PICTURES = 6
Key = tuple[str, str, float]  # attack, norm, radius


def write_gallery(
    model: nn.Module,
    split: Dataset,
    classes: tuple[str, ...],
    folder: Path | str,
    suite: Suite,
    balls: tuple[Ball, ...],
    settings: AttackSettings,
    *,
    device: torch.device,
    shard: Shard = WHOLE,
) -> None:
    """Repeat the first successful attacks of a complete study, and store the adversarial images.

    Random numbers are addressed by image, so the same perturbations are found again. An image is left out if
    rounding, which depends on the batch, makes its attack fail. An existing gallery is not changed.

    Args:
        model: The attacked model; it is moved to `device`.
        split: The images of the study.
        classes: Names of the classes.
        folder: The folder of the study of `run_attack`.
        suite: The attacks of the study.
        balls: The balls of the study.
        settings: The settings of the study.
        device: Where the attacks run.
        shard: The shard of this process.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.attacks import PGD
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> from specguard.studies import about_study, run_attack
        >>> model, data = ViT(preset("tiny_smooth"), torch.Generator().manual_seed(0)).eval(), digits()
        >>> split = data.take(1, first=True)
        >>> about = about_study(model, data, split)
        >>> suite, balls = Suite((("pgd", PGD(steps=2)),)), (Ball("l2", 0.1),)
        >>> settings, cpu = AttackSettings(diagnose=False), torch.device("cpu")
        >>> with TemporaryDirectory() as folder:
        ...     study = (model, split, data.classes, Path(folder), suite, balls, settings)
        ...     summary = run_attack(*study, about=about, device=cpu)
        ...     write_gallery(*study, device=cpu)
        ...     (Path(folder) / "gallery" / "pictures.json").exists()
        True
    """
    folder = Path(folder)
    place, study = folder / "gallery", StudyFolder(folder, shard)
    with locked(folder, shared=not study.alone), study.together(), torch.no_grad():
        if (place / "pictures.json").exists():
            return
        model = model.to(device).eval()
        positions = {sample: position for position, sample in enumerate(split.samples.tolist())}
        attacks = dict(suite.attacks)
        known: dict[Key, Ball] = {(name, b.norm, b.radius): b for name in attacks for b in balls}
        chosen = _chosen(each_record(folder / RECORDS, AttackRecord))
        if not (chosen.keys() <= known.keys() and all(s in positions for some in chosen.values() for s in some)):
            raise RunError(f"{folder} holds records that do not belong to this evaluation")
        pictures: list[Picture] = []
        found: list[tuple[Tensor, Tensor]] = []
        for (name, norm, radius), samples in chosen.items():
            index = torch.tensor([positions[sample] for sample in samples])
            images, labels = (part.to(device) for part in split.batch(index))
            result = attacks[name](
                model,
                images,
                labels,
                known[name, norm, radius],
                ids=torch.tensor(samples, device=device),
                seed=settings.seed,
                precision=settings.precision,
            )
            confidence = [model(x).softmax(1).amax(1).tolist() for x in (images, result.images)]
            for i in result.success.nonzero()[:, 0].tolist():
                pictures.append(
                    Picture(
                        sample=samples[i],
                        attack=name,
                        norm=known[name, norm, radius].norm,
                        radius=radius,
                        distance=float(result.distance[i]),
                        label=classes[int(labels[i])],
                        predicted=classes[int(result.predicted[i])],
                        confidence=(confidence[0][i], confidence[1][i]),
                    )
                )
                found.append((images[i].float().cpu(), result.images[i].float().cpu()))
        folder_below(folder, "gallery")
        write_tensors(place / "images.safetensors", _tensors(model, found, device))
        write_record(place / "pictures.json", Gallery(pictures=tuple(pictures)))


def _chosen(records: Iterable[AttackRecord]) -> dict[Key, list[int]]:
    """By attack and ball: images that an attack misclassifies, each at its smallest ball, from many classes."""
    first: dict[int, tuple[int, Outcome]] = {}
    for record in records:
        if record.clean == record.label:
            for outcome in record.outcomes:
                _, known = first.get(record.sample, (0, None))
                nearer = known is None or (known.norm == outcome.norm and outcome.radius < known.radius)
                if outcome.success and nearer:
                    first[record.sample] = (record.label, outcome)
    seen: dict[int, int] = {}
    ranked = []
    for sample in sorted(first):
        label = first[sample][0]
        seen[label] = seen.get(label, 0) + 1
        ranked.append((seen[label], sample))
    chosen: dict[Key, list[int]] = {}
    for _, sample in sorted(ranked)[:_PICTURES]:
        outcome = first[sample][1]
        chosen.setdefault((outcome.attack, outcome.norm, outcome.radius), []).append(sample)
    return chosen


def _tensors(model: nn.Module, found: list[tuple[Tensor, Tensor]], device: torch.device) -> dict[str, Tensor]:
    if not found:
        return {}
    clean, adversarial = (torch.stack(images) for images in zip(*found, strict=True))
    tensors = {"clean": clean, "adversarial": adversarial}
    for name, images in tuple(tensors.items()):
        rollout = attention_rollout(model, images.to(device))
        if rollout is not None:
            tensors[f"attention_{name}"] = rollout.cpu()
    return tensors

"""A few broken images of an evaluation, kept so that a person can look at them.

gallery/pictures.json        which images, by which attack, and what the model saw before and after
gallery/images.safetensors   clean and adversarial images, and where the model looked, in the same order
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from specguard.data import Dataset
from specguard.errors import RunError
from specguard.nn import Classifier
from specguard.records.files import folder_below
from specguard.records.store import Json, locked, read_lines, write_json, write_tensors
from specguard.studies.attack import Evaluation
from specguard.studies.rollout import attention_rollout
from specguard.studies.shards import WHOLE, Place, Shard

_PICTURES = 6


def gallery(
    model: Classifier,
    split: Dataset,
    classes: tuple[str, ...],
    folder: Path,
    evaluation: Evaluation,
    *,
    device: torch.device,
    shard: Shard = WHOLE,
) -> None:
    """Attack the first broken images of a complete evaluation again, and keep what they look like.

    Random numbers belong to the image, so that the same perturbation is found again. Where sums that depend on the
    batch lead elsewhere, and nothing is broken, the image is left out. A gallery that is there is left as it is.
    """
    place, study = folder / "gallery", Place(folder, shard)
    with locked(folder, shared=not study.alone), study.together(), torch.no_grad():
        if (place / "pictures.json").exists():
            return
        model = model.to(device).eval()
        positions = {sample: position for position, sample in enumerate(split.samples.tolist())}
        known = {(name, b.norm, b.radius) for name, _ in evaluation.suite.attacks for b in evaluation.balls}
        try:
            chosen = _chosen(read_lines(folder / "records.jsonl"))
        except (KeyError, TypeError) as error:
            raise RunError(f"{folder} holds records that are none of an evaluation") from error
        if not (chosen.keys() <= known and all(sample in positions for some in chosen.values() for sample in some)):
            raise RunError(f"{folder} holds records that do not belong to this evaluation")
        pictures: list[Json] = []
        found: list[tuple[Tensor, Tensor]] = []
        for (name, norm, radius), samples in chosen.items():
            attack = dict(evaluation.suite.attacks)[name]
            ball = next(b for b in evaluation.balls if (b.norm, b.radius) == (norm, radius))
            index = torch.tensor([positions[sample] for sample in samples])
            images, labels = (part.to(device) for part in split.batch(index))
            ids = torch.tensor(samples, device=device)
            result = attack(
                model, images, labels, ball, ids=ids, seed=evaluation.seed, precision=evaluation.precision
            )
            confidence = [model(x).softmax(1).amax(1).tolist() for x in (images, result.images)]
            for i in result.success.nonzero()[:, 0].tolist():
                pictures.append(
                    {
                        "sample": samples[i],
                        "attack": name,
                        "norm": norm,
                        "radius": radius,
                        "distance": float(result.distance[i]),
                        "label": classes[int(labels[i])],
                        "predicted": classes[int(result.predicted[i])],
                        "confidence": [confidence[0][i], confidence[1][i]],
                    }
                )
                found.append((images[i].float().cpu(), result.images[i].float().cpu()))
        folder_below(folder, "gallery")
        write_tensors(place / "images.safetensors", _tensors(model, found, device))
        write_json(place / "pictures.json", {"pictures": pictures})


def _chosen(records: Iterable[Json]) -> dict[tuple[str, str, float], list[int]]:
    """By attack and ball: images that were right and fell, each at the first ball; of many classes."""
    first: dict[int, Json] = {}
    for record in records:
        if record["broken"] and record["before"] == record["label"]:
            known = first.get(record["sample"])
            if known is None or (known["norm"] == record["norm"] and record["radius"] < known["radius"]):
                first[record["sample"]] = record
    seen: dict[int, int] = {}
    ranked = []
    for sample in sorted(first):
        label = first[sample]["label"]
        seen[label] = seen.get(label, 0) + 1
        ranked.append((seen[label], sample))
    chosen: dict[tuple[str, str, float], list[int]] = {}
    for _, sample in sorted(ranked)[:_PICTURES]:
        record = first[sample]
        chosen.setdefault((record["attack"], record["norm"], record["radius"]), []).append(sample)
    return chosen


def _tensors(model: nn.Module, found: list[tuple[Tensor, Tensor]], device: torch.device) -> dict[str, Tensor]:
    if not found:
        return {}
    clean, adversarial = (torch.stack(images) for images in zip(*found, strict=True))
    tensors = {"clean": clean, "adversarial": adversarial}
    for name, images in tuple(tensors.items()):
        looked = attention_rollout(model, images.to(device))
        if looked is not None:
            tensors[f"attention_{name}"] = looked.cpu()
    return tensors

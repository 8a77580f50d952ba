"""Put together the manifest from what the steps left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from build_scripts.calibrate import MEASURED
from build_scripts.convert import FACTS
from build_scripts.plan import Plan
from build_scripts.store import Store
from engines.bundle import (
    CALIBRATION,
    MODEL_BIN,
    MODEL_XML,
    TOKENIZER,
    Backend,
    Cost,
    Host,
    Limits,
    Manifest,
    Model,
    Source,
    Text,
    file_entry,
)


def bundle_files(store: Store) -> list[Path]:
    """Everything that goes into the bundle beside the manifest."""
    converted = [store.folder("convert") / name for name in (MODEL_XML, MODEL_BIN, TOKENIZER)]
    return [*converted, store.folder("calibrate") / CALIBRATION]


def make_manifest(plan: Plan, store: Store, host: Host) -> Manifest:
    spec, source = plan.spec, plan.spec.source
    facts = read_json(store.folder("convert") / FACTS)
    measured = read_json(store.folder("calibrate") / MEASURED)
    return Manifest(
        model=Model(
            name=source.name,
            architecture=facts["architecture"],
            parameters=facts["parameters"],
            config=facts["config"],
            source=Source(
                package=f"{source.package}=={source.version}",
                file=source.file,
                sha256=source.sha256,
                licence=source.licence,
            ),
        ),
        backend=Backend(
            name=spec.backend,
            library="openvino",
            version=host.library_version,
            precision=spec.precision,
            threads=spec.threads,
        ),
        cpu=host.cpu,
        profiles=spec.profiles,
        limits=Limits(**measured["limits"]),
        text=Text(**facts["text"]),
        cost=Cost(**measured["cost"]),
        files=tuple(file_entry(path) for path in bundle_files(store)),
        steps=plan.keys,
    ).sealed()


def read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data

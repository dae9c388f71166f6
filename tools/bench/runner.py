"""Find the areas, run them, print a table, and write everything to a file when asked to."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench import areas

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from tools.bench.measures import Measure

HEADINGS = ("measure", "ours", "peer", "ratio", "limit", "unit")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _options(arguments)
    found = find_areas()
    if options.list:
        for name, area in found.items():
            print(f"{name}: {_title(area)} Cases: {', '.join(area.CASES)}.")
        return 0
    try:
        chosen = [choice for name in options.areas or found for choice in _choose(found, name)]
        if options.json is not None and not options.json.absolute().parent.is_dir():
            raise ValueError(f"--json {options.json}: the folder does not exist.")
        if options.device == "cuda":
            _check_cuda()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results: list[dict[str, Any]] = []
    for area, case in chosen:
        measures = list(found[area].CASES[case](options.device))
        print(f"\n{area}/{case}, {options.device}\n{table(measures)}", flush=True)
        results += [
            {"area": area, "case": case} | asdict(measure) | {"ratio": measure.ratio}
            for measure in measures
        ]
    for area in dict.fromkeys(area for area, _ in chosen):
        print(f"\n{area}: {(found[area].__doc__ or '').strip()}")
    if options.json is not None:
        machine = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "device": options.device,
        }
        options.json.write_text(json.dumps(machine | {"measures": results}, indent=1) + "\n")
    return 0


def find_areas() -> dict[str, ModuleType]:
    """Return the modules of all areas by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(areas.__path__))
    return {name.rstrip("_"): importlib.import_module(f"{areas.__name__}.{name}") for name in names}


def table(measures: Sequence[Measure]) -> str:
    """Lay out measures under `HEADINGS`; a dash stands where there is nothing to compare with."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for measure in measures:
        numbers = (measure.ours, measure.peer, measure.ratio, measure.limit)
        rows.append((measure.name, *map(_number, numbers), measure.unit))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = []
    for name, *numbers, unit in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells, unit]).rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _choose(found: dict[str, ModuleType], choice: str) -> list[tuple[str, str]]:
    name, _, case = choice.partition("/")
    if name not in found:
        raise ValueError(f"Unknown area {name!r}: choose among {', '.join(found)}.")
    cases = found[name].CASES
    if case and case not in cases:
        raise ValueError(f"Unknown case {case!r} of {name}: choose among {', '.join(cases)}.")
    return [(name, known) for known in cases if case in ("", known)]


def _title(area: ModuleType) -> str:
    return (area.__doc__ or "").strip().splitlines()[0]


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU that torch can use.")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hatch run bench", description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA[/CASE]", help="default: all areas")
    parser.add_argument("--list", action="store_true", help="list areas and cases, run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measures here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args(arguments)

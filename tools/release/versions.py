"""Levels of changes, the versions that follow from them, and ranges that let these in."""

from enum import IntEnum
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


class Level(IntEnum):
    """How much a change means to users."""

    NONE = 0
    FIX = 1
    FEATURE = 2
    BREAKING = 3


# What changelog fragments are named for.
FRAGMENT_LEVELS = {
    "breaking": Level.BREAKING,
    "feature": Level.FEATURE,
    "fix": Level.FIX,
    "doc": Level.FIX,
}


def raise_version(version: Version, level: Level) -> Version:
    """Return the version that follows one with changes of this level.

    Below 1.0 a break raises the minor version and everything else the patch version; from 1.0 on,
    a break raises the major version and a feature the minor one.

    Example:
        >>> [str(raise_version(Version("0.1.4"), level)) for level in Level]
        ['0.1.4', '0.1.5', '0.1.5', '0.2.0']
        >>> [str(raise_version(Version("1.2.3"), level)) for level in Level]
        ['1.2.3', '1.2.4', '1.3.0', '2.0.0']
    """
    major, minor, patch = version.major, version.minor, version.micro
    if level == Level.BREAKING:
        return Version(f"{major + 1}.0.0" if major else f"0.{minor + 1}.0")
    if level == Level.FEATURE and major:
        return Version(f"{major}.{minor + 1}.0")
    return Version(f"{major}.{minor}.{patch + 1}") if level else version


def admits(requirement: str, version: Version) -> bool:
    """Tell whether a requirement lets a version in, pre-releases like any other."""
    parsed = Requirement(requirement)
    return parsed.url is None and parsed.specifier.contains(version, prereleases=True)


def require(requirement: str, version: Version) -> str:
    """Rewrite a requirement so that it lets in a version and those compatible with it.

    Example:
        >>> require("trl-x[fast]>=0.1,<0.2; python_version < '3.13'", Version("0.2.1"))
        'trl-x[fast]>=0.2.1,<0.3; python_version < "3.13"'
        >>> require("trl-x~=1.1", Version("2.0.0"))
        'trl-x>=2.0,<3'
    """
    parsed = Requirement(requirement)
    short = ".".join(map(str, version.release[: 3 if version.micro else 2]))
    lower = str(version) if version.is_prerelease else short
    upper = str(version.major + 1) if version.major else f"0.{version.minor + 1}"
    extras = f"[{','.join(sorted(parsed.extras))}]" if parsed.extras else ""
    marker = f"; {parsed.marker}" if parsed.marker else ""
    return f"{parsed.name}{extras}>={lower},<{upper}{marker}"


def rewrite(manifest: Path, changes: dict[str, str]) -> None:
    """Replace requirements in a pyproject.toml, and leave all else as it is written."""
    import tomlkit

    document = tomlkit.parse(manifest.read_text(encoding="utf-8"))
    project = document["project"]
    lists = [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]
    for requirements in lists:
        for i, text in enumerate(requirements):
            requirements[i] = changes.get(str(text), text)
    manifest.write_text(tomlkit.dumps(document), encoding="utf-8")


def pin_lowest(requirement: Requirement) -> list[str]:
    """Pin a requirement to the lowest version that its range states, if it states one.

    Example:
        >>> pin_lowest(Requirement("jinja2>=3.1.6,<4")), pin_lowest(Requirement("jinja2<4"))
        (['jinja2==3.1.6'], [])
    """
    lower = (c.version for c in requirement.specifier if c.operator in (">=", "==", "~="))
    return [f"{requirement.name}=={version}" for version in lower]

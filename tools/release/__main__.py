"""The release tool's commands; CONTRIBUTING.md says when to use which."""

import argparse
import json
import sys

from tools.rails.environments import ROOT
from tools.release.affected import find_affected
from tools.release.bumping import bump
from tools.release.checking import check
from tools.release.commands import ReleaseError
from tools.release.members import load_members
from tools.release.planning import Move, make_plan
from tools.release.publishing import publish
from tools.release.rehearsing import rehearse
from tools.release.status import Status, read_status


def _parse(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hatch run release:<command>")
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="what came since each package's last release")
    status.add_argument("--json", action="store_true")
    commands.add_parser("plan", help="which packages move, where to, and why")
    commands.add_parser("bump", help="do what `plan` says, in one commit")
    affected = commands.add_parser("affected", help="the packages to test after a change")
    affected.add_argument("base", help="the commit to compare HEAD with")
    checked = commands.add_parser("check", help="build, examine and test what users would install")
    checked.add_argument("packages", nargs="*", metavar="package", help=f"of {names}; all if none")
    published = commands.add_parser("publish", help="upload what was checked, and tag it")
    published.add_argument("--index", required=True, help="the simple index's URL")
    published.add_argument("--upload", required=True, help="the URL to upload to")
    published.add_argument("--dry-run", action="store_true", help="say what would be done")
    rehearsed = commands.add_parser("rehearse", help="a release of one package, on this machine")
    rehearsed.add_argument("package", choices=names, nargs="?", default="trl-redirect")
    arguments = parser.parse_args()
    unknown = set(getattr(arguments, "packages", ())) - set(names)
    if unknown:
        parser.error(f"There is no {', '.join(sorted(unknown))}: choose of {', '.join(names)}.")
    return arguments


def _print_status(statuses: list[Status], as_json: bool) -> None:
    found = [status.as_dict() for status in statuses]
    if as_json:
        _say(json.dumps(found, indent=2))
    for one in [] if as_json else found:
        counts = f"{len(one['fragments'])} fragments, {len(one['shipped'])} shipped files changed"
        state = f"released {one['released'] or '-':8} {one['state']} ({one['level']})"
        _say(f"{one['name']:15} {state}, {counts}")
    problems = [status.problem for status in statuses if status.problem]
    if problems:
        raise ReleaseError("\n".join(problems))


def _print_plan(moves: list[Move]) -> None:
    for move in moves:
        old = move.status.released or "unreleased"
        _say(f"{move.name} {old} -> {move.version} ({move.level.name.lower()})")
        changes = [f"{before} becomes {after}" for before, after in move.ranges.items()]
        for line in [*move.reasons, *changes]:
            _say(f"    {line}")
    if not moves:
        _say("Nothing moves.")


def _run() -> None:
    members = load_members(ROOT)
    arguments = _parse(list(members))
    statuses = {}
    if arguments.command in ("status", "plan", "bump", "publish"):
        statuses = {name: read_status(ROOT, member) for name, member in members.items()}
    match arguments.command:
        case "status":
            _print_status(list(statuses.values()), arguments.json)
        case "plan":
            _print_plan(make_plan(statuses))
        case "bump":
            moves = make_plan(statuses)
            bump(ROOT, moves)
            _print_plan(moves)
        case "affected":
            _say(json.dumps(find_affected(ROOT, members, arguments.base)))
        case "check":
            for name in members:
                if name in arguments.packages or not arguments.packages:
                    check(ROOT, members, name, _say)
        case "publish":
            where = (arguments.index, arguments.upload)
            publish(ROOT, statuses.values(), *where, _say, dry_run=arguments.dry_run)
        case "rehearse":
            rehearse(ROOT, arguments.package, _say)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        _run()
    except ReleaseError as error:
        sys.exit(f"error: {error}")

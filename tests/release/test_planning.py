"""Which packages a release moves, and the versions and ranges that they get."""

import pytest
from packaging.version import Version

from tools.rails.environments import ROOT
from tools.release.commands import ReleaseError
from tools.release.members import Member, load_members
from tools.release.planning import make_plan
from tools.release.status import Status
from tools.release.versions import Level, admits, raise_version, require

V1 = Version("0.1.0")


def stand(members, changes):
    """Everything released as it is; then these packages changed at these levels."""
    statuses = {}
    for name, member in members.items():
        statuses[name] = Status(member, member.version, heading=str(member.version))
        if name in changes:
            statuses[name].fragments = {f"x.{changes[name].name.lower()}.md": changes[name]}
    return statuses


def moves_of(changes, members=None):
    plan = make_plan(stand(members or load_members(ROOT), changes))
    return {move.name: str(move.version) for move in plan}


@pytest.fixture
def members():
    """This repository's packages as they are at 0.1.0."""
    return {
        name: Member(
            name,
            member.folder,
            V1,
            [f"{sibling}>=0.1,<0.2" for sibling in member.needs],
            member.reexports,
        )
        for name, member in load_members(ROOT).items()
    }


def test_the_graph_of_this_repository():
    members = load_members(ROOT)
    assert {name: member.needs for name, member in members.items() if member.needs} == {
        "trl-prepare": ["trl-zero3"],
        "trl-models": [
            *("trl-chatformat", "trl-prepare", "trl-redirect", "trl-valuehead", "trl-zero3"),
        ],
    }
    assert [name for name, member in members.items() if member.reexports] == ["trl-models"]
    order = list(members)
    assert order.index("trl-zero3") < order.index("trl-prepare") < order.index("trl-models")


@pytest.mark.parametrize("level", [Level.FIX, Level.FEATURE])
@pytest.mark.parametrize("name", sorted(load_members(ROOT)))
def test_what_its_users_ranges_let_in_moves_alone(members, name, level):
    assert moves_of({name: level}, members) == {name: "0.1.1"}


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("trl-zero3", {"trl-zero3": "0.2.0", "trl-prepare": "0.1.1", "trl-models": "0.2.0"}),
        ("trl-prepare", {"trl-prepare": "0.2.0", "trl-models": "0.2.0"}),
        ("trl-chatformat", {"trl-chatformat": "0.2.0", "trl-models": "0.2.0"}),
        ("trl-redirect", {"trl-redirect": "0.2.0", "trl-models": "0.2.0"}),
        ("trl-valuehead", {"trl-valuehead": "0.2.0", "trl-models": "0.2.0"}),
        ("trl-models", {"trl-models": "0.2.0"}),
    ],
)
def test_a_break_moves_those_whose_ranges_exclude_it(members, name, moved):
    assert moves_of({name: Level.BREAKING}, members) == moved


def test_several_changes_move_each_package_once_and_in_order(members):
    plan = make_plan(stand(members, {"trl-zero3": Level.BREAKING, "trl-prepare": Level.FEATURE}))
    assert [(move.name, str(move.version)) for move in plan] == [
        ("trl-zero3", "0.2.0"),
        ("trl-prepare", "0.1.1"),
        ("trl-models", "0.2.0"),
    ]
    assert [move.ranges for move in plan] == [
        {},
        {"trl-zero3>=0.1,<0.2": "trl-zero3>=0.2,<0.3"},
        {"trl-zero3>=0.1,<0.2": "trl-zero3>=0.2,<0.3"},
    ]


def test_a_chain_of_exact_pins_moves_to_its_end():
    chain = {
        name: Member(name, ROOT, Version("1.0.0"), siblings)
        for name, siblings in {"a": [], "b": ["a==1.0.0"], "c": ["b==1.0.0"], "d": []}.items()
    }
    assert moves_of({"a": Level.FEATURE}, chain) == {"a": "1.1.0", "b": "1.0.1", "c": "1.0.1"}


def test_a_metapackage_that_moves_anyway_inherits_what_moves_with_it(members):
    members["trl-redirect"].version = members["trl-models"].version = Version("1.0.0")
    members["trl-models"].siblings = [
        "trl-redirect>=1.0,<2" if "redirect" in text else text
        for text in members["trl-models"].siblings
    ]
    changes = {"trl-redirect": Level.FEATURE, "trl-models": Level.FIX}
    assert moves_of(changes, members) == {"trl-redirect": "1.1.0", "trl-models": "1.1.0"}


def test_first_releases_have_the_version_of_their_manifests(members):
    statuses = {name: Status(member) for name, member in members.items()}
    plan = make_plan(statuses)
    assert [move.name for move in plan] == list(members)
    assert {str(move.version) for move in plan} == {"0.1.0"}


def test_a_new_package_joins_released_ones(members):
    statuses = stand(members, {})
    statuses["trl-redirect"] = Status(members["trl-redirect"])
    assert [move.name for move in make_plan(statuses)] == ["trl-redirect"]


def bump(statuses, name, version):
    statuses[name].member.version = Version(version)
    statuses[name].heading = version


def test_what_is_bumped_moves_no_more(members):
    statuses = stand(members, {})
    bump(statuses, "trl-redirect", "0.1.1")
    assert make_plan(statuses) == []
    assert statuses["trl-redirect"].state == "bumped"


def test_what_is_bumped_and_changes_again_is_refused(members):
    statuses = stand(members, {"trl-redirect": Level.FIX})
    bump(statuses, "trl-redirect", "0.1.1")
    with pytest.raises(ReleaseError, match=r"trl-redirect 0\.1\.1 has new fragments"):
        make_plan(statuses)


def test_what_is_bumped_and_no_longer_fits_is_refused(members):
    statuses = stand(members, {"trl-zero3": Level.BREAKING})
    bump(statuses, "trl-prepare", "0.1.1")
    with pytest.raises(ReleaseError, match=r"trl-prepare 0\.1\.1: .* excludes 0\.2\.0"):
        make_plan(statuses)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shipped": ["README.md"]}, "has no changelog fragment"),
        (
            {"shipped": ["src/x.py"], "api": Level.BREAKING, "fragments": {"a.fix.md": Level.FIX}},
            "fragments say fix, but its API's difference from 0.1.0 is breaking",
        ),
        (
            {"shipped": ["src/x.py"], "api": Level.FEATURE, "fragments": {"a.doc.md": Level.FIX}},
            "fragments say fix, but its API's difference from 0.1.0 is feature",
        ),
    ],
)
def test_problems_are_named_and_stop_the_plan(members, change, message):
    statuses = stand(members, {})
    for key, value in change.items():
        setattr(statuses["trl-zero3"], key, value)
    assert message in statuses["trl-zero3"].problem
    with pytest.raises(ReleaseError, match="trl-zero3"):
        make_plan(statuses)


def test_a_version_that_was_written_by_hand_is_refused(members):
    statuses = stand(members, {})
    statuses["trl-zero3"].member.version = Version("0.3.0")
    with pytest.raises(
        ReleaseError, match=r"manifest says 0\.3\.0, and its last release is 0\.1\.0"
    ):
        make_plan(statuses)


@pytest.mark.parametrize(
    ("old", "level", "new"),
    [
        ("0.1.0", Level.BREAKING, "0.2.0"),
        ("0.9.3", Level.BREAKING, "0.10.0"),
        ("0.1.9", Level.FEATURE, "0.1.10"),
        ("1.4.2", Level.BREAKING, "2.0.0"),
        ("1.4.2", Level.FEATURE, "1.5.0"),
        ("1.4.2", Level.FIX, "1.4.3"),
        ("1.4.2", Level.NONE, "1.4.2"),
    ],
)
def test_versions_that_follow(old, level, new):
    assert str(raise_version(Version(old), level)) == new


@pytest.mark.parametrize(
    ("requirement", "version", "inside"),
    [
        ("a", "9", True),
        ("a>=0.1", "0.2.0", True),
        ("a>=0.1,<0.2", "0.1.9", True),
        ("a>=0.1,<0.2", "0.2.0", False),
        ("a~=0.1.0", "0.1.7", True),
        ("a~=0.1.0", "0.2.0", False),
        ("a~=0.1", "0.9.0", True),
        ("a==0.1.*", "0.1.5", True),
        ("a==0.1.*", "0.2.0", False),
        ("a==0.1.0", "0.1.1", False),
        ("a===0.1.0", "0.1.1", False),
        ("a!=0.2.0", "0.2.0", False),
        ("a>0.1.0", "0.1.0", False),
        ("a<=0.2", "0.2.0", True),
        ("a>=0.1,<0.3", "0.2.0rc1", True),
        ("a[x,y]>=0.1,<0.2 ; python_version < '3.13'", "0.1.1", True),
        ("a @ file:///a.whl", "0.1.0", False),
    ],
)
def test_ranges_of_every_form(requirement, version, inside):
    assert admits(requirement, Version(version)) is inside
    rewritten = require(requirement, Version(version))
    assert admits(rewritten, Version(version))
    assert admits(rewritten, raise_version(Version(version), Level.FIX))
    assert not admits(rewritten, raise_version(Version(version), Level.BREAKING))


def test_extras_and_markers_of_a_range_stay():
    old = "a[y,x]>=0.1,<0.2; python_version < '3.13'"
    assert require(old, Version("1.2.0")) == 'a[x,y]>=1.2,<2; python_version < "3.13"'

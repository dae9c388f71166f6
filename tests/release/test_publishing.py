"""What was checked is uploaded once, in order, and tagged, wherever a run was cut short."""

import http.client
import http.server
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from tests.release.test_building import build
from tests.release.throwaway import release_python
from tools.release.checking import write_record
from tools.release.members import load_members
from tools.release.rehearsing import serve


def bump_and_check(released, folder, changes):
    """Bump what changes, and leave the record that a check of it leaves."""
    repository = released.clone(folder)
    for name, kind in changes.items():
        repository.add_fragment(name, kind)
    repository.commit()
    repository.release("bump")
    for member in load_members(repository.folder).values():
        if str(member.version) != "0.1.0":
            files, _ = build(repository, repository.folder / "dist", member.name)
            write_record(repository.folder, member, map(Path, files))
    return repository


@pytest.fixture(scope="module")
def checked_once(released_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked") / "repository"
    return bump_and_check(released_once, folder, {"trl-redirect": "fix", "trl-zero3": "fix"})


@pytest.fixture
def checked(checked_once, tmp_path):
    """Two packages bumped, and checked."""
    return checked_once.clone(tmp_path / "repository")


class Index:
    """A package index on loopback, behind a gate that can end who talks to it.

    Args:
        server: The index's own port.
        files: Where it keeps its files.
    """

    def __init__(self, server, files):
        self.server, self.files = server, files
        self.uploads = []
        self.client = None
        self.fault = None  # (method, which one, whether the index has done it)
        self.counts = {"GET": 0, "POST": 0}
        gate = self

        class Gate(http.server.BaseHTTPRequestHandler):
            def handle_any(self):
                gate.pass_on(self)

            do_GET = do_POST = handle_any

            def log_message(self, *_):
                pass

        self.gate = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate)
        self.url = f"http://127.0.0.1:{self.gate.server_port}/"

    def pass_on(self, request):
        method = request.command
        self.counts[method] += 1
        hit = self.fault is not None and self.fault[:2] == (method, self.counts[method])
        if hit and not self.fault[2]:
            self.end_client()
            return
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        before = set(self.names())
        onward = http.client.HTTPConnection("127.0.0.1", self.server)
        onward.request(method, request.path, body, dict(request.headers))
        answer = onward.getresponse()
        content = answer.read()
        if method == "POST":
            self.uploads += [*set(self.names()) - before]
        if hit:
            self.end_client()
            return
        request.send_response(answer.status)
        for key in ("Content-Type", "Location"):
            if answer.headers[key]:
                request.send_header(key, answer.headers[key])
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def end_client(self):
        os.killpg(self.client.pid, signal.SIGKILL)

    def names(self):
        return sorted(file.name for file in self.files.iterdir())

    def publish(self, repository, *options):
        """Start publishing to it, and wait; return the exit status and what was printed."""
        self.counts = {"GET": 0, "POST": 0}
        where = ["--index", f"{self.url}simple/", "--upload", self.url]
        self.client = repository.start("publish", *where, *options)
        output, _ = self.client.communicate()
        return self.client.returncode, output


@pytest.fixture
def index(tmp_path):
    with serve(tmp_path / "index", release_python()) as url:
        made = Index(int(url.rsplit(":", 1)[1].strip("/")), tmp_path / "index")
        thread = threading.Thread(target=made.gate.serve_forever)
        thread.start()
        yield made
        made.gate.shutdown()
        thread.join()
        made.gate.server_close()


def expected_files(repository):
    return sorted(
        file.name for file in (repository.folder / "dist").iterdir() if file.suffix != ".json"
    )


def tags_of(repository):
    return {tag for tag in repository.git("tag").split() if not tag.endswith("-v0.1.0")}


def check_published(index, repository):
    assert index.names() == expected_files(repository)
    assert sorted(index.uploads) == index.names()  # each once
    for file in index.files.iterdir():
        assert file.read_bytes() == (repository.folder / "dist" / file.name).read_bytes()
    releases = {name.split("-py3")[0] for name in index.names() if name.endswith(".whl")}
    assert tags_of(repository) == {
        name.replace("_", "-").replace("-0.", "-v0.") for name in releases
    }
    for tag in tags_of(repository):
        assert repository.git("rev-parse", tag) == repository.git("rev-parse", "HEAD")
    assert repository.git("status", "--porcelain") == ""


def test_files_go_in_order_and_tags_follow(released_once, index, tmp_path):
    changes = {"trl-zero3": "breaking"}
    repository = bump_and_check(released_once, tmp_path / "repository", changes)
    status, output = index.publish(repository)
    assert status == 0, output
    check_published(index, repository)
    assert [name.split("-")[0] for name in index.uploads[::2]] == [
        *("trl_zero3", "trl_prepare", "trl_models"),
    ]
    assert [name.endswith(".whl") for name in index.uploads] == [False, True] * 3
    assert tags_of(repository) == {"trl-zero3-v0.2.0", "trl-prepare-v0.1.1", "trl-models-v0.2.0"}
    status, output = index.publish(repository)
    assert status == 1
    assert "Nothing to publish" in output


def test_a_dry_run_changes_nothing(checked, index):
    before = checked.snapshot()
    status, output = index.publish(checked, "--dry-run")
    assert status == 0, output
    assert output.count("would upload") == 4
    assert output.count("would tag") == 2
    assert index.names() == []
    assert checked.snapshot() == before


POINTS = [
    *(("GET", number, done) for number in (1, 2) for done in (False, True)),
    *(("POST", number, done) for number in range(1, 5) for done in (False, True)),
]


@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{p[0]}{p[1]}-{'after' if p[2] else 'before'}"
)
def test_a_run_that_is_killed_is_finished_by_the_next(checked, index, point):
    index.fault = point
    status, _ = index.publish(checked)
    assert status == -signal.SIGKILL
    assert index.names() == sorted(index.uploads)
    index.fault = None
    status, output = index.publish(checked)
    assert status == 0, output
    check_published(index, checked)


@pytest.mark.parametrize("which", [1, 2])
def test_a_tag_that_fails_is_made_by_the_next_run(checked, index, which):
    hook = checked.folder / ".git" / "hooks" / "reference-transaction"
    hook.write_text(
        '#!/bin/sh\n[ "$1" = prepared ] || exit 0\n'
        f'echo x >> "{checked.folder}/../count"\n'
        f'[ "$(wc -l < "{checked.folder}/../count")" -ne {which} ]\n'
    )
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    status, output = index.publish(checked)
    assert status == 1
    assert "git tag" in output
    assert len(tags_of(checked)) == which - 1
    assert len(index.names()) == 2 * which
    status, output = index.publish(checked)
    assert status == 0, output
    check_published(index, checked)


def test_an_upload_that_is_refused_stops_all(checked, index):
    # Of that name already, but no longer listed: the index refuses to take it.
    wheel = next(name for name in expected_files(checked) if name.startswith("trl_zero3-0.1.1-"))
    (index.files / wheel).write_bytes(b"something else")
    status, output = index.publish(checked)
    assert status == 1
    assert f"The index has another {wheel}" in output
    assert index.uploads == []
    assert tags_of(checked) == set()


def test_an_index_that_does_not_answer_stops_all(checked):
    where = ["--index", "http://127.0.0.1:9/simple/", "--upload", "http://127.0.0.1:9/"]
    assert "gave no answer" in checked.refuse("publish", *where)
    assert tags_of(checked) == set()


def forget_the_record(repository):
    next((repository.folder / "dist").glob("trl-zero3-*.json")).unlink()


def change_a_file(repository):
    with next((repository.folder / "dist").glob("trl_zero3-*.whl")).open("ab") as wheel:
        wheel.write(b"x")


def lose_a_file(repository):
    next((repository.folder / "dist").glob("trl_zero3-*.whl")).unlink()


def commit_more(repository):
    readme = repository.member("trl-zero3") / "README.md"
    readme.write_text(readme.read_text() + "\n")
    repository.commit()


@pytest.mark.parametrize("change", [forget_the_record, change_a_file, lose_a_file, commit_more])
def test_what_was_not_checked_is_refused_before_anything_is_uploaded(checked, index, change):
    change(checked)
    status, output = index.publish(checked)
    assert status == 1
    assert "trl-zero3 0.1.1 was not checked as it is now: run `check` on it." in output
    assert index.names() == []
    assert tags_of(checked) == set()


def test_commits_to_other_packages_do_not_matter(checked, index):
    readme = checked.folder / "README.md"
    readme.write_text(readme.read_text() + "\n")
    checked.commit()
    status, output = index.publish(checked)
    assert status == 0, output
    check_published(index, checked)

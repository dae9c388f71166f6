"""Repositories to release from: copies of this one's working tree with a history of their own."""

import json
import os
import shutil
import subprocess

from tools.rails.environments import ROOT, hatch_environment

NAMES = (
    *("trl-chatformat", "trl-models", "trl-prepare"),
    *("trl-redirect", "trl-valuehead", "trl-zero3"),
)


def release_python():
    """Return the interpreter that has what the release tool needs."""
    return hatch_environment("release")[0]


class Repository:
    """A repository to change and release.

    Args:
        folder: Where it is.
    """

    def __init__(self, folder):
        self.folder = folder

    @classmethod
    def copy_tree(cls, folder):
        """Copy this repository's working tree, and commit it as the first release of everything."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        repository = cls(folder)
        repository.git("init", "--quiet", "--initial-branch", "main")
        repository.git("config", "user.name", "Test")
        repository.git("config", "user.email", "test@localhost")
        for name in NAMES:
            for fragment in (repository.member(name) / "changelog.d").glob("*.md"):
                fragment.unlink()
            changelog = repository.member(name) / "CHANGELOG.md"
            changelog.write_text(changelog.read_text() + "\n## 0.1.0 (2026-01-01)\n")
        repository.commit("Release everything")
        for name in NAMES:
            repository.git("tag", f"{name}-v0.1.0")
        return repository

    def clone(self, folder):
        """Return a copy of it."""
        shutil.copytree(self.folder, folder)
        return Repository(folder)

    def member(self, name):
        """Return a package's folder."""
        return self.folder / "packages" / name

    def source(self, name):
        """Return a package's outermost module."""
        return self.member(name) / "src" / name.replace("-", "_") / "__init__.py"

    def add_fragment(self, name, kind, text="Something changed."):
        """Write a changelog fragment."""
        (self.member(name) / "changelog.d" / f"change.{kind}.md").write_text(f"{text}\n")

    def edit(self, file, old, new):
        """Replace a text that a file has once."""
        text = file.read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
        file.write_text(text.replace(old, new))

    def git(self, *arguments):
        """Run git and return what it printed."""
        done = subprocess.run(
            ["git", *arguments], cwd=self.folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self, message="A change"):
        """Commit all changes."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def start(self, *arguments):
        """Start the release tool, in a process group of its own."""
        return subprocess.Popen(
            [release_python(), "-m", "tools.release", *arguments],
            cwd=self.folder,
            env=os.environ | {"TWINE_USERNAME": "x", "TWINE_PASSWORD": "x"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def release(self, *arguments):
        """Run the release tool and return what it printed."""
        process = self.start(*arguments)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return output

    def refuse(self, *arguments):
        """Run the release tool, which must refuse, and return why."""
        process = self.start(*arguments)
        output, _ = process.communicate()
        assert process.returncode == 1, output
        assert "tools/release/" not in output, output  # no traceback of its own
        return output

    def status(self):
        """Return what `status` says of each package."""
        process = self.start("status", "--json")
        output, _ = process.communicate()
        return {one["name"]: one for one in json.JSONDecoder().raw_decode(output)[0]}

    def snapshot(self):
        """Return all files that git would see, and where the branch and the tags are."""
        names = self.git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        files = {name: (self.folder / name).read_bytes() for name in names}
        return files, self.git("show-ref")

"""Files beside the package agree with it: versions, oldest versions, licence, Dockerfile."""

import re
import tomllib
from pathlib import Path

import eagle_kit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normalized(package):
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def pinned(name):
    """Versions by package of a constraints file."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {normalized(package): version for package, version in pairs}


def requirements(*extras):
    """Lower bounds by package of the core and of some extras."""
    words = list(PROJECT["dependencies"])
    for extra in extras:
        words += PROJECT["optional-dependencies"][extra]
    found = {}
    for word in words:
        match = re.match(r"([\w.-]+)>=([\d.]+)", word)
        if match:
            found[normalized(match[1])] = match[2]
    return found


def numbers(version):
    """A version as numbers, without zeros at its end."""
    found = [int(part) for part in version.split(".")]
    while found and found[-1] == 0:
        found.pop()
    return found


def test_the_version_is_one_and_has_an_entry_in_the_changelog():
    assert PROJECT["version"] == eagle_kit.__version__
    assert f"## {eagle_kit.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_oldest_versions_are_the_lower_bounds():
    oldest = pinned("constraints-oldest.txt")
    bounds = requirements("train", "serve") | {"triton": requirements("dev")["triton"]}
    for package, version in oldest.items():
        assert numbers(version) == numbers(bounds[package]), package
    assert set(requirements()) <= set(oldest)


def test_what_ci_ran_with_is_allowed():
    bounds = requirements("train", "serve", "eval", "dev", "docs")
    versions = pinned("constraints.txt")
    for package, bound in bounds.items():
        found = [int(part) for part in re.findall(r"\d+", versions[package])[:3]]
        assert found >= numbers(bound), package
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "://" not in text and "+" not in text, "an index or a build of one machine"


def test_the_table_of_versions_is_that_of_the_constraints():
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    oldest = pinned("constraints-oldest.txt")
    newest = pinned("constraints.txt")
    for package in ("torch", "triton", "transformers"):
        first, last = (".".join(each[package].split(".")[:2]) for each in (oldest, newest))
        assert f"| {package} | {first} | {last} |" in page


def test_the_licence_is_whole_and_named():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0" and "Apache License" in text and "END OF TERMS" in text


def test_what_the_dockerfile_copies_is_there():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source


LABORATORY = re.compile(r"^\s*(?:from|import) (benchmarks|kernel_lab|recipes|tests)\b", re.MULTILINE)


def test_nothing_in_the_package_imports_its_laboratory():
    """import-linter finds static imports; here texts of programs that the package starts count, too."""
    found = []
    for path in (ROOT / "eagle_kit").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if LABORATORY.search(text) or re.search(r'"(benchmarks|kernel_lab|recipes)[".]', text):
            found.append(str(path.relative_to(ROOT)))
    assert found == []

"""Put into wheel and sdist what git tracks, and nothing else; in the wheel the examples are part of the package.

A package index shows the README without its relative links, which lead nowhere there.

Without git, as when a wheel is built from the sdist, every file that is here counts as tracked.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]+\)")


class BuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # it leads to this folder, where everything is
        for file in project_files(Path(self.root)):
            if self.target_name == "sdist" or file.startswith("whitney_loop/"):
                build_data["force_include"][file] = file
            elif file.startswith("examples/"):
                build_data["force_include"][file] = f"whitney_loop/{file}"


class MetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": RELATIVE_LINK.sub(r"\1", readme)}


def project_files(root: Path) -> list[str]:
    """The files that git tracks, relative to ``root``; without git all that are not hidden or compiled."""
    command = ["git", "ls-files", "-z", "--cached"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = []
    return [file for file in listed if (root / file).is_file()] or _all_files(root)


def _all_files(root: Path) -> list[str]:
    files = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
    return [file.as_posix() for file in files if not any(part.startswith((".", "__pycache__")) for part in file.parts)]
